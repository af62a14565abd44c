import numpy as np
import pytest
from matplotlib.colors import to_rgb
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
    assert {text.get_text() for text in panel.texts} == set(gaps)  # twelve dots bear their names
    lines = [line for axes in drawn[1].axes for line in axes.lines if len(line.get_xdata()) == 3]
    assert min(1 - np.dot(to_rgb(line.get_color()), (0.2126, 0.7152, 0.0722)) for line in lines) > 0.3  # none is faint
    shown = [line.get_xydata() for line in panel.lines] + [np.asarray(c.get_offsets()) for c in panel.collections]
    heights = next(points[:, 1] for points in shown if len(points) == len(gaps))
    np.testing.assert_allclose(sorted(heights), sorted(gaps.values()))
    with pytest.raises(ValueError, match="models have a gap"):
        plot_sweep([r for r in rows if r["kind"] != "fit"], "gap", tmp_path)


@pytest.mark.parametrize(("models", "names", "words"), [(9, 9, "too few to correlate"), (13, 0, "τ = ")])
def test_few_models_bear_names_and_no_correlation(tmp_path, monkeypatch, models, names, words):
    drawn, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.append(figure) or real(figure, *a, **k))
    rows = [{**r, "checkpoint": f"{r['checkpoint']} $^$"} for r in study(models=models)]  # no formula
    plot_sweep(rows, "gap", tmp_path)
    panel = drawn[0].axes[0]
    assert len(panel.texts) == names
    assert words in panel.get_title()
    assert any("Kendall" in axes.get_ylabel() for axes in drawn[1].axes) == (models >= 10)
