import json
from pathlib import Path

import pytest

from sharpness.sweep import read_config, run_sweep
from tests.sweeps import rows_of


def test_an_ablation_with_radii_and_measures_of_its_own(place):
    config = json.loads(Path("sweep.json").read_text())
    config["ablations"] = [{}, {"statistic": "average", "rho": 0.2, "measures": ["adaptive"]}]
    Path("own.json").write_text(json.dumps(config))
    assert run_sweep(read_config("own.json"), "out", progress=False) == []
    rows = [r for r in rows_of("out", "own.json") if r.get("ablation")]
    assert [(r["checkpoint"], r["measure"], r["rho"], r["ablation"]) for r in rows] == [
        (f"net{i}.pt", "adaptive", 0.2, {"statistic": "average"}) for i in range(4)
    ]
    config["ablations"] = [{"statistic": "average", "measures": ["geometric"]}]
    Path("own.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'geometric', which is not among measures"):
        read_config("own.json")
