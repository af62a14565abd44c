import json
from pathlib import Path

import torch

from sharpness.sweep import read_config, run_sweep
from sharpness.sweep.digests import of_model
from tests import networks
from tests.sweeps import MODULE, rows_of


def jobs_of(folder="out"):
    return {p.name for p in Path(folder, "jobs").glob("*.json")}


def test_another_spelling_is_the_same_and_another_content_is_not(place):
    """The case that mixed rows of two data sets in one table."""
    sweep = read_config("sweep.json")
    run_sweep(sweep, "out", progress=False)
    first = jobs_of()
    assert jobs_of() == first
    (place / "sub").mkdir()
    run_sweep(read_config(place / "sub" / ".." / "sweep.json"), "out", progress=False)
    run_sweep(read_config(place / "sweep.json"), "out", progress=False)
    assert jobs_of() == first
    before = rows_of("out")
    torch.manual_seed(7)
    torch.save({"x": torch.randn(24, 6), "y": torch.randint(3, (24,))}, "train.pt")
    assert rows_of("out") == []  # none of it was measured on these data
    run_sweep(read_config("sweep.json"), "out", progress=False)
    after = rows_of("out")
    assert len(after) == len(before)
    assert not {r["job"] for r in after} & {r["job"] for r in before}
    changed = jobs_of()
    Path("sweepmodel.py").write_text(MODULE.replace("Tanh", "ReLU"))  # the code is a part of the model
    assert rows_of("out") == []
    assert changed


def test_two_functions_of_one_module_are_two_sources(place):
    Path("mine.py").write_text(
        "import torch\ndef small():\n    return [(torch.ones(4, 6), torch.tensor([0, 1, 2, 0]))]\n"
        "def large():\n    return [(2 * torch.ones(4, 6), torch.tensor([0, 1, 2, 0]))]\n"
    )
    found = {}
    for name in ("small", "large"):
        config = {**json.loads(Path("sweep.json").read_text()), "data": f"mine:{name}"}
        Path(f"{name}.json").write_text(json.dumps(config))
        assert run_sweep(read_config(f"{name}.json"), "out", progress=False) == []
        found[name] = [r["sharpness"] for r in rows_of("out", f"{name}.json") if r["kind"] == "sharpness"]
    assert found["small"] != found["large"]


def test_only_what_is_read_of_a_folder_counts(tmp_path):
    networks.vit().save_pretrained(tmp_path / "vit")
    first = of_model(str(tmp_path / "vit"), None)
    (tmp_path / "vit" / "README.md").write_text("notes")
    (tmp_path / "vit" / "results").mkdir()
    (tmp_path / "vit" / "results" / "config.json").write_text("{}")
    assert of_model(str(tmp_path / "vit"), None) == first
    (tmp_path / "vit" / "preprocessor_config.json").write_text("{}")
    assert of_model(str(tmp_path / "vit"), None) != first
