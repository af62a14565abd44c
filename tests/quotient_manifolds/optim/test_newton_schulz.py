"""Inverse roots by products."""

import pytest
import torch

from quotient_manifolds.linalg import hermitian_power
from quotient_manifolds.optim.metric import inverse_root


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_against_eigenvalues(dtype, size):
    torch.manual_seed(0)
    U = torch.linalg.qr(torch.randn(5, 6, 6, dtype=dtype)).Q
    S = size * (U * torch.logspace(0, -6, 6).to(dtype)) @ U.mH  # singular values of X down to 1e-3
    torch.testing.assert_close(inverse_root(S), hermitian_power(S, -0.5), rtol=1e-7, atol=0)


def test_what_is_rounding_stays_small():
    d = torch.tensor([1.0, 1e-5, 1e-8, 0.0])
    values = d * inverse_root(torch.diag(d**2)).diagonal()
    assert abs(float(values[0]) - 1) < 1e-12
    assert (values[1:] <= 7000 * d[1:]).all()
    exact = d[:3] * hermitian_power(torch.diag(d[:3] ** 2), -0.5).diagonal()  # which the exact root would not leave
    assert abs(float(exact[2]) - 1) < 1e-12


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-60, 1e-41])
def test_what_is_too_small_becomes_zero(size):
    """Its inverse root, times the metric's, would be infinite in float32, and infinity times 0 is no number."""
    S = size * torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    assert not inverse_root(S).any()
    assert inverse_root(S + 1e-39 * torch.eye(3, dtype=torch.float64)).diagonal(dim1=-2, dim2=-1).all()
