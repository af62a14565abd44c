import math

import numpy as np

from quotient_manifolds.symmetries import ModelDistance, PairDistance
from reproduction.plots import plot_distances


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
