import json

import torch
from torch.nn.functional import cross_entropy

from quotient_manifolds.symmetries import find_symmetric_pairs
from sharpness import cli, demo


def test_the_digits_and_their_transformer():
    torch.set_default_dtype(torch.float32)
    x, y, _, y_test = demo.digits(0)
    assert (len(y), len(y_test)) == (1437, 360)
    model = demo.vision_transformer()
    assert len(find_symmetric_pairs(model)) == 24
    assert model(x[:2]).logits.shape == (2, 10)
    # The loss that training lowers: after one epoch the accuracy is still that of chance.
    before = cross_entropy(model(x).logits, y)
    demo.train(model, x, y, epochs=1, progress=False)
    assert cross_entropy(model(x).logits, y) < before


def test_demo_end_to_end(tmp_path, monkeypatch, capsys):
    """The demo at a quarter of its training; the full one is ``make demo``."""
    torch.set_default_dtype(torch.float32)
    full = demo.train
    monkeypatch.setattr(demo, "train", lambda *a, **k: full(*a, **k | {"epochs": 14}))
    monkeypatch.setattr(demo, "MOVES", {kind: demo.MOVES[kind] for kind in ("heads", "gain")})
    out = tmp_path / "picture.png"
    assert cli.main(["demo", "--seed", "1", "--out", str(out), "--quiet"]) == 0
    assert "gains of LayerNorms" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["test_accuracy"] > 0.7  # of ten classes, after a quarter of the training: .83 to .89 over seeds
    network, heads, gain = found["rows"]
    assert found["output_change"] < 1e-3
    for name, moved in (("complete-inv", heads), ("complete-inv", gain), ("geodesic-inv", heads)):
        assert abs(moved[name] / network[name] - 1) < 5e-3
    for name, moved in (("adaptive", heads), ("euclidean", gain), ("geodesic-inv", gain)):
        assert abs(moved[name] / network[name] - 1) > 0.05


def test_numbers_of_another_origin_are_not_replaced(tmp_path, capsys):
    """The numbers go beside the picture: beside config.png stands a model's configuration."""
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["demo", "--quiet", "--out", str(tmp_path / "config.png")]) == 2
    assert "config.json, which the numbers would replace, is not from a demo" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"
