"""The zoos: recipes by number, shifted data, and a run that survives SIGKILL at any moment."""

import csv
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import sharpness
from quotient_manifolds.symmetries import model_distance
from reproduction import cli, radii, study, zoo
from reproduction.baselines import distance
from reproduction.collection import train_collection
from reproduction.radii import PRIMARY, choose_radii, median_models, radius_at, radius_of_levels
from reproduction.zoo_data import LABELS, corrupt, corrupted_images, inference_tables, normalised
from sharpness import Search
from sharpness import cli as measuring
from sharpness.checkpoints import load_state_dict
from sharpness.data import DataChoice
from sharpness.losses import RadiusError
from sharpness.models import load
from sharpness.study import Checkpoint, Sweep, read_config, read_rows, run_sweep
from tests.support import networks
from tests.support.sweeps import repeated


def write_pictures(path, counts=(("train", 6), ("test", 3))):
    """Folders as those of CIFAR-10, with three classes that differ in their colour."""
    rng = np.random.default_rng(0)
    for part, count in counts:
        for c, name in enumerate(("blue", "green", "red")):
            (path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (32, 32, 3), dtype=np.uint8)
                pixels[:, :, 2 - c] += 120
                Image.fromarray(pixels).save(path / part / name / f"{i}.png")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Data of a tiny zoo from scratch."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_pictures(tmp_path / "data" / "cifar10")
    monkeypatch.setattr(zoo, "_IMAGES", {"scratch": 12})
    monkeypatch.setattr(zoo, "_POINTS", {"scratch": 4})
    small = {**zoo.KINDS["scratch"][1], "epochs": (1, 2), "batch": (4, 6)}
    monkeypatch.setitem(zoo.KINDS, "scratch", (3, small))
    return tmp_path


def build(out, models=3, first=0):
    torch.set_num_threads(1)
    return zoo.build("scratch", Path("data"), Path(out), models=models, first=first, progress=False)


def rows_of(out):
    """Without the time it took; the shifted images, in a file of each zoo's own, count by their digest."""
    found = {
        part: read_rows(Path(out) / part, read_config(Path(out) / "models" / f"{part}.json"))
        for part in ("results", "shift")
    }
    for row in found["shift"]:
        del row["test"]["source"]
    return {k: [{n: v for n, v in row.items() if n != "seconds"} for row in rows] for k, rows in found.items()}


def test_killed_again_and_again_it_ends_with_the_same_models_and_rows(place):
    assert build("whole") == []
    context, killed = multiprocessing.get_context("fork"), 0

    def files():
        return sum(len(names) for _, *found in os.walk("killed") for names in found)  # folders may vanish meanwhile

    for more in (1, 3, 2, 4):  # whatever the machine's speed, it is killed after some progress
        process, before = context.Process(target=build, args=("killed",)), files()
        process.start()
        while process.is_alive() and files() < before + more:
            time.sleep(0.001)
        killed += process.is_alive()
        process.kill()  # SIGKILL
        process.join()
    assert killed >= 2
    assert build("killed") == []
    found, expected = rows_of("killed"), rows_of("whole")
    assert found == expected
    for rows in found.values():
        assert [r["checkpoint"] for r in rows] == [f"model_{i:02d}.safetensors" for i in range(3)]  # none twice
        assert all(np.isfinite([r["train_loss"], r["test_loss"]]).all() for r in rows)
    assert found["results"] != found["shift"]
    for path in Path("whole/models").glob("*.safetensors"):
        one, two = load_state_dict(path), load_state_dict(Path("killed/models") / path.name)
        assert all(torch.equal(one[k], two[k]) for k in one)
    before = {p: p.stat().st_mtime_ns for p in Path("killed").rglob("*.safetensors")}
    assert build("killed") == []
    assert before == {p: p.stat().st_mtime_ns for p in Path("killed").rglob("*.safetensors")}


def test_a_zoo_in_parts_has_the_models_of_the_whole(place):
    for out, models, first in (("whole", 3, 0), ("one", 2, 0), ("two", 3, 2)):
        assert build(out, models, first) == []
    assert sorted(p.name for p in Path("two/models").glob("*.safetensors")) == [
        "model_02.safetensors", "start_02.safetensors"
    ]  # fmt: skip
    parts = [rows_of(out) for out in ("one", "two")]
    assert {k: parts[0][k] + parts[1][k] for k in parts[0]} == rows_of("whole")
    with pytest.raises(ValueError, match="there are the models 0 to 2, so the first cannot be 3"):
        build("none", 3, 3)


def test_starts_differ_and_are_those_of_the_models(place):
    build("zoo", models=2)
    starts = [load_state_dict(Path(f"zoo/models/start_{i:02d}.safetensors")) for i in range(2)]
    assert {v.dtype for v in starts[0].values()} == {torch.float16}
    assert load("reproduction.vision:scratch_vit", "zoo/models/model_00.safetensors").model.cls_token.dtype == (
        torch.float32
    )
    name = "transformer.layers.0.self_attn.in_proj_weight"
    scales = [zoo.recipe("scratch", i).init_scale for i in range(2)]
    norms = [s[name].float().norm() / scale for s, scale in zip(starts, scales, strict=True)]
    assert norms[0] == pytest.approx(float(norms[1]), rel=0.02)  # of one distribution but for the scale
    assert not torch.equal(starts[0][name] / scales[0], starts[1][name] / scales[1])
    record = json.loads(Path("zoo/models/model_01.json").read_text(encoding="utf-8"))
    assert record["recipe"]["seed"] == 2001
    assert record["device"] == "cpu"
    net = load("reproduction.vision:scratch_vit", "zoo/models/model_01.safetensors").model
    far = study.from_starts(read_config("zoo/models/sweep.json").checkpoints, Path("zoo/models"))
    assert far["model_01.safetensors"]["distance"] == pytest.approx(distance(net, starts[1]))
    other = load("reproduction.vision:scratch_vit", "zoo/models/start_01.safetensors").model
    assert far["model_01.safetensors"]["geodesic_distance"] == pytest.approx(model_distance(net, other).total)
    assert set(far) == {"model_00.safetensors", "model_01.safetensors"}


def test_the_model_that_all_started_from(place):
    weights = load("reproduction.vision:scratch_vit").model.state_dict()
    save_file(weights, "start.safetensors")
    train, test = (DataChoice(f"data/cifar10/{part}") for part in ("train", "test"))
    recipes = [zoo.recipe("scratch", 0)]
    network = "reproduction.vision:scratch_vit"
    train_collection(network, train, "zoo/models", checkpoint="start.safetensors", recipes=recipes, test=test)
    found = study.fit_of_start(Path("zoo"))
    model = load(network, "start.safetensors")
    [(x, y)] = test.load(model, "cpu")
    with torch.no_grad():
        scores = model.model.eval()(x)
    assert found["test_error"] == pytest.approx(float((scores.argmax(1) != y).float().mean()))
    assert found["test_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, y)), rel=1e-5)
    assert found.keys() == {"train_loss", "train_error", "test_loss", "test_error"}


def test_models_that_the_plan_leaves_out(place, monkeypatch):
    """A model that had diverged made the radii of its zoo unobtainable; nothing looked for those without skill."""
    torch.set_num_threads(1)
    build("zoo")
    assert radii.guess_error(read_config("zoo/models/sweep.json")) >= 1 / 2  # of three classes, one has at most 6 of 12
    fits = {
        r["checkpoint"]: r["train_error"]
        for r in read_rows("zoo/results", read_config("zoo/models/results.json"))
        if r["kind"] == "fit"
    }
    monkeypatch.setattr(radii, "guess_error", lambda sweep: min(fits.values()))
    assert radii.tested(Path("zoo"))[1] == dict.fromkeys(fits, "it has learned nothing")
    monkeypatch.setattr(radii, "guess_error", lambda sweep: 1.1)
    assert radii.tested(Path("zoo"))[1] == {}
    path = Path("zoo/models/model_01.safetensors")
    save_file({k: v * torch.nan for k, v in load_file(path).items()}, path)
    assert [f["checkpoint"] for f in build("zoo")] == ["model_01.safetensors"] * 2  # of test and shifted data
    found, out = radii.tested(Path("zoo"))
    assert [r["checkpoint"] for r in found] == ["model_00.safetensors", "model_02.safetensors"]
    assert out == {"model_01.safetensors": "its losses are not finite"}


def test_no_radius_at_which_the_ball_leaves_the_manifold(tmp_path, monkeypatch):
    """The second-order geodesics of the mix metric stay finite there; one search in vain tells where that is."""
    torch.set_default_dtype(torch.float32)
    model, (x, y) = networks.vit(layers=1), networks.images(12)
    model.save_pretrained(tmp_path / "vit")
    torch.save({"x": x, "y": y}, tmp_path / "data.pt")
    checkpoint = Checkpoint("vit", str(tmp_path / "vit"))
    sweep = Sweep(checkpoints=(checkpoint,), data=DataChoice(str(tmp_path / "data.pt")), search=Search(steps=3))
    sigma = sharpness.evaluate(model, [(x, y)], measure="geodesic-mix", rho=1e-3, progress=False).min_singular_value
    evaluate, tried = sharpness.evaluate, []
    monkeypatch.setattr(sharpness, "evaluate", lambda *a, rho, **kw: tried.append(rho) or evaluate(*a, rho=rho, **kw))
    found = radius_of_levels(sweep, [checkpoint], "geodesic-mix")
    assert all(rho <= sigma / 2**0.5 for rho in found)
    assert sum(rho > sigma / 2**0.5 for rho in tried) == 1
    assert len(set(tried)) == len(tried)
    assert len(found) < 2
    assert len(radius_of_levels(sweep, [checkpoint], "geodesic-inv")) == 2


def test_radii_by_rule_then_a_table_with_the_same_words(place, capsys, monkeypatch):
    monkeypatch.setattr(radii, "guess_error", lambda sweep: 1.1)  # these models have learned little
    assert cli.main(["zoo", "scratch", "--data", "data", "--out", "zoo", "--quiet"]) == 0
    config = choose_radii(Path("zoo"), measures=("adaptive",), progress=False)
    found = json.loads(config.read_text(encoding="utf-8"))
    assert set(found["rho"]) == {"adaptive"} < set(PRIMARY)
    assert "gradient-norm" in found["measures"]
    config.write_text(json.dumps(found | {"rho": found["rho"] | {"euclidean": [0.25, 0.5]}}), encoding="utf-8")
    both = json.loads(
        choose_radii(Path("zoo"), measures=("euclidean",), device="meta", progress=False).read_text(encoding="utf-8")
    )
    assert both["device"] == json.loads(Path("zoo/models/hessian.json").read_text(encoding="utf-8"))["device"] == "meta"
    assert both["rho"] == found["rho"] | {"euclidean": [0.25, 0.5]}  # what is known is kept
    config.write_text(json.dumps(found), encoding="utf-8")
    sweep = read_config(config)
    names = median_models(radii.tested(Path("zoo"))[0])
    assert run_sweep(sweep, "zoo/results", progress=False) == []
    rows = read_rows("zoo/results", sweep)
    assert [r["kind"] for r in rows].count("fit") == 3  # those that testing made: they are not made again
    for measure, by_level in found["rho"].items():
        for level, rho in zip((0.1, 0.5), by_level, strict=False):
            values = [r["sharpness"] for r in rows if r.get("measure") == measure and r["rho"] == rho]
            chosen = [r["sharpness"] for r in rows if r.get("rho") == rho and r["checkpoint"] in names]
            assert len(values) == 3
            assert np.median(chosen) == pytest.approx(level, rel=0.2)
    assert measuring.main(["sweep", str(config), "--out", "zoo/results", "--quiet"]) == 0
    monkeypatch.setitem(sys.modules, "weightwatcher", None)
    from_starts, starts = study.from_starts, {}
    monkeypatch.setattr(study, "from_starts", lambda *arguments: starts.update(from_starts(*arguments)) or starts)
    with pytest.warns(UserWarning, match="α is left out"):
        parts = study.rows_of(Path("zoo"))
    own = parts[""]
    with monkeypatch.context() as patch:
        patch.setattr(study, "alphas", lambda checkpoints: {})
        patch.setattr(
            study,
            "read_rows",
            lambda *a, **k: [r for r in read_rows(*a, **k) if r["checkpoint"] != names[0] or "rho" not in r],
        )
        with pytest.warns(UserWarning, match="only 2 of 3 models are wholly measured"):
            unfinished = study.rows_of(Path("zoo"))
    assert unfinished == {k: [r for r in rows if r["checkpoint"] != names[0]] for k, rows in parts.items()}
    account = study.account(Path("zoo"))
    assert account["models"] == 3
    assert account["first"] == 0
    assert account["left_out"] == {}
    assert account["start"] is None
    assert min(account["hours"].values()) >= 0
    trained = [json.loads(Path(f"zoo/models/model_0{i}.json").read_text(encoding="utf-8"))["seconds"] for i in range(3)]
    assert account["hours"]["training"] == pytest.approx(sum(trained) / 3600, abs=1e-3)
    assert {r["kind"] for r in own} == {"fit", "baselines", "sharpness"}
    assert {r["kind"] for r in parts["_shift"]} == {"fit"}
    of_few = {r["train_loss"] for r in read_rows("zoo/shift", read_config("zoo/models/shift.json"))}
    losses = [{r["train_loss"] for r in part if r["kind"] == "fit"} for part in (own, parts["_shift"])]
    assert losses[0] == losses[1] != of_few
    low, high = found["rho"]["adaptive"]
    assert {r["rho"] for r in own if r.get("measure") == "adaptive"} == {low, high}
    distances = {r["checkpoint"]: {k: r[k] for k in starts[r["checkpoint"]]} for r in own if r["kind"] == "baselines"}
    assert distances == starts
    assert len(starts) == 3
    capsys.readouterr()
    assert measuring.main(["table", "zoo/results", "--target", "test-loss"]) == 0
    assert "3 models with a test-loss: too few to correlate, which needs 10." in capsys.readouterr().out
    Path("many.jsonl").write_text("".join(json.dumps(r) + "\n" for r in repeated(rows, 4)), encoding="utf-8")
    assert measuring.main(["table", "many.jsonl", "--target", "test-loss"]) == 0
    printed = capsys.readouterr().out
    assert "tau given train_loss, train_error" in printed
    assert "critical_sharpness" in printed


def test_a_radius_that_is_never_reached_or_too_large():
    def bounded(rho):
        if rho > 1:
            raise RadiusError("too large")
        return rho

    assert radius_at(0.5, bounded, 0.1) == 0.5
    assert radius_at(3.0, bounded, 0.1) is None
    assert radius_at(0.01, lambda rho: rho**3, 5.0) == 0.215
    with pytest.raises(ValueError, match="1 models have a training loss"):
        median_models([{"checkpoint": "a", "kind": "fit", "train_loss": 1.0}])


def test_recipes_of_the_zoos_vary_in_everything():
    found = {kind: [zoo.recipe(kind, i) for i in range(48)] for kind in zoo.KINDS}
    for kind, recipes in found.items():
        fixed = {k for k in vars(recipes[0]) if len({getattr(r, k) for r in recipes}) == 1}
        assert fixed == {
            "vit": {"optimizer", "init_scale"}, "scratch": {"frozen"},
            "minilm": {"optimizer", "init_scale", "augmentation", "mixup"},
        }[kind]  # fmt: skip
    seeds = [r.seed for recipes in found.values() for r in recipes]
    assert len(set(seeds)) == len(seeds)
    assert not {r.seed for r in found["vit"]} & set(range(24))  # those of the pilot
    assert max(r.lr for r in found["scratch"] if r.optimizer == "adamw") <= 3e-3
    assert min(r.lr for r in found["scratch"] if r.optimizer == "sgd") >= 3e-2


def test_images_are_corrupted_and_always_alike(tmp_path):
    write_pictures(tmp_path / "images", [("test", 4)])
    made = [corrupted_images(tmp_path / "images" / "test", tmp_path / str(i)) for i in range(2)]
    first, second = ({p.relative_to(m).as_posix(): p.read_bytes() for p in m.rglob("*.png")} for m in made)
    assert first == second
    assert sorted(first) == sorted(f"{c}/{i}.png" for c in ("blue", "green", "red") for i in range(4))
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    changed = [corrupt(pixels, kind, rng) for kind in range(5)]
    assert all(c.shape == pixels.shape and c.dtype == np.uint8 and (c != pixels).mean() > 0.5 for c in changed)
    assert changed[1].std() < pixels.std() > changed[2].std()
    assert changed[3].mean() > pixels.mean() + 20


def test_tables_of_inference(tmp_path):
    data = tmp_path / "mnli"
    for folder in ("train15k", "dev_matched", "hard/MNLIMismatchedHardWithHardTest"):
        (data / folder).mkdir(parents=True)
    pairs = [(f"It 's number {i} .", f'A "number" , I don \'t know {i}', n) for i, n in enumerate(LABELS)]
    lines = ["premise\thypo\tlabel", *("\t".join(p) for p in pairs), "a\tb\tlabel"]
    (data / "train15k" / "multinli.train.en.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (data / "dev_matched" / "dev.txt").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None)
        writer.writerow(["index", "premise", "hypothesis", "gold_label", "right"])
        writer.writerow([0, "It's number 2.", 'A "number", I don\'t know 2', "neutral", 7])  # that of a training pair
        writer.writerow([1, "Short.", "Yes.", "entailment", 7])
    for name, text in (("s1", "Do n't .\n"), ("s2", "Do .\n"), ("labels", "contradiction\n")):
        (data / "hard" / "MNLIMismatchedHardWithHardTest" / f"{name}.test").write_text(text, encoding="utf-8")
    paths = inference_tables(data, tmp_path, train=10)
    train, test, shift = ([json.loads(line) for line in p.read_text(encoding="utf-8").splitlines()] for p in paths)
    assert sorted(r["label"] for r in train) == ["contradictory", "entailment", "neutral"]
    assert not {r["premise"] for r in train} & {"it 's number 2 ."}
    assert [r["hypothesis"] for r in test] == ["yes.", 'a "number", i don\'t know 2']
    assert shift == [{"premise": "don't .", "hypothesis": "do .", "label": "contradiction"}]
    assert normalised("``So''  do n't") == '"so" don\'t'


def test_radii_between_sound_and_too_large():
    """The level lies at ρ = 0.7; beyond 0.75 the loss is not finite."""

    def increase(rho):
        if rho > 0.75:
            raise RadiusError("too large")
        return rho**2

    for start in (0.05, 0.4, 5.0):
        assert radius_at(0.49, increase, start) == pytest.approx(0.7, rel=0.02)
    assert radius_at(0.6, increase, 0.4) is None  # at 0.77, where nothing is finite
