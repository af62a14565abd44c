import itertools

import numpy as np
import pytest
import scipy.stats

from reproduction.statistics import _balanced, kendall, kendall_family


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


@pytest.mark.parametrize("level", [0.5, 0.9, 0.985])
@pytest.mark.parametrize("digits", [0, 1, 8])
def test_the_level_of_balanced_intervals_is_that_of_all_ranks(level, digits):
    """Only the ends of each column are ranked, with ties as many as they may be."""
    rng = np.random.default_rng(0)
    shared = rng.standard_normal(500)
    draws = [np.round(np.exp(a * shared + rng.standard_normal(500)), digits) for a in (0.0, 1.0, 3.0)]
    draws[0][:3] = np.nan
    table = np.column_stack(draws)[3:]
    places = (scipy.stats.rankdata(table, axis=0) - 0.5) / len(table)
    assert _balanced(draws, level) == pytest.approx(np.quantile(np.abs(2 * places - 1).max(axis=1), level), abs=1e-12)


def kendall_1942(x, y, z):
    """Kendall's own partial coefficient."""
    xy, xz, yz = (plain_tau_b(*pair) for pair in ((x, y), (x, z), (y, z)))
    return (xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2))


def test_the_partial_coefficient_removes_what_others_explain():
    rng = np.random.default_rng(1)
    z = rng.standard_normal((2, 150))
    x, y = (z.sum(0) + 0.5 * rng.standard_normal(150) for _ in range(2))
    assert kendall(x, y, resamples=10).value > 0.6
    vanished = kendall(np.exp(x), y, given=[np.exp(z[0]), z[1] ** 3])  # monotone functions are as good
    assert abs(vanished.value) < 0.15
    assert vanished.low < 0 < vanished.high
    assert vanished.p > 0.01
    assert kendall(x, y, given=z[0]).low > 0.1  # one control does not do for two
    kept = kendall(x, y + x, given=z, resamples=200)
    assert kept.value > 0.4
    assert kept.p < 0.01
    assert np.isnan(kendall(z[0], y, given=z, resamples=10).value)
    assert np.isnan(kendall(x, np.exp(z[0]), given=z[0], resamples=10).value)


def test_the_partial_coefficient_vanishes_under_independence_where_that_of_1942_does_not():
    """Both quantities have a correlation of 0.9 with z, and nothing else in common."""
    rng = np.random.default_rng(0)
    found, old = [], []
    for _ in range(12):
        z = rng.standard_normal(120)
        x, y = (0.9 * z + np.sqrt(1 - 0.81) * rng.standard_normal(120) for _ in range(2))
        found.append(kendall(x, y, given=z, resamples=1).value)
        old.append(kendall_1942(x, y, z))
    assert abs(np.mean(found)) < 0.05
    assert np.mean(old) == pytest.approx(0.19, abs=0.05)


def test_the_residuals_are_those_of_normal_scores():
    rng = np.random.default_rng(1)
    x, y, z = rng.standard_normal((3, 20))
    scores = [scipy.stats.norm.ppf((scipy.stats.rankdata(v) - 0.5) / 20) for v in (x, y, z)]
    for quadratic in (False, True):
        left = [s - np.polyval(np.polyfit(scores[2], s, 1 + quadratic), scores[2]) for s in scores[:2]]
        found = kendall(x, y, given=z, quadratic=quadratic, resamples=1).value
        assert found == pytest.approx(plain_tau_b(*left))


def test_a_family_is_missed_as_often_as_it_says_and_one_by_one_far_more_often():
    """Forty samples of twelve independent quantities that mean nothing."""
    rng = np.random.default_rng(0)
    missed = {"family": 0, "one by one": 0}
    for k in range(40):
        xs, y = {str(i): rng.standard_normal(50) for i in range(12)}, rng.standard_normal(50)
        together = kendall_family(xs, y, resamples=1000, seed=k)
        alone = [kendall(x, y, resamples=300, seed=k) for x in xs.values()]
        missed["family"] += any(not t.low <= 0 <= t.high for t in together.values())
        missed["one by one"] += any(not t.low <= 0 <= t.high for t in alone)
        assert [t.value for t in together.values()] == [t.value for t in alone]
    assert missed["family"] <= 6
    assert missed["one by one"] >= 12


def test_a_family_of_the_same_quantity_costs_nothing():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 40))
    one = kendall_family({"x": x}, y)["x"]
    many = kendall_family({str(i): np.exp(x) for i in range(9)}, y)["5"]
    assert (many.low, many.high) == pytest.approx((one.low, one.high), abs=0.01)
    with_constant = kendall_family({"x": x, "constant": np.ones(40)}, y)
    assert np.isnan(with_constant["constant"].value)
    assert (with_constant["x"].low, with_constant["x"].high) == (one.low, one.high)


def test_bad_input_is_named():
    assert kendall_family({}, [1, 2, 3]) == {}
    with pytest.raises(ValueError, match="equal length"):
        kendall([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="at least 3 models"):
        kendall([1, 2], [1, 2])
    with pytest.raises(ValueError, match="given 1 has NaN"):
        kendall([1, 2, 3], [1, 2, 3], given=[[1, 2, 3], [1, 2, float("nan")]])
    with pytest.raises(ValueError, match="y has NaN"):
        kendall([1, 2, 3], [1, float("nan"), 2])


def test_p_values_count_the_controls():
    """Of ten models with two controls 10 % of unrelated quantities had p < .05, as if there were none."""
    rng = np.random.default_rng(1)
    draws = rng.standard_normal((600, 4, 10))
    share = np.mean([kendall(x, y, given=[a, b], resamples=1).p < 0.05 for x, y, a, b in draws])
    assert 0.025 < share < 0.075
    x, y = draws[0, :2]
    assert kendall(x, y, given=[]) == kendall(x, y)
