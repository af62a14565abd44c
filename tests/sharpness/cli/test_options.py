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
    assert cli.main(["demo", "--condition", "0.5", "--quiet", "--out", str(tmp_path / "p.png")]) == 2
    assert capsys.readouterr().err == "sharpness: a condition number is at least 1, got 0.5\n"
    with pytest.raises(SystemExit):
        cli.main(["nothing"])


def test_help_and_module():
    found = subprocess.run([sys.executable, "-m", "sharpness", "demo", "--help"], capture_output=True, text=True)
    assert found.returncode == 0
    for option in ("--seed", "--out", "--condition", "--quiet"):
        assert option in found.stdout
