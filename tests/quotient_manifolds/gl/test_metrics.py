import pkgutil
import re
from pathlib import Path

import pytest
import torch

from quotient_manifolds import GLQuotientInv
from tests import oracle
from tests.points import MANIFOLDS, close, metrics


def test_the_printed_sylvester_equation_is_not_the_projection():
    # Paper, §5.2: AΛ + ΛAᵀ = B in place of AΛᵀ + ΛᵀA = B.
    manifold = GLQuotientInv(5, 4)
    x, u = manifold.random(9, 3), torch.randn(9, 3)
    G, H = manifold.unpack_tensor(x)
    xi, eta = manifold.unpack_tensor(u)
    A = (G.T @ G) @ (H.T @ H)
    B = G.T @ G @ H.T @ eta - xi.T @ G @ H.T @ H
    eye = torch.eye(3)
    L = torch.linalg.solve(torch.kron(A, eye) + torch.kron(eye, A), B.reshape(-1)).reshape(3, 3)
    printed = torch.cat([xi + G @ L, eta - H @ L.T])
    assert not manifold.check_vector_on_tangent(x, printed)
    assert manifold.check_vector_on_tangent(x, manifold.proju(x, u))


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("n", "m", "h"), [(4, 3, 1), (5, 4, 3), (3, 3, 3)])
def test_against_the_definitions(metric, dtype, n, m, h):
    manifold = MANIFOLDS[metric](n, m)
    x, u, v = (torch.randn(n + m, h, dtype=dtype) for _ in range(3))
    close(manifold.inner(x, u, v), oracle.metric(metric, n, x, u, v), 1e-10)
    close(manifold.proju(x, u), oracle.project(metric, n, x, u), 1e-10)
    close(manifold.acceleration(x, u), oracle.euler_lagrange(metric, n, x, u), 1e-8)
    # The Riemannian gradient represents the differential on horizontal vectors.
    g = manifold.egrad2rgrad(x, u)
    p = manifold.proju(x, v)
    close(manifold.inner(x, g, p), (u.conj() * p).real.sum(), 1e-10)


def test_every_formula_stands_where_the_page_says():
    page = (Path(__file__).parents[3] / "docs" / "math" / "geometry.md").read_text()
    names = re.findall(r"`(quotient_manifolds\.[\w.]+)`", page)
    assert len(names) > 12
    for name in names:
        assert pkgutil.resolve_name(name) is not None
