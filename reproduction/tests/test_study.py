"""The analysis of the study, on rows whose answer is known beforehand."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pandas
import pytest
import scipy.stats

from reproduction.comparison import compare
from reproduction.plots import plot_partial
from reproduction.power import LEVEL, draw
from reproduction.statistics import kendall
from reproduction.study import (
    _inside,
    agreement,
    alphas,
    beside_distance,
    differences,
    judged,
    plain_table,
    table,
)
from reproduction.tables import verdicts
from sharpness.study import Checkpoint


def zoo(models=96, seed=0, sign=1.0):
    """Geodesic-inv says something given the training loss; adaptive follows the loss alone, as the margin does."""
    rng = np.random.default_rng(seed)
    controls, _, _ = draw(rng, models, 0.0)
    own, *noise = rng.standard_normal((5, models))
    loss, error = np.exp(0.3 * controls)
    gap = np.exp(-0.8 * controls.mean(0) + 0.6 * sign * own + 0.2 * noise[0]) / 10
    rows = []
    for i in range(models):
        name = f"m{i:02d}"
        fit = {"train_loss": loss[i], "train_error": error[i] / 10, "test_error": error[i] / 10 + gap[i]}
        rows.append({"checkpoint": name, "kind": "fit", **fit, "test_loss": loss[i] + 5 * gap[i]})
        rows.append({"checkpoint": name, "kind": "baselines", "margin": -loss[i] + 0.1 * noise[1][i]})
        for k, rho in enumerate((0.1, 0.3)):
            inv = np.exp(0.5 * controls[0, i] + own[i] + 0.3 * noise[2 + k][i])
            adaptive = np.exp(controls[0, i] + 0.5 * noise[2 + k][i])
            of = {"checkpoint": name, "kind": "sharpness", "ablation": {}, "rho": rho}
            rows += [{**of, "measure": "geodesic-inv", "sharpness": rho * inv}]
            rows += [{**of, "measure": "adaptive", "sharpness": rho * adaptive}]
    return rows


def of(found, **where):
    """Rows of a table with these values."""
    for column, value in where.items():
        found = found[found[column] == value]
    return found


@pytest.mark.parametrize(("sign", "words"), [(1.0, "correlated, +"), (-1.0, "correlated, −")])
def test_what_is_there_is_found_with_its_sign_and_what_is_not_is_not(sign, words):
    rows = zoo(sign=sign)
    raw = {r.quantity: r.tau for r in compare(rows, "gap")}
    assert raw["adaptive"].high < 0  # without the training loss it seems to say something
    for target in ("gap", "test-loss"):
        found = verdicts(compare(rows, target, level=LEVEL, resamples=200))
        assert found["geodesic-inv"] == words
        assert not found["adaptive"].startswith("correlated")
        assert not found["margin"].startswith("correlated")


def test_negligible_needs_enough_models():
    said = [verdicts(compare(zoo(models, seed=3), "gap", resamples=30))["margin"] for models in (24, 300)]
    assert said == ["unresolved", "negligible"]


def test_squared_controls():
    """On a measure and a gap that share nothing but a relation to the training loss with a minimum."""
    rng = np.random.default_rng(0)
    loss, error, *noise = rng.standard_normal((4, 300))
    rows = []
    for i, (bend, far) in enumerate(zip(loss**2 + noise[0], loss**2 + noise[1], strict=True)):
        fit = {"train_loss": np.exp(loss[i]), "train_error": error[i], "test_error": error[i] + bend}
        rows.append({"checkpoint": f"m{i:03d}", "kind": "fit", **fit})
        rows.append({"checkpoint": f"m{i:03d}", "kind": "baselines", "margin": far})
    plain, squared = (
        next(r for r in compare(rows, "gap", level=LEVEL, quadratic=q, resamples=50) if r.quantity == "margin")
        for q in (False, True)
    )
    assert plain.partial.low > 0.25
    assert squared.partial.value < 0.3 * plain.partial.value
    assert squared.corrected.value == squared.partial.value
    said = [of(table(judged({"zoo": rows}, "gap", quadratic=q)), quantity="margin") for q in (False, True)]
    assert [found["verdict"].item() == "correlated, +" for found in said] == [True, False]


def test_a_difference_is_that_of_the_partial_coefficients():
    found = differences({"zoo": zoo()}, "gap")
    assert found[["target", "collection", "measure", "nats"]].values.tolist() == [
        ["gap", "zoo", "geodesic-inv", at] for at in (0.1, 0.5)
    ]
    taus = {(r.quantity, r.rho): r.partial.value for r in compare(zoo(), "gap", resamples=1) if r.rho}
    assert found["τ"][0] == pytest.approx(taus["geodesic-inv", 0.1] - taus["adaptive", 0.1])
    assert found["low"][0] > 0


def test_measures_beside_the_distance():
    rows = zoo()
    near = {r["checkpoint"]: -r["sharpness"] for r in rows if r.get("measure") == "adaptive" and r["rho"] == 0.3}
    rows = [{**r, "distance": near[r["checkpoint"]]} if r["kind"] == "baselines" else r for r in rows]
    found = beside_distance({"vit": rows, "other": [r for r in rows if r.get("measure") != "adaptive"]})
    assert of(found, collection="other")["measure"].unique().tolist() == ["geodesic-inv"]
    assert of(found, measure="adaptive", radius=0.3)[["τ", "low", "high"]].values.tolist() == [[-1, -1, -1]]
    fits = [r for r in rows if r["kind"] == "fit"]
    at = {r["checkpoint"]: r["sharpness"] for r in rows if r.get("measure") == "geodesic-inv" and r["rho"] == 0.1}
    x, y = ([by[f["checkpoint"]] for f in fits] for by in (at, near))
    given = [[f[control] for f in fits] for control in ("train_loss", "train_error")]
    own = of(found, collection="vit", measure="geodesic-inv", radius=0.1)
    assert own["τ"].item() == kendall(x, y, given=given).value


def test_how_alike_two_measures_rank_the_models():
    rows = zoo()
    found = agreement({"vit": rows}, "geodesic-inv", "adaptive")
    assert found[["models", "nats"]].values.tolist() == [[96, 0.1]] * 4 + [[96, 0.5]] * 4
    names = ("geodesic-inv", "adaptive")
    at = [[r["sharpness"] for r in rows if r.get("measure") == m and r["rho"] == 0.3] for m in names]
    gap = [r["test_error"] - r["train_error"] for r in rows if r["kind"] == "fit"]
    inv, adaptive = (scipy.stats.kendalltau(v, gap).statistic for v in at)
    own = scipy.stats.kendalltau(*at).statistic
    assert found["τ"][4:].tolist() == pytest.approx([own, inv, adaptive, adaptive - inv])
    assert agreement({"vit": rows}, "geodesic-inv", "complete-inv").empty  # which has no radius


def test_the_tables_and_the_figures(tmp_path):
    zoos = {"vit": zoo(60), "scratch": [r for r in zoo(40, seed=1) if r.get("measure") != "adaptive"]}
    by_target = {target: judged(zoos, target) for target in ("gap", "test-loss")}
    found = table(by_target["gap"])
    assert found["quantity"].unique().tolist() == ["adaptive", "geodesic-inv", "margin"]
    assert of(found, collection="scratch", quantity="adaptive")["verdict"].item() == "no radius"
    assert (of(found, quantity="geodesic-inv")["verdict"] == "correlated, +").all()
    given = ("train_loss", "train_error", "margin")
    beyond = table(judged(zoos, "gap", given=given), given)
    assert beyond["quantity"].unique().tolist() == ["adaptive", "geodesic-inv"]
    raw = {(r.quantity, r.rho): r.tau.value for r in compare(zoos["vit"], "gap", resamples=1)}
    plain = of(plain_table(by_target), target="gap", collection="vit", quantity="adaptive", radius=0.3)
    assert plain["τ"].item() == raw["adaptive", 0.3]
    tables = {target: table(zoos) for target, zoos in by_target.items()}
    plot_partial(tables, tmp_path / "partial.png")
    plot_partial({"gap": tables["gap"]}, tmp_path / "gap.png", names=["adaptive", "geodesic-inv"])
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("partial.png", "gap.png"))


def test_a_measure_that_reaches_one_level_is_unresolved():
    rows = [r for r in zoo() if (r.get("measure"), r.get("rho")) != ("geodesic-inv", 0.3)]
    said = [of(table(judged({"zoo": r}, "gap")), quantity="geodesic-inv")["verdict"] for r in (rows, zoo())]
    assert said[0].tolist() == ["unresolved, at one level only"]
    assert said[1].tolist() == ["correlated, +"] * 2


def test_a_quantity_of_few_models_is_not_judged():
    rows = [{**r, "distance": 1.0 * (i % 7)} if r["kind"] == "baselines" else r for i, r in enumerate(zoo())]
    for row in rows:
        if row["kind"] == "baselines" and row["checkpoint"] < "m10":
            del row["margin"]
    found = of(table(judged({"zoo": rows}, "gap")), quantity="margin")
    assert found["verdict"].tolist() == ["fewer than nine tenths of the models"]


def test_layers_whose_fit_fails_have_no_alpha(monkeypatch):
    """Weightwatcher marks them by −1, which had entered the mean."""

    class Watcher:
        def __init__(self, model, log_level):
            self.layers = [2.0, -1.0, 3.0] if model.cls_token.any() else [-1.0]

        def analyze(self):
            return pandas.DataFrame({"alpha": self.layers})

    module = ModuleType("weightwatcher")
    module.__spec__, module.WeightWatcher = ModuleSpec("weightwatcher", None), Watcher
    monkeypatch.setitem(sys.modules, "weightwatcher", module)
    found = alphas(
        [Checkpoint("a", "reproduction.vision:scratch_vit"), Checkpoint("b", "reproduction.vision:vit_cifar10")]
    )
    assert found == {"a": {"alpha": 2.5}}


def test_balls_that_leave_the_manifold_are_left_out():
    rows = [
        {"kind": "sharpness", "measure": m, "rho": 0.3, "min_singular_value": s}
        for m in ("geodesic-mix", "complete-mix", "geodesic-inv") for s in (0.5, 0.4)
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="2 balls of mix measures leave"):
        kept = _inside([{"kind": "fit"}, *rows])
    assert kept == [{"kind": "fit"}, rows[0], rows[2], rows[4], rows[5]]
