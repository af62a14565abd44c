import base64
import re
import sys

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

import sharpness
from sharpness import LayerShare, LayerShares, plots
from tests.support import networks
from tests.support.processes import together


def drawn_with_own_settings():
    assert "matplotlib.pyplot" not in sys.modules
    matplotlib.use("svg")
    size = matplotlib.rcParams["font.size"]
    plots.plot_layers(LayerShares([LayerShare("a", "MLP", None, 1.0)]))
    assert matplotlib.get_backend() == "svg"
    assert matplotlib.rcParams["font.size"] == size
    assert "matplotlib.pyplot" not in sys.modules


def test_a_users_settings_and_backend_stay(tmp_path):
    done = together(1, drawn_with_own_settings, folder=tmp_path)
    assert done.codes == [0], done.output


def test_colours_differ_for_colour_blind_readers():
    def seen(colour, matrix):
        return matrix @ np.array(matplotlib.colors.to_rgb(colour)) ** 2.2

    # Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
    blind = {
        "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                       [-0.003882, -0.048116, 1.051998]],
        "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                         [-0.011820, 0.042940, 0.968881]],
    }  # fmt: skip

    def nearest(colours):
        return min(
            np.linalg.norm(seen(a, np.array(m)) - seen(b, np.array(m)))
            for m in blind.values() for i, a in enumerate(colours) for b in colours[:i]
        )  # fmt: skip

    assert nearest(list(plots.COLOURS.values())) > 0.15
    assert nearest(["#ff0000", "#806000", "#00ff00"]) < nearest(list(plots.COLOURS.values()))
    assert len(set(plots.MARKERS.values())) == len(plots.COLOURS)


def test_profile():
    model, batch = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    model.weight.data.fill_(2.0)
    options = {"loss_fn": lambda model, x: (model(x) - 1).square().sum()}
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.5, progress=False, **options)
    (axes,) = plots.plot_profile(model, batch, result.direction(0), points=3, **options).axes
    (line,) = [line for line in axes.lines if line.get_label() == "straight line"]
    np.testing.assert_allclose(line.get_xdata(), [-1, 0, 1])
    np.testing.assert_allclose(line.get_ydata(), [1, 1, 9])
    (shade,) = [p for p in axes.patches if p.get_label() == "ball, ρ = 0.5"]
    corners = shade.get_patch_transform().transform(shade.get_path().vertices)[:, 0]
    assert (corners.min(), corners.max()) == (-0.5, 0.5)


def test_layers():
    shares = LayerShares(
        [LayerShare("a.0", "Q–K", 0, 0.1), LayerShare("a.0", "Q–K", 1, 0.2), LayerShare("a.0", "V–O", 0, 0.3),
         LayerShare("head", "head", None, 0.4)]
    )  # fmt: skip
    axes = plots.plot_layers(shares).axes[0]
    np.testing.assert_allclose(
        axes.images[0].get_array().filled(np.nan), [[10, 20, 30, np.nan], [np.nan, np.nan, np.nan, 40]]
    )
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a.0", "head"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["Q–K 0", "Q–K 1", "V–O 0", "weights"]
    with pytest.raises(ValueError, match="no shares to draw"):
        plots.plot_layers(LayerShares())


@pytest.mark.parametrize("name", ["table.tsv", "figure"])
def test_a_file_whose_name_is_of_no_figure_is_refused(tmp_path, name):
    shares = LayerShares([LayerShare("a", "MLP", None, 1.0)])
    with pytest.raises(ValueError, match=rf"{name} is no figure by its name; choose one that ends in \.png"):
        plots.plot_layers(shares, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    plots.plot_layers(shares, tmp_path / "figure.PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.PNG"]


def test_a_report_is_of_the_largest_radius(tmp_path, monkeypatch):
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=[0.05, 0.01], progress=False)
    drawn, profile, layers = {}, plots.plot_profile, plots.plot_layers

    def drawing(model, batch, direction, **options):
        drawn.setdefault("profile", direction)
        return profile(model, batch, direction, **options)

    monkeypatch.setattr("sharpness.plots.plot_profile", drawing)
    monkeypatch.setattr("sharpness.plots.plot_layers", lambda found: layers(drawn.setdefault("layers", found)))
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch[1]))
        return nn.functional.cross_entropy(model(batch[0]).logits, batch[1])

    plots.write_report(tmp_path / "r.html", model, batch, [result], loss_fn=loss_fn, micro_batch=5)
    assert set(seen) == {5, 2}
    assert drawn["profile"].norm == pytest.approx(0.05)
    assert drawn["layers"] == result[0.05].by_layer() != result[0.01].by_layer()
    pictures = re.findall(r"base64,([^\"]*)", (tmp_path / "r.html").read_text(encoding="utf-8"))
    assert [base64.b64decode(p)[:4] for p in pictures] == [b"\x89PNG"] * 2
    gone = sharpness.evaluate(model, [batch], rho=0.05, keep_directions=False, progress=False)
    plots.write_report(tmp_path / "r.html", model, batch, [gone], {"a": "<b>"})
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "no figures of geodesic-inv: " in page
    assert "keep_directions=True" in page
    assert "&lt;b&gt;" in page
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    flat = sharpness.evaluate(plain, [batch], measure="adaptive", progress=False)
    plots.write_report(tmp_path / "r.html", plain, batch, [flat])
    assert (tmp_path / "r.html").read_text(encoding="utf-8").count("<img") == 2
