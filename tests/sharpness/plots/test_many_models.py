import numpy as np
import pytest
from matplotlib.figure import Figure

from sharpness.plots import plot_sweep
from tests.studies import study


def test_a_sweep_is_drawn(tmp_path, monkeypatch):
    """The target of every model stands above its sharpness, in a panel for each measure."""
    drawn, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.append(figure) or real(figure, *a, **k))
    rows = study()
    paths = plot_sweep(rows, "gap", tmp_path)
    assert [p.name for p in paths] == ["scatter.png", "radius.png"]
    gaps = {r["checkpoint"]: r["test_error"] - r["train_error"] for r in rows if r["kind"] == "fit"}
    panel = next(axes for axes in drawn[0].axes if "geodesic-inv" in axes.get_title())
    assert "τ = " in panel.get_title()
    shown = [line.get_xydata() for line in panel.lines] + [np.asarray(c.get_offsets()) for c in panel.collections]
    heights = next(points[:, 1] for points in shown if len(points) == len(gaps))
    np.testing.assert_allclose(sorted(heights), sorted(gaps.values()))
    with pytest.raises(ValueError, match="models have a gap"):
        plot_sweep([r for r in rows if r["kind"] != "fit"], "gap", tmp_path)
