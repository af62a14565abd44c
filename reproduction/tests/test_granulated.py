import itertools

import pytest

from reproduction.granulated import granulated_kendall


def test_granulated_kendall():
    lr, width = zip(*itertools.product([1, 2, 3], [10, 20]), strict=True)
    gap = [a + 0.01 * b for a, b in zip(lr, width, strict=True)]
    tracks_lr = list(lr)
    psi, parts = granulated_kendall(tracks_lr, gap, {"lr": lr, "width": width})
    assert parts == {"lr": 1.0, "width": 0.0}  # explains one hyperparameter, says nothing of the other
    assert psi == 0.5
    assert granulated_kendall(gap, gap, {"lr": lr, "width": width})[0] == 1.0
    assert granulated_kendall([-g for g in gap], gap, {"lr": lr, "width": width})[0] == -1.0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="hyperparameter 'lr' has 2 values for 3 models"):
        granulated_kendall([1, 2, 3], [1, 2, 3], {"lr": [1, 2]})
    with pytest.raises(ValueError, match="at least one hyperparameter"):
        granulated_kendall([1, 2, 3], [1, 2, 3], {})
