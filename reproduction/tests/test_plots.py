import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from quotient_manifolds.symmetries import ModelDistance, PairDistance
from reproduction.plots import plot_ablations, plot_distances, plot_radii
from tests.studies import study


def test_a_relaxation_has_its_own_figure(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"checkpoint": f"m{i}", "kind": "fit", "train_error": 0.1, "test_error": 0.1 + rng.uniform()} for i in range(5)
    ]
    for switch in ({}, {"geodesic": "first-order"}, {"relaxation": 0.1}, {"relaxation": 0.3}):
        rows += [
            {"checkpoint": f"m{i}", "kind": "sharpness", "measure": "geodesic-inv", "ablation": switch, "rho": 0.1,
             "sharpness": rng.uniform()}
            for i in range(5)
        ]  # fmt: skip
    drawn = plot_ablations(rows, "gap", tmp_path, prefix="study_")
    assert [p.name for p in drawn] == ["study_ablations.png", "study_relaxation.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    assert plot_ablations([r for r in rows if not r.get("ablation")], "gap", tmp_path) == []


@pytest.mark.parametrize("models", [9, 12])
def test_the_influence_of_the_radius(tmp_path, models):
    drawn = plot_radii(study(models=models), "gap", tmp_path / "radius.png")
    lines = [line for axes in drawn.axes for line in axes.lines if len(line.get_xdata()) == 3]
    assert len(lines) >= 2 * models
    assert min(1 - np.dot(to_rgb(line.get_color()), (0.2126, 0.7152, 0.0722)) for line in lines) > 0.3  # none is faint
    assert any("Kendall" in axes.get_ylabel() for axes in drawn.axes) == (models >= 10)


def test_a_map_a_kind_with_what_is_absent_left_empty(tmp_path):
    pairs = [
        PairDistance("a qk head 0", "a", "qk", 0, 0, 1.0),
        PairDistance("a qk head 1", "a", "qk", 1, 0, 2.0),
        PairDistance("b qk head 0", "b", "qk", 0, 0, math.nan),
        PairDistance("a vo head 0", "a", "vo", 0, 0, 5.0),
    ]
    drawn = plot_distances(ModelDistance("inv", tuple(pairs)), tmp_path / "map.png")
    qk, vo = (axes for axes in drawn.axes if axes.images and axes.get_title())
    np.testing.assert_array_equal(np.ma.filled(qk.images[0].get_array(), np.nan), [[1, 2], [np.nan, np.nan]])
    assert np.ma.filled(vo.images[0].get_array(), np.nan).tolist() == [[5.0]]
    assert [label.get_text() for label in qk.get_yticklabels()] == ["a", "b"]
    assert (tmp_path / "map.png").stat().st_size > 1000
