"""One sentence for what users cause, the traceback for a defect; nothing of theirs is replaced."""

import contextlib
import errno
import os
import sys

import pytest

from reproduction import cli as laboratory
from sharpness import LayerShare, LayerShares, cli, plots
from sharpness.errors import naming, words_of
from sharpness.files import atomic_write, check_apart, check_file, check_folder, write_json, write_text


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "tests.spread:model", "tests.spread:batches", "--device", "cuda:9"], "the device 'cuda:9' cannot be"),
        (["run", "tests.spread:model", "tests.spread:batches", "--out", "/nowhere/x.json"], "there is no folder"),
        (["demo", "--out", "picture.foo"], "is not a figure: its name must end in"),
        (["sweep", "nowhere.json", "--out", "out"], "there is no configuration 'nowhere.json'"),
        (["finetune", "tests.spread:model", "x", "--models", "0", "--out", "out"], "whole number of at least 1"),
        (
            ["finetune", "tests.spread:model", "tests.spread:batches", "--test", "nope", "--out", "out"],
            "there is no data at nope",
        ),
        (["toy", "--out", ""], "the path is empty"),
        (["run", "bert-base-uncased", "x.tsv"], "nothing is downloaded"),
        (["run", "./no/such/folder", "tests.spread:batches"], "there is no folder './no/such/folder'"),
    ],
)
def test_what_is_wrong_is_known_before_the_work(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr("sharpness.demo.train", lambda *_, **__: pytest.fail("the demo trains"))
    monkeypatch.setattr("sharpness.study.run.evaluate", lambda *_, **__: pytest.fail("it measures"))
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


@pytest.mark.parametrize("out", ["mine", "..", ".", "link"])
def test_a_command_refuses_before_it_measures(place, capsys, monkeypatch, out):
    """The case that deleted folders: --out FOLDER."""
    monkeypatch.chdir(place / "mine")
    monkeypatch.setattr("sharpness.models.load", lambda *_, **__: pytest.fail("measured already"))
    before = {k: v for k, v in tree(place).items() if k != "pipe"}
    target = str(place / out) if out in ("mine", "link") else out
    assert cli.main(["run", "tests.spread:model", "tests.spread:batches", "--out", target, "--quiet"]) == 2
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
