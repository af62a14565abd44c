"""One sentence for what users cause, the traceback when they ask for it."""

import contextlib
import sys

import pytest

from reproduction import cli as laboratory
from sharpness import Profile, cli, plots
from sharpness.errors import naming, words_of


def test_words():
    assert words_of(ValueError("a\n  b")) == "a b"
    assert words_of(KeyError("steps")) == "KeyError: 'steps'"
    assert words_of(AssertionError()) == "AssertionError"
    with pytest.raises(ValueError, match="the settings: TypeError: odd") as caught, naming("the settings"):
        raise TypeError("odd")
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(ImportError, match="missing"), naming("the settings"):  # what to install is said elsewhere
        raise ImportError("missing")


def test_a_defect_is_one_line_and_shown_on_request(monkeypatch, capsys):
    def defect(*_, **__):
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr("reproduction.toy.run", defect)
    assert laboratory.main(["toy", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said == ("reproduction: ZeroDivisionError: in the middle (unexpected error: --debug prints the traceback)\n")
    assert laboratory.main(["toy", "--quiet", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert laboratory.main(["--debug", "toy", "--quiet"]) == 2
    assert "Traceback" in capsys.readouterr().err


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
    with pytest.raises(ImportError, match=r"pip install 'quotient-manifolds\[plot\]'"):
        plots.plot_profile(Profile("adaptive", (0.0, 1.0), {"first-order": (1.0, 2.0)}, 1.0))
