import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds.symmetries import move_
from reproduction.adaptive_norm import AdaptiveNormMeasure
from reproduction.additive import AdditiveMeasure
from reproduction.rk4 import RungeKuttaMeasure, RungeKuttaPatch
from sharpness import MEASURES, get_measure, plots
from tests.support.measured import values


class FineMeasure(RungeKuttaMeasure):
    class pair_patch(RungeKuttaPatch):
        substeps = 8


class CoarseMeasure(RungeKuttaMeasure):
    class pair_patch(RungeKuttaPatch):
        substeps = 1


def of(kind, name, **changes):
    """A measure of the laboratory, from one by name."""
    return kind(**vars(get_measure(name)) | changes)


@pytest.mark.parametrize(("metric", "rho"), [("inv", 0.2), ("mix", 0.03)])
def test_runge_kutta_geodesics(trained, metric, rho):
    model, _twin, batch = trained
    base = MEASURES[f"geodesic-{metric}"]
    fine, coarse = (values(trained, measure=of(k, base), rho=rho) for k in (FineMeasure, CoarseMeasure))
    assert fine[0] == pytest.approx(fine[1], rel=1e-8)
    second = values(trained, measure=base, rho=rho)[0]
    assert 0 < abs(coarse[0] - fine[0]) < abs(second - fine[0])
    # The direction that is handed out leads to the loss that was reported.
    result = sharpness.evaluate(model, [batch], measure=of(RungeKuttaMeasure, base), rho=rho, steps=4)
    with sharpness.perturbed(model, result.direction(0)), torch.no_grad():
        loss = float(F.cross_entropy(model(batch[0]).logits, batch[1]))
    assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)


@pytest.mark.parametrize(
    "how",
    [
        of(RungeKuttaMeasure, "geodesic-inv"),
        of(RungeKuttaMeasure, "geodesic-mix"),
        replace(MEASURES["geodesic-inv"], geodesic="exact"),
        replace(MEASURES["geodesic-mix"], geodesic="exact"),
        of(AdaptiveNormMeasure, "geodesic-mix"),
        of(AdaptiveNormMeasure, "geodesic-inv", geodesic="first-order"),
        of(AdditiveMeasure, "geodesic-inv", relaxation=0.01),
        of(AdditiveMeasure, "geodesic-mix", relaxation=0.01),
    ],
    ids=lambda m: f"{m.pair_metric}-{m.geodesic}-{type(m).__name__}",
)
def test_gradients_of_the_pulled_back_loss(trained, how):
    """By central differences along horizontal vectors."""
    model, _, (x, y) = trained
    space = sharpness.WeightSpace(model, how)
    generator = torch.Generator().manual_seed(3)
    xi, v = (space.random(generator) for _ in range(2))
    xi, v = xi * (0.02 / xi.norm()), v / v.norm()
    with space.attached():

        def loss(c):
            space.move_to(c)
            return F.cross_entropy(model(x).logits, y)

        g = space.gradient(loss(xi))
        with torch.no_grad():
            expected = float(loss(xi + 1e-5 * v) - loss(xi - 1e-5 * v)) / 2e-5
    assert float(g @ v) == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("metric", "rho"), [("inv", 0.2), ("mix", 0.03)])
def test_exact_geodesics(trained, metric, rho):
    model, _, batch = trained
    base = MEASURES[f"geodesic-{metric}"]
    exact = values(trained, measure=base, geodesic="exact", rho=rho)
    assert exact[0] == pytest.approx(exact[1], rel=1e-8)
    fine = values(trained, measure=of(FineMeasure, base), rho=rho)[0]
    assert exact[0] == pytest.approx(fine, rel=1e-5)
    assert abs(exact[0] - values(trained, measure=base, rho=rho)[0]) > 10 * abs(exact[0] - fine)
    result = sharpness.evaluate(model, [batch], measure=replace(base, geodesic="exact"), rho=rho, steps=4)
    with sharpness.perturbed(model, result.direction(0)), torch.no_grad():
        loss = float(F.cross_entropy(model(batch[0]).logits, batch[1]))
    assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)
    assert result.batches[0].num_exited_pairs == 0


def test_geodesics_that_would_leave_the_manifold_are_shortened():
    """Scalar pairs leave at t = −1/(2B), where the product has shrunk to zero."""
    torch.manual_seed(3)
    model = nn.MultiheadAttention(1, 1, bias=False, batch_first=True)
    for p in model.parameters():
        nn.init.constant_(p, 0.7)
    x = torch.randn(6, 5, 1)
    y = -model(x, x, x, need_weights=False)[0].detach()  # the way there leads the product of values and outputs past 0

    def loss(model, batch):
        return -F.mse_loss(model(batch[0], batch[0], batch[0], need_weights=False)[0], batch[1])

    options = {"measure": get_measure("geodesic-mix", geodesic="exact"), "relative_tol": 0, "steps": 1}
    far = sharpness.evaluate(model, [(x, y)], loss, rho=1.0, **options)
    assert far.batches[0].num_exited_pairs > 0
    assert "geodesic would leave the manifold; it was shortened" in str(far)
    assert math.isfinite(float(far))
    near = sharpness.evaluate(model, [(x, y)], loss, rho=1e-3, **options)
    assert near.batches[0].num_exited_pairs == 0
    with sharpness.perturbed(model, far.direction(0)), torch.no_grad():
        assert float(loss(model, (x, y))) == pytest.approx(far.batches[0].worst_loss, rel=1e-6)


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_adaptive_norm_of_horizontal_vectors(trained, metric):
    model, _, batch = trained
    measure = of(AdaptiveNormMeasure, metric)
    result = sharpness.evaluate(model, [batch], measure=measure, rho=0.1, steps=5, relative_tol=0)
    direction = result.direction(0)
    parameters = dict(model.named_parameters())
    square = sum(float((v / parameters[n].detach()).square().sum()) for n, v in direction.tensors.items())
    assert math.sqrt(square) == pytest.approx(0.1, rel=1e-9)
    for pair in direction.symmetries.pairs:
        manifold, x = pair.manifold(metric.removeprefix("geodesic-")), pair.gather(parameters).detach()
        u = torch.cat([direction.tensors[s.name].as_strided(s.size, s.stride, s.offset) for s in pair.slots])
        assert float((manifold.proju(x, u) - u).norm()) < 1e-7 * float(u.norm())
    one, two = values(trained, measure=measure)
    assert abs(one / two - 1) > 0.05  # it is the metric's norm that makes the measure invariant


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_relaxation(trained, metric):
    exact = values(trained, measure=metric, rho=0.02)
    with pytest.raises(TypeError, match="unexpected keyword argument 'relaxation'"):
        get_measure(metric, relaxation=0.3)
    tiny = values(trained, measure=of(AdditiveMeasure, metric, relaxation=1e-12), rho=0.02)
    assert tiny[0] == pytest.approx(exact[0], rel=1e-6)
    large = values(trained, measure=of(AdditiveMeasure, metric, relaxation=0.1), rho=0.02)
    assert abs(large[0] / large[1] - 1) > 0.01


def test_what_a_patch_cannot_do_is_said(trained):
    model, _, batch = trained
    stepped = of(RungeKuttaMeasure, "geodesic-inv")
    with pytest.raises(ValueError, match="closed forms, which this measure does not have"):
        sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1, measure=stepped)
    # A retraction that is not quadratic is differentiated by differences, and this one follows the same geodesics.
    one, two = (
        sharpness.hessian(model, [batch], measure=measure, num_matvecs=3, progress=False)
        for measure in (stepped, "geodesic-inv")
    )
    assert float(one) == pytest.approx(float(two), rel=1e-4)
    assert one.trace == pytest.approx(two.trace, rel=1e-4)
    direction = sharpness.evaluate(model, [batch], measure=stepped, rho=0.5, steps=2).direction(0)
    straight = replace(direction, measure=get_measure("geodesic-inv", geodesic="first-order"))
    curves = [plots.plot_profile(model, batch, d, points=3).axes[0].lines[-1] for d in (direction, straight)]
    assert list(curves[0].get_ydata()) != list(curves[1].get_ydata())
    with pytest.raises(TypeError, match="unexpected keyword argument 'geodesics'"):
        get_measure("geodesic-inv", geodesics="exact")


# -- which pairs are divided out, and what has no meaning --------------------------------------------------------------


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_symmetry_none_equals_adaptive(trained, metric):
    assert values(trained, measure=metric, symmetry="none") == values(trained, measure="adaptive")


def test_symmetry_of_one_kind(trained):
    model, _twin, batch = trained
    one, two = values(trained), values(trained, symmetry="none")
    for kind, other in (("qk", "vo"), ("vo", "qk")):
        half = values(trained, symmetry=kind)
        assert half[0] not in (one[0], two[0])
        # Only what is divided out may be moved.
        moved = copy.deepcopy(model)
        move_(moved, seed=1, condition=30.0, kinds=[kind])
        same = values((moved, moved, batch), symmetry=kind)[0]
        assert same == pytest.approx(half[0], rel=1e-8)
        unlike = values((moved, moved, batch), symmetry=other)[0]
        assert abs(unlike / values(trained, symmetry=other)[0] - 1) > 0.01
        of_kind = get_measure("geodesic-inv", symmetry=kind)
        found = sharpness.evaluate(model, [batch], measure=of_kind, rho=0.1, steps=1).direction(0).symmetries.pairs
        assert {p.kind for p in found} == {kind}


@pytest.mark.parametrize(
    ("name", "switches", "words"),
    [
        ("adaptive", {"geodesic": "first-order"}, "geodesic says how symmetric pairs are treated"),
        ("adaptive", {"symmetry": "qk"}, "symmetry says how"),
        ("geodesic-inv", {"geodesic": "third-order"}, "geodesic must be one of"),
    ],
)
def test_combinations_without_meaning(name, switches, words):
    with pytest.raises(ValueError, match=words):
        get_measure(name, **switches)


@pytest.mark.parametrize(
    ("name", "switches", "words"),
    [
        ("adaptive", {"rho": 0.0}, "rho must be one or several positive numbers"),
        ("adaptive", {"rho": -1.0}, "rho must be one or several positive numbers"),
        ("adaptive", {"rho": math.nan}, "rho must be one or several positive numbers"),
    ],
)
def test_numbers_out_of_range(trained, name, switches, words):
    model, _, batch = trained
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(model, [batch], measure=get_measure(name, **switches))
