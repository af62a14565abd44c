import pytest
import torch

from quotient_manifolds.gl.bent import Bent, first_path, polar
from quotient_manifolds.gl.path import Path, energy, moved_end
from tests.geodesics import METRICS, field


def ends(dtype=torch.float64, n=12, m=9, h=3, seed=0):
    """Independent random points, the second turned to fit the first."""
    torch.manual_seed(seed)
    manifold = METRICS["inv"](n, m)
    x, y = (manifold.canonical(manifold.random(5, n + m, h, dtype=dtype)) for _ in range(2))
    P, _, Qh = torch.linalg.svd(y[:, :n].mH @ x[:, :n] + y[:, n:].mH @ x[:, n:])
    return manifold, x, y @ (P @ Qh)


@field
def test_a_bent_path_is_shorter_than_a_straight_one(dtype):
    manifold, x, y = ends(dtype)
    path = first_path(manifold.metric, 12, x, y, 4)
    straight = energy(Path(path.metric, 12, x, y, 0 * path.c))[0]
    least = manifold.dist(x, y) ** 2
    assert bool((energy(path)[0] - least < 0.5 * (straight - least)).all())
    # The spans of both ends at right angles, columns of one size: a geodesic, each column a quarter of a circle.
    eye = torch.eye(6, dtype=dtype)
    one, other = (torch.cat([eye[:, k : k + 3]] * 2)[None] for k in (0, 3))
    path = first_path(manifold.metric, 6, one, other, 8)
    torch.testing.assert_close(energy(path)[0], torch.tensor([6 * torch.pi**2 / 4], dtype=path.x.real.dtype))


@field
def test_coefficients_follow_the_end(dtype):
    """Against differences; exact but for the change of f, which counts with the middle size."""
    manifold, x, y = ends(dtype)
    like = first_path(manifold.metric, 12, x, y, 4)
    L = torch.randn(5, 3, 3, dtype=dtype)
    moved = [first_path(manifold.metric, 12, x, moved_end(12, y, s * 1e-5 * L), 4).c for s in (1, -1)]
    expected = (moved[0] - moved[1]) / 2e-5
    bent = [Bent(X, Y, like) for X, Y in zip(like.split(x), like.split(y), strict=True)]
    for b in bent:
        b.prepare()
    found = torch.cat([b.following(m) for b, m in zip(bent, (L, -L.mH), strict=True)], -2)
    assert (found - expected).norm() < 0.15 * expected.norm()
    # Exact where both ends have one size.
    X, Y = (torch.linalg.qr(z)[0] for z in (x[:, :12], y[:, :12]))
    skew = L - L.mH
    bent = Bent(X, Y, like)
    bent.prepare()
    ahead, behind = (Bent(X, Y @ torch.linalg.matrix_exp(s * 1e-5 * skew), like).coefficients() for s in (1, -1))
    torch.testing.assert_close(bent.following(skew), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("h", "dtype"), [(2, torch.float64), (1, torch.complex128), (2, torch.complex128)])
def test_a_half_turn_has_no_singular_matrix_on_its_way(h, dtype):
    """From the identity to its negative, where a straight path goes through zero."""
    eye = torch.eye(h, dtype=dtype)
    x, y = (torch.cat([s * eye, s * eye])[None] for s in (1, -1))
    found = first_path(METRICS["inv"](h, h).metric, h, x, y, 4).points()[0]
    assert torch.linalg.svdvals(found).min() > 0.9


def test_an_item_that_is_not_finite_leaves_the_others_alone():
    X = torch.randn(3, 4, 2)
    bad = X.clone()
    bad[1] = torch.nan
    bad[2, 0] = torch.inf
    torch.testing.assert_close(polar(bad)[0], polar(X)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_square_factors_turn_without_losing_rank(dtype):
    manifold = METRICS["inv"](4, 4)
    x, y = (manifold.random(8, 8, 4, dtype=dtype) for _ in range(2))
    if dtype == torch.float64:
        for part in (slice(0, 4), slice(4, 8)):
            wrong = torch.linalg.det(x[:, part]) * torch.linalg.det(y[:, part]) < 0
            y[wrong, part.start] = -y[wrong, part.start]
    path = first_path(manifold.metric, 4, x, y, 4)
    found = path.points()[0]
    lowest = torch.linalg.svdvals(found)[..., -1].amin(1) / torch.linalg.svdvals(x[:, :4])[..., -1]
    straight = x[:, None] + torch.linspace(0, 1, 10)[:, None, None] * (y - x)[:, None]
    assert lowest.median() > 0.2
    if dtype == torch.float64:
        signs = torch.linalg.det(straight[:, :, :4]).sign()
        assert bool((signs != signs[:, :1]).any())
