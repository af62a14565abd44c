"""Sweeps: resumable after any kill, the same rows however they were spread, bad checkpoints recorded."""

import errno
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sharpness import cli, evaluate
from sharpness.rows import targets
from sharpness.sweep import Accuracies, read_config, read_rows, run_sweep

from . import networks

ROOT = Path(__file__).parent.parent
MODULE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).float()
"""
#: What differs between runs.
TIMES = ("seconds",)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Four checkpoints of a function's model, data, and a configuration."""
    torch.set_default_dtype(torch.float32)
    (tmp_path / "sweepmodel.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sweepmodel", raising=False)  # of another test's folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "collection").mkdir()
    for i in range(4):
        torch.manual_seed(i)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        torch.save(net.state_dict(), tmp_path / "collection" / f"net{i}.pt")
    for name, count, seed in (("train", 24, 0), ("test", 12, 1)):
        torch.manual_seed(seed)
        torch.save({"x": torch.randn(count, 6), "y": torch.randint(3, (count,))}, tmp_path / f"{name}.pt")
    config = {
        "checkpoints": [{"path": "collection/*.pt", "model": "sweepmodel:model"}],
        "data": {"source": "train.pt", "batch_size": 8, "num_examples": 16, "subset_seed": 3},
        "test": "test.pt",
        "measures": ["adaptive", "euclidean"],
        "rho": {"adaptive": [0.1, 0.3], "euclidean": 0.05},
        "ablations": [{}, {"ball_norm": float("inf")}],
        "steps": 4,
    }
    (tmp_path / "sweep.json").write_text(json.dumps(config))
    return tmp_path


def rows_of(folder, config="sweep.json"):
    rows = read_rows(folder, read_config(config))
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def test_rows_are_those_of_evaluate(place):
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 0
    rows = rows_of("out")
    assert len(rows) == 4 * (1 + 1 + 2 * 2 + 2 * 1)
    assert [json.loads(line)["job"] for line in Path("out/results.jsonl").read_text().splitlines()] == [
        r["job"] for r in rows
    ]
    row = next(r for r in rows if r.get("measure") == "adaptive" and r["rho"] == 0.3 and not r["ablation"])
    sweep = read_config("sweep.json")
    from sharpness.models import load

    loaded = load("sweepmodel:model", "collection/net0.pt")
    batches = sweep.data.load(loaded)
    expected = evaluate(loaded.model, batches, measure="adaptive", rho=[0.1, 0.3], steps=4, progress=False)
    assert row["checkpoint"] == "net0.pt"
    assert row["sharpness"] == expected.mean(0.3)
    assert row["per_batch"] == [b.value for b in expected.at(0.3)]
    assert row["settings"]["steps"] == 4
    assert row["data"]["num_examples"] == 16
    fit = next(r for r in rows if r["kind"] == "fit")
    data = torch.load("test.pt", weights_only=True)
    wrong = (loaded.model(data["x"]).argmax(1) != data["y"]).double().mean()
    assert fit["test_error"] == pytest.approx(float(wrong))
    assert targets(rows)["net0.pt"] == pytest.approx(fit["test_error"] - fit["train_error"])


def test_finished_jobs_are_not_done_again(place, monkeypatch):
    sweep = read_config("sweep.json")
    assert run_sweep(sweep, "out", progress=False) == []
    before = {p.name: p.stat().st_mtime_ns for p in Path("out/jobs").iterdir()}
    assert run_sweep(sweep, "out", progress=False) == []
    assert before == {p.name: p.stat().st_mtime_ns for p in Path("out/jobs").iterdir()}
    config = json.loads(Path("sweep.json").read_text())
    config["measures"].append("gradient-norm")
    Path("more.json").write_text(json.dumps(config))
    assert run_sweep(read_config("more.json"), "out", progress=False) == []
    after = {p.name: p.stat().st_mtime_ns for p in Path("out/jobs").iterdir()}
    assert before.items() < after.items()
    assert len(after) == len(before) + 4
    config["steps"] = 5
    Path("other.json").write_text(json.dumps(config))
    assert rows_of("out", "other.json") == [r for r in rows_of("out") if r["kind"] != "sharpness"]


def test_shards_give_the_same_rows(place):
    sweep = read_config("sweep.json")
    run_sweep(sweep, "whole", progress=False)
    for i in (3, 1, 2):
        assert cli.main(["sweep", "sweep.json", "--out", "parts", "--shard", f"{i}/3", "--quiet"]) == 0
    assert rows_of("whole") == rows_of("parts")


def test_a_bad_checkpoint_is_recorded_and_the_others_go_on(place, capsys):
    Path("collection/net1.pt").write_bytes(b"no checkpoint")
    torch.save({"0.weight": torch.zeros(2, 2)}, "collection/net2.pt")
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    err = capsys.readouterr().err
    assert "sharpness: net1.pt, fit: collection/net1.pt is no plain state dict of tensors" in err
    assert "net2.pt, adaptive: the weights in collection/net2.pt are not those of Sequential" in err
    assert "Traceback" not in err
    assert {r["checkpoint"] for r in rows_of("out")} == {"net0.pt", "net3.pt"}
    torch.manual_seed(1)
    torch.save(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).state_dict(), "collection/net1.pt")
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    assert {r["checkpoint"] for r in rows_of("out")} == {"net0.pt", "net1.pt", "net3.pt"}


def start(place, *arguments, torchrun=0):
    command = [sys.executable, "-W", "ignore"]
    if torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
    command += ["-m", "sharpness", "sweep", "sweep.json", "--out", *arguments, "--quiet"]
    settings = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=place, env=settings, stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.xdist_group("torchrun")
def test_torchrun_gives_the_same_rows(place):
    run_sweep(read_config("sweep.json"), "whole", progress=False)
    process = start(place, "spread", torchrun=2)
    assert process.wait(120) == 0, process.stderr.read().decode()
    process.stderr.close()
    assert rows_of("whole") == rows_of("spread")


#: Random moments at which a sweep is cut short; `make fuzz` takes fifty.
MOMENTS = int(os.environ.get("FUZZ_KILLS", "4"))


def _sweep_here(place):
    os.chdir(place)
    sys.path.insert(0, str(place))
    torch.set_num_threads(1)
    run_sweep(read_config("sweep.json"), "killed", progress=False)


def longer(place):
    config = json.loads(Path("sweep.json").read_text())
    config["rho"] = {"adaptive": [0.1 * k for k in range(1, 9)], "euclidean": [0.01 * k for k in range(1, 9)]}
    Path("sweep.json").write_text(json.dumps(config))
    began = time.monotonic()
    run_sweep(read_config("sweep.json"), "whole", progress=False)
    return time.monotonic() - began


def test_killed_at_random_moments(place):
    """SIGKILL again and again while jobs are written; what is left is finished by the next call."""
    duration, random = longer(place), np.random.default_rng(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sharpness.sweep"])
    killed = 0
    for moment in random.uniform(0, 1.2 * duration, MOMENTS):
        process = context.Process(target=_sweep_here, args=(place,))
        process.start()
        limit = time.monotonic() + 60
        while not Path("killed/jobs").is_dir() and process.is_alive() and time.monotonic() < limit:
            time.sleep(0.001)
        process.join(moment)
        killed += process.is_alive()
        process.kill()
        process.join()
        if len(list(Path("killed/jobs").glob("*.json"))) == len(list(Path("whole/jobs").glob("*.json"))):
            shutil.rmtree("killed")
    assert killed >= MOMENTS // 4
    assert run_sweep(read_config("sweep.json"), "killed", progress=False) == []
    assert rows_of("killed") == rows_of("whole")


def test_a_disk_that_is_full_at_random_moments(place, monkeypatch, capsys):
    """Every write, flush and move may find no space; the file is named, and nothing that was finished is lost."""
    longer(place)
    random, calls = np.random.default_rng(0), itertools.count()
    fails_at = math.inf
    write_text, replace, fsync = Path.write_text, Path.replace, os.fsync

    def full(original):
        def call(path, *arguments, **options):
            if next(calls) == fails_at:
                if original is write_text:
                    original(path, "{", encoding="utf-8")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(path, *arguments, **options)

        return call

    monkeypatch.setattr(Path, "write_text", full(write_text))
    monkeypatch.setattr(Path, "replace", full(replace))
    monkeypatch.setattr(os, "fsync", full(fsync))
    for moment in random.integers(0, 40, MOMENTS):
        calls = itertools.count()
        fails_at = int(moment)
        kept = {p.name: p.read_bytes() for p in Path("killed/jobs").glob("*.json")}
        if cli.main(["sweep", "sweep.json", "--out", "killed", "--quiet"]) == 0:  # there was no such write any more
            shutil.rmtree("killed")
            continue
        assert re.search(r"No space left on device: 'killed/.*'", capsys.readouterr().err)
        found = {p.name: p.read_bytes() for p in Path("killed/jobs").glob("*.json")}
        assert kept.items() <= found.items()
        assert not [p for p in Path("killed").rglob(".sharpness-*")]
    fails_at = math.inf
    assert cli.main(["sweep", "sweep.json", "--out", "killed", "--quiet"]) == 0
    assert rows_of("killed") == rows_of("whole")


# -- what a result was computed from ---------------------------------------------------------------------------------


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


def test_a_diverged_checkpoint_is_a_failed_row(place, capsys):
    torch.save({k: v * torch.nan for k, v in torch.load("collection/net0.pt").items()}, "collection/net9.pt")
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    assert "net9.pt, fit: train_loss is nan; the model has diverged" in capsys.readouterr().err
    assert cli.main(["table", "out"]) == 0


def test_a_garbled_job_is_done_again(place):
    run_sweep(read_config("sweep.json"), "out", progress=False)
    whole = rows_of("out")
    junk = (b"", b"{", b"[1]", b"\xff", b'{"rows": 3}')
    for path, content in zip(sorted(Path("out/jobs").glob("*.json")), junk, strict=False):
        path.write_bytes(content)
    assert len(rows_of("out")) < len(whole)
    assert run_sweep(read_config("sweep.json"), "out", progress=False) == []
    assert rows_of("out") == whole


def test_a_radius_that_is_too_large_loses_no_other(place, capsys):
    config = json.loads(Path("sweep.json").read_text())
    config |= {"rho": {"euclidean": [0.1, 1e300, 0.3]}, "measures": ["euclidean"], "ablations": [{}]}
    Path("sweep.json").write_text(json.dumps(config))
    for _ in range(2):  # said again by the next call, which does nothing again
        assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 4
        assert all("euclidean at rho = 1e+300: " in line and "use a smaller rho" in line for line in err), err
        assert {r["rho"] for r in rows_of("out") if r["kind"] == "sharpness"} == {0.1, 0.3}


BAD = """
import torch
from torch import nn
from sweepmodel import model as sound

class Odd(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(6, 3), error

    def forward(self, x):
        raise self.error("odd")

"""


def test_whatever_one_model_raises_the_others_go_on(place, capsys):
    kinds = ("TypeError", "AttributeError", "AssertionError", "RecursionError", "ZeroDivisionError")
    Path("bad.py").write_text(BAD + "".join(f"def {k.lower()}():\n    return Odd({k})\n\n" for k in kinds))
    for k in kinds:
        torch.save(nn.Sequential(nn.Linear(6, 3)).state_dict(), f"{k}.pt")
        weights = {name.replace("0.", "layer."): v for name, v in torch.load(f"{k}.pt").items()}
        torch.save(weights, f"{k}.pt")
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, "cut.safetensors")
    Path("cut.safetensors").write_bytes(Path("cut.safetensors").read_bytes()[:20])
    config = json.loads(Path("sweep.json").read_text())
    config["checkpoints"] += [{"path": f"{k}.pt", "model": f"bad:{k.lower()}"} for k in kinds]
    config["checkpoints"].append({"path": "cut.safetensors", "model": "sweepmodel:model"})
    Path("bad.json").write_text(json.dumps(config))
    assert cli.main(["sweep", "bad.json", "--out", "out", "--quiet"]) == 1
    err = capsys.readouterr().err
    assert "cut.safetensors is not a readable safetensors file" in err
    for k in kinds:
        assert f"{k}.pt, adaptive: {k}: odd" in err
    run_sweep(read_config("sweep.json"), "sound", progress=False)
    assert [r for r in rows_of("out", "bad.json") if r["checkpoint"].startswith("net")] == rows_of("sound")


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


@pytest.mark.xdist_group("torchrun")
def test_a_killed_rank_ends_the_others(place):
    config = json.loads(Path("sweep.json").read_text())
    config["rho"] = {"adaptive": [0.01 * k for k in range(1, 30)], "euclidean": 0.05}
    config |= {"steps": 40, "relative_tol": 0}
    Path("sweep.json").write_text(json.dumps(config))
    process = start(place, "out", torchrun=2)
    limit = time.monotonic() + 60
    while not Path("out/jobs").is_dir() and time.monotonic() < limit:
        time.sleep(0.02)
    listing = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True)
    ranks = [int(line.split()[0]) for line in listing.stdout.splitlines() if "sharpness" in line]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait(60) != 0
    process.stderr.close()
    run_sweep(read_config("sweep.json"), "whole", progress=False)
    assert len(rows_of("out")) < len(rows_of("whole"))
    assert run_sweep(read_config("sweep.json"), "out", progress=False) == []
    assert rows_of("out") == rows_of("whole")


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
        ({"ablations": [{"geodesic": "rk4"}]}, "means nothing for any of adaptive, euclidean"),
    ],
)
def test_mistakes_in_the_configuration(place, capsys, change, message):
    import re

    config = json.loads(Path("sweep.json").read_text()) | change
    config = {k: v for k, v in config.items() if v is not None}
    Path("sweep.json").write_text(json.dumps(config))
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert err.count("\n") == 1


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
    with pytest.raises(ValueError, match="unknown measure 'geometric'"):
        read_config("own.json")


def test_known_accuracies_stand_in_for_a_test_set(place):
    config = json.loads(Path("sweep.json").read_text())
    del config["test"]
    config["measures"] = ["gradient-norm"]
    config["ablations"] = [{}]
    config["accuracies"] = {"file": "acc.csv", "name": "model", "test": "dev"}
    Path("acc.csv").write_text("model,dev,train\n" + "".join(f"net{i},0.{6 + i}5,0.9\n" for i in range(3)))
    Path("known.json").write_text(json.dumps(config))
    failed = run_sweep(read_config("known.json"), "out", progress=False)
    assert [(f["checkpoint"], f["error"]) for f in failed] == [("net3.pt", "acc.csv has no accuracy of 'net3.pt'")]
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
        ("model,dev\nnet0,good\n", "holds no accuracy"),
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


def test_baselines_of_a_sweep(place):
    config = json.loads(Path("sweep.json").read_text())
    config |= {"initial": "collection/net0.pt", "measures": ["gradient-norm"], "ablations": [{}]}
    Path("base.json").write_text(json.dumps(config))
    assert run_sweep(read_config("base.json"), "out", progress=False) == []
    found = {r["checkpoint"]: r for r in rows_of("out", "base.json") if r["kind"] == "baselines"}
    assert found["net0.pt"]["distance"] == 0
    assert found["net1.pt"]["distance"] > 1
    assert all(r["relative_flatness"] > 0 and r["weight_norm"] > 0 for r in found.values())


# -- checkpoints and data of all kinds ---------------------------------------------------------------------------------


class Payload:
    """Unpickled, it writes a file."""

    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.mark.filterwarnings("ignore")
def test_bert_folders_good_and_bad(place, capsys):
    from reproduction.pretrain import wordpiece

    words = ["good film", "bad film", "dull film"] * 3
    names = {"good": 0, "bad": 1, "dull": 2}
    tokenizer = wordpiece(["a", "b", "c"], 20, length=16)  # the tiny network knows few tokens
    for folder in ("good", "wordless", "narrow", "nameless"):
        model = networks.bert(layers=1)
        model.config.label2id = {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2} if folder == "nameless" else names
        if folder == "narrow":
            model.classifier = nn.Linear(model.config.hidden_size, 2)
            model.num_labels = model.config.num_labels = 2
            model.config.label2id = names
        model.save_pretrained(place / "berts" / folder)
        if folder != "wordless":
            tokenizer.save_pretrained(place / "berts" / folder)
    (place / "berts" / "pickled").mkdir()
    (place / "berts" / "pickled" / "config.json").write_text((place / "berts/good/config.json").read_text())
    torch.save(Payload(), place / "berts" / "pickled" / "pytorch_model.bin")
    (place / "texts.tsv").write_text("text\tlabel\n" + "".join(f"{w}\t{w.split()[0]}\n" for w in words))
    config = {"checkpoints": "berts/*", "data": "texts.tsv", "measures": ["geodesic-inv"], "rho": 0.05, "steps": 2,
              "baselines": False}  # fmt: skip
    (place / "berts.json").write_text(json.dumps(config))
    assert cli.main(["sweep", "berts.json", "--out", "b", "--quiet"]) == 1
    said = {line.split()[1]: line for line in capsys.readouterr().err.splitlines() if line.startswith("sharpness:")}
    assert [r["checkpoint"] for r in rows_of("b", "berts.json")] == ["good"], said
    assert rows_of("b", "berts.json")[0]["sharpness"] > 0
    assert set(said) == {"wordless,", "narrow,", "nameless,", "pickled,"}
    assert "the model has no tokenizer: put one into its folder" in said["wordless,"]
    assert "'good', which stands for no class (label_0, label_1); say what labels mean" in said["narrow,"]
    assert "'good', which stands for no class (label_0, label_1, label_2); say what labels mean" in said["nameless,"]
    assert "berts/pickled holds pickled objects other than tensors" in said["pickled,"]
    assert not Path("executed").exists()


@pytest.mark.filterwarnings("ignore")
def test_soups_checkpoints_good_and_pickled(place, capsys):
    open_clip = pytest.importorskip("open_clip")
    from PIL import Image

    torch.manual_seed(0)
    visual = open_clip.create_model("ViT-B-32-quickgelu", pretrained=None).visual
    head = nn.Linear(512, 2)
    state = {f"model.visual.{k}": v for k, v in visual.state_dict().items()} | {"model.logit_scale": torch.ones(())}
    (place / "soups").mkdir()
    torch.save(state | {f"classification_head.{k}": v for k, v in head.state_dict().items()}, "soups/model_0.pt")
    torch.save({"weights": Payload()}, "soups/model_1.pt")
    for c, shade in (("cat", 40), ("dog", 200)):
        (place / "pictures" / c).mkdir(parents=True)
        Image.new("RGB", (32, 32), (shade, 90, 10)).save(place / "pictures" / c / "0.png")
    config = {"checkpoints": [{"path": "soups/*.pt", "model": "ViT-B-32-quickgelu"}], "data": "pictures",
              "measures": ["geodesic-mix"], "rho": 0.01, "steps": 1}  # fmt: skip
    (place / "soups.json").write_text(json.dumps(config))
    assert cli.main(["sweep", "soups.json", "--out", "s", "--quiet"]) == 1
    rows = rows_of("s", "soups.json")
    assert [(r["checkpoint"], r["kind"]) for r in rows] == [("model_0.pt", "baselines"), ("model_0.pt", "sharpness")]
    assert rows[0]["relative_flatness"] > 0
    assert rows[1]["sharpness"] > 0
    assert "soups/model_1.pt is no plain state dict of tensors" in capsys.readouterr().err
    assert not Path("executed").exists()


def test_data_that_cannot_be_read_is_said_once_a_job(place, capsys):
    config = json.loads(Path("sweep.json").read_text())
    config |= {"checkpoints": [{"path": "collection/net0.pt", "model": "sweepmodel:model"}], "data": "bad.tsv"}
    (place / "bad.tsv").write_bytes(b"text\tlabel\nna\xefve\t1\n")
    (place / "bad.json").write_text(json.dumps(config))
    assert cli.main(["sweep", "bad.json", "--out", "bad", "--quiet"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert all("line 2 of bad.tsv is not UTF-8; convert the file" in line for line in lines)
    assert len(lines) == 6  # the fit, the baselines, and two measures with two settings each
    assert Path("bad/results.jsonl").read_text() == ""  # no row is a result too
    config["data"] = {"source": "empty", "image_size": 2, "mean": [0.5] * 3, "std": [0.5] * 3}
    (place / "empty" / "cat").mkdir(parents=True)
    (place / "bad.json").write_text(json.dumps(config))
    assert cli.main(["sweep", "bad.json", "--out", "bad", "--quiet"]) == 1
    assert "the class folder cat of empty holds no image" in capsys.readouterr().err
    (place / "empty" / "cat" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    assert cli.main(["sweep", "bad.json", "--out", "bad", "--quiet"]) == 1
    assert "the image cat/0.png cannot be read" in capsys.readouterr().err
