import torch

from sharpness import cli, demo


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
