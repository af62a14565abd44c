import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient
from quotient_manifolds.testing import check_manifold
from tests.broken_manifolds import Base


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_size_of_a_point_makes_no_difference(scale):
    straight = {name: lambda self, x, u, **options: x + u for name in ("retr", "expmap")}
    for base in (GLQuotientMix, GLQuotientInv):
        x = scale * base(6, 5).random(11, 3)
        check_manifold(base(6, 5), x).raise_if_failed()
        manifold = type("Straight", (base,), {**straight, "__scaling__": base.__scaling__.copy()})(6, 5)
        found = {c.name for c in check_manifold(manifold, x).failures}
        assert {"retraction: slope of the error", "exponential: slope of the error"} <= found


def test_one_bad_point_of_a_batch_is_seen():
    def canonical(self, x):
        found = Base.canonical(self, x)
        return torch.where((x.abs().amax((-2, -1), keepdim=True) < 0.1), 2 * found, found)

    manifold = type("Spoilt", (Base,), {"canonical": canonical, "__scaling__": Base.__scaling__.copy()})(5, 4)
    x = manifold.random(2, 9, 2)
    assert check_manifold(manifold, x).ok
    x[1] *= 1e-3
    assert "canonical is one of the orbit" in [c.name for c in check_manifold(manifold, x).failures]


def test_gradients_may_be_off_and_nothing_hangs():
    manifold = GLQuotientInv(5, 4)
    with torch.no_grad():
        assert check_manifold(manifold, manifold.random(9, 2)).ok
    none = {"proju": lambda self, x, u: 0 * u, "__scaling__": RescaleQuotient.__scaling__.copy()}
    still = type("Still", (RescaleQuotient,), none)("mix")
    with pytest.raises(ValueError, match="no finite horizontal vector"):
        check_manifold(still, still.random(2, 5))
    with pytest.raises(ValueError, match="a batch without points"):
        check_manifold(manifold, torch.zeros(0, 9, 2))
