import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.symmetries import GL, block, pair
from reproduction.adaptive_norm import AdaptiveNormMeasure


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_spectrum_is_invariant_also_where_the_gradient_is_not_zero(trained_small, metric):
    model, twin, batch = trained_small

    def of(m, measure):
        return sharpness.hessian(m, [batch], measure=measure, num_matvecs=6)

    one, two = (of(m, metric) for m in (model, twin))
    assert one.max_eigenvalue == pytest.approx(two.max_eigenvalue, rel=1e-6)
    assert one.trace == pytest.approx(two.trace, rel=1e-6)
    baseline = {"geodesic-inv": "euclidean", "geodesic-mix": "adaptive"}[metric]
    plain, moved = (of(m, baseline) for m in (model, twin))
    assert abs(moved.max_eigenvalue / plain.max_eigenvalue - 1) > 0.1
    assert abs(moved.trace / plain.trace - 1) > 0.1
    # Without the acceleration the second derivative along straight lines depends on the representative.
    straight = AdaptiveNormMeasure(**vars(sharpness.get_measure(metric, geodesic="first-order")))
    one, two = (of(m, straight).max_eigenvalue for m in (model, twin))
    assert abs(two / one - 1) > 1e-3


def test_results_and_pieces(trained_small):
    model, _, batch = trained_small
    result = sharpness.hessian(model, [batch], num_matvecs=9)
    assert "geodesic-inv Hessian of ViTForImageClassification: largest eigenvalue" in str(result)
    assert result.to_dict()["batches"][0]["trace"] == result.trace is not None
    twice = sharpness.hessian(model, [batch, batch], num_matvecs=9)
    assert result.std_error == result.batches[0].std_error > 0
    assert f"trace {result.trace:.6g} ± {result.std_error:.2g}, 1 batch" in str(result)
    assert twice.std_error == twice.to_dict()["std_error"] == pytest.approx(result.std_error)  # of the same vectors
    pieces = sharpness.hessian(model, [batch], num_matvecs=9, micro_batch=5)
    assert pieces.max_eigenvalue == pytest.approx(result.max_eigenvalue, rel=1e-9)
    assert pieces.trace == pytest.approx(result.trace, rel=1e-9)
    assert sharpness.hessian(model, [batch], num_matvecs=9, measure="euclidean").trace != result.trace
    exact = sharpness.get_measure("geodesic-inv", geodesic="exact")
    assert sharpness.hessian(model, [batch], measure=exact, num_matvecs=9).trace == result.trace
    with pytest.raises(ValueError, match="num_matvecs must be a whole number of at least 1, got 0"):
        sharpness.hessian(model, [batch], num_matvecs=0)


def test_gradient_norms(trained_small):
    model, _, batch = trained_small
    result = sharpness.gradient_norm(model, [batch, batch])
    assert "gradient norm of ViTForImageClassification in the metric of geodesic-inv" in str(result)
    assert [b.passes for b in result.batches] == [1, 1]
    assert result.trace is result.max_eigenvalue is None


def test_the_scalar_network():
    """ℓ = (βx − y)² with β = gh, along β e^{2Bt} (inv) and β (1 + 2Bt) (mix), with unit speed."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    g, h, x, y = 1.5, -0.8, 0.7, 0.4
    with torch.no_grad():
        model[0].weight.fill_(h)
        model[1].weight.fill_(g)
    only = pair([block(model[1], "weight")], [block(model[0], "weight", transpose=True)], GL(1))
    batch = (torch.tensor([[x]]), torch.tensor([[y]]))

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    beta, r = g * h, g * h * x - y
    # d²/dt² (βe^{2Bt}x − y)² at 0 with 2B² = 1: 2 (2Bβx)² + 2 r (2B)² β x.
    inv = sharpness.hessian(model, [batch], loss, pairs=[only])
    assert inv.max_eigenvalue == pytest.approx(4 * (beta * x) ** 2 + 4 * r * beta * x, rel=1e-9)
    # β(1 + 2Bt) with 2β²B² = 1: 2 (2Bβx)² = 4x².
    mix = sharpness.hessian(model, [batch], loss, measure="geodesic-mix", pairs=[only])
    assert mix.max_eigenvalue == pytest.approx(4 * x**2, rel=1e-9)
    assert mix.trace == pytest.approx(4 * x**2, rel=1e-6)
