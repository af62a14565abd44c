import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix
from tests.points import ALL, MANIFOLDS, close, metrics, two_points


@metrics
def test_float32_stays_float32_and_agrees_with_float64(metric):
    manifold = MANIFOLDS[metric](20, 15)
    x, u = manifold.random(3, 35, 5), torch.randn(3, 35, 5)
    for operation in (manifold.proju, manifold.egrad2rgrad, manifold.retr, manifold.norm):
        single = operation(x.float(), u.float())
        assert single.dtype == torch.float32
        close(single.double(), operation(x, u), 1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@metrics
def test_on_a_gpu(metric):
    manifold = MANIFOLDS[metric](20, 15)
    x, u = manifold.random(3, 35, 5), torch.randn(3, 35, 5)
    for operation in (manifold.proju, manifold.egrad2rgrad, manifold.retr, manifold.norm):
        close(operation(x.cuda(), u.cuda()).cpu(), operation(x, u), 1e-10)


@metrics
def test_projx_lifts_a_rank_deficient_tensor_on_the_manifold(metric):
    manifold = MANIFOLDS[metric](5, 4)
    x = torch.cat([torch.zeros(5, 2), torch.randn(4, 2)])
    lifted = manifold.projx(x)
    manifold.assert_check_point_on_manifold(lifted)
    assert torch.equal(lifted[5:], x[5:])
    valid = manifold.random(9, 2)
    assert manifold.projx(valid) is valid
    with pytest.raises(ValueError, match="NaN"):
        manifold.projx(torch.full((9, 2), float("nan")))


@metrics
def test_points_that_pass_the_check_are_accepted(metric):
    """Factors of condition 1e3 and 1e4 in float32: G Hᴴ is rank-deficient to rounding, the point is one."""
    manifold = MANIFOLDS[metric](8, 7, relaxation=1e-3)
    torch.manual_seed(0)
    s = torch.logspace(0, -3, 3)
    G = (torch.linalg.qr(torch.randn(8, 3)).Q * s) @ torch.linalg.qr(torch.randn(3, 3)).Q
    H = (torch.linalg.qr(torch.randn(7, 3)).Q * s**1.3) @ torch.linalg.qr(torch.randn(3, 3)).Q
    x = torch.cat([G, H]).float()
    manifold.assert_check_point_on_manifold(x)
    u = manifold.proju(x, torch.randn(15, 3).float())
    assert manifold.retr(x, 1e-3 * u).isfinite().all()


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_no_tensor_is_made_on_another_device(manifold):
    """With another default device, whatever does not follow its arguments meets a tensor without numbers."""
    x, u = two_points(manifold)
    y = x + 0.005 * torch.randn_like(x)
    with torch.device("meta"):
        assert torch.ones(1).is_meta
        for name in ("inner", "norm", "proju", "egrad2rgrad", "retr", "acceleration", "expmap", "exit_time"):
            assert not getattr(manifold, name)(x, u).is_meta
        for name in ("logmap", "dist", "align"):
            assert not getattr(manifold, name)(x, y).is_meta
        assert not manifold.geodesic(x, u, 0.5)[0].is_meta
        assert not manifold.geodesic_between(x, y, 0.5).is_meta
        assert not manifold.mean(torch.stack([x, y])).is_meta
        assert not manifold.parallel_transport(x, u, u)[1].is_meta


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_batches_without_points(manifold):
    none = torch.zeros(0, 7, 2)
    for name in ("proju", "retr", "expmap", "acceleration"):
        assert getattr(manifold, name)(none, none).shape == (0, 7, 2)
    assert manifold.norm(none, none).shape == (0,)
    with pytest.raises(ValueError, match="with k ≥ 1"):
        manifold.mean(torch.zeros(0, 7, 2))


@pytest.mark.parametrize("kind", [GLQuotientInv, GLQuotientMix])
def test_a_product_that_overflows_is_named(kind):
    manifold = kind(5, 4)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        x = 1e20 * manifold.random(9, 2, dtype=torch.float32)
        try:
            manifold.norm(x, x)
        except ValueError as error:
            seen.add(str(error))
    assert seen == {"the product G Hᴴ over- or underflows in torch.float32; rescale the point, or use torch.float64"}
