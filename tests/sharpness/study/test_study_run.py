import errno
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quotient_manifolds.linalg import as_count
from sharpness import cli
from sharpness.study import plan, read_config, read_results, read_rows, run_sweep
from tests.support import networks
from tests.support.extent import EXHAUSTIVE
from tests.support.pictures import picture_network
from tests.support.processes import forked
from tests.support.small_clip import fine_tuned, name_small_models
from tests.support.sweeps import rows_of


def test_finished_jobs_are_not_done_again(place, monkeypatch):
    sweep = read_config("sweep.json")
    assert run_sweep(sweep, "out", progress=False) == []
    before = {p.name: p.stat().st_mtime_ns for p in Path("out/jobs").iterdir()}
    assert run_sweep(sweep, "out", progress=False) == []
    assert before == {p.name: p.stat().st_mtime_ns for p in Path("out/jobs").iterdir()}
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    config["measures"].append("gradient-norm")
    Path("more.json").write_text(json.dumps(config), encoding="utf-8")
    assert run_sweep(read_config("more.json"), "out", progress=False) == []
    after = {p.name: p.stat().st_mtime_ns for p in Path("out/jobs").iterdir()}
    assert before.items() < after.items()
    assert len(after) == len(before) + 4
    config["steps"] = 5
    Path("other.json").write_text(json.dumps(config), encoding="utf-8")
    assert rows_of("out", "other.json") == [r for r in rows_of("out") if r["kind"] != "sharpness"]


def test_remarks_stand_in_the_results_and_in_their_tables(place, capsys, monkeypatch):
    """They were warnings, which the command line swallows."""
    Path("halves.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.out, self.spare = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)\n"
        "        self.a.requires_grad_(False)\n"
        "    def forward(self, x):\n"
        "        return self.out(torch.tanh(self.a(x)))\n"
        "def model():\n"
        "    torch.manual_seed(0)\n"
        "    return Net().float()\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(place)
    halves = importlib.import_module("halves")
    Path("halves").mkdir()
    for name in "ab":
        torch.save(halves.model().state_dict(), f"halves/{name}.pt")
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    config |= {"measures": ["adaptive", "gradient-norm"], "rho": {"adaptive": 0.1}}
    config["checkpoints"] = [{"path": "halves/*.pt", "model": "halves:model"}]
    Path("halves.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["sweep", "halves.json", "--out", "out", "--quiet"]) == 0
    rows = [json.loads(line) for line in Path("out/results.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in (row for row in rows if row["kind"] == "sharpness"):
        frozen, unused = row["remarks"]
        assert frozen == "33 of 89 weights of the model are measured; the others are frozen"
        assert "spare" in unused
    capsys.readouterr()
    lines = [f"{remark} (adaptive, gradient-norm; a.pt, b.pt)" for remark in (frozen, unused)]
    assert cli.main(["table", "out"]) == 0
    printed = capsys.readouterr().out
    assert all(f"- {line}\n" in printed for line in lines)
    assert cli.main(["table", "out", "--format", "csv"]) == 0
    assert all(line in capsys.readouterr().err for line in lines[:1])
    # A ranking of more models has them too.
    with open("out/results.jsonl", "a", encoding="utf-8") as file:
        for k, row in itertools.product(range(10), rows):
            file.write(json.dumps({**row, "checkpoint": f"{row['checkpoint']}{k}"}) + "\n")
    assert cli.main(["table", "out/results.jsonl"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    assert f"- {frozen} (adaptive, gradient-norm; 22 models)" in notes
    assert len(notes) == 1 + 2  # what the columns are, and the remarks
    run = ["run", "halves:model", "train.pt", "--measure", "adaptive", "--rho", "0.1", "--quiet"]
    assert cli.main(run) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"- {frozen}")
    assert unused in printed


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
    assert "sharpness: net1.pt: collection/net1.pt is not a plain state dict of tensors" in err
    assert "net2.pt: the weights in collection/net2.pt are not those of Sequential" in err
    assert "Traceback" not in err
    assert {r["checkpoint"] for r in rows_of("out")} == {"net0.pt", "net3.pt"}
    torch.manual_seed(1)
    torch.save(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).state_dict(), "collection/net1.pt")
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    assert {r["checkpoint"] for r in rows_of("out")} == {"net0.pt", "net1.pt", "net3.pt"}


def test_a_file_that_cannot_be_read_leaves_the_others_their_rows(place, capsys, monkeypatch):
    """The summary read it again, stopped there, and was never written. What all need, as the data, is no such file."""
    lost = ["collection/net1.pt"]

    def unreadable(path, *arguments):
        if any(str(path).endswith(name) for name in lost):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments)

    opened = open
    monkeypatch.setattr("sharpness.study.plan.open", unreadable, raising=False)
    for _ in range(2):
        assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
        assert re.search(r"net1.pt, model: .*Permission denied", capsys.readouterr().err)
    assert {r["checkpoint"] for r in rows_of("out")} == {"net0.pt", "net2.pt", "net3.pt"}
    assert len(Path("out/results.jsonl").read_text(encoding="utf-8").splitlines()) == len(rows_of("out"))
    (failure,) = read_rows("out", read_config("sweep.json"), failed=True)
    assert failure["checkpoint"] == "net1.pt"
    plan._of_contents.cache_clear()
    lost[:] = ["train.pt", "data.pt"]
    with pytest.raises(PermissionError):
        rows_of("out")


MOMENTS = 50 if EXHAUSTIVE else 4


def _sweep_here(place, out):
    os.chdir(place)
    sys.path.insert(0, str(place))
    torch.set_num_threads(1)
    return cli.main(["sweep", "sweep.json", "--out", out, "--quiet"])


def longer(place):
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    config["rho"] = {"adaptive": [0.1 * k for k in range(1, 5)], "euclidean": [0.01 * k for k in range(1, 5)]}
    Path("sweep.json").write_text(json.dumps(config), encoding="utf-8")
    began = time.monotonic()
    run_sweep(read_config("sweep.json"), "whole", progress=False)
    return time.monotonic() - began


def test_killed_at_random_moments(place):
    """SIGKILL again and again while jobs are written; what is left is finished by the next call."""
    duration, random = longer(place), np.random.default_rng(0)
    killed = 0
    for moment in random.uniform(0, 1.2 * duration, MOMENTS):
        process = forked.Process(target=_sweep_here, args=(place, "killed"))
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
    run_sweep(read_config("sweep.json"), "whole", progress=False)
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


def test_a_garbled_job_is_done_again(place):
    run_sweep(read_config("sweep.json"), "out", progress=False)
    whole = rows_of("out")
    junk = (b"", b"{", b"[1]", b"\xff", b'[{"checkpoint": "net0.pt", "kind": "sharpness"}]')
    for path, content in zip(sorted(Path("out/jobs").glob("*.json")), junk, strict=False):
        path.write_bytes(content)
    assert len(rows_of("out")) < len(whole)
    assert run_sweep(read_config("sweep.json"), "out", progress=False) == []
    assert rows_of("out") == whole


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
    Path("bad.py").write_text(
        BAD + "".join(f"def {k.lower()}():\n    return Odd({k})\n\n" for k in kinds), encoding="utf-8"
    )
    for k in kinds:
        torch.save(nn.Sequential(nn.Linear(6, 3)).state_dict(), f"{k}.pt")
        weights = {name.replace("0.", "layer."): v for name, v in torch.load(f"{k}.pt").items()}
        torch.save(weights, f"{k}.pt")
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, "cut.safetensors")
    Path("cut.safetensors").write_bytes(Path("cut.safetensors").read_bytes()[:20])
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    config["checkpoints"] += [{"path": f"{k}.pt", "model": f"bad:{k.lower()}"} for k in kinds]
    config["checkpoints"].append({"path": "cut.safetensors", "model": "sweepmodel:model"})
    Path("bad.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["sweep", "bad.json", "--out", "out", "--quiet"]) == 1
    err = capsys.readouterr().err
    assert "cut.safetensors is not a readable safetensors file" in err
    for k in kinds:
        assert f"{k}.pt: {k}: odd" in err
    run_sweep(read_config("sweep.json"), "sound", progress=False)
    assert [r for r in rows_of("out", "bad.json") if r["checkpoint"].startswith("net")] == rows_of("sound")


class Payload:
    """Unpickled, it writes a file."""

    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.mark.filterwarnings("ignore")
def test_bert_folders_good_and_bad(place, capsys):
    from tests.support.texts import wordpiece

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
    (place / "berts" / "pickled" / "config.json").write_text(
        (place / "berts/good/config.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    torch.save(Payload(), place / "berts" / "pickled" / "pytorch_model.bin")
    (place / "texts.tsv").write_text(
        "text\tlabel\n" + "".join(f"{w}\t{w.split()[0]}\n" for w in words), encoding="utf-8"
    )
    config = {"checkpoints": "berts/*", "data": "texts.tsv", "measures": ["geodesic-inv"], "rho": 0.05, "steps": 2}
    (place / "berts.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["sweep", "berts.json", "--out", "b", "--quiet"]) == 1
    said = {line.split()[1]: line for line in capsys.readouterr().err.splitlines() if line.startswith("sharpness: ")}
    assert [r["checkpoint"] for r in rows_of("b", "berts.json")] == ["good"], said
    assert rows_of("b", "berts.json")[0]["sharpness"] > 0
    assert set(said) == {"wordless:", "narrow:", "nameless:", "pickled:"}
    assert "the model has no tokenizer: put one into its folder" in said["wordless:"]
    assert "'good', which is not the name of a class (LABEL_0, LABEL_1); say what labels mean" in said["narrow:"]
    assert (
        "'good', which is not the name of a class (LABEL_0, LABEL_1, LABEL_2); say what labels mean"
        in said["nameless:"]
    )
    assert "pickled cannot be loaded: a file is not a plain state dict of tensors" in said["pickled:"]
    assert not Path("executed").exists()


@pytest.mark.filterwarnings("ignore")
def test_soups_checkpoints_good_and_pickled(place, capsys, monkeypatch):
    pytest.importorskip("open_clip")
    from PIL import Image

    name_small_models(place / "configs", monkeypatch)
    (place / "soups").mkdir()
    torch.save(fine_tuned().state_dict(), "soups/model_0.pt")
    torch.save({"weights": Payload()}, "soups/model_1.pt")
    for c, shade in (("cat", 40), ("dog", 200)):
        (place / "pictures" / c).mkdir(parents=True)
        Image.new("RGB", (32, 32), (shade, 90, 10)).save(place / "pictures" / c / "0.png")
    config = {"checkpoints": [{"path": "soups/*.pt", "model": "tests.support.small_clip:fine_tuned"}],
              "data": "pictures", "measures": ["geodesic-mix"], "rho": 0.01, "steps": 1}  # fmt: skip
    (place / "soups.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["sweep", "soups.json", "--out", "s", "--quiet"]) == 1
    rows = rows_of("s", "soups.json")
    assert [(r["checkpoint"], r["kind"]) for r in rows] == [("model_0.pt", "sharpness")]
    assert rows[0]["sharpness"] > 0
    assert "soups/model_1.pt is not a plain state dict of tensors" in capsys.readouterr().err
    assert not Path("executed").exists()


def test_data_that_cannot_be_read_is_said_once(place, capsys):
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    config |= {"checkpoints": [{"path": "collection/net0.pt", "model": "sweepmodel:model"}], "data": "bad.tsv"}
    (place / "bad.tsv").write_bytes(b"text\tlabel\nna\xefve\t1\n")
    (place / "bad.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["sweep", "bad.json", "--out", "bad", "--quiet"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert all("bad.tsv is not UTF-8; convert the file" in line for line in lines)
    assert len(lines) == 1  # not by the fit, and four measures
    assert Path("bad/results.jsonl").read_text(encoding="utf-8") == ""  # no row is a result too
    assert cli.main(["table", "bad"]) == 2
    said = capsys.readouterr().err.splitlines()
    measures = ", ".join(config["measures"])
    assert said[0] == f"failed: net0.pt (fit, {measures}): {lines[0].removeprefix('sharpness: net0.pt: ')}"
    torch.save(picture_network().state_dict(), "pictures.pt")
    config |= {
        "checkpoints": [{"path": "pictures.pt", "model": "tests.support.pictures:picture_network"}],
        "data": "empty",
    }
    (place / "empty" / "cat").mkdir(parents=True)
    (place / "bad.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["sweep", "bad.json", "--out", "bad", "--quiet"]) == 1
    assert "the class folder cat of empty holds no image" in capsys.readouterr().err
    for c in ("cat", "dog"):
        (place / "empty" / c).mkdir(exist_ok=True)
        (place / "empty" / c / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    assert cli.main(["sweep", "bad.json", "--out", "bad", "--quiet"]) == 1
    assert re.search("the image (cat|dog)/0.png cannot be read", capsys.readouterr().err)


def test_what_all_checkpoints_need_is_looked_at_first(place, capsys):
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8"))
    (place / "bad.json").write_text(json.dumps(config | {"data": "nowhere.pt"}), encoding="utf-8")
    assert cli.main(["sweep", "bad.json", "--out", "bad", "--quiet"]) == 2
    assert "there is no data at nowhere.pt" in capsys.readouterr().err


def test_results_of_something_else_are_not_replaced(place, capsys):
    Path("mine").mkdir()
    Path("mine/results.jsonl").write_text("my own table", encoding="utf-8")
    assert cli.main(["sweep", "sweep.json", "--out", "mine", "--quiet"]) == 2
    assert "results.jsonl is not from a sweep into this folder" in capsys.readouterr().err
    assert Path("mine/results.jsonl").read_text(encoding="utf-8") == "my own table"


def test_what_is_wrong_is_known_before_the_first_search(place, capsys, monkeypatch):
    """A column of the test data that has another name was told after half an hour; now nothing is measured first."""
    torch.save({"x": torch.randn(12, 5), "y": torch.randint(3, (12,))}, "narrow.pt")
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8")) | {"test": "narrow.pt"}
    Path("wrong.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr("sharpness.study.run.statistic_of", lambda *_, **__: pytest.fail("it measures"))
    for more in (["--dry-run"], []):
        assert cli.main(["sweep", "wrong.json", "--out", "wrong", "--quiet", *more]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert [line.split()[1] for line in lines] == [f"net{i}.pt:" for i in range(4)]
        assert all("mat1 and mat2 shapes cannot be multiplied (4x5 and 6x8)" in line for line in lines)
        assert Path("wrong").exists() == (not more)


STEPS = "steps must be a whole number of at least 1, got 0"


def test_failures_are_said_when_they_happen(place, capsys, monkeypatch):
    from sharpness.study import run

    measured, seen = run.quantity, []

    def fails_once(name, *arguments, **options):
        seen.append(capsys.readouterr().err)
        if len(seen) == 2:
            as_count("steps", 0)
        return measured(name, *arguments, **options)

    monkeypatch.setattr("sharpness.study.run.quantity", fails_once)
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    assert [bool(said) for said in seen[:4]] == [False, False, True, False]
    assert seen[2] == f"sharpness: net0.pt, euclidean: {STEPS}\n"
    assert cli.main(["table", "out"]) == 0
    assert f"failed: net0.pt (euclidean): {STEPS}\n" in capsys.readouterr().err
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 0
    assert cli.main(["table", "out"]) == 0
    assert capsys.readouterr().err == ""


def test_a_sweep_shows_where_a_defect_is_and_goes_on(place, capsys, monkeypatch):
    def defect(name, *arguments, **options):
        return int(name)  # a ValueError, as that of a check

    monkeypatch.setattr("sharpness.study.run.quantity", defect)
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.count("Traceback (most recent call last):") == said.count("in defect") > 0
    assert {row["kind"] for row in rows_of("out")} == {"fit"}


def test_the_plan_is_said_first(place, capsys):
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--dry-run"]) == 0
    said = capsys.readouterr().err
    # Two radii of one measure and one of the other, each as it is and as an average.
    assert re.search(r"4 of 4 checkpoints, 24 searches, roughly \d+ (s|min); 0 of 20 jobs are done\n", said)
    assert not Path("out").exists()
    run_sweep(read_config("sweep.json"), "out", progress=False)
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--dry-run"]) == 0
    assert "0 of 4 checkpoints, 0 searches; 20 of 20 jobs are done" in capsys.readouterr().err


def test_a_sweep_without_a_configuration(place, capsys):
    """The rows are those of the same sweep from a file."""
    config = json.loads(Path("sweep.json").read_text(encoding="utf-8")) | {
        "rho": [0.1, 0.3],
        "measures": ["adaptive", "euclidean"],
    }
    config["test"] = {"source": "test.pt", "batch_size": 8}
    Path("same.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["sweep", "same.json", "--out", "file", "--quiet"]) == 0
    nets = sorted(map(str, Path("collection").glob("*.pt")))
    data = shlex.split("--data train.pt --test test.pt --batch-size 8 --num-examples 16 --subset-seed 3")
    words = [*data, "--measure", "adaptive", "euclidean", "--rho", "0.1", "0.3", "--steps", "4", "--quiet"]
    assert cli.main(["sweep", *nets, "--model", "sweepmodel:model", *words, "--out", "words"]) == 0
    rows = (read_results(name) for name in ("file", "words"))
    one, two = ([{k: v for k, v in row.items() if k not in ("seconds", "job")} for row in found] for found in rows)
    assert one == two
    assert {row.get("rho") for row in two} == {None, 0.1, 0.3}
    for wrong, said in (
        (["sweep.json", "--measure", "adaptive"], "sweep.json says what is measured; leave out measure"),
        (nets, "give the data with --data, or a configuration"),
        ([nets[0], nets[0], *data], "two checkpoints are called 'net0.pt'"),
    ):
        assert cli.main(["sweep", *wrong, "--out", "wrong"]) == 2
        assert said in capsys.readouterr().err
