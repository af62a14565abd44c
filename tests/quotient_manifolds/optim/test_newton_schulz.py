"""Inverse roots by products."""

import pytest
import torch

from quotient_manifolds.linalg import hermitian_power
from quotient_manifolds.optim.newton_schulz import inverse_root


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


def test_zero_gives_numbers():
    found = inverse_root(torch.zeros(2, 3, 3))
    assert found.to(torch.float32).isfinite().all()
