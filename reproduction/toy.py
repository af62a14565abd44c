r"""The two-parameter network x ↦ θ₂θ₁x with the loss (θ₂θ₁x − y)²: what depends on the representative.

Everything except the closed forms is computed by the library: Riemannian gradients and Hessians by the manifolds,
sharpness by :func:`sharpness.evaluate`. Paper, Figures 1 and 6, App. D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds import GLQuotientInv, QuotientManifold, RescaleQuotient
from quotient_manifolds.symmetries import GL, SymmetricPair, Symmetries, pair, slot
from sharpness.evaluation import evaluate, progress_bar
from sharpness.files import check_folder, write_json

__all__ = [
    "POINTS", "Toy", "closed_forms", "euclidean_gradient_norm", "euclidean_hessian_trace", "riemannian_gradient_norm",
    "riemannian_hessian_trace", "run",
]  # fmt: skip

#: Six marked points (θ₁, θ₂): three representatives of one network, two of one minimum, and one of the other sign.
POINTS = ((0.5, 0.6), (1.0, 0.3), (0.25, 1.2), (1.0, 1.0), (2.0, 0.5), (-0.8, 1.0))

Loss = Callable[[Tensor], Tensor]


class Toy(nn.Module):
    """The network, with θ₁ and θ₂ as vectors of length 1."""

    def __init__(self, theta1: float, theta2: float) -> None:
        super().__init__()
        self.theta1 = nn.Parameter(torch.tensor([theta1], dtype=torch.float64))
        self.theta2 = nn.Parameter(torch.tensor([theta2], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Compute θ₂θ₁x."""
        return self.theta2 * self.theta1 * x

    def pair(self) -> SymmetricPair:
        """Return the pair G = θ₁, H = θ₂ with the group GL(1)."""
        return pair([slot(self, "theta1")], [slot(self, "theta2")], GL(1), name="toy")


def closed_forms(theta1: float, theta2: float, x: float, y: float, rho: float) -> dict[str, float]:
    r"""Evaluate the inv sharpness of the toy network in closed form.

    With :math:`y_0 = θ_2 θ_1 x` and B = ±ρ/√2: first order :math:`2\sqrt2 ρ |y_0(y_0 - y)|`; second order
    :math:`\max_± ±2\sqrt2 ρ\, y_0(y_0 - y) + 2ρ^2 y_0(2y_0 - y)`; exactly
    :math:`\max_± (y_0 e^{±\sqrt2 ρ} - y)^2 - (y_0 - y)^2`; along the second-order retraction with e^{B} replaced by
    1 + B + B²/2.

    Parameters
    ----------
    theta1, theta2, x, y, rho : float
        Weights, input, target and radius.

    Returns
    -------
    dict of str to float
        ``"first order"``, ``"second order"``, ``"exact"``, ``"retraction"``.

    Notes
    -----
    Paper, Eq. 19–22; Eq. 19 and 20 lack the √2 of 21 and 22, and the quadratic term of 22 must be 2ρ²y₀(2y₀ − y).
    """
    y0, B = theta1 * theta2 * x, rho / np.sqrt(2)
    slope, curve = 2 * np.sqrt(2) * rho * y0 * (y0 - y), 2 * rho**2 * y0 * (2 * y0 - y)

    def rise(factor: float) -> float:
        return float((y0 * factor - y) ** 2 - (y0 - y) ** 2)

    signs = (-1, 1)
    return {
        "first order": abs(slope),
        "second order": max(abs(slope) + curve, 0.0),
        "exact": max(rise(np.exp(2 * s * B)) for s in signs),
        "retraction": max(rise((1 + s * B + B**2 / 2) ** 2) for s in signs),
    }


def _gradient(f: Loss, x: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(torch.func.grad(f))(x)
    return found


def euclidean_gradient_norm(f: Loss, x: Tensor) -> Tensor:
    """Compute ‖∇f‖ at points (…, 2, 1) → (…)."""
    return _gradient(f, x).square().sum((-2, -1)).sqrt()


def euclidean_hessian_trace(f: Loss, x: Tensor) -> Tensor:
    """Compute tr ∇²f at points (…, 2, 1) → (…)."""
    H = torch.func.vmap(torch.func.hessian(f))(x).reshape(-1, 2, 2)
    return H.diagonal(dim1=-2, dim2=-1).sum(-1)


def riemannian_gradient_norm(manifold: QuotientManifold, f: Loss, x: Tensor) -> Tensor:
    """Compute ‖grad f‖ in the metric at points (…, 2, 1) → (…)."""
    return manifold.norm(x, manifold.egrad2rgrad(x, _gradient(f, x)))


def riemannian_hessian_trace(manifold: QuotientManifold, f: Loss, x: Tensor) -> Tensor:
    """Compute the trace of the Riemannian Hessian on the quotient, d²/dt² f along the unit geodesic; (…, 2, 1) → (…).

    The retraction agrees with the geodesic to second order, and so does this derivative. The quotient of two
    parameters by GL(1) has one dimension, hence one unit direction up to sign.
    """
    space = manifold.tangent_space_at(x)
    u = space.proju(x)
    u = u / space.norm(u, keepdim=True)
    acceleration = space.acceleration(u)

    def along(p: Tensor, v: Tensor, a: Tensor) -> Tensor:
        def curve(t: Tensor) -> Tensor:
            return f(p + t * v + 0.5 * t**2 * a)

        return torch.func.grad(torch.func.grad(curve))(torch.zeros((), dtype=p.dtype))

    found: Tensor = torch.func.vmap(along)(x, u, acceleration)
    return found


def _variation(values: Tensor) -> float:
    """Compute the largest deviation from the mean, relative to it."""
    mean = values.mean()
    return float((values - mean).abs().max() / mean.abs().clamp_min(1e-300))


def run(
    *, out: Path = Path("toy"), x: float = 1.0, y: float = 1.0, size: int = 160,
    rhos: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3), progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Draw the level sets, and measure the variation along an orbit and the sharpness over ρ.

    Parameters
    ----------
    out : Path
        Folder for ``toy.png``, ``orbit.png`` and ``toy.json``.
    x, y : float
        Input and target.
    size : int
        Points of the grid in each direction.
    rhos : sequence of float
        Radii of the sharpness.
    progress : bool
        Show a progress bar.

    Returns
    -------
    dict
        The contents of ``toy.json``.

    Raises
    ------
    ValueError
        x is zero.
    """
    if not 1e-3 <= abs(x) <= 1e3 or not abs(y) <= 1e3:
        raise ValueError(f"x must lie between 1e-3 and 1e3 in size, and y up to 1e3, got {x} and {y}")
    check_folder(out)
    axis = torch.linspace(
        -2.5, 2.5, size, dtype=torch.float64
    )  # an even number of points, so that none lies on an axis
    theta2, theta1 = torch.meshgrid(axis, axis, indexing="ij")
    points = torch.stack([theta1, theta2], -1).reshape(-1, 2, 1)
    manifolds: dict[str, QuotientManifold] = {
        "RescaleQuotient": RescaleQuotient("inv"),
        "GLQuotientInv": GLQuotientInv(1, 1),
    }

    def f(p: Tensor) -> Tensor:
        return (p[1, 0] * p[0, 0] * x - y) ** 2

    def quantities(at: Tensor, manifold: QuotientManifold) -> dict[str, Tensor]:
        return {
            "loss": torch.func.vmap(f)(at),
            "Euclidean gradient norm": euclidean_gradient_norm(f, at),
            "Riemannian gradient norm": riemannian_gradient_norm(manifold, f, at),
            "Euclidean Hessian trace": euclidean_hessian_trace(f, at),
            "Riemannian Hessian trace": riemannian_hessian_trace(manifold, f, at),
        }

    alphas = torch.logspace(-1, 1, 41, dtype=torch.float64)
    orbit = torch.stack([POINTS[0][0] * alphas, POINTS[0][1] / alphas], -1).unsqueeze(-1)
    variation = {name: {q: _variation(v) for q, v in quantities(orbit, m).items()} for name, m in manifolds.items()}
    measured = _sharpness(POINTS[0], x, y, rhos, progress)
    least = torch.tensor([[[1.0], [y / x]], [[2.0], [y / x / 2]]], dtype=torch.float64)
    at_minimum = {q: float(v[0]) for q, v in quantities(least, manifolds["GLQuotientInv"]).items()}
    result = {
        "x": x,
        "y": y,
        "variation along the orbit of the first point (relative)": variation,
        "sharpness at the first point": measured,
        "at the minimum (1, y/x)": at_minimum,
        "closed form of the Riemannian Hessian trace there, 4y²": 4 * y**2,
    }
    write_json(out / "toy.json", result)
    from .plots import plot_orbit, plot_toy

    shown = {k: v.reshape(size, size).numpy() for k, v in quantities(points, manifolds["GLQuotientInv"]).items()}
    marked = torch.tensor(POINTS, dtype=torch.float64).unsqueeze(-1)
    marks = {k: v.tolist() for k, v in quantities(marked, manifolds["GLQuotientInv"]).items()}
    plot_toy({"theta1": theta1.numpy(), "theta2": theta2.numpy()}, shown, POINTS, marks, measured, out / "toy.png")
    plot_orbit(out / "orbit.png")
    _print(variation, measured, at_minimum["Riemannian Hessian trace"])
    print(f"\n{out}/toy.png, orbit.png and toy.json hold the figures and the numbers")
    return result


def _sharpness(
    point: tuple[float, float], x: float, y: float, rhos: Sequence[float], progress: bool
) -> dict[str, list[float]]:
    """Measure the sharpness over ρ, beside its closed forms."""
    measured: dict[str, list[float]] = {"rho": list(rhos), "measured (second-order geodesic)": []}
    with progress_bar(len(rhos), "sharpness of the toy network", "radius", progress=progress) as shown:
        for rho in rhos:
            for label, value in closed_forms(*point, x, y, rho).items():
                measured.setdefault(f"closed form, {label}", []).append(value)
            model = Toy(*point)
            batch = (torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64))
            found = evaluate(
                model, [batch], lambda m, b: (m(b[0]) - b[1]).square().sum(), measure="geodesic-inv", rho=rho,
                steps=60, restarts=1, symmetries=Symmetries((model.pair(),)), progress=False,
            )  # fmt: skip
            measured["measured (second-order geodesic)"].append(float(found))
            shown.update()
    return measured


def _print(variation: dict[str, dict[str, float]], measured: dict[str, list[float]], trace: float) -> None:
    print(f"{'relative variation along an orbit':<36}" + "".join(f"{name:>18}" for name in variation))
    for q in next(iter(variation.values())):
        print(f"{q:<36}" + "".join(f"{found[q]:>18.1e}" for found in variation.values()))
    print(f"\n{'sharpness of the first point, ρ =':<36}" + "".join(f"{rho:>12g}" for rho in measured["rho"]))
    for label, values in measured.items():
        if label != "rho":
            print(f"{label:<36}" + "".join(f"{v:>12.6f}" for v in values))
    print(f"\nRiemannian Hessian trace at the minimum: {trace:.6f} = 4y², not 0")
