import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix
from tests.points import ALL, MANIFOLDS, carry, close, metrics, two_points


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
    """The length of a point as a vector is √(2h) with inv, whatever the point; with mix it is of the product's size."""
    manifold = kind(5, 4)
    for seed in range(20):
        torch.manual_seed(seed)
        x = 1e20 * manifold.random(9, 2, dtype=torch.float32)
        if kind is GLQuotientInv:
            assert float(manifold.norm(x, x)) == pytest.approx(2, rel=1e-5)
        else:
            with pytest.raises(ValueError, match=r"^GLQuotientMix.*norm gives numbers that its dtype does not hold"):
                manifold.norm(x, x)
        for name in ("proju", "retr", "canonical"):
            assert getattr(manifold, name)(*(x, x)[: 1 if name == "canonical" else 2]).isfinite().all()


@pytest.mark.parametrize("kind", [GLQuotientInv, GLQuotientMix])
def test_the_canonical_representative_is_differentiated(kind):
    """Where singular values are distinct; elsewhere it is not unique, and whoever asks for a derivative is told."""
    manifold = kind(5, 4)
    x = manifold.random(9, 2).requires_grad_()
    weights = torch.randn(9, 2)

    def value(x):
        return (weights * manifold.canonical(x)).sum()

    (grad,) = torch.autograd.grad(value(x), x)
    step = torch.randn(9, 2)
    with torch.no_grad():
        difference = (value(x + 1e-6 * step) - value(x - 1e-6 * step)) / 2e-6
    assert float((grad * step).sum()) == pytest.approx(float(difference), rel=1e-6)
    small = (2.0**-300 * x.detach()).requires_grad_()
    close(torch.autograd.grad(value(small), small)[0], grad, 1e-9)
    equal = manifold.origin(9, 2).requires_grad_()
    assert torch.equal(manifold.canonical(equal), equal)
    with pytest.raises(ValueError, match="no derivative where singular values are equal"):
        value(equal).backward()


@metrics
def test_coordinates_at_points_of_any_size(metric):
    """A covector pulled back is the derivative of the retraction in coordinates, and lengths are those of vectors."""
    manifold = MANIFOLDS[metric](5, 4)
    c, egrad = 0.1 * torch.randn(9, 2), torch.randn(9, 2)
    x = manifold.random(9, 2)
    for size in (1.0, 2.0**-70, 2.0**70):
        space = manifold.tangent_space_at(size * x)
        u = space.from_coordinates(c)
        close(space.coordinates(u), c, 1e-12)
        close(space.norm(u), torch.linalg.norm(c), 1e-12)
        close((space.to_covector(u) * u).sum(), c.square().sum(), 1e-12)
        close((space.dual_coordinates(egrad) * c).sum(), (egrad * u).sum(), 1e-10)
        horizontal = space.coordinates(space.proju(u))
        close(space.project_coordinates(c), horizontal, 1e-11)
        step = horizontal * min(1.0, size**4) ** (metric == "mix")  # of the size of the point
        close(
            space.retr_coordinates(step), carry(manifold, space.retr(space.from_coordinates(step)), space.gauge.A), 1e-9
        )
        L = torch.randn(2, 2)
        vertical = carry(manifold, manifold.vertical(space.gauge.x, L), torch.linalg.inv(space.gauge.A))
        close((space.vertical_moment(u) * L).sum(), space.inner(u, vertical), 1e-9)
        close((space.vertical_covector(L) * u).sum(), space.inner(u, vertical), 1e-9)
        square, along = space.along_gradient(space.to_covector(space.from_coordinates(step)))
        assert square.isfinite()
        assert along(0.1).isfinite().all()
