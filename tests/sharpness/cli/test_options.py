import shlex
import subprocess
import sys

import pytest

import reproduction.cli
from sharpness import cli


def commands(parser, *names):
    """The names of every command below a parser, and its own."""
    yield names
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, command in action.choices.items():
                yield from commands(command, *names, name)


@pytest.mark.parametrize("program", [cli, reproduction.cli], ids=["sharpness", "reproduction"])
def test_every_command_prints_its_help(program, capsys):
    """Two ended in a TypeError, for a default that is a list of numbers."""
    found = list(commands(program.parser()))
    assert len(found) > 7
    for names in found:
        with pytest.raises(SystemExit) as ended:
            program.main([*names, "--help"])
        assert ended.value.code == 0
        assert " ".join(["usage:", program.parser().prog, *names]) in capsys.readouterr().out
    if program is reproduction.cli:
        with pytest.raises(SystemExit):
            program.main(["diagonal", "--help"])
        assert "(default: 0.001 0.1)" in capsys.readouterr().out


def test_mistakes_end_in_one_line(tmp_path, capsys):
    assert cli.main(["demo", "--quiet", "--out", str(tmp_path / "p.txt")]) == 2
    err = capsys.readouterr().err
    assert f"'{tmp_path}/p.txt' is not a figure: its name must end in" in err
    assert err.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main(["nothing"])


def test_help_and_module():
    found = subprocess.run([sys.executable, "-m", "sharpness", "demo", "--help"], capture_output=True, text=True)
    assert found.returncode == 0
    for option in ("--seed", "--out", "--quiet"):
        assert option in found.stdout


def test_the_help_of_every_command_has_commands_that_are_read():
    top = cli.parser()
    (commands,) = (a.choices for a in top._actions if isinstance(a.choices, dict))
    for command in (top, *commands.values()):
        shown = [line.split(None, 1)[1] for line in command.epilog.splitlines() if line.startswith("  sharpness ")]
        assert shown, command.prog
        for line in shown:
            top.parse_args(shlex.split(line))
            assert line in command.format_help()  # as it is, not wrapped


def test_completion(capsys, monkeypatch):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", "bash"])
    assert ended.value.code == 0
    assert "canonicalize" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", "bash"])
    assert ended.value.code == 2
    assert "pip install 'quotient-manifolds[completion]'" in capsys.readouterr().err
