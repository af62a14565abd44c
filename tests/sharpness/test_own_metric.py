"""A metric of one's own: that half-way between inv and mix, which is the Euclidean one at balanced factors."""

import pytest
import scipy.linalg
import torch

import sharpness
from quotient_manifolds.linalg import pack, row_power, standard_normal, sylvester
from quotient_manifolds.symmetries import Symmetries, factor_pair
from sharpness.patches import PairPatch


class BalancedSpace:
    """Horizontal vectors where both Gram matrices are Σ and the weight is W_G = M⁻¹(MN)^½ = 1; straight lines."""

    def __init__(self, gauge):
        self.gauge, self.x, self.gram = gauge, gauge.x, torch.diag_embed(gauge.sigma)

    def coordinates(self, u):
        return u

    from_coordinates = dual_coordinates = coordinates

    def project_coordinates(self, c):
        (xi, eta), G, H = c.split([self.gauge.n, c.shape[-2] - self.gauge.n], dim=-2), self.gauge.G, self.gauge.H
        L = sylvester(self.gram, self.gram, eta.mH @ H - G.mH @ xi)
        return pack(xi + G @ L, eta - H @ L.mH)

    def random(self, generator):
        U, V = (X * row_power(self.gauge.sigma, self.gauge.sigma > 0, -0.5) for X in (self.gauge.G, self.gauge.H))
        E, F = (standard_normal((U.shape[-2], V.shape[-2]), self.x, generator) for _ in range(2))
        return self.project_coordinates(pack(E @ V, F.mH @ U))


class Balanced(sharpness.Measure):
    class pair_patch(PairPatch):
        def horizontal_space(self, gauge, x):
            return BalancedSpace(gauge)


KINDS = ((sharpness.gradient_norm, None), (sharpness.evaluate, 0.3), (sharpness.average, 0.3))


def measured(A, measure, kinds=KINDS):
    """The factors G A⁻¹ and H Aᵀ of a model, the gradient of its product, and measures of it."""
    model, draw = torch.nn.Module(), torch.Generator().manual_seed(0)
    G, H, target = (torch.randn(size, generator=draw, dtype=torch.float64) for size in ((5, 2), (4, 2), (5, 4)))
    model.G, model.H = torch.nn.Parameter(G @ torch.linalg.inv(A)), torch.nn.Parameter(H @ A.mT)
    run = ([target], lambda model, target: (model.G @ model.H.mT - target).square().sum())
    how = {"measure": measure, "symmetries": Symmetries((factor_pair(model.G, model.H),)), "progress": False}
    return model.G.data, model.H.data, 2 * (G @ H.mT - target), [float(f(model, *run, rho=r, **how)) for f, r in kinds]


@pytest.mark.parametrize("measure", [Balanced("", "mix", geodesic="first-order"), "geodesic-inv", "euclidean"])
def test_a_metric_of_ones_own(measure):
    G, H, E, values = measured(torch.tensor([[3.0, 1], [0, 0.5]], dtype=torch.float64), measure)
    assert (measured(torch.eye(2).double(), measure)[-1] == pytest.approx(values, rel=1e-8)) == (measure != "euclidean")
    W_G = torch.linalg.inv(G.mT @ G) @ torch.tensor(scipy.linalg.sqrtm((G.mT @ G @ H.mT @ H).numpy()))
    W_H = torch.linalg.inv(H.mT @ H) @ torch.tensor(scipy.linalg.sqrtm((H.mT @ H @ G.mT @ G).numpy()))
    square = sum(float((g @ torch.linalg.inv(W) * g).sum()) for g, W in ((E @ H, W_G), (E.mT @ G, W_H)))
    assert (values[0] == pytest.approx(square**0.5, rel=1e-8)) == isinstance(measure, Balanced)


@pytest.mark.parametrize(
    ("geodesic", "words"),
    [
        ("second-order", "'retr', which geodesic='second-order' needs"),
        ("exact", "'exit_time', which geodesic='exact' needs"),
    ],
)
def test_what_a_metric_lacks_is_named(geodesic, words):
    """It was an AttributeError in the middle of the ascent."""
    measure = Balanced("", "mix", geodesic=geodesic)
    with pytest.raises(ValueError, match=f"BalancedSpace has no {words}: add the method, or .*'first-order'"):
        measured(torch.eye(2).double(), measure, kinds=[(sharpness.evaluate, 0.3)])
    measured(torch.eye(2).double(), measure, kinds=[(sharpness.gradient_norm, None)])  # which moves nothing
