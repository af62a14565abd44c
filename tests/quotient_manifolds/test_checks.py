import geoopt
import numpy as np
import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix
from tests.points import ALL, MANIFOLDS, metrics, two_points


@metrics
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.randn(8, 2), ["5 + 4", "(8, 2)"]),
        (lambda: torch.randn(9, 5), ["h = 5", "min(n, m) = 4"]),
        (lambda: torch.cat([torch.zeros(5, 2), torch.randn(4, 2)]), ["full column rank", "(9, 2)", "B = 0"]),
        (lambda: torch.cat([torch.randn(5, 1).expand(5, 2), torch.randn(4, 2)]), ["full column rank", "factor G"]),
        (lambda: torch.full((9, 2), float("nan")), ["NaN", "(9, 2)"]),
        (lambda: torch.randn(9, 2).index_fill(0, torch.tensor([3]), float("inf")), ["infinite"]),
        (lambda: torch.ones(9, 2, dtype=torch.int64), ["int64", "float32"]),
        (lambda: torch.randn(9, 2).half(), ["float16", "float32"]),
        (lambda: torch.randn(9, 2).bfloat16(), ["bfloat16", "float32"]),
    ],
)
def test_bad_points_are_named(metric, make, words):
    manifold = MANIFOLDS[metric](5, 4)
    x = make()
    for operation in (
        lambda: manifold.proju(x, torch.ones_like(x)),
        lambda: manifold.retr(x, torch.ones_like(x)),
        lambda: manifold.assert_check_point_on_manifold(x),
    ):
        with pytest.raises(ValueError, match=type(manifold).__name__) as caught:
            operation()
        for word in words:
            assert word in str(caught.value)


def test_bad_arguments_are_named():
    manifold = GLQuotientInv(5, 4)
    x = manifold.random(9, 2)
    with pytest.raises(ValueError, match="does not fit the point"):
        manifold.proju(x, torch.randn(9, 3))
    with pytest.raises(ValueError, match=r"dtype torch.float64 .* torch.float32"):
        manifold.inner(x, x, x.float())
    with pytest.raises(ValueError, match="device"):
        manifold.proju(x, torch.empty(9, 2, device="meta"))
    with pytest.raises(ValueError, match="n must be a whole number of at least 1"):
        GLQuotientInv(0, 3)
    with pytest.raises(ValueError, match="relaxation"):
        GLQuotientInv(2, 3, relaxation=1.5)
    with pytest.raises(ValueError, match="packs 2 factors"):
        manifold.pack_point(torch.randn(4, 2), torch.randn(5, 2))
    with pytest.raises(ValueError, match="number of columns"):
        manifold.pack_point(torch.randn(5, 2), torch.randn(4, 3))
    for bad, words in (
        (torch.eye(3), "needs matrices"),
        (torch.eye(2).float(), "dtype"),
        (torch.zeros(2, 2), "singular"),
    ):
        with pytest.raises(ValueError, match=words):
            manifold.act(x, bad)
    with pytest.raises(ValueError, match="not horizontal"):
        manifold.assert_check_vector_on_tangent(x, manifold.vertical(x, torch.randn(2, 2)))


@pytest.mark.parametrize("manifold", ALL, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_vectors_that_are_not_finite_are_one_error_everywhere(manifold, bad):
    x, u = two_points(manifold)
    u[0, 0, 0] = bad
    for name in ("inner", "norm", "proju", "egrad2rgrad", "retr", "expmap", "acceleration"):
        with pytest.raises(ValueError, match=r"the vector u of shape .* has NaN or infinite entries"):
            getattr(manifold, name)(x, u)
    with pytest.raises(ValueError, match="has NaN or infinite entries"):
        manifold.transp(x, x, u)
    with pytest.raises(TypeError, match="u must be a tensor, got dict"):
        manifold.proju(x, {})
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        manifold.to_matrix([1.0])


@pytest.mark.parametrize("rows", [5.7, True, "5", -1, None])
def test_row_counts_are_whole_numbers(rows):
    with pytest.raises(ValueError, match=r"GLQuotientInv: n must be a whole number of at least 1, got"):
        GLQuotientInv(rows, 4)
    assert GLQuotientInv(np.int64(5), 4).n == 5


def test_a_divergent_run_gets_advice_that_helps():
    manifold = GLQuotientMix(4, 3)
    x = geoopt.ManifoldParameter(manifold.random(7, 2), manifold=manifold)
    optimizer = geoopt.optim.RiemannianSGD([x], lr=1e12)
    for _ in range(20):
        optimizer.zero_grad()
        (manifold.to_matrix(x) - 1).square().sum().backward()
        try:
            optimizer.step()
        except ValueError as error:
            assert "lower the learning rate" in str(error) or "learning rate is too high" in str(error)  # noqa: PT017
            return
    pytest.fail("it did not diverge")


def test_sizes_are_whole_numbers_of_python_or_numpy():
    manifold = GLQuotientInv(5, 4)
    assert manifold.random(np.int64(3), np.int32(9), 2).shape == (3, 9, 2)
    for bad in ((9.0, 2), (True, 2), ("9", 2), (np.float64(9), 2), (-9, 2)):
        with pytest.raises(TypeError, match="a size must be one or several whole numbers"):
            manifold.random(*bad)
