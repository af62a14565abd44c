"""Points, vectors and group elements of the quotient manifolds."""

import pytest
import torch
from hypothesis import strategies as st

from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient

MANIFOLDS = {"inv": GLQuotientInv, "mix": GLQuotientMix}


metrics = pytest.mark.parametrize("metric", ["inv", "mix"])


@st.composite
def cases(draw, largest=8):
    """A manifold, a point with well-conditioned factors, an element of GL(h) of a given condition number."""
    metric = draw(st.sampled_from(["inv", "mix"]))
    dtype = draw(st.sampled_from([torch.float64, torch.complex128]))
    h = draw(st.integers(1, largest))
    n, m = h + draw(st.integers(0, 5)), h + draw(st.integers(0, 5))
    batch = draw(st.sampled_from([(), (3,), (2, 2)]))
    condition = 10 ** draw(st.floats(0, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*batch, *shape, dtype=dtype, generator=generator)

    def orthonormal(rows):
        return torch.linalg.qr(normal(rows, h)).Q

    spread = torch.linspace(1, 3, h, dtype=torch.float64)
    G, H = orthonormal(n) * spread @ orthonormal(h), orthonormal(m) * spread @ orthonormal(h)
    s = condition ** torch.linspace(-0.5, 0.5, h, dtype=torch.float64)
    A = (orthonormal(h) * s) @ orthonormal(h).mH
    manifold = MANIFOLDS[metric](n, m)
    return manifold, manifold.pack_point(G, H), A, (lambda: normal(n + m, h)), lambda: normal(h, h)


def close(a, b, tolerance=1e-8):
    scale = b.abs().amax()
    assert (a - b).abs().amax() <= tolerance * scale, f"relative difference {(a - b).abs().amax() / scale:.2e}"


def two_points(manifold):
    """Points whose product has no singular value below 1, and vectors of length 0.1: mix may leave from 1/√2 on."""
    if isinstance(manifold, RescaleQuotient):
        x = torch.randn(2, 2, 5)
        x = x + x.sign()
    else:
        x = torch.cat([torch.linalg.qr(torch.randn(2, rows, 2)).Q for rows in manifold.row_split()], -2)
        x = manifold.act(x * torch.tensor([1.0, 2.0]), torch.randn(2, 2, 2).matrix_exp())
    u = manifold.proju(x, torch.randn_like(x))
    return x, 0.1 * u / manifold.norm(x, u, keepdim=True)


def carry(manifold, u, A):
    """A tangent vector moved along the orbit: (ξ_G A⁻¹, ξ_H Aᴴ), by an explicit inverse."""
    xi, eta = manifold.unpack_tensor(u)
    return torch.cat([xi @ torch.linalg.inv(A), eta @ A.mH], dim=-2)


ALL = (GLQuotientInv(4, 3), GLQuotientMix(4, 3), RescaleQuotient("inv"), RescaleQuotient("mix"))
