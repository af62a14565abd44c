import copy
import math

import pytest

import sharpness
from quotient_manifolds.symmetries import apply_random_symmetry_, find_symmetric_pairs
from sharpness import get_measure
from tests.measured import values


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_symmetry_none_equals_adaptive(trained, metric):
    assert values(trained, measure=metric, symmetry="none") == values(trained, measure="adaptive")


def test_symmetry_of_one_kind(trained):
    model, _twin, batch = trained
    one, two = values(trained), values(trained, symmetry="none")
    for kind, other in (("qk", "vo"), ("vo", "qk")):
        half = values(trained, symmetry=kind)
        assert half[0] not in (one[0], two[0])
        # Only what is divided out may be moved.
        moved = copy.deepcopy(model)
        apply_random_symmetry_(moved, 30.0, seed=1, pairs=[p for p in find_symmetric_pairs(moved) if p.kind == kind])
        same = values((moved, moved, batch), symmetry=kind)[0]
        assert same == pytest.approx(half[0], rel=1e-8)
        unlike = values((moved, moved, batch), symmetry=other)[0]
        assert abs(unlike / values(trained, symmetry=other)[0] - 1) > 0.01
        of_kind = get_measure("geodesic-inv", symmetry=kind)
        found = sharpness.evaluate(model, [batch], measure=of_kind, rho=0.1, steps=1).direction(0).pairs
        assert {p.kind for p in found} == {kind}


@pytest.mark.parametrize(
    ("name", "switches", "words"),
    [
        ("adaptive", {"geodesic": "first-order"}, "geodesic says how symmetric pairs are treated"),
        ("adaptive", {"symmetry": "qk"}, "symmetry says how"),
        ("geodesic-inv", {"geodesic": "third-order"}, "geodesic must be one of"),
    ],
)
def test_combinations_without_meaning(name, switches, words):
    with pytest.raises(ValueError, match=words):
        get_measure(name, **switches)


@pytest.mark.parametrize(
    ("name", "switches", "words"),
    [
        ("adaptive", {"rho": 0.0}, "rho must be one or several positive numbers"),
        ("adaptive", {"rho": -1.0}, "rho must be one or several positive numbers"),
        ("adaptive", {"rho": math.nan}, "rho must be one or several positive numbers"),
    ],
)
def test_numbers_out_of_range(trained, name, switches, words):
    model, _, batch = trained
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(model, [batch], measure=get_measure(name, **switches))
