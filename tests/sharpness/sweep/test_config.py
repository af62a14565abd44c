import json
import re
from pathlib import Path

import pytest

from sharpness import cli
from sharpness.sweep import read_config
from tests.sweeps import rows_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x0: &a [1]\ny: *a\ndata: train.pt", r"has the alias \*a; write it out"),
        ("normalize_logits: 'false'", "entry normalize_logits: Expected `bool`, got `str`"),
        ("seed: abc", "entry seed: Expected `int.*`, got `str`"),
        ("steps: true", "entry steps: Expected `int.*`, got `bool`"),
        ("steps: 0", "entry steps: Expected `int` >= 1"),
        ("relative_tol: x", "entry relative_tol: Expected `float.*`, got `str`"),
        ("rho: [-1]", "rho must be one or several positive numbers"),
        ("rho: []", r"rho must be one or several positive numbers, got \(\)"),
        ("rho: {adaptive: []}", r"rho must be one or several positive numbers, got \(\)"),
        ("restarts: 1\nablations: [{}, {statistic: average}]", "restarts belong to searches"),
        ("data: {source: train.pt, batch_size: []}", "entry data.batch_size: Expected `int.*`, got `array`"),
        ("[" * 3000, "cannot be parsed"),
    ],
)
def test_values_of_the_wrong_kind(place, text, words):
    base = 'checkpoints: {path: "collection/*.pt", model: "sweepmodel:model"}\n'
    base += "" if "data" in text else "data: train.pt\n"
    Path("wrong.yaml").write_text(base + text)
    with pytest.raises(ValueError, match=words):
        read_config("wrong.yaml")


def test_a_number_in_yaml_is_one(place):
    base = 'checkpoints: {path: "collection/*.pt", model: "sweepmodel:model"}\ndata: train.pt\n'
    Path("good.yaml").write_text(base + "relative_tol: 1e-3\nrho: 1e-2")
    sweep = read_config("good.yaml")
    assert sweep.settings["relative_tol"] == 1e-3
    assert set(sweep.rho.values()) == {(1e-2,)}
    Path("good.yaml").write_text(base + "measures: [euclidean]\nrho: {euclidean: 0.1, adaptive: []}")
    assert read_config("good.yaml").rho == {"euclidean": (0.1,), "adaptive": ()}  # of what is not measured


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, r"missing required entry `data`"),
        ({"measure": ["adaptive"]}, "unknown entry `measure`; known are"),
        ({"measures": ["flat"]}, "unknown measure 'flat'"),
        ({"checkpoints": "nowhere/*"}, r"no checkpoint matches 'nowhere/\*'"),
        ({"data": {"source": "train.pt", "colour": 1}}, "entry data: contains unknown entry `colour`"),
        ({"checkpoints": [{"model": "x"}]}, r"entry checkpoints\[0\]: missing required entry `path`"),
        ({"ablations": [{"speed": 3}]}, "unknown switch"),
        ({"ablations": [{"geodesic": "rk4"}]}, "has no meaning for any of adaptive, euclidean"),
    ],
)
def test_mistakes_in_the_configuration(place, capsys, change, message):

    config = json.loads(Path("sweep.json").read_text()) | change
    config = {k: v for k, v in config.items() if v is not None}
    Path("sweep.json").write_text(json.dumps(config))
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert err.count("\n") == 1


def test_a_folder_with_brackets_in_its_name(place):
    """They mean something in patterns."""
    (place / "a [1]").mkdir()
    for path in [*place.iterdir()]:
        if path.name != "a [1]":
            path.rename(place / "a [1]" / path.name)
    assert len(read_config(place / "a [1]" / "sweep.json").checkpoints) > 1


def test_yaml_and_mistakes_in_it(place, capsys):
    pytest.importorskip("yaml")
    Path("sweep.yaml").write_text(
        "checkpoints: [{path: collection/net0.pt, model: 'sweepmodel:model'}]\n"
        "data: train.pt\nmeasures: [adaptive]\nsteps: 2\n"
    )
    assert cli.main(["sweep", "sweep.yaml", "--out", "out", "--quiet"]) == 0
    assert [r["kind"] for r in rows_of("out", "sweep.yaml")] == ["baselines", "sharpness"]
    Path("sweep.yaml").write_text("checkpoints: [\n")
    assert cli.main(["sweep", "sweep.yaml", "--out", "out", "--quiet"]) == 2
    assert "sweep.yaml cannot be parsed" in capsys.readouterr().err
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--shard", "3", "--quiet"]) == 2
    assert "--shard takes i/n" in capsys.readouterr().err
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--shard", "3/2", "--quiet"]) == 2
    assert "1 ≤ i ≤ n" in capsys.readouterr().err
