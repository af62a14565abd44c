import itertools

import numpy as np
import pytest

from sharpness.statistics import kendall


def plain_tau_b(x, y):
    """From the definition: concordant less discordant pairs, over the geometric mean of the untied ones."""
    signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in itertools.combinations(range(len(x)), 2)]
    score = sum(a * b for a, b in signs)
    return score / np.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))


def test_kendall_against_its_definition_with_ties():
    rng = np.random.default_rng(0)
    x, y = rng.integers(6, size=15), rng.integers(6, size=15)
    found = kendall(x, y)
    assert found.value == pytest.approx(plain_tau_b(x, y))
    ties = sum(x[i] == x[j] or y[i] == y[j] for i, j in itertools.combinations(range(15), 2))
    assert found.ties == ties > 0
    assert "tied pairs" in str(found)
    assert found.low <= found.value <= found.high


def test_perfect_and_reversed_order():
    x = np.arange(8.0)
    assert kendall(x, x).value == pytest.approx(1)
    assert kendall(x, -x).value == pytest.approx(-1)
    assert kendall(x, -x).p < 0.01
    assert np.isnan(kendall(x, np.ones(8)).value)


def test_the_interval_covers_as_often_as_it_says():
    """Of 40 samples from a population of known τ, about 95 % of the intervals hold it."""
    rng = np.random.default_rng(0)
    rho = 0.7
    truth = 2 / np.pi * np.arcsin(rho)
    covered = 0
    for k in range(40):
        z = rng.multivariate_normal([0, 0], [[1, rho], [rho, 1]], size=60)
        found = kendall(z[:, 0], z[:, 1], resamples=100, seed=k)
        covered += found.low <= truth <= found.high
    assert covered >= 33


def test_the_partial_coefficient_removes_what_a_third_quantity_explains():
    rng = np.random.default_rng(0)
    z = rng.standard_normal(300)
    x, y = z + 0.5 * rng.standard_normal(300), z + 0.5 * rng.standard_normal(300)
    raw = kendall(x, y, resamples=10).value
    assert raw > 0.4
    vanished = kendall(x, y, given=z, resamples=200)
    assert abs(vanished.value) < 0.5 * raw
    assert vanished.p > 0.01
    kept = kendall(x, y + x, given=z, resamples=200)
    assert kept.value > 0.4
    assert kept.p < 0.01
    assert np.isnan(kendall(z, y, given=z, resamples=10).value)
    small = {"x": [1, 2, 3, 4, 5], "y": [2, 1, 4, 3, 5], "given": [1, 3, 2, 5, 4]}
    xy, xz, yz = (plain_tau_b(np.array(small[a]), np.array(small[b])) for a, b in itertools.combinations(small, 2))
    expected = (xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2))
    assert kendall(**small, resamples=5).value == pytest.approx(expected)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="equal length"):
        kendall([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="at least 3 models"):
        kendall([1, 2], [1, 2])
    with pytest.raises(ValueError, match="y has NaN"):
        kendall([1, 2, 3], [1, float("nan"), 2])
