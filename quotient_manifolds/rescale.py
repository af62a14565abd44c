r"""The rescaling quotient: pairs (u, v) that a network sees only through the elementwise product u ⊙ v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import QuotientManifold, TangentSpace, check_vector, in_own_precision
from .geodesics import as_times, column, raise_on_exit
from .linalg import check_tensors, holds, in_double, largest, power_of_two, root, standard_normal
from .means import checked_weights


@in_own_precision
class _RescaleTangentSpace(TangentSpace):
    r"""Horizontal vectors are (u ⊙ B, v ⊙ B): :math:`η_u/u = η_v/v = B`.

    In units of the point, η/x, every coordinate is a GL(1) pair with the Gram matrices 1. The metric is (η/unit)², with
    the unit vectors x (inv) or x/|β| (mix).
    """

    def __init__(self, metric: str, x: Tensor) -> None:
        self.x, self._metric = x, metric
        size = x.abs().sqrt().prod(-2, keepdim=True)  # √|β|, a number wherever x is
        self._unit = x if metric == "inv" else x / size / size

    def inner(self, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute Σ η ν/unit² with unit vectors x (inv) or x/|β| (mix); (…) or (…, 1, 1)."""
        v = u if v is None else v
        return ((u / self._unit) * (v / self._unit)).sum(dim=(-2, -1), keepdim=keepdim)

    def norm(self, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute ‖u‖, whose derivative at 0 is 0; (…) or (…, 1, 1)."""
        c = u / self._unit
        size = power_of_two(largest(c))
        result = root((c / size).square().sum((-2, -1), keepdim=True)) * size
        return result if keepdim else result[..., 0, 0]

    def proju(self, u: Tensor) -> Tensor:
        """Project on (u ⊙ B, v ⊙ B) with B = ½(η_u/u + η_v/v); (…, 2, d)."""
        return self.x * (u / self.x).mean(dim=-2, keepdim=True)

    def egrad2rgrad(self, u: Tensor) -> Tensor:
        """Return the horizontal part of ∇ ⊙ unit², with unit vectors x (inv) or x/|β| (mix); (…, 2, d)."""
        return self._unit * (u * self._unit).mean(dim=-2, keepdim=True)

    def acceleration(self, u: Tensor) -> Tensor:
        """Return (u ⊙ B², v ⊙ B²) for inv, its negative for mix; (…, 2, d). B_u and B_v may differ."""
        b, other = u / self.x, (u / self.x).flip(-2)
        return self.x * (b * b if self._metric == "inv" else other * (other - 2 * b))

    def geodesic(self, u: Tensor, t: Any = 1.0) -> tuple[Tensor, Tensor]:
        r"""Return points :math:`x e^{Bt}` (inv) or :math:`x \sqrt{1 + 2Bt}` (mix), and velocities; (k…, …, 2, d).

        A mix geodesic ends where 1 + 2Bt ≤ 0.
        """
        B = (u / self.x).mean(dim=-2, keepdim=True)
        t = as_times(t, self.x)
        step = B * column(t, B)
        if self._metric == "inv":
            return self.x * step.exp(), self.x * step.exp() * B
        times = torch.where(1 + 2 * step > 0, torch.inf, -1 / (2 * B))
        raise_on_exit(times.gather(-1, times.abs().argmin(-1, keepdim=True))[..., 0, 0], t)
        root = (1 + 2 * step).sqrt()
        return self.x * root, self.x * B / root

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw Gaussian multiples of the unit vectors, of unit variance in the metric; (…, 2, d)."""
        draw = standard_normal((*self.x.shape[:-2], self.x.shape[-1]), self.x, generator)
        return self._unit * (draw.unsqueeze(-2) / 2**0.5)


@in_own_precision
class RescaleQuotient(QuotientManifold):
    r"""Pairs of vectors without zero entries, modulo (u, v) → (αu, v/α) elementwise.

    With :math:`B = η_u/u = η_v/v` of a horizontal vector η and β = u ⊙ v:

    - inv: :math:`\langle η, ν \rangle = \sum η_u ν_u/u^2 + η_v ν_v/v^2`, geodesic :math:`(u e^{Bt}, v e^{Bt})`,
      :math:`β e^{2Bt}`, :math:`\mathrm{dist} = \|\log(β_1/β_0)\|/\sqrt 2`;
    - mix: :math:`\langle η, ν \rangle = \sum v^2 η_u ν_u + u^2 η_v ν_v`, geodesic
      :math:`(u \sqrt{1+2Bt}, v \sqrt{1+2Bt})`, :math:`β(1+2Bt)`, :math:`\mathrm{dist} = \|β_1 - β_0\|/\sqrt 2`;
      it leaves the manifold where 1 + 2Bt ≤ 0.

    Parameters
    ----------
    metric : {"inv", "mix"}

    Raises
    ------
    ValueError
        Another metric.

    Notes
    -----
    A point is one float32 or float64 tensor (…, 2, d): u and v.

    Paper, §5.1 and Eqs. 7–8, where the ball of radius ρ is ‖B‖ ≤ ρ: by :math:`\|η\|^2 = 2\|B\|^2` (inv) it is
    ‖B‖ ≤ ρ/√2. This is the GL(1) quotient for every coordinate; complex pairs: ``GLQuotientInv(1, 1)`` with h = 1.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import RescaleQuotient
    >>> manifold = RescaleQuotient("inv")
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> manifold.to_matrix(manifold.expmap(x, x * torch.tensor([0.5, 0.0])))
    tensor([8.1548, 8.0000])
    """

    name = "RescaleQuotient"
    _complex_allowed = False

    def __init__(self, metric: str = "inv") -> None:
        if metric not in ("inv", "mix"):
            raise ValueError(f'RescaleQuotient: metric must be "inv" or "mix", got {metric!r}')
        super().__init__()
        self.metric = metric

    def extra_repr(self) -> str:
        """Return the metric, for ``repr``."""
        return f"metric={self.metric!r}"

    def row_split(self) -> list[int]:
        """Return [1, 1], the rows of u and v."""
        return [1, 1]

    def _tangent_space(self, x: Tensor, differentiable: bool) -> TangentSpace:
        self._check_point(x)
        return _RescaleTangentSpace(self.metric, x)

    def mean(self, points: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the Fréchet mean over the first dimension: the geometric (inv) or arithmetic (mix) mean of β.

        It is given at the representative of the first of the points, (k, …, 2, d). Their products must agree in sign.
        The weights, (k,), are divided by their sum; equal by default.
        """
        weights, wide = checked_weights(self, points, weights), in_double(points)
        u = torch.einsum("k,k...->...", weights, self.logmap(wide[0].expand_as(wide), wide))
        return self.expmap(wide[0], u).to(points)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        r"""Return the horizontal u with expmap(x, u) on the orbit of y: B = ½ log(β₁/β₀) or ½(β₁/β₀ − 1).

        Raises
        ------
        ValueError
            If the products differ in sign.
        """
        check_vector(self, x, y, "y")
        for point in (x, y):
            self.tangent_space_at(point)  # the checks
        if not holds((x.sign() * y.sign()).prod(-2) > 0):
            raise ValueError(
                f"{self}: no geodesic joins points of shape {tuple(x.shape)} whose products u ⊙ v differ in sign; "
                "they lie in different components"
            )
        ratio = (in_double(y) / in_double(x)).prod(-2, keepdim=True)  # that of four numbers may overflow in float32
        B = ratio.log() / 2 if self.metric == "inv" else (ratio - 1) / 2
        return (in_double(x) * B).to(x)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute ‖log(β₁/β₀)‖/√2 (inv) or ‖β₁ − β₀‖/√2 (mix); (…) or (…, 1, 1). Raises like :meth:`logmap`."""
        return self.norm(x, self.logmap(x, y), keepdim=keepdim)

    def act(self, x: Tensor, A: Tensor) -> Tensor:
        """Move x along its orbit to (αu, v/α), (…, 2, d); A is α, (…, d), without zeros."""
        check_tensors(self, x=x, A=A)
        if not holds(A != 0):
            raise ValueError(f"{self}: A of shape {tuple(A.shape)} has zeros, and no inverse")
        return x * torch.stack([A, 1 / A], dim=-2)

    def vertical(self, x: Tensor, L: Tensor) -> Tensor:
        """Return the vertical vector (λu, −λv), (…, 2, d); L is λ, (…, d)."""
        check_tensors(self, x=x, L=L)
        return x * torch.stack([L, -L], dim=-2)

    def random_algebra(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw λ with standard Gaussian entries, (…, d)."""
        self.unpack_tensor(x)  # the checks
        super()._check_point(x)
        return standard_normal((*x.shape[:-2], x.shape[-1]), x, generator)

    def random_element(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw α = exp λ, (…, d)."""
        return self.random_algebra(x, generator).exp()

    def to_matrix(self, x: Tensor) -> Tensor:
        """Compute β = u ⊙ v, (…, d)."""
        u, v = self.unpack_tensor(x)
        return (u * v).squeeze(-2)

    def canonical(self, x: Tensor) -> Tensor:
        """Return the representative with u = √abs(β) and v = sign(β) √abs(β); (…, 2, d)."""
        self.tangent_space_at(x)
        root = x.abs().sqrt().prod(-2)
        return torch.stack([root, root * x.sign().prod(-2)], dim=-2)

    def origin(self, *size: Any, dtype: Any = None, device: Any = None, seed: int | None = 42) -> Tensor:
        """Return u = v = 1, of shape ``size``; ``seed``, part of geoopt's interface, is ignored."""
        return self._as_point(torch.ones, size, dtype=dtype, device=device)

    def _projx(self, x: Tensor) -> Tensor:
        tiny = torch.finfo(x.dtype).tiny
        return torch.where(x.abs() < tiny, torch.where(x < 0, -(tiny**0.5), tiny**0.5).to(x.dtype), x)

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        fits = len(shape) >= 2 and shape[-2] == 2 and shape[-1] >= 1
        return fits, None if fits else f"{self}: '{name}' needs shape (…, 2, d), got {tuple(shape)}"

    def _check_point(self, x: Tensor) -> None:
        super()._check_point(x)
        if not holds(x != 0):
            raise ValueError(
                f"{self}: the point of shape {tuple(x.shape)} has zero entries, where the quotient has no metric; "
                "remove these coordinates"
            )
