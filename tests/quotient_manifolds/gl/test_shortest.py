import torch

from quotient_manifolds import GLQuotientInv
from quotient_manifolds.gl import shortest as module
from quotient_manifolds.gl.shortest import SOLVED, Shortest, shortest


def points(b=12):
    manifold = GLQuotientInv(6, 4)
    return manifold, *(manifold.canonical(manifold.random(b, 10, 2)) for _ in range(2))


def test_more_starts_find_nothing_longer():
    manifold, x, y = points(3)
    one, usual, many = (shortest(manifold, x, y, k) for k in (1, None, 3))
    for found in (one, usual, many):
        assert found.residual.max() <= SOLVED
        assert found.softest.min() > 0  # no saddles: the second variation is positive
    assert bool((many.length <= usual.length * (1 + 1e-8)).all())
    torch.testing.assert_close(usual.length, many.length, rtol=1e-8, atol=0)


def test_the_geodesics_end_where_they_say():
    manifold, x, y = points(4)
    found = shortest(manifold, x, y, None)
    end, velocity = manifold.geodesic(x, found.u, 1.0)
    torch.testing.assert_close(end, found.end)
    torch.testing.assert_close(velocity, found.end_velocity)
    torch.testing.assert_close(manifold.to_matrix(end), manifold.to_matrix(y), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.length, manifold.norm(x, found.u))


def test_items_do_not_depend_on_their_batch(monkeypatch):
    manifold, x, y = points(5)
    together = shortest(manifold, x, y, None).length
    monkeypatch.setattr(module, "_CHUNK", 1)
    torch.testing.assert_close(shortest(manifold, x, y, None).length, together, rtol=1e-8, atol=0)


def test_only_what_is_better_is_kept():
    def made(length, residual):
        two = torch.ones(2, 10, 2)
        lengths, residuals, inf = torch.tensor(length), torch.tensor(residual), torch.full((2,), torch.inf)
        return Shortest(two, two, two, residuals, lengths, inf, inf, inf)

    known = made([1.0, 1.0], [1e-12, 1e-3])
    known.improve(torch.arange(2), made([2.0, 2.0], [1e-13, 1e-12]))
    assert known.length.tolist() == [1.0, 2.0]
    known.improve(torch.arange(2), made([0.5, 2.0], [1e-10, 1e-10]))
    assert known.length.tolist() == [0.5, 2.0]
    assert known.residual.tolist() == [1e-10, 1e-12]
