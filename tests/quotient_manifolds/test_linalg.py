"""Small matrices, and batches of model inputs."""

import itertools
import math
from collections import UserDict, namedtuple
from types import MappingProxyType

import pytest
import scipy.linalg
import torch
from torch import nn

import sharpness
from quotient_manifolds.linalg import (
    column_rank_ratio,
    differentiated,
    finite,
    largest,
    power_of_two,
    root,
    sylvester,
    transformed,
)
from quotient_manifolds.passes import default_forward, tensors, to_device, tree_map
from quotient_manifolds.symmetries import verify
from tests.support import networks

# -- linalg -----------------------------------------------------------------------------------------------------------


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


def test_sylvester_to_third_order():
    """Along a line, against the Taylor series of the general solution, by every nesting of modes."""
    A1, A2, B = positive_diagonal(3), positive_diagonal(3), torch.randn(3, 3)
    D1, D2, DB = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)

    def solve(B):
        return torch.from_numpy(scipy.linalg.solve_sylvester(A1.numpy(), A2.numpy(), B.numpy()))

    first = solve(DB - D1 @ solve(B) - solve(B) @ D2)
    second = solve(-2 * (D1 @ first + first @ D2))
    third = solve(-3 * (D1 @ second + second @ D2))

    def along(t):
        return sylvester(A1 + t * D1, A2 + t * D2, B + t * DB)

    for inner, middle, outer in itertools.product((torch.func.jacfwd, torch.func.jacrev), repeat=3):
        zero = torch.zeros(())
        torch.testing.assert_close(inner(along)(zero), first)
        torch.testing.assert_close(middle(inner(along))(zero), second)
        torch.testing.assert_close(outer(middle(inner(along)))(zero), third)


def test_sylvester_under_vmap_equals_the_batch():
    A1, A2 = torch.diag_embed(torch.rand(5, 3)), torch.diag_embed(torch.rand(5, 3))
    B = torch.randn(5, 3, 3)
    torch.testing.assert_close(torch.func.vmap(sylvester)(A1, A2, B), sylvester(A1, A2, B))


def test_sylvester_gives_zero_for_zero_over_zero():
    A = torch.diag(torch.tensor([1.0, 0.0]))
    X = sylvester(A, A, torch.tensor([[2.0, 3.0], [4.0, 0.0]]))
    torch.testing.assert_close(X, torch.tensor([[1.0, 3.0], [4.0, 0.0]]))


def test_autograd_and_transforms_are_told_apart():
    leaf, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    assert [differentiated(x) for x in (leaf, 2 * leaf, plain, leaf.detach())] == [True, True, False, False]
    assert differentiated(plain, leaf)
    assert not differentiated()
    seen = []
    look = lambda x: (seen.append((differentiated(x), transformed())), x.sum())[1]  # noqa: E731
    look(plain), torch.func.vmap(look)(plain), torch.func.grad(look)(plain), torch.func.jvp(look, (plain,), (plain,))
    assert seen == [(False, False), (False, True), (True, True), (False, True)]


def test_rank_ratio():
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


# -- batches ----------------------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", ["x", "y"])


def test_a_tree_keeps_its_form():
    batch = {"a": [torch.ones(1), (torch.zeros(2), "word")], "b": Pair(torch.ones(3), None)}
    found = tree_map(lambda t: t + 1, batch)
    assert isinstance(found["a"], list)
    assert isinstance(found["a"][1], tuple)
    assert isinstance(found["b"], Pair)
    assert found["b"].y is None
    assert [t.tolist() for t in tensors(found)] == [[2.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
    assert [len(t) for t in tensors(UserDict(batch))] == [1, 2, 3]


def test_an_empty_sequence_is_named():
    with pytest.raises(ValueError, match="of type list, holds no tensor"):
        default_forward(nn.Identity(), [])


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType])
def test_mappings_are_measured_verified_and_split_alike(kind):
    model, (pixels, labels) = networks.vit(), networks.images()
    plain = {"pixel_values": pixels, "labels": labels}
    expected = float(sharpness.evaluate(model, [plain], rho=0.1, steps=2))
    assert float(sharpness.evaluate(model, [kind(plain)], rho=0.1, steps=2)) == expected
    split = float(sharpness.evaluate(model, [kind(plain)], rho=0.1, steps=2, micro_batch=5))
    assert split == pytest.approx(expected, rel=1e-10)
    assert verify(model, kind(plain)).ok


def test_named_tuples_and_half_precision():
    model, batch = networks.vit(), networks.images()
    expected = float(sharpness.evaluate(model, [batch], rho=0.1, steps=2))
    assert float(sharpness.evaluate(model, [Pair(*batch)], rho=0.1, steps=2)) == expected
    low, few = model.to(torch.bfloat16), Pair(batch[0].to(torch.bfloat16), batch[1])
    assert float(sharpness.evaluate(low, [few], rho=0.1, steps=2)) > 0


def test_a_batch_goes_to_a_device():
    batch = {"x": torch.ones(2), "more": (torch.zeros(1), "word")}
    assert to_device(batch, torch.device("cpu")) is batch
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["more"][0].is_meta
    assert moved["more"][1] == "word"
