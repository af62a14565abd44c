import geoopt
import pytest
import torch

from quotient_manifolds import (
    ConvergenceError,
    GLQuotientInv,
    GLQuotientMix,
    RescaleQuotient,
    frechet_mean,
)
from tests.support.points import ALL, close, two_points


def test_random_points_have_a_mean():
    manifold = GLQuotientInv(5, 4)
    points = manifold.random(4, 9, 2)
    other = manifold.act(points, torch.randn(4, 2, 2))[torch.randperm(4)]
    found = frechet_mean(manifold, torch.stack([points, other], 1))
    assert found.certificate.max() < 1e-8
    mean, again = manifold.to_matrix(found.point)
    torch.testing.assert_close(again, mean, rtol=1e-6, atol=1e-7)
    # What is no mean is told apart by the sum of its logarithms.
    bases = torch.stack([found.point[0], points[0]])
    logs = manifold.logmap(bases.expand(4, 2, 9, 2), points.unsqueeze(1).expand(4, 2, 9, 2))
    of_mean, of_point = manifold.norm(bases, logs.mean(0))
    assert of_mean < 1e-8
    assert of_point > 0.1
    torch.testing.assert_close(found.variance[0], manifold.norm(bases.expand_as(logs), logs)[:, 0].square().mean())


def test_points_so_far_apart_that_their_logarithms_jump():
    """Steps that make the sum of logarithms shorter, whatever the variance, went to and fro here for ever."""
    torch.manual_seed(6)
    manifold = GLQuotientInv(3, 3)
    assert frechet_mean(manifold, manifold.random(10, 6, 1)).certificate < 1e-8


@pytest.mark.parametrize("manifold", [GLQuotientInv(5, 4), GLQuotientMix(5, 4)], ids=repr)
def test_weights_divide_the_geodesic_between_two_points(manifold):
    x = manifold.random(3, 9, 2)
    y = manifold.act(x + 0.1 * torch.randn_like(x), torch.randn(3, 2, 2))
    weighted = manifold.mean(torch.stack([x, y]), torch.tensor([3.0, 1.0]))
    expected = manifold.geodesic_between(x, y, torch.tensor(0.25))
    torch.testing.assert_close(manifold.to_matrix(weighted), manifold.to_matrix(expected), rtol=1e-7, atol=1e-7)
    plain = manifold.mean(torch.stack([x, y]))
    assert (manifold.to_matrix(plain) - manifold.to_matrix(expected)).abs().max() > 1e-3


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_closed_form_of_the_rescaling_quotient(metric):
    manifold = RescaleQuotient(metric)
    points = torch.rand(6, 2, 5) + 0.5
    beta = manifold.to_matrix(points)
    expected = beta.log().mean(0).exp() if metric == "inv" else beta.mean(0)
    found = frechet_mean(manifold, points)
    torch.testing.assert_close(manifold.to_matrix(found.point), expected)


def test_bad_points_weights_and_counts():
    manifold, points = GLQuotientInv(4, 3), torch.randn(3, 7, 2)
    for wrong in (torch.ones(2), -torch.ones(3), torch.zeros(3)):
        with pytest.raises(ValueError, match="as many weights"):
            frechet_mean(manifold, points, wrong)
    with pytest.raises(TypeError, match=r"manifold must be one with logarithms.*got str"):
        frechet_mean("mix", points)
    with pytest.raises(ValueError, match="with k ≥ 1"):
        frechet_mean(manifold, points[:0])
    square = GLQuotientInv(2, 2)
    apart = torch.stack([torch.eye(2).repeat(2, 1), torch.cat([torch.eye(2), torch.eye(2).flip(0)])])
    with pytest.raises(ConvergenceError):
        square.mean(apart)
    assert frechet_mean(manifold, points[:1]).variance < 1e-12


def test_the_certificate_and_other_manifolds():
    """Any of geoopt's own with a logarithm will do, given what its points look like as matrices."""
    sphere = geoopt.SphereExact()
    sphere.to_matrix = lambda x: x
    points = sphere.projx(torch.randn(5, 1, 4) * 0.1 + torch.tensor([1.0, 0, 0, 0]))
    found = frechet_mean(sphere, points)
    assert found.certificate.max() < 1e-8


def test_a_mean_of_scaled_points_is_the_scaled_mean():
    """Lengths in mix have the unit of the product: a bound that did not was too tight, or reached too early."""
    manifold = GLQuotientMix(4, 3)
    torch.manual_seed(3)
    x = torch.randn(7, 2)
    points = torch.stack([manifold.expmap(x, manifold.proju(x, 0.1 * torch.randn(7, 2))) for _ in range(4)])
    scales = torch.tensor([1.0, 1e-3, 0.1, 1e3])[:, None, None]
    expected, *found = manifold.to_matrix(manifold.mean(scales.sqrt() * points.unsqueeze(1))) / scales
    for product in found:
        torch.testing.assert_close(product, expected, rtol=1e-7, atol=1e-8)


def test_whole_numbers_are_weights():
    manifold = RescaleQuotient("inv")
    points = torch.rand(2, 2, 3) + 0.5
    expected = manifold.mean(torch.stack([points[0], *3 * [points[1]]]))
    found = manifold.mean(points, torch.tensor([1, 3]))
    torch.testing.assert_close(manifold.to_matrix(found), manifold.to_matrix(expected))


@pytest.mark.parametrize("manifold", ALL, ids=str)
def test_batches_without_points_and_expanded_batches(manifold):
    x, u = two_points(manifold)
    points = torch.stack([x[0], manifold.expmap(x[0], 0.1 * u[0])])
    for batch in ((0,), (2, 0)):
        none = points.reshape(2, *(1 for _ in batch), *x.shape[-2:]).expand(2, *batch, *x.shape[-2:])
        assert manifold.mean(none).shape == (*batch, *x.shape[-2:])
        assert frechet_mean(manifold, none).variance.shape == batch
    mean = manifold.mean(points)
    close(manifold.mean(points.unsqueeze(1).expand(2, 3, *x.shape[-2:])), mean.expand(3, *x.shape[-2:]), 1e-8)
