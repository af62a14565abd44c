"""Checks of manifolds that users write."""

import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient
from quotient_manifolds.linalg import NotFiniteError
from quotient_manifolds.testing import check_manifold
from tests.support.broken_manifolds import Base
from tests.support.extent import EXHAUSTIVE, checkered, share

# -- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3 if EXHAUSTIVE else 1))
@pytest.mark.parametrize(("cls", "dtype"), checkered([GLQuotientInv, GLQuotientMix], [torch.complex128, torch.float64]))
def test_gl_quotients_pass(cls, dtype, seed):
    torch.manual_seed(seed)
    manifold = cls(6, 4)
    report = check_manifold(manifold, manifold.random(2, 10, 3, dtype=dtype), seed=seed)
    assert report.ok, report
    assert len(report.checks) == 24  # none was left out


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_rescale_quotients_pass(metric):
    manifold = RescaleQuotient(metric)
    report = check_manifold(manifold, manifold.random(3, 2, 5))
    assert report.ok, report


def only_first(name):
    """The method, right for the first point of a batch and for single points."""

    def method(self, x, u):
        found = getattr(Base, name)(self, x, u)
        return found if x.dim() == 2 else torch.cat([found[:1], 1.1 * found[1:]])

    return method


SPOILT = {
    "act moves representatives": {"act": lambda self, x, A: x},
    "transport to the same point": {"transp": lambda self, x, y, v: 0 * v},
    "a batch equals its single points": {"egrad2rgrad": only_first("egrad2rgrad")},
    "product is invariant": {"act": lambda self, x, A: Base.act(self, x, A) * 1.01},
    "vertical vectors keep the product": {"vertical": lambda self, x, L: x @ L},
    "canonical is one of the orbit": {"canonical": lambda self, x: 2 * Base.canonical(self, x)},
    "canonical is the same for all": {"canonical": lambda self, x: x},
    "projx leaves points alone": {"projx": lambda self, x: x + 1e-12},
    "inner is symmetric and bilinear": {
        "inner": lambda self, x, u, v=None, *, keepdim=False: Base.inner(self, x, u, u, keepdim=keepdim)
    },
    "inner is invariant": {
        "inner": lambda self, x, u, v=None, *, keepdim=False: (
            Base.inner(self, x, u, v, keepdim=keepdim) + 0.1 * (u * (u if v is None else v)).sum((-2, -1), keepdim)
        )
    },
    "proju is a projection": {"proju": lambda self, x, u: 0.99 * Base.proju(self, x, u)},
    "proju removes vertical vectors": {"proju": lambda self, x, u: u},
    "horizontal ⟂ vertical": {"proju": lambda self, x, u: GLQuotientMix(self.n, self.m).proju(x, u)},
    "proju is equivariant": {"proju": lambda self, x, u: euclidean_projection(x, u)},
    "gradient represents the derivative": {"egrad2rgrad": lambda self, x, u: 1.01 * Base.egrad2rgrad(self, x, u)},
    "gradient is equivariant": {"egrad2rgrad": lambda self, x, u: u},
    "gradient: slope of the remainder": {"egrad2rgrad": lambda self, x, u: u},
    "acceleration follows from the metric": {"acceleration": lambda self, x, u: 0.9 * Base.acceleration(self, x, u)},
    "retraction is equivariant": {"retr": lambda self, x, u: x + u + 0.5 * u * u},
    "retraction: slope of the error": {"retr": lambda self, x, u: x + u},
    "exponential: slope of the error": {"expmap": lambda self, x, u: x + u},
    "transport arrives horizontal": {"transp": lambda self, x, y, v: v},
    "distance of orbits": {"dist": lambda self, x, y, *, keepdim=False: 1.01 * Base.dist(self, x, y, keepdim=keepdim)},
}


def euclidean_projection(x, u):
    """Take away the part along the orbit, as the Euclidean metric measures it."""
    manifold, h = GLQuotientInv(5, 4), x.shape[-1]
    basis = torch.eye(h * h).reshape(h * h, h, h)
    vertical = torch.stack([manifold.vertical(x, L) for L in basis]).flatten(1)
    return u - (torch.linalg.lstsq(vertical.T, u.flatten()[:, None]).solution.T @ vertical).reshape(x.shape)


@pytest.mark.parametrize("name", share(SPOILT, 2))
def test_what_is_wrong_is_named(name):
    manifold = type("Spoilt", (Base,), {**SPOILT[name], "__scaling__": Base.__scaling__.copy()})(5, 4)
    batch = (2,) if "batch" in name else ()
    report = check_manifold(manifold, manifold.random(*batch, 9, 2))
    assert not report.ok
    assert name in [c.name for c in report.failures]
    assert f"FAILED  {name}" in str(report)


def test_random_vectors_that_are_not_horizontal_are_named():
    def space(self, x, differentiable):
        found = Base._tangent_space(self, x, differentiable)
        found.random = lambda generator=None: torch.randn_like(x)
        return found

    manifold = type("Spoilt", (Base,), {"_tangent_space": space, "__scaling__": Base.__scaling__.copy()})(5, 4)
    assert [c.name for c in check_manifold(manifold, manifold.random(9, 2)).failures] == [
        "random vectors are horizontal"
    ]


def test_orders_that_all_but_cancel():
    x = torch.tensor([[-0.28382883390494545], [-0.44613383578155724]])
    report = check_manifold(GLQuotientMix(1, 1), x, seed=17)
    assert report.ok, report


def test_a_first_order_retraction_may_be_declared():
    spoilt = {"retr": lambda self, x, u: x + u, "__scaling__": Base.__scaling__.copy()}
    manifold = type("FirstOrder", (Base,), spoilt)(5, 4)
    x = manifold.random(9, 2)
    assert [c.name for c in check_manifold(manifold, x).failures] == ["retraction: slope of the error"]
    assert check_manifold(manifold, x, retraction_order=1).ok


# -- random point -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "scale"), checkered((GLQuotientMix, GLQuotientInv), (1e-3, 1e3)))
def test_the_size_of_a_point_makes_no_difference(base, scale):
    straight = {name: lambda self, x, u, **options: x + u for name in ("retr", "expmap")}
    x = scale * base(6, 5).random(11, 3)
    report = check_manifold(base(6, 5), x)
    assert report.ok, report
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


# -- report -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["canonical", "projx", "transp", "dist", "retr", "proju", "egrad2rgrad"])
def test_nan_is_no_pass(method):
    spoilt = {method: lambda self, x, *rest: torch.full_like(Base.canonical(self, x), torch.nan)}
    manifold = type("Spoilt", (Base,), {**spoilt, "__scaling__": Base.__scaling__.copy()})(5, 4)
    x = manifold.random(9, 2)
    assert not check_manifold(manifold, x).ok


def test_an_error_is_reported_for_its_cause_and_not_for_its_words():
    """Of results that are not finite; any other one is the manifold's own."""
    x = Base(5, 4).random(9, 2)

    def spoilt(error):
        def dist(self, x, y, *, keepdim=False):
            raise error

        return type("Spoilt", (Base,), {"dist": dist, "__scaling__": Base.__scaling__.copy()})(5, 4)

    words = "has NaN or infinite entries"
    for error in (NotFiniteError(words), NotFiniteError("too large")):
        assert [c.name for c in check_manifold(spoilt(error), x).failures] == [f"results are finite: {error}"]
    for error in (ValueError(words), ValueError("too large")):
        with pytest.raises(ValueError, match=str(error)):
            check_manifold(spoilt(error), x)


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
