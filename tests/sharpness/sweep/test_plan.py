import json
from pathlib import Path

import pytest

from sharpness import cli
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


def test_entries_that_measure_the_same(place):
    """They were measured twice, or gave results that no command read."""
    config = json.loads(Path("sweep.json").read_text()) | {"measures": ["adaptive", "euclidean"], "rho": [0.1, 0.2]}
    Path("own.json").write_text(json.dumps({**config, "ablations": [{}, {"rho": {"adaptive": [0.3]}}, {}]}))
    plan = read_config("own.json").measured()
    assert plan == [("adaptive", {}, [0.1, 0.2]), ("adaptive", {}, [0.3]), ("euclidean", {}, [0.1, 0.2])]
    Path("own.json").write_text(json.dumps({**config, "ablations": [{}, {"rho": {"adaptive": [0.2, 0.3]}}]}))
    with pytest.raises(ValueError, match=r"two entries of ablations measure adaptive at rho = 0\.2; give all radii"):
        read_config("own.json")


def test_a_second_configuration_in_one_folder_is_told_of(place, capsys):
    config = json.loads(Path("sweep.json").read_text()) | {"measures": ["adaptive"], "rho": [0.1]}
    Path("one.json").write_text(json.dumps(config))
    Path("more.json").write_text(json.dumps({**config, "rho": [0.1, 0.2]}))
    Path("other.json").write_text(json.dumps({**config, "measures": ["euclidean"]}))
    for name, said in (("one", ""), ("more", ""), ("other", "16 rows of another configuration are in out/jobs only")):
        assert cli.main(["sweep", f"{name}.json", "--out", "out", "--quiet"]) == 0
        err = capsys.readouterr().err
        assert said in err
        assert bool(err) == bool(said)


def test_jobs_that_are_not_in_the_results_are_told_of(place, capsys):
    """After an interruption the results are those of the run before, perhaps of another configuration."""
    config = json.loads(Path("sweep.json").read_text()) | {"measures": ["adaptive"], "rho": [0.1], "baselines": False}
    Path("one.json").write_text(json.dumps(config))
    Path("other.json").write_text(json.dumps({**config, "rho": [0.2]}))
    assert cli.main(["sweep", "one.json", "--out", "out", "--quiet"]) == 0
    assert cli.main(["table", "out"]) == 0
    assert capsys.readouterr().err == ""
    run_sweep(read_config("other.json"), "out", progress=False)  # what a command does before it writes the results
    assert cli.main(["table", "out"]) == 0
    assert "out/jobs has further finished jobs (8) than the results: the sweep goes on" in capsys.readouterr().err
    Path("out/jobs/broken.json").write_bytes(b'{"rows": [\xff')
    assert cli.main(["plot", "out", "--out", "figures"]) in (0, 2)
    assert "further finished jobs (8)" in capsys.readouterr().err
    assert cli.main(["table", "out/results.csv"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["sweep", "other.json", "--out", "out", "--quiet"]) == 0
    assert "of another configuration are in out/jobs only" in capsys.readouterr().err
