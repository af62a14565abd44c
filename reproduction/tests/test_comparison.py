"""Rankings at comparable radii; rows as files; tables and figures of a sweep."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from reproduction.comparison import compare, curves
from reproduction.statistics import kendall, kendall_difference
from reproduction.tables import verdicts
from sharpness.study import targets
from tests.support import studies


def study(**options):
    """The rows as the recorded tables have them: what is changed in a measure stands apart."""
    rows = studies.study(**options)
    for row in rows:
        if row["kind"] == "sharpness":
            row["measure"], _, changed = row["measure"].partition(", ")
            row["ablation"] = dict([changed.split(" = ")]) if changed else {}
    return rows


def test_every_radius_has_the_tau_of_its_column():
    rows = study()
    found = compare(rows, resamples=50)
    goal = targets(rows)
    line = next(r for r in found if r.quantity == "adaptive" and r.rho == 0.5)
    values = [next(r["sharpness"] for r in rows if r["checkpoint"] == m and r.get("rho") == 0.5) for m in line.models]
    assert line.values == tuple(values)
    assert line.tau.value == pytest.approx(scipy.stats.kendalltau(values, [goal[m] for m in line.models]).statistic)
    assert line.loss_increase == np.median(values)
    assert {r.quantity for r in found} >= {"train_loss", "weight_norm", "adaptive, statistic = average"}


def test_a_further_control():
    """A measure and a gap that share nothing but the distance: found given the losses, gone given the distance too."""
    rng = np.random.default_rng(0)
    loss, error, far, *noise = rng.standard_normal((5, 200))
    rows = []
    for i, (gap, sharp) in enumerate(zip(2 * far + noise[0], 2 * far + noise[1], strict=True)):
        of = {"checkpoint": f"m{i:03d}"}
        rows.append({**of, "kind": "fit", "train_loss": loss[i], "train_error": error[i], "test_error": error[i] + gap})
        rows.append({**of, "kind": "baselines", "distance": far[i], "geodesic_distance": None if i else 1.0})
        rows.append({**of, "kind": "sharpness", "measure": "adaptive", "ablation": {}, "rho": 0.5, "sharpness": sharp})
    further = ("train_loss", "train_error", "distance")
    plain, found = (compare(rows, resamples=10, given=given) for given in (further[:2], further))
    assert {r.quantity for r in found if r.partial is not None} == {"adaptive"}
    one, two = (next(r.partial for r in ranked if r.quantity == "adaptive") for ranked in (plain, found))
    assert one.low > 0.4
    assert abs(two.value) < 0.15
    targeted = targets(rows)
    given = [loss, error, far]
    expected = kendall([r["sharpness"] for r in rows if "rho" in r], list(targeted.values()), given=given, resamples=1)
    assert two.value == expected.value
    assert "distance" in {r.quantity for r in plain if r.partial is not None}
    with pytest.raises(ValueError, match="199 models have no geodesic_distance to control for"):
        compare(rows, given=("train_loss", "geodesic_distance"))
    with pytest.raises(ValueError, match="'depth' cannot be controlled for; choose from train_loss, train_error"):
        compare(rows, given=("train_loss", "depth"))


def test_a_measure_that_no_model_has_at_every_radius_is_left_out():
    rows = [{**r, "rho": r["rho"] + 1e-3 * int(r["checkpoint"][1:])} if "rho" in r else r for r in study()]
    assert {r.rho for r in compare(rows, resamples=5)} == {None}


def test_a_radius_that_few_models_have_is_left_out_and_the_others_stay():
    rows = study()
    rare = [{**r, "rho": 50.0} for r in rows if r.get("rho") == 5.0 and r["checkpoint"] in ("m00", "m01")]
    found, plain = ({(c.measure, str(c.ablation)): c for c in curves(given)} for given in (rows + rare, rows))
    assert found.keys() == plain.keys()
    for key, curve in found.items():
        assert np.array_equal(curve.rho, plain[key].rho)
        assert curve.models == plain[key].models
    lacking = [r for r in rows if (r["checkpoint"], r.get("rho")) != ("m00", 5.0)]
    assert [len(c.models) for c in curves(lacking) if c.measure == "adaptive"] == [11, 11]


def test_difference_of_tau_resamples_both_together():
    rng = np.random.default_rng(0)
    y = rng.normal(size=40)
    x, other = y + 0.1 * rng.normal(size=40), rng.normal(size=40)
    found = kendall_difference(x, other, y)
    assert found.value == pytest.approx(
        scipy.stats.kendalltau(x, y).statistic - scipy.stats.kendalltau(other, y).statistic
    )  # fmt: skip
    assert 0.3 < found.low < found.value < found.high
    assert kendall_difference(x, x, y).high == 0


def test_corrected_intervals_are_of_what_has_a_radius_and_of_what_has_none():
    """They are wider than those of one coefficient, wider still at a higher level, and have its value."""
    found, strict = (compare(study(), resamples=200, level=level) for level in (0.95, 0.99))
    own = [r for r in found if r.rho and "," not in r.quantity]
    assert len(own) == 6
    for r, s in zip(found, strict, strict=True):
        assert (r.corrected is None) == (s.corrected is None)
        if r.corrected is not None:
            assert r.corrected.value == pytest.approx(r.partial.value)
            assert s.corrected.high - s.corrected.low >= r.corrected.high - r.corrected.low >= 0
    assert sum(r.corrected.high - r.corrected.low for r in own) > sum(r.partial.high - r.partial.low for r in own)
    assert all(r.corrected is None for r in found if r.quantity in ("train_loss", "train_error") or "," in r.quantity)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        compare(study(), level=1.5)


def test_what_few_models_have_does_not_decide_which_models_count():
    """The others were judged on these five models alone, and the five were enough for a verdict."""
    rng = np.random.default_rng(0)
    gap, loss, noise = rng.uniform(size=(3, 60))
    rows = [{"checkpoint": i, "kind": "fit", "train_loss": loss[i], "test_loss": gap[i] + loss[i]} for i in range(60)]
    rows += [{"checkpoint": i, "kind": "baselines", "margin": gap[i], "distance": noise[i]} for i in range(60)]
    plain = {r.quantity: r for r in compare(rows, "loss-gap", resamples=50)}
    for few in (5, 57):
        of = [{**r, "fisher_trace": noise[r["checkpoint"]] if r["checkpoint"] < few else None} for r in rows]
        found = {r.quantity: r for r in compare(of, "loss-gap", resamples=50)}
        assert found["margin"].partial == plain["margin"].partial
        assert found["fisher_trace"].tau.models == few
        assert found["margin"].corrected.models == (60 if few == 5 else 57)
        assert (found["fisher_trace"].corrected is None) == (few == 5)
        assert verdicts(list(found.values()))["margin"] == "correlated, +"
    assert "fisher_trace" in verdicts(list(found.values()))


def test_a_radius_that_many_models_lack_costs_the_others_nothing():
    rows = [r for r in study() if r.get("rho") != 5.0 or int(r["checkpoint"][1:]) % 2]
    assert {(c.measure, len(c.models), c.rho[-1] < 5) for c in curves(rows) if c.measure == "adaptive"} == {
        ("adaptive", len({r["checkpoint"] for r in rows}), True)
    }


def test_too_few_models_with_a_target():
    with pytest.raises(ValueError, match="0 models have a gap"):
        compare([r for r in study() if r["kind"] != "fit"])
    with pytest.raises(ValueError, match="target must be one of"):
        targets(study(), "luck")


def test_a_verdict_needs_all_radii_and_one_side():
    one = next(r for r in compare(study(), resamples=20) if r.corrected is not None and r.rho)

    def said(*intervals):
        taus = [replace(one.corrected, low=a, high=b, value=(a + b) / 2) for a, b in intervals]
        return verdicts([replace(one, corrected=tau) for tau in taus])[one.quantity]

    assert said((0.1, 0.5), (0.2, 0.6)) == "correlated, +"
    assert said((-0.5, -0.1), (-0.6, -0.2)) == "correlated, −"
    assert said((0.1, 0.5), (-0.1, 0.6)) == said((0.1, 0.5), (-0.6, -0.2)) == "unresolved"
    assert said((-0.2, 0.2), (-0.1, 0.25)) == "negligible"
    assert said((-0.2, 0.2), (-0.1, 0.35)) == "unresolved"
    assert verdicts([replace(one, corrected=None)]) == {}


def test_one_quantity_in_two_units_has_one_verdict():
    found = verdicts(compare(study(), resamples=50))
    assert found["adaptive"] == found["geodesic-inv"]
