"""One sentence for what users cause, the traceback for a defect; nothing of theirs is replaced."""

import contextlib
import errno
import io
import json
import os
import pkgutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from quotient_manifolds import lora_command
from reproduction import cli as laboratory
from sharpness import LayerShare, LayerShares, cli, plots
from sharpness.errors import naming, words_of
from sharpness.files import atomic_write, check_apart, check_file, check_folder, write_json, write_text
from sharpness.study.rows import write_results
from tests.support import whole_networks
from tests.support.studies import study

ROOT = Path(__file__).parents[2]


def test_words():
    assert words_of(ValueError("a\n  b")) == "a b"
    assert words_of(KeyError("steps")) == "KeyError: 'steps'"
    assert words_of(AssertionError()) == "AssertionError"
    with pytest.raises(ValueError, match="the settings: TypeError: odd") as caught, naming("the settings"):
        raise TypeError("odd")
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(ImportError, match="missing"), naming("the settings"):  # what to install is said elsewhere
        raise ImportError("missing")


def test_a_defect_shows_where_it_is(monkeypatch, capsys):
    def defect(*_, **__):
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr("reproduction.toy.run", defect)
    assert laboratory.main(["toy", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert said.endswith("\nreproduction: ZeroDivisionError: in the middle\n")


SMALL = ["run", "tests.support.spread:model", "tests.support.spread:batches", "--quiet"]
#: Functions within our own, at all depths, with a command that comes there.
INNER = {
    "sharpness.evaluation.attached_space": SMALL, "sharpness.space.WeightSpace.move_to": SMALL,
    "sharpness.losses.default_loss": SMALL, "sharpness.losses.BatchLoss.__call__": SMALL,
    "sharpness.commands._print": SMALL,
    "sharpness.study.plan.as_data": [*SMALL, "--out", "{}/out.json"],
    "quotient_manifolds.symmetries.discovery.settled": ["symmetries", "tests.support.spread:model"],
    "quotient_manifolds.adapters.storage.safe_open": ["lora", "compare", "{}/one", "{}/one"],
    "quotient_manifolds.adapters.folders.as_config": ["lora", "compare", "{}/one", "{}/one"],
}  # fmt: skip


@pytest.mark.parametrize("error", [KeyError("steps"), ValueError("odd")])
@pytest.mark.parametrize("where", INNER)
def test_a_defect_of_any_class_shows_where_it_is(where, error, monkeypatch, capsys, tmp_path):
    """A KeyError or ValueError in the middle of our code was said in one sentence, as if a user could mend it."""

    def defect(*_, **__):
        raise error.with_traceback(None)

    monkeypatch.syspath_prepend(ROOT)
    torch.manual_seed(0)
    names = [f"base_model.model.layer.lora_{x}.weight" for x in "AB"]
    (tmp_path / "one").mkdir()
    safetensors.torch.save_file(
        {n: torch.randn(4, 4) for n in names}, tmp_path / "one" / "adapter_model.safetensors", {"format": "pt"}
    )
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["layer"]})
    (tmp_path / "one" / "adapter_config.json").write_text(config, encoding="utf-8")
    program, *arguments = (word.format(tmp_path) for word in ["sharpness"] * (INNER[where][0] != "lora") + INNER[where])
    main = lora_command.main if program == "lora" else cli.main
    assert main(arguments) == 0, capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err
    with contextlib.suppress(OSError):
        (tmp_path / "out.json").unlink()
    monkeypatch.setattr(where, defect)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert "in defect" in said
    assert said.splitlines()[-1].endswith(str(error))


class Odd(torch.nn.Module):
    def forward(self, x):
        return {}["of the model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "tests.sharpness.test_errors:Odd", "tests.support.spread:batches"], "Odd has no trainable parameter"),
        (
            ["run", "tests.support.spread:model", "tests.support.spread:batches", "--steps", "0"],
            "steps must be a whole number",
        ),
        (["run", "tests.support.spread:model", "builtins:list"], "builtins:list gave no batch"),
        (
            ["run", "tests.support.spread:model", "tests.sharpness.test_errors:no_batches"],
            "no_batches failed: KeyError: 'data'",
        ),
        (["symmetries", "tests.support.spread:nothing"], "is not an importable module:function"),
        (["run", "tests.sharpness.test_errors:odd_model", "tests.support.spread:batches"], "KeyError: 'of the model'"),
        (["lora", "compare", "nowhere", "nowhere"], "nowhere is no file"),
    ],
)
def test_what_a_user_can_mend_is_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    main = lora_command.main if arguments[0] == "lora" else cli.main
    assert main(arguments[arguments[0] == "lora" :]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def odd_model():
    model = Odd()
    model.weight = nn.Parameter(torch.ones(2, 2))
    return model


def no_batches():
    yield {}["data"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "tests.support.spread:model", "tests.support.spread:batches", "--device", "cuda:9"],
            "the device 'cuda:9' cannot be",
        ),
        (
            ["run", "tests.support.spread:model", "tests.support.spread:batches", "--out", "/nowhere/x.json"],
            "there is no folder",
        ),
        (["demo", "--out", "picture.foo"], "is not a figure: its name must end in"),
        (["sweep", "nowhere.json", "--out", "out"], "there is no configuration 'nowhere.json'"),
        (
            ["finetune", "tests.support.spread:model", "x", "--models", "0", "--out", "out"],
            "whole number of at least 1",
        ),
        (
            [
                "finetune",
                "tests.support.spread:model",
                "tests.support.spread:batches",
                "--test",
                "nope",
                "--out",
                "out",
            ],
            "there is no data at nope",
        ),
        (["toy", "--out", ""], "the path is empty"),
        (["run", "bert-base-uncased", "tests.support.spread:batches"], "has an owner: owner/name"),
        (["run", "tests.support.spread:model", "x.tsv"], "there is no data at x.tsv"),
        (["run", "owner/name", "tests.support.spread:batches"], "HF_HUB_OFFLINE forbids to fetch it"),
        (["run", "tests.support.spread:model", "owner/name/test"], "HF_HUB_OFFLINE forbids to fetch it"),
        (["run", "./no/such/folder", "tests.support.spread:batches"], "there is no folder './no/such/folder'"),
    ],
)
def test_what_is_wrong_is_known_before_the_work(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr("sharpness.demo.train", lambda *_, **__: pytest.fail("the demo trains"))
    monkeypatch.setattr("sharpness.study.run.statistic_of", lambda *_, **__: pytest.fail("it measures"))
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # of the parser
        command = laboratory if arguments[0] in ("finetune", "toy") else cli
        assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"install the extra plot, pip install '\.\[plot\]' in the checkout"):
        plots.plot_layers(LayerShares([LayerShare("a", "MLP", None, 1.0)]))


def test_without_pandas(monkeypatch, capsys):
    """The error was that of the import alone."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "sharpness.sameness", raising=False)
    assert cli.main(["same", "one", "two"]) == 2
    assert "comparing two models needs pandas: install the extra plot, pip install" in capsys.readouterr().err


# -- files are written as a whole or not at all ------------------------------------------------------------------------


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def place(tmp_path):
    """A folder of somebody's, with a link, a pipe and nothing of ours."""
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "deep" / "thesis.txt").write_text("years of work", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "mine" / "deep" / "thesis.txt")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_only_files_are_replaced(place):
    before = {k: v for k, v in tree(place).items() if k != "pipe"}
    for name, words in (
        ("mine", "'.*mine' is a folder; name a file"),
        ("link", "is a symbolic link"),
        ("pipe", "is a device, pipe or socket"),
        ("nowhere/out.json", "no folder '.*nowhere' for 'out.json'"),
        ("", "is a folder"),
    ):
        with pytest.raises((ValueError, OSError), match=words):
            write_json(place / name, {})
    with pytest.raises(ValueError, match="is a device"):
        check_file(os.devnull)
    assert {k: v for k, v in tree(place).items() if k != "pipe"} == before
    write_json(place / "out.json", {"a": 1})
    write_json(place / "out.json", {"a": 2})
    assert (place / "out.json").read_text(encoding="utf-8") == '{\n  "a": 2\n}\n'
    assert check_folder(place / "new" / "deeper").is_dir()
    with pytest.raises(ValueError, match="is a file; name a folder"):
        check_folder(place / "out.json")
    for check in (check_file, check_folder, lambda read: check_apart(place / "out.json", [read])):
        with pytest.raises(ValueError, match="holds a NUL character"):
            check(f"{place}/new\0.json")


@pytest.mark.parametrize("text", ["0.5", "[1]", "null", '"pretrained_cfg"'])
def test_a_configuration_that_is_no_object_is_refused(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert cli.main(["run", str(tmp_path), "tests.support.spread:batches", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sharpness: {tmp_path} cannot be loaded: "), said


@pytest.mark.parametrize("out", ["mine", "..", ".", "link"])
def test_a_command_refuses_before_it_measures(place, capsys, monkeypatch, out):
    """The case that deleted folders: --out FOLDER."""
    monkeypatch.chdir(place / "mine")
    monkeypatch.setattr("sharpness.models.load", lambda *_, **__: pytest.fail("measured already"))
    before = {k: v for k, v in tree(place).items() if k != "pipe"}
    target = str(place / out) if out in ("mine", "link") else out
    assert (
        cli.main(["run", "tests.support.spread:model", "tests.support.spread:batches", "--out", target, "--quiet"]) == 2
    )
    assert "name a file" in capsys.readouterr().err
    assert {k: v for k, v in tree(place).items() if k != "pipe"} == before


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "a.txt", "old")

    def half():
        with atomic_write(tmp_path / "a.txt") as own:
            own.write_text("ne", encoding="utf-8")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(own))

    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        half()
    assert tree(tmp_path) == {"a.txt": b"old"}


def test_nothing_that_is_read_is_written(place):
    """Files in folders that are read count, through links and other spellings; new ones where all files are data."""
    mine, thesis = place / "mine", place / "mine" / "deep" / "thesis.txt"
    for out in (thesis, place / "mine" / ".." / "mine" / "deep" / "thesis.txt", place / "link"):
        for read in (thesis, mine, place / "link"):
            with pytest.raises(
                ValueError, match=r"writing to .* would (replace|change) .*, which is read; choose another"
            ):
                check_apart(out, [None, read])
    check_apart(mine / "new.json", [mine, thesis])
    check_apart(place / "other", [mine, thesis], [mine])
    with pytest.raises(ValueError, match=r"would change .*mine, which is read"):
        check_apart(mine / "new.json", (), [mine])


# -- wherever the output goes ------------------------------------------------------------------------------------------

#: What each command writes; a line with - prints nothing.
WRITTEN = {
    "demo --quiet --out {0}/picture.png": "picture.png picture.json",
    "run torch.nn:PReLU {0}/data.pt --checkpoint {0}/netä.pt --measure adaptive --quiet --out {0}/r.json "
    "--report {0}/r.html": "r.json r.html",
    "sweep {0}/netä.pt --model torch.nn:PReLU --data {0}/data.pt --measure adaptive --quiet --out {0}/out": "- "
    "out/results.jsonl",
    "table {0}/results.jsonl": "",
    "plot {0}/results.jsonl --out {0}/plot.png": "plot.png",
    "compare {0}/vit {0}/vit": "",
    "same {0}/vit {0}/vit --out {0}/same.csv": "same.csv",
    "symmetries {0}/vit": "",
    "canonicalize {0}/vit --out {0}/canonical": "canonical/model.safetensors",
    "env": "",
    "merge {0}/lora {0}/lora --out {0}/merged": "merged/README.md",
    "resize {0}/lora --rank 1 --out {0}/small": "small/README.md",
    "balance {0}/lora --out {0}/even": "even/README.md",
    "compare {0}/lora {0}/lora": "",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What commands read, in a folder whose name ASCII does not have."""
    torch.set_default_dtype(torch.float32)
    world = tmp_path_factory.mktemp("world") / "Größe 空"
    world.mkdir()
    torch.save(nn.PReLU().state_dict(), world / "netä.pt")
    torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, world / "data.pt")
    write_results(world / "results.jsonl", [{**row, "checkpoint": f"ä{row['checkpoint']}"} for row in study(10)])
    whole_networks.build("vit").float().save_pretrained(world / "vit")
    (world / "lora").mkdir()
    factors = {f"base_model.model.q.lora_{f}.weight": torch.ones(2, 2) for f in "AB"}
    safetensors.torch.save_file(factors, world / "lora" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"], "base_model_name_or_path": "空"}
    text = json.dumps(config, ensure_ascii=False)
    (world / "lora" / "adapter_config.json").write_text(text, encoding="utf-8")
    return world


class Interrupted(io.StringIO):
    def write(self, _):
        raise KeyboardInterrupt


def closed_pipe():
    reads, writes = os.pipe()
    os.close(reads)
    return open(writes, "w", encoding="utf-8")


def once(work):
    found = []
    return lambda *given, **options: found[0] if found else found.append(work(*given, **options)) or found[0]


#: Standard output, with the exit code and the words of a command that prints.
OUTPUTS = {
    "ascii": (lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="surrogateescape"), 0, ""),
    "closed": (closed_pipe, 141, ""),
    "full": (lambda: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", encoding="utf-8"), 2, "No space left on device"),
    "interrupted": (Interrupted, 130, "interrupted"),
}


@pytest.mark.parametrize("line", WRITTEN)
def test_wherever_its_output_goes_a_command_ends_in_a_line_and_loses_nothing(line, world, monkeypatch, capsys):
    """Results were lost at a ρ that a terminal lacks; closed pipes and Ctrl-C ended in tracebacks."""
    torch.set_default_dtype(torch.float32)
    silent, names = WRITTEN[line].startswith("-"), WRITTEN[line].removeprefix("- ").split()
    lora = "lora" in line
    program, module = ("quotient-lora", lora_command) if lora else ("sharpness", cli)
    # In an ASCII locale this is how Python reads the path.
    here = os.fsencode(world).decode("ascii", "surrogateescape")
    monkeypatch.setattr(sys, "argv", [program, *(word.format(here) for word in line.split())])
    monkeypatch.setattr("sharpness.demo.train", lambda *_, **__: None)
    few = torch.randn(8, 1, 8, 8), torch.arange(8)
    monkeypatch.setattr("sharpness.demo.digits", lambda _: few * 2)
    monkeypatch.setattr("sharpness.demo.MOVES", {})
    monkeypatch.setattr("sharpness.demo.RADII", {"euclidean": 0.05})
    monkeypatch.setattr("sharpness.study.correlation._RESAMPLES", 30)
    for drawing in ("sharpness.demo.draw", "sharpness.plots.write_report", "sharpness.study.plot_sweep"):
        monkeypatch.setattr(drawing, lambda *given, **_: next(p for p in given if isinstance(p, Path)).touch())
    for name in ("quotient_manifolds.symmetries.model_distance", "sharpness.sameness.judge"):
        monkeypatch.setattr(name, once(pkgutil.resolve_name(name)))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    for how, (output, code, words) in OUTPUTS.items():
        before, listening = set(world.rglob("*")), signal.getsignal(signal.SIGTERM)
        with monkeypatch.context() as context:
            if how == "interrupted" and (lora or silent):
                work = f"quotient_manifolds.adapters.{sys.argv[1]}" if lora else "sharpness.study.run_sweep"
                context.setattr(work, lambda *_, **__: Interrupted().write(""))
            context.setattr(sys, "stdout", stream := output())
            found = module.command() if lora else module.main()
        signal.signal(signal.SIGTERM, listening)
        quiet = silent and how in ("closed", "full")
        assert (how, found) == (how, 0 if quiet else code)
        said = capsys.readouterr().err
        assert said.count("\n") == bool(words and not quiet)
        assert (words in said) or quiet
        if how == "ascii" and line.startswith("run"):
            assert rb"nats at \u03c1 = 0.5" in stream.buffer.getvalue()
        if how != "interrupted" or not (lora or silent):
            assert all((world / name).exists() for name in names)
        with contextlib.suppress(OSError):
            stream.close()
        for path in sorted(set(world.rglob("*")) - before, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("command", ["sharpness.cli run", "quotient_manifolds.lora_command merge"])
def test_help_in_ascii_and_for_a_reader_who_leaves(command):
    """In a process of its own, which writes what is left when it ends."""
    module, name = command.split()
    code = f"import sys; from {module} import *; sys.exit(globals().get('command', main)())"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONUNBUFFERED": ""}
    with open(os.devnull, "wb") as nobody:
        for stdout, expected in ((nobody, 0), (closed_pipe(), 141)):
            command = [sys.executable, "-W", "ignore", "-c", code, name, "--help"]
            done = subprocess.run(
                command, stdout=stdout, stderr=subprocess.PIPE, env=environment, cwd=ROOT, check=False
            )
            stdout.close()
            assert (done.returncode, done.stderr) == (expected, b"")
