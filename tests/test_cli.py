import subprocess
import sys

import pytest
import torch

from quotient_manifolds.symmetries import find
from sharpness import cli
from sharpness.studies import demo


def test_demo_end_to_end(tmp_path, monkeypatch, capsys):
    """The demo at a tenth of its training; the full one is ``make demo``."""
    torch.set_default_dtype(torch.float32)
    full = demo.train
    monkeypatch.setattr(demo, "train", lambda *a, **k: full(*a, **k | {"epochs": 6}))
    monkeypatch.setattr(demo, "RADII", {name: radii[:2] for name, radii in demo.RADII.items()})
    out = tmp_path / "picture.png"
    assert cli.main(["demo", "--seed", "1", "--out", str(out), "--quiet"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    rows = {
        tuple(line.split()[:2]): line.split() for line in printed.splitlines() if line.startswith(("geo", "ada", "euc"))
    }
    assert len(rows) == 8
    for (measure, _), row in rows.items():
        change = abs(float(row[-1]))
        assert change < 1e-3 if measure.startswith("geodesic") else change > 0.05


def test_the_demo_learns_the_digits():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    x, y, x_test, y_test = demo.digits(0)
    assert (len(y), len(y_test)) == (1437, 360)
    model = demo.vision_transformer()
    demo.train(model, x, y, epochs=30, progress=False)
    assert demo._accuracy(model, x_test, y_test) > 0.85
    assert len(find(model)) == 24


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
