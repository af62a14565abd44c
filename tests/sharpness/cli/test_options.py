import subprocess
import sys

import pytest

from sharpness import cli


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
