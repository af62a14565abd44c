import json
from pathlib import Path

import pytest

from sharpness.rows import targets
from sharpness.sweep import Accuracies, read_config, run_sweep
from tests.sweeps import rows_of


def test_known_accuracies_stand_in_for_a_test_set(place):
    config = json.loads(Path("sweep.json").read_text())
    del config["test"]
    config["measures"] = ["gradient-norm"]
    config["ablations"] = [{}]
    config["accuracies"] = {"file": "acc.csv", "name": "model", "test": "dev"}
    Path("acc.csv").write_text("model,dev,train\n" + "".join(f"net{i},0.{6 + i}5,0.9\n" for i in range(3)))
    Path("known.json").write_text(json.dumps(config))
    failed = run_sweep(read_config("known.json"), "out", progress=False)
    assert [(f["checkpoint"], f["error"]) for f in failed] == [("net3.pt", "acc.csv has no accuracy for 'net3.pt'")]
    fits = {r["checkpoint"]: r for r in rows_of("out", "known.json") if r["kind"] == "fit"}
    assert [fits[f"net{i}.pt"]["test_error"] for i in range(3)] == pytest.approx([0.35, 0.25, 0.15])
    measured = [r for r in rows_of("out", "known.json") if r["kind"] == "fit"]
    assert all(r["train_loss"] > 0 and r["train_error"] <= 1 for r in measured)
    # By number, with training accuracies of their own: nothing is run.
    config["accuracies"] |= {"match": "number", "train": "train"}
    Path("acc.csv").write_text("model,dev,train\n" + "".join(f"Run {i},0.8,0.9\n" for i in range(4)))
    Path("known.json").write_text(json.dumps(config))
    assert run_sweep(read_config("known.json"), "number", progress=False) == []
    assert targets(rows_of("number", "known.json")) == pytest.approx({f"net{i}.pt": 0.1 for i in range(4)})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("model,dev\nnet0,85\n", "accuracies are fractions"),
        ("model,dev\nnet0,good\n", "does not hold an accuracy"),
        ("model,other\nnet0,0.5\n", "has no column 'dev'"),
        ("model,dev\nnet0,0.5\nnet0.pt,0.6\n", "a second time"),
    ],
)
def test_accuracies_that_are_none(place, lines, message):
    Path("acc.csv").write_text(lines)
    with pytest.raises(ValueError, match=message):
        Accuracies("acc.csv", "model", "dev").read()


def test_a_sweep_has_test_data_or_accuracies(place):
    config = json.loads(Path("sweep.json").read_text())
    for wrong, message in (
        ({"accuracies": {"file": "a.csv", "name": "n", "test": "t"}}, "both test and accuracies"),
        ({"accuracies": {"file": "a.csv"}, "test": None}, "entry accuracies: missing required entry `name`"),
        ({"initial": "nowhere.pt"}, "no initial weights at"),
    ):
        Path("wrong.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(ValueError, match=message):
            read_config("wrong.json")
