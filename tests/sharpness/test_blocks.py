import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from reproduction.rk4 import RungeKuttaBlock
from sharpness import MEASURES, get_measure
from tests import networks
from tests.measured import values

ADAPTIVE = "reproduction.adaptive_norm:AdaptiveNormBlock"


ADDITIVE = "reproduction.additive:AdditiveBlock"


RK4 = "reproduction.rk4:RungeKuttaBlock"


FINE, COARSE = f"{__name__}:FineBlock", f"{__name__}:CoarseBlock"


class FineBlock(RungeKuttaBlock):
    substeps = 8


class CoarseBlock(RungeKuttaBlock):
    substeps = 1


@pytest.mark.parametrize(("metric", "rho"), [("inv", 0.5), ("mix", 0.03)])
def test_runge_kutta_geodesics(trained, metric, rho):
    model, _twin, batch = trained
    base = MEASURES[f"geodesic-{metric}"]
    fine, coarse = (values(trained, measure=replace(base, pair_block=block), rho=rho) for block in (FINE, COARSE))
    assert fine[0] == pytest.approx(fine[1], rel=1e-8)
    second = values(trained, measure=base, rho=rho)[0]
    assert 0 < abs(coarse[0] - fine[0]) < abs(second - fine[0])
    # The direction that is handed out leads to the loss that was reported.
    result = sharpness.evaluate(model, [batch], measure=replace(base, pair_block=RK4), rho=rho, steps=4)
    with sharpness.perturbed(model, result.direction(0)), torch.no_grad():
        loss = float(F.cross_entropy(model(batch[0]).logits, batch[1]))
    assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)


@pytest.mark.parametrize(
    "how",
    [
        replace(MEASURES["geodesic-inv"], pair_block=RK4),
        replace(MEASURES["geodesic-mix"], pair_block=RK4),
        replace(MEASURES["geodesic-inv"], geodesic="exact"),
        replace(MEASURES["geodesic-mix"], geodesic="exact"),
        replace(MEASURES["geodesic-mix"], pair_block=ADAPTIVE),
        replace(MEASURES["geodesic-inv"], pair_block=ADAPTIVE, geodesic="first-order"),
        replace(MEASURES["geodesic-inv"], relaxation=0.01, pair_block=ADDITIVE),
        replace(MEASURES["geodesic-mix"], relaxation=0.01, pair_block=ADDITIVE),
    ],
    ids=lambda m: f"{m.pair_metric}-{m.geodesic}-{m.pair_block.split(':')[1]}",
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


@pytest.mark.parametrize(("metric", "rho"), [("inv", 0.5), ("mix", 0.03)])
def test_exact_geodesics(trained, metric, rho):
    model, _, batch = trained
    base = MEASURES[f"geodesic-{metric}"]
    exact = values(trained, measure=base, geodesic="exact", rho=rho)
    assert exact[0] == pytest.approx(exact[1], rel=1e-8)
    fine = values(trained, measure=replace(base, pair_block=FINE), rho=rho)[0]
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
    model = networks.shake(nn.MultiheadAttention(1, 1, bias=False, batch_first=True), 0.7)
    x, y = torch.randn(6, 5, 1), torch.randn(6, 5, 1)

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
    measure = get_measure(metric, pair_block=ADAPTIVE)
    result = sharpness.evaluate(model, [batch], measure=measure, rho=0.1, steps=5, relative_tol=0)
    direction = result.direction(0)
    parameters = dict(model.named_parameters())
    square = sum(float((v / parameters[n].detach()).square().sum()) for n, v in direction.tensors.items())
    assert math.sqrt(square) == pytest.approx(0.1, rel=1e-9)
    by_parameter = {parameters[n]: v for n, v in direction.tensors.items()}
    for pair in direction.pairs:
        manifold, x = pair.manifold(metric.removeprefix("geodesic-")), pair.gather().detach()
        u = torch.cat([by_parameter[b.tensor].as_strided(b.size, b.stride, b.offset) for b in pair.G + pair.H])
        assert float((manifold.proju(x, u) - u).norm()) < 1e-7 * float(u.norm())
    one, two = values(trained, measure=metric, pair_block=ADAPTIVE)
    assert abs(one / two - 1) > 0.05  # it is the metric's norm that makes the measure invariant


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_relaxation(trained, metric):
    exact = values(trained, measure=metric, rho=0.02)
    with pytest.raises(ValueError, match="relaxation needs a pair_block"):
        values(trained, measure=metric, rho=0.02, relaxation=0.3)
    tiny = values(trained, measure=metric, rho=0.02, relaxation=1e-12, pair_block=ADDITIVE)
    assert tiny[0] == pytest.approx(exact[0], rel=1e-6)
    large = values(trained, measure=metric, rho=0.02, relaxation=0.1, pair_block=ADDITIVE)
    assert abs(large[0] / large[1] - 1) > 0.01


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("nosuchmodule:Block", "cannot be imported"),
        ("sharpness.blocks:Nope", "cannot be imported"),
        ("math:pi", "is not a subclass of sharpness.blocks.PairBlock"),
        ("sharpness.blocks:ElementwiseBlock", "is not a subclass of sharpness.blocks.PairBlock"),
    ],
)
def test_blocks_that_cannot_be_used_are_named(block, words):
    measure = get_measure("geodesic-inv", pair_block=block)
    with pytest.raises(ValueError, match=f"pair_block='{block}' {words}"):
        sharpness.evaluate(networks.vit(), [networks.images()], measure=measure, rho=0.1)


def test_what_a_block_cannot_do_is_said(trained):
    model, _, batch = trained
    stepped = get_measure("geodesic-inv", pair_block=RK4)
    with pytest.raises(ValueError, match="closed forms, which RungeKuttaBlock does not have"):
        sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1, measure=stepped)
    with pytest.raises(ValueError, match="needs a quadratic retraction"):
        sharpness.hessian(model, [batch], measure=stepped, num_matvecs=3)
    direction = sharpness.evaluate(model, [batch], measure=stepped, rho=0.5, steps=2).direction(0)
    losses = sharpness.profile(model, batch, direction, points=3).losses
    assert losses["first-order"] != losses["second-order"]
    with pytest.raises(ValueError, match="defines no length of vectors"):
        sharpness.gradient_norm(model, [batch], measure=get_measure("adaptive", ball_norm=math.inf))
    with pytest.raises(ValueError, match="a measure has no 'geodesics'; its fields are name"):
        get_measure("geodesic-inv", geodesics="exact")
