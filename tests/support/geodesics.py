"""Points and horizontal vectors for the tests of exact geodesics."""

import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix

METRICS = {"inv": GLQuotientInv, "mix": GLQuotientMix}
metric = pytest.mark.parametrize("name", METRICS)
field = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])


def problem(name, n=7, m=5, h=3, dtype=torch.float64, length=None, seed=0, batch=()):
    """A point and a horizontal vector: of length 0.8 (inv), or of 0.6 σ_h (mix), close to where it may leave."""
    torch.manual_seed(seed)
    manifold = METRICS[name](n, m)
    x = manifold.random(*batch, n + m, h, dtype=dtype)
    u = manifold.proju(x, torch.randn_like(x))
    if length is None:
        length = 0.8 if name == "inv" else 0.6 * torch.linalg.svdvals(manifold.to_matrix(x))[..., h - 1]
    return manifold, x, u * torch.as_tensor(length / manifold.norm(x, u))[..., None, None]
