r"""Geodesics between points of one column, in closed form.

With σ the norm of the product G Hᴴ, and a, b the angles by which G and H turn, horizontal curves have

.. math:: \text{inv: } ds^2 = \tfrac12 d(\log σ)^2 + da^2 + db^2, \qquad
          \text{mix: } ds^2 = \tfrac12 dσ^2 + σ^2 (da^2 + db^2) .

So mix is a cone, flat where it is cut open: its geodesics are straight lines of a plane with the polar coordinates
:math:`(σ, \sqrt2 \sqrt{a^2 + b^2})`. The group still turns both factors by one sign, or by one phase of complex
numbers, which is chosen so that a² + b² is least.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..metrics import Metric, Pair

#: Parts of an arc of phases in each of which a minimum is looked for, and how often they are halved: to the last digit.
_PARTS, _HALVINGS = 32, 50


def one_column(metric: Metric, n: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the shortest geodesics between points in canonical gauge, (b, n + m, 1).

    They are the velocities at x, the ends, the velocities there, and the times, (b), at which the shortest path leads
    through the tip of the cone, where no geodesic exists; inf elsewhere.
    """
    (size, start), (other, end) = (_polar(z, n) for z in (x, y))
    phase = (_phase if x.is_complex() else _sign)(start, end)
    end = end[0] * phase, end[1] * phase
    angles = [
        2 * torch.atan2(*(torch.linalg.vector_norm(z, dim=1, keepdim=True) for z in (f - e, f + e)))
        for e, f in zip(start, end, strict=True)
    ]
    turn = _turn(angles)
    u = _velocity(metric, start, end, angles, size, other)
    v = -_velocity(metric, end, start, angles, other, size)
    lost = (turn >= math.pi) & (not metric.complete)
    return u, y * phase, v, torch.where(lost, size / (size + other), torch.inf)[:, 0, 0]


def _polar(x: Tensor, n: int) -> tuple[Tensor, Pair]:
    """Return the norm of the product, (b, 1, 1), and both factors divided by their lengths."""
    sizes = [torch.linalg.vector_norm(X, dim=1, keepdim=True) for X in (x[:, :n], x[:, n:])]
    return sizes[0] * sizes[1], (x[:, :n] / sizes[0], x[:, n:] / sizes[1])


def _turn(angles: list[Tensor]) -> Tensor:
    """Return by how much the geodesic turns, of the angles between the factors."""
    return math.sqrt(2) * torch.hypot(*angles)


def _velocity(metric: Metric, start: Pair, end: Pair, angles: list[Tensor], size: Tensor, other: Tensor) -> Tensor:
    """Return the first velocity of the geodesic from a point with the norm ``size`` to one with the norm ``other``."""
    turn = _turn(angles)
    if metric.complete:
        growth, rate = (other / size).log() / 2, torch.ones_like(turn)
    else:
        growth = (other - size - 2 * other * (turn / 2).sin().square()) / (2 * size)
        rate = other / size * torch.sinc(turn / math.pi)
    parts = zip(start, end, angles, strict=True)
    return torch.cat([growth * e + rate * a * _towards(e, f) for e, f, a in parts], 1) * size.sqrt()


def _towards(e: Tensor, f: Tensor) -> Tensor:
    """Return the unit tangent vector of the sphere at e that points to f; any if f is e or −e."""
    any_other = torch.zeros_like(e).scatter(1, e.abs().argmin(1, keepdim=True), 1)
    v, spare = (_without(e, z) for z in (f - e, any_other))
    v = torch.where(torch.linalg.vector_norm(v, dim=1, keepdim=True) > 4 * torch.finfo(v.dtype).eps, v, spare)
    length = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    return v / torch.where(length > 0, length, 1)  # in one dimension there is none, and nothing turns


def _without(e: Tensor, v: Tensor) -> Tensor:
    """Remove the component along e, twice, because the first time leaves rounding errors of a large one."""
    for _ in range(2):
        v = v - e * (e.conj() * v).real.sum(1, keepdim=True)
    return v


def _sign(start: Pair, end: Pair) -> Tensor:
    """Return the sign that makes the angles (a, b) rather than (π − a, π − b); one row cannot turn."""
    cosines = [(e * f).sum(1, keepdim=True).clamp(-1, 1) for e, f in zip(start, end, strict=True)]
    fixed = [c for c, e in zip(cosines, start, strict=True) if e.shape[1] == 1]
    fits = fixed[0] > 0 if fixed else cosines[0].arccos() + cosines[1].arccos() <= math.pi
    return torch.where(fits, 1.0, -1.0).to(cosines[0])


def _phase(start: Pair, end: Pair) -> Tensor:
    r"""Return the phase z, (b, 1, 1), for which a² + b² is least.

    With :math:`p = e_G^H f_G` the angle is :math:`a = \arccos(|p| \cos s)`, s the phase of zp, and b is that of zq, q
    of the other factor. Both grow with the distance of z from what suits them best, so the best for both lies on the
    shorter arc between, and there at a zero of the slope, of which there may be several.
    """
    products = [(e.conj() * f).sum(1) for e, f in zip(start, end, strict=True)]  # (b, 1)
    rests = [(f - e * p[:, None]).abs().square().sum(1) for e, f, p in zip(start, end, products, strict=True)]
    lengths, phases = [p.abs() for p in products], [p.angle() for p in products]
    between = torch.remainder(phases[0] - phases[1] + math.pi, 2 * math.pi) - math.pi
    arc = between.abs()

    def angle(i: int, s: Tensor) -> Tensor:
        return torch.atan2((rests[i] + (lengths[i] * s.sin()).square()).sqrt(), lengths[i] * s.cos())

    def slope(s: Tensor) -> Tensor:
        """Differentiate (a² + b²)/2."""
        one, two = (lengths[i] * t.sin() / torch.sinc(angle(i, t) / math.pi) for i, t in enumerate((s, arc - s)))
        return one - two

    edges = torch.linspace(0, 1, _PARTS + 1, dtype=arc.dtype, device=arc.device) * arc
    low, high = edges[:, :-1], edges[:, 1:]
    zero = (slope(low) <= 0) & (slope(high) >= 0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rising = slope(middle) > 0
        low, high = torch.where(rising, low, middle), torch.where(rising, middle, high)
    values = torch.where(zero, angle(0, low).square() + angle(1, arc - low).square(), torch.inf)
    s = low.gather(1, values.argmin(1, keepdim=True))
    turn = torch.copysign(s, between) - phases[0]
    return torch.polar(torch.ones_like(turn), turn)[..., None]
