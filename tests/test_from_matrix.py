"""The point of a matrix."""

import pytest
import torch

from quotient_manifolds import from_matrix


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_from_matrix(dtype):
    W = torch.randn(2, 6, 5, dtype=dtype)
    x = from_matrix(W, 3)
    G, H = x.split([6, 5], dim=-2)
    U, s, Vh = torch.linalg.svd(W, full_matrices=False)
    assert torch.allclose(G @ H.mH, (U[..., :3] * s[..., None, :3]) @ Vh[..., :3, :])
    assert torch.allclose(G.mH @ G, H.mH @ H)
    with pytest.raises(ValueError, match="no point of rank 6"):
        from_matrix(W, 6)
    with pytest.raises(ValueError, match="a rank below 2"):
        from_matrix(torch.ones(3, 3), 2)
