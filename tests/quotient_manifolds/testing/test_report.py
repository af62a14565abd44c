import pytest
import torch

from quotient_manifolds import GLQuotientInv
from quotient_manifolds.testing import check_manifold
from tests.broken_manifolds import Base


@pytest.mark.parametrize("method", ["canonical", "projx", "transp", "dist", "retr", "proju", "egrad2rgrad"])
def test_nan_is_no_pass(method):
    spoilt = {method: lambda self, x, *rest: torch.full_like(Base.canonical(self, x), torch.nan)}
    manifold = type("Spoilt", (Base,), {**spoilt, "__scaling__": Base.__scaling__.copy()})(5, 4)
    x = manifold.random(9, 2)
    assert not check_manifold(manifold, x).ok


def test_bad_input():
    manifold = GLQuotientInv(5, 4)
    with pytest.raises(ValueError, match=r"pass x\.to\(torch\.float64\)"):
        check_manifold(manifold, manifold.random(9, 2, dtype=torch.float32))
    with pytest.raises(ValueError, match="does not have full column rank"):
        check_manifold(manifold, torch.zeros(9, 2))
    nameless = type("Nameless", (Base,), {"__scaling__": Base.__scaling__.copy()})(5, 4)
    nameless.random_algebra = lambda *_: super(GLQuotientInv.__mro__[1], nameless).random_algebra(nameless)
    with pytest.raises(NotImplementedError, match="override random_algebra"):
        check_manifold(nameless, nameless.random(9, 2))
