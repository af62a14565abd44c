"""The balls of the ascents: norms, projections, and steps along a gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from .distributed import World
from .vectors import chunked, combine_, gram_matrix

__all__ = ["Ball", "CubeBall", "RoundBall", "View"]


class Ball(ABC):
    r"""A ball around the origin, with the operations that the ascents need.

    Parameters
    ----------
    radius : float
        ρ, in the ball's norm.
    world : World, optional
        The processes over which vectors are spread.

    Notes
    -----
    All vectors are (dim,), of the same dtype and device. Methods that end in an underscore write to their first tensor.

    Examples
    --------
    The same gradient offers more in the cube, which contains the round ball:

    >>> import torch
    >>> g = torch.tensor([3.0, -4.0])
    >>> RoundBall(0.5).linear_max(g), CubeBall(0.5).linear_max(g)
    (2.5, 3.5)
    """

    def __init__(self, radius: float, world: World | None = None) -> None:
        self.radius, self.world = radius, World() if world is None else world

    @abstractmethod
    def norm(self, x: Tensor) -> float:
        """Compute the ball's norm of a vector, (dim,)."""

    @abstractmethod
    def linear_max(self, g: Tensor) -> float:
        r"""Compute :math:`\max_{\|y\| \le ρ} \langle g, y \rangle`, ρ times the dual norm of g, (dim,)."""

    @abstractmethod
    def to_sphere_(self, x: Tensor) -> Tensor:
        """Move a vector other than 0 to the ball's surface, in place."""

    @abstractmethod
    def step_(self, out: Tensor, x: Tensor, previous: Tensor, g: Tensor, eta: float, alpha: float) -> None:
        r"""Write Auto-PGD's next iterate: :math:`z = P(x + η d)`, :math:`P(x + α(z - x) + (1 - α)(x - x_{prev}))`.

        d is the steepest direction of unit length, P the projection onto the ball.

        Parameters
        ----------
        out : Tensor
            (dim,), to which the iterate is written; may be ``previous``.
        x, previous : Tensor
            (dim,), the last two iterates.
        g : Tensor
            (dim,), the gradient at x.
        eta, alpha : float
            Step size η, and the weight α of the step against the momentum.
        """

    @abstractmethod
    def view(self, g: Tensor, best: Tensor, other: Tensor | None) -> View:
        """Prepare the next step from the best point so far, its gradient and, if any, the best point before it.

        Parameters
        ----------
        g : Tensor
            (dim,), the gradient at ``best``.
        best : Tensor
            (dim,)
        other : Tensor or None
            (dim,), for the momentum.

        Returns
        -------
        View
        """


class View(ABC):
    """The gap, the slope and the next iterate of the power method, at the best point so far.

    Attributes
    ----------
    gap : float
        The Frank–Wolfe gap there.
    slope : float or None
        The outward derivative there; None at the origin, and for balls that are not round.
    """

    gap: float
    slope: float | None = None

    @abstractmethod
    def propose_(self, out: Tensor, omega: float, *, momentum: bool) -> None:
        r"""Write the next iterate to ``out``, (dim,).

        :math:`y = \arg\max_{\|y\| \le ρ} \langle g, y \rangle`, plus a quarter of best − other if asked for, then
        averaged with the best point: :math:`ω y + (1 - ω)\, best`; each time scaled to the surface.
        """


#: Momentum of the power iteration.
_MOMENTUM = 0.25


class RoundBall(Ball):
    r"""The ball :math:`\|x\|_2 \le ρ`.

    Every iterate is a linear combination of two earlier ones and a gradient, so all norms follow from their Gram
    matrix: a step takes one pass to compute that and one to write. Such combinations of horizontal vectors are
    horizontal.

    Parameters
    ----------
    radius : float
        ρ.

    Examples
    --------
    >>> import torch
    >>> RoundBall(0.5).to_sphere_(torch.tensor([3.0, 4.0]))
    tensor([0.3000, 0.4000])
    """

    def norm(self, x: Tensor) -> float:
        """Measure a vector by its Euclidean norm."""
        return math.sqrt(float(gram_matrix(x, world=self.world)[0, 0]))

    def linear_max(self, g: Tensor) -> float:
        r"""Compute :math:`ρ \|g\|_2`."""
        return self.radius * self.norm(g)

    def to_sphere_(self, x: Tensor) -> Tensor:
        """Scale a vector other than 0 to length ρ, in place."""
        return x.mul_(self.radius / self.norm(x))

    def step_(self, out: Tensor, x: Tensor, previous: Tensor, g: Tensor, eta: float, alpha: float) -> None:
        """Write Auto-PGD's next iterate, see :meth:`Ball.step_`; the steepest direction is g/‖g‖."""
        gram = gram_matrix(x, previous, g, world=self.world)

        def project(c: np.ndarray) -> np.ndarray:
            length = math.sqrt(max(c @ gram @ c, 0.0))
            return c * min(1.0, self.radius / length) if length > 0 else c

        here, before = np.array([1.0, 0, 0]), np.array([0, 1.0, 0])
        z = project(here + np.array([0, 0, eta / (math.sqrt(gram[2, 2]) + 1e-12)]))
        c = project(here + alpha * (z - here) + (1 - alpha) * (here - before))
        combine_(out, (x, c[0]), (previous, c[1]), (g, c[2]))

    def view(self, g: Tensor, best: Tensor, other: Tensor | None) -> View:
        """Prepare the next step from the best point so far, see :meth:`Ball.view`."""
        return _RoundView(self.radius, g, best, other, self.world)


class _RoundView(View):
    def __init__(self, radius: float, g: Tensor, best: Tensor, other: Tensor | None, world: World) -> None:
        self._radius = radius
        self._vectors = (g, best) if other is None else (g, best, other)
        self._gram = gram_matrix(*self._vectors, world=world)
        self.gap = float(radius * math.sqrt(self._gram[0, 0]) - self._gram[0, 1])
        if self._gram[1, 1] > 0:
            self.slope = float(self._gram[0, 1] / math.sqrt(self._gram[1, 1]))

    def _onto(self, c: np.ndarray) -> np.ndarray:
        return c * (self._radius / (math.sqrt(max(c @ self._gram @ c, 0.0)) + 1e-300))

    def propose_(self, out: Tensor, omega: float, *, momentum: bool) -> None:
        unit = np.eye(len(self._vectors))
        largest = 0.1 * torch.finfo(self._vectors[0].dtype).max
        if not self._radius < largest * math.sqrt(self._gram[0, 0]):  # the gradient is practically zero: no direction
            out.copy_(self._vectors[1])
            return
        c = self._onto(unit[0])
        if momentum:
            c = self._onto(c + _MOMENTUM * (unit[1] - unit[2]))
        if omega < 1:
            mixed = omega * c + (1 - omega) * unit[1]
            if (
                mixed @ self._gram @ mixed < (1e-3 * self._radius) ** 2
            ):  # opposite points: their midpoint has no direction
                mixed = 0.5 * omega * c + (1 - 0.5 * omega) * unit[1]
            c = self._onto(mixed)
        combine_(out, *zip(self._vectors, c.tolist(), strict=True))


class CubeBall(Ball):
    r"""The ball :math:`\|x\|_\infty \le ρ`.

    With the adaptive metric it changes every weight by at most a fraction ρ of its size.

    Parameters
    ----------
    radius : float
        ρ.

    Notes
    -----
    Andriushchenko, Croce, Müller, Hein, Flammarion 2023 measure sharpness over this ball too.

    Examples
    --------
    >>> import torch
    >>> CubeBall(0.5).to_sphere_(torch.tensor([3.0, -4.0]))
    tensor([ 0.5000, -0.5000])
    """

    def norm(self, x: Tensor) -> float:
        """Measure a vector by its largest entry."""
        return float(self.world.max(torch.linalg.vector_norm(x, math.inf) if len(x) else x.new_zeros(())))

    def linear_max(self, g: Tensor) -> float:
        r"""Compute :math:`ρ \|g\|_1`."""
        parts = [torch.linalg.vector_norm(part, 1, dtype=torch.float64) for (part,) in chunked(g)]
        total = torch.stack([g.new_zeros((), dtype=torch.float64), *parts]).sum()
        return self.radius * float(self.world.sum(total))

    def to_sphere_(self, x: Tensor) -> Tensor:
        """Move a vector to the corner ρ sign(x), in place."""
        return x.sign_().mul_(self.radius)

    def step_(self, out: Tensor, x: Tensor, previous: Tensor, g: Tensor, eta: float, alpha: float) -> None:
        """Write Auto-PGD's next iterate, see :meth:`Ball.step_`; the steepest direction is sign(g)."""
        for o, here, before, slope in chunked(out, x, previous, g):
            z = (here + eta * slope.sign()).clamp_(-self.radius, self.radius)
            new = here + alpha * (z - here) + (1 - alpha) * (here - before)
            o.copy_(new.clamp_(-self.radius, self.radius))

    def view(self, g: Tensor, best: Tensor, other: Tensor | None) -> View:
        """Prepare the next step from the best point so far, see :meth:`Ball.view`."""
        gap = self.linear_max(g) - float(gram_matrix(g, best, world=self.world)[0, 1])
        return _CubeView(self.radius, g, best, other, gap)


class _CubeView(View):
    def __init__(self, radius: float, g: Tensor, best: Tensor, other: Tensor | None, gap: float) -> None:
        self._radius, self._g, self._best, self._other, self.gap = radius, g, best, other, gap

    def propose_(self, out: Tensor, omega: float, *, momentum: bool) -> None:
        last = self._other if momentum and self._other is not None else self._best
        for o, slope, top, before in chunked(out, self._g, self._best, last):
            y = (self._radius * slope.sign() + _MOMENTUM * (top - before)).clamp_(-self._radius, self._radius)
            o.copy_(torch.lerp(top, y, omega))
