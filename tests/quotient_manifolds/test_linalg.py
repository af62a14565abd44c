import math

import pytest
import scipy.linalg
import torch

from quotient_manifolds.linalg import column_rank_ratio, finite, largest, power_of_two, root, sylvester, trace_product


def positive_diagonal(h):
    return torch.diag(torch.rand(h) + 0.5)


def test_sylvester_solves_diagonal_equations():
    A1, A2, B = positive_diagonal(4), positive_diagonal(4), torch.randn(4, 4)
    expected = torch.from_numpy(scipy.linalg.solve_sylvester(A1.numpy(), A2.numpy(), B.numpy()))
    torch.testing.assert_close(sylvester(A1, A2, B), expected)


def test_sylvester_has_the_derivatives_of_the_general_equation():
    """Finite differences of SciPy's solver along non-diagonal changes of the coefficients."""
    A1, A2, B = positive_diagonal(3), positive_diagonal(3), torch.randn(3, 3)
    D1, D2, DB = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)

    def solve(t):
        arrays = [(a + t * d).numpy() for a, d in ((A1, D1), (A2, D2), (B, DB))]
        return torch.from_numpy(scipy.linalg.solve_sylvester(*arrays))

    _, first = torch.func.jvp(sylvester, (A1, A2, B), (D1, D2, DB))
    torch.testing.assert_close(first, (solve(1e-5) - solve(-1e-5)) / 2e-5, rtol=1e-7, atol=1e-8)

    # Second order through reverse mode over reverse mode.
    inputs = [t.clone().requires_grad_() for t in (A1, A2, B)]
    W = torch.randn(3, 3)
    gradients = torch.autograd.grad((W * sylvester(*inputs)).sum(), inputs, create_graph=True)
    slope = sum((g * d).sum() for g, d in zip(gradients, (D1, D2, DB), strict=True))
    curvature = sum((g * d).sum() for g, d in zip(torch.autograd.grad(slope, inputs), (D1, D2, DB), strict=True))
    numeric = (W * (solve(1e-4) - 2 * solve(0.0) + solve(-1e-4))).sum() / 1e-8
    torch.testing.assert_close(curvature, numeric, rtol=1e-5, atol=1e-5)


def test_sylvester_under_vmap_equals_the_batch():
    A1, A2 = torch.diag_embed(torch.rand(5, 3)), torch.diag_embed(torch.rand(5, 3))
    B = torch.randn(5, 3, 3)
    torch.testing.assert_close(torch.func.vmap(sylvester)(A1, A2, B), sylvester(A1, A2, B))


def test_sylvester_gives_zero_for_zero_over_zero():
    A = torch.diag(torch.tensor([1.0, 0.0]))
    X = sylvester(A, A, torch.tensor([[2.0, 3.0], [4.0, 0.0]]))
    torch.testing.assert_close(X, torch.tensor([[1.0, 3.0], [4.0, 0.0]]))


def test_trace_product_and_rank_ratio():
    W = torch.randn(3, 3, dtype=torch.complex128)
    W = W + W.mH
    X, Y = torch.randn(2, 5, 3, dtype=torch.complex128)
    torch.testing.assert_close(trace_product(W, X, Y), torch.trace(W @ X.mH @ Y).real)
    assert column_rank_ratio(torch.zeros(4, 2)) == 0
    torch.testing.assert_close(column_rank_ratio(torch.diag(torch.tensor([4.0, 1.0]))), torch.tensor(0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_powers_of_two_are_exact(dtype):
    info = torch.finfo(dtype)
    sizes = torch.tensor([0, 1, 1.5, 2, 3e-12, 5e9, info.tiny, info.max, torch.nan, torch.inf], dtype=dtype)
    found = power_of_two(sizes)
    for size, power in zip(sizes.tolist(), found.tolist(), strict=True):
        assert math.frexp(power)[0] == 0.5
        assert torch.tensor(1 / power, dtype=dtype).isfinite()
        if 0 < size < torch.inf:
            assert power <= size < 4 * power
    assert found[0] == found[8] == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(bad):
    for X in (torch.randn(3, 4, 2), torch.randn(3, 4, 2, dtype=torch.complex128), torch.randn(5)):
        assert finite(X)
        X[(1,) * X.dim()] = bad
        assert not finite(X)
    assert finite(torch.zeros(0, 3, 2))
    X = torch.randn(3, 4, 2, dtype=torch.complex128)
    expected = torch.view_as_real(X).abs().amax((1, 2, 3))
    assert torch.equal(largest(X)[:, 0, 0], expected)
    assert torch.equal(largest(X.mH)[:, 0, 0], expected)


def test_the_root_has_a_derivative_at_zero():
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    assert torch.equal(torch.autograd.grad(root(x).sum(), x)[0], torch.tensor([0.0, 0.25]))
    assert root(torch.tensor(torch.nan)).isnan()
