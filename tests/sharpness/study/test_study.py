"""What a sweep measures: its file, its jobs, and the rows that they give."""

import json
import re
from pathlib import Path

import pytest
import torch

import sharpness
from sharpness import cli, evaluate
from sharpness.study import read_config, read_results, run_sweep, targets
from sharpness.study.plan import of_model
from tests.support import networks
from tests.support.sweeps import MODULE, rows_of

BASE = {"checkpoints": [{"path": "collection/*.pt", "model": "sweepmodel:model"}], "data": "train.pt"}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"seed": "abc"}, "Expected `int.*`, got `str` - at `$.search.seed`"),
        ({"steps": True}, "Expected `int.*`, got `bool` - at `$.search.steps`"),
        ({"steps": 0}, "steps must be .* at least 1"),
        ({"relative_tol": "x"}, "Expected `float.*`, got `str` - at `$.search.relative_tol`"),
        ({"rho": [-1]}, "rho must be one or several positive numbers"),
        ({"rho": []}, r"rho must be one or several positive numbers, got \(\)"),
        ({"rho": {"adaptive": []}}, r"rho must be one or several positive numbers, got \(\)"),
        ({"data": {"source": "train.pt", "batch_size": []}}, "Expected `int.*`, got `array` - at `$.batch_size`"),
        ({"checkpoints": 3}, "Expected `str | array`, got `int`"),
        ({"checkpoints": []}, "Expected `array` of length >= 1"),
        ({"initial": 0}, "initial must be the place or name of a model, got 0"),
    ],
)
def test_values_of_the_wrong_kind(place, entries, words):
    Path("wrong.json").write_text(json.dumps(BASE | entries), encoding="utf-8")
    with pytest.raises(ValueError, match=words.replace("$.", r"\$.").replace("| ", r"\| ")):
        read_config("wrong.json")


def test_what_is_not_measured_needs_no_radius(place):
    Path("good.json").write_text(
        json.dumps(BASE | {"measures": ["euclidean"], "rho": {"euclidean": 0.1, "adaptive": []}}),
        encoding="utf-8",
    )
    assert read_config("good.json").measured() == {"euclidean": [0.1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, r"missing required field `data`"),
        ({"measure": ["adaptive"]}, "unknown field `measure`"),
        ({"measures": ["flat"]}, "unknown measure 'flat'"),
        ({"checkpoints": "nowhere/*"}, r"no checkpoint matches 'nowhere/\*'"),
        ({"data": {"source": "train.pt", "colour": 1}}, "data has no 'colour'; its entries are source, text, label"),
        ({"checkpoints": [{"model": "x"}]}, r"missing required field `path` - at `\$\[0\]`"),
        ({"ablations": [{}]}, "unknown field `ablations`"),
    ],
)
def test_mistakes_in_the_configuration(place, capsys, change, message):

    config = json.loads(Path("sweep.json").read_text(encoding="utf-8")) | change
    config = {k: v for k, v in config.items() if v is not None}
    Path("sweep.json").write_text(json.dumps(config), encoding="utf-8")
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


@pytest.mark.parametrize("text", ["", "[", "{", "[" * 3000, "[1]", '{"steps": NaN}', "\xff"])
def test_what_is_no_json(place, capsys, text):
    Path("sweep.json").write_bytes(text.encode("latin-1"))
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("sharpness: sweep.json: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("shard", "words"), [("3", "a shard is i/n"), ("3/2", "1 ≤ i ≤ n"), ("0/2", "1 ≤ i ≤ n")])
def test_a_shard_that_is_none(place, capsys, shard, words):
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--shard", shard, "--quiet"]) == 2
    assert words in capsys.readouterr().err


def test_entries_that_measure_the_same(place):
    """They were measured twice, or gave results that no command read."""
    measures = ["adaptive", "euclidean", "adaptive"]
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8")) | {"measures": measures, "rho": [0.1, 0.2]}
    Path("own.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_config("own.json").measured() == {"adaptive": [0.1, 0.2], "euclidean": [0.1, 0.2]}


def test_a_measure_of_ones_own(place, monkeypatch):
    """A study adds it to the known ones by a name."""
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8")) | {"measures": ["twice"], "rho": [0.2]}
    Path("own.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="unknown measure 'twice'; choose one of"):
        read_config("own.json")
    monkeypatch.setitem(sharpness.MEASURES, "twice", sharpness.Measure("twice", elementwise="euclidean"))
    assert read_config("own.json").measured() == {"twice": [0.2]}
    assert run_sweep(read_config("own.json"), "out", progress=False) == []
    rows = [r for r in rows_of("out", "own.json") if r["kind"] == "sharpness"]
    assert {r["measure"] for r in rows} == {"twice"}


def test_an_interrupted_sweep_leaves_no_results_of_another(place, capsys, monkeypatch):
    """They would be those of the run before, perhaps of another configuration."""
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8")) | {"measures": ["adaptive"], "rho": [0.1]}
    Path("one.json").write_text(json.dumps(config), encoding="utf-8")
    Path("other.json").write_text(json.dumps({**config, "rho": [0.2]}), encoding="utf-8")
    assert cli.main(["sweep", "one.json", "--out", "out", "--quiet"]) == 0
    assert cli.main(["table", "out"]) == 0
    assert capsys.readouterr().err == ""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sharpness.study.run.statistic_of", interrupted)
        assert cli.main(["sweep", "other.json", "--out", "out", "--quiet"]) == 130
    assert cli.main(["table", "out"]) == 2
    assert "the sweep in out is not complete; run `sharpness sweep` again to resume it" in capsys.readouterr().err
    assert cli.main(["sweep", "other.json", "--out", "out", "--quiet"]) == 0
    assert {row.get("rho") for row in read_results("out")} == {None, 0.2}


def test_a_refused_sweep_leaves_the_results(place, capsys):
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 0
    before = Path("out/results.jsonl").read_bytes()
    for shard in ("5/4", "one"):
        assert cli.main(["sweep", "sweep.json", "--out", "out", "--shard", shard, "--quiet"]) == 2
        assert Path("out/results.jsonl").read_bytes() == before


def test_a_test_set_or_training_data_give_a_fit(place):
    """Known accuracies can be written beside the training error by hand."""
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8")) | {"measures": []}
    for part, other in (("train", "test"), ("test", None)):
        own = {k: v for k, v in config.items() if k != "test"} | {part: "test.pt"}
        Path("fit.json").write_text(json.dumps(own), encoding="utf-8")
        assert run_sweep(read_config("fit.json"), part, progress=False) == []
        rows = rows_of(part, "fit.json")
        assert len(rows) == 4
        assert all(("test_error" in row) == (other is None) and row["train_error"] <= 1 for row in rows)
        written = targets([{**row, "test_error": row["train_error"] + 0.25} for row in rows])
        assert written == pytest.approx({f"net{i}.pt": 0.25 for i in range(4)})
    Path("none.json").write_text(json.dumps({k: v for k, v in config.items() if k != "test"}), encoding="utf-8")
    assert run_sweep(read_config("none.json"), "none", progress=False) == []
    assert rows_of("none", "none.json") == []
    Path("wrong.json").write_text(json.dumps({**config, "initial": "nowhere.pt"}), encoding="utf-8")
    with pytest.raises(ValueError, match="no initial weights at"):
        read_config("wrong.json")


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
    Path("sweepmodel.py").write_text(
        MODULE.replace("Tanh", "ReLU"), encoding="utf-8"
    )  # the code is a part of the model
    assert rows_of("out") == []
    assert changed


def test_two_functions_of_one_module_are_two_sources(place):
    Path("two_sources.py").write_text(
        "import torch\ndef small():\n    return [(torch.ones(4, 6), torch.tensor([0, 1, 2, 0]))]\n"
        "def large():\n    return [(2 * torch.ones(4, 6), torch.tensor([0, 1, 2, 0]))]\n",
        encoding="utf-8",
    )
    found = {}
    for name in ("small", "large"):
        config = {**json.loads(Path("sweep.json").read_text(encoding="utf-8")), "data": f"two_sources:{name}"}
        Path(f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
        assert run_sweep(read_config(f"{name}.json"), "out", progress=False) == []
        found[name] = [r["sharpness"] for r in rows_of("out", f"{name}.json") if r["kind"] == "sharpness"]
    assert found["small"] != found["large"]


def test_only_what_is_read_of_a_folder_counts(tmp_path):
    networks.vit().save_pretrained(tmp_path / "vit")
    first = of_model(str(tmp_path / "vit"), None)
    (tmp_path / "vit" / "README.md").write_text("notes", encoding="utf-8")
    (tmp_path / "vit" / "results").mkdir()
    (tmp_path / "vit" / "results" / "config.json").write_text("{}", encoding="utf-8")
    assert of_model(str(tmp_path / "vit"), None) == first
    (tmp_path / "vit" / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    assert of_model(str(tmp_path / "vit"), None) != first


def test_rows_are_those_of_evaluate(place):
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 0
    rows = rows_of("out")
    assert len(rows) == 4 * (1 + 2 * 2 + 2 * 1)
    assert [json.loads(line)["job"] for line in Path("out/results.jsonl").read_text(encoding="utf-8").splitlines()] == [
        r["job"] for r in rows
    ]
    row = next(r for r in rows if r.get("measure") == "adaptive" and r["rho"] == 0.3)
    sweep = read_config("sweep.json")
    from sharpness.models import load

    loaded = load("sweepmodel:model", "collection/net0.pt")
    batches = sweep.data.load(loaded)
    expected = evaluate(loaded.model, batches, measure="adaptive", rho=[0.1, 0.3], steps=4, progress=False)
    assert row["checkpoint"] == "net0.pt"
    assert row["sharpness"] == float(expected[0.3])
    assert row["per_batch"] == [b.value for b in expected[0.3].batches]
    assert row["settings"]["steps"] == 4
    assert row["data"]["num_examples"] == 16
    fit = next(r for r in rows if r["kind"] == "fit")
    data = torch.load("test.pt", weights_only=True)
    wrong = (loaded.model(data["x"]).argmax(1) != data["y"]).double().mean()
    assert fit["test_error"] == pytest.approx(float(wrong))
    assert targets(rows)["net0.pt"] == pytest.approx(fit["test_error"] - fit["train_error"])


def test_a_diverged_checkpoint_is_a_failed_row(place, capsys):
    torch.save({k: v * torch.nan for k, v in torch.load("collection/net0.pt").items()}, "collection/net9.pt")
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    assert "net9.pt, fit: train_loss is nan; the model has diverged" in capsys.readouterr().err
    assert cli.main(["table", "out"]) == 0


def test_a_radius_that_is_too_large_loses_no_other(place, capsys):
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    config |= {"rho": {"euclidean": [0.1, 1e300, 0.3]}, "measures": ["euclidean"]}
    Path("sweep.json").write_text(json.dumps(config), encoding="utf-8")
    for _ in range(2):  # said again by the next call, which does nothing again
        assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 4
        assert all("euclidean at rho = 1e+300: " in line and "use a smaller rho" in line for line in err), err
        assert {r["rho"] for r in rows_of("out") if r["kind"] == "sharpness"} == {0.1, 0.3}


def test_baselines_of_a_sweep(place, capsys):
    """What a function of the user's returns."""
    Path("largest_weight.py").write_text(
        "def largest(model, batches, start):\n"
        "    assert len(batches) == 2 and start.keys() == model.state_dict().keys()\n"
        "    far = sum(float((p.detach() - start[name]).square().sum()) for name, p in model.named_parameters())\n"
        "    largest = max(float(p.detach().abs().max()) for p in model.parameters())\n"
        "    return {'largest': largest, 'distance': far, 'nothing': None}\n"
        "def broken(model, batches, start):\n    return {'gap': 1 / 0}\n",
        encoding="utf-8",
    )
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    config |= {"initial": "collection/net0.pt", "measures": ["gradient-norm"]}
    Path("base.json").write_text(json.dumps(config | {"baselines": "largest_weight:largest"}), encoding="utf-8")
    assert [f["error"] for f in run_sweep(read_config("base.json"), "out", progress=False)] == []
    found = {r["checkpoint"]: r for r in rows_of("out", "base.json") if r["kind"] == "baselines"}
    assert found["net0.pt"]["distance"] == 0
    assert found["net1.pt"]["distance"] > 1
    for name, row in found.items():
        assert row["largest"] == max(float(v.abs().max()) for v in torch.load(f"collection/{name}").values())
        assert row["nothing"] is None
    Path("base.json").write_text(json.dumps(config | {"baselines": "largest_weight:broken"}), encoding="utf-8")
    assert cli.main(["sweep", "base.json", "--out", "broken", "--quiet"]) == 1
    assert "net0.pt, baselines: largest_weight:broken failed: ZeroDivisionError" in capsys.readouterr().err
