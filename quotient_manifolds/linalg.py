"""Batched linear algebra with small matrices that both metrics need.

Everything here works on stacks ``(…, h, h)``, on any device, real or complex, without a loop over the stack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

__all__ = [
    "AUTOCAST_DEVICES",
    "at_least_float32",
    "column_rank_ratio",
    "exposed",
    "finite",
    "hermitian_power",
    "holds",
    "in_double",
    "in_own_precision",
    "is_differentiated",
    "largest",
    "own_precision",
    "pack",
    "power_of_two",
    "rank_tolerance",
    "root",
    "row_power",
    "sylvester",
    "symmetric_part_doubled",
    "trace_product",
    "weighted_sylvester",
]


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


#: Devices on which autocast may be on.
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def own_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function compute in the dtype of its arguments, because autocast would round products to half precision."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return wrapped(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped


def in_own_precision(cls: C) -> C:
    """Apply :func:`own_precision` to the public methods that a class defines."""
    for name, method in list(vars(cls).items()):
        guarded = hasattr(method, "in_own_precision") or getattr(method, "__isabstractmethod__", False)
        if isinstance(method, FunctionType) and not name.startswith("_") and not guarded:
            setattr(cls, name, own_precision(method))
    return cls


class _Exposed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, None]:
        return _Exposed.apply(x.movedim(in_dims[0], 0)), None


def exposed(x: Tensor) -> Tensor:
    """Return values that decide what is computed, without derivatives; first the dimensions that ``vmap`` hides."""
    return _Exposed.apply(x.detach())


def holds(condition: Tensor) -> bool:
    """Return whether a condition holds everywhere, also in what ``torch.vmap`` hides."""
    try:
        return bool(condition.all())
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return bool(exposed(condition).all())


def finite(X: Tensor) -> bool:
    """Return whether all entries of a tensor are finite."""
    # The sum is finite only if all entries are, and takes a twentieth of the time.
    if not _are_functorch_transforms_active() and bool(0 * X.detach().sum() == 0):
        return True
    return holds(X.isfinite())


def largest(X: Tensor) -> Tensor:
    """Return the largest modulus of an entry (of a real or imaginary part) of every matrix, (…, 1, 1)."""
    X = X.detach()
    X = torch.view_as_real(X.resolve_conj()).flatten(-2) if X.is_complex() else X
    return torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))  # faster than abs


def power_of_two(size: Tensor) -> Tensor:
    """Return the largest power of two up to a size, 1 for 0 and NaN; a division by it is exact."""
    size = torch.where(size > 0, size, 1).detach()
    most = math.frexp(torch.finfo(size.dtype).max)[1] - 2  # the inverse is a number too
    return (torch.frexp(size).exponent - 1).clamp(-most, most).to(size.dtype).exp2()


def root(square: Tensor) -> Tensor:
    """Return the square root, whose derivative at 0 is defined as 0."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0 * square)


def is_differentiated(x: Tensor) -> bool:
    """Return whether derivatives with respect to x may be asked for, in reverse or forward mode."""
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    try:
        return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # torch.vmap hides what belongs to x
        return True


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights are moved and differentiated: half precision would round a small step away."""
    return torch.promote_types(dtype, torch.float32)


def in_double(X: Tensor) -> Tensor:
    """Widen to double precision; real stays real and complex stays complex."""
    return X.to(torch.complex128 if X.is_complex() else torch.float64)


def pack(G: Tensor, H: Tensor) -> Tensor:
    """Stack the rows of two factors, broadcasting their batch dimensions."""
    batch = torch.broadcast_shapes(G.shape[:-2], H.shape[:-2])
    return torch.cat([G.expand(*batch, *G.shape[-2:]), H.expand(*batch, *H.shape[-2:])], dim=-2)


def row_power(sigma: Tensor, present: Tensor, exponent: float) -> Tensor:
    """Return σ^exponent as a row (…, 1, h), with zeros for absent directions."""
    power = torch.where(present, sigma, 1) ** exponent
    return torch.where(present, power, 0).unsqueeze(-2)


def symmetric_part_doubled(C: Tensor) -> Tensor:
    """Return C + Cᴴ."""
    return C + C.mH


def trace_product(W: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    """Return Re Tr(W Xᴴ Y) for a Hermitian W of shape (…, h, h); X and Y are (…, n, h)."""
    return ((X @ W).conj() * Y).real.sum(dim=(-2, -1))


def column_rank_ratio(X: Tensor) -> Tensor:
    """Return σ_min(X) / σ_max(X), 0 for a zero matrix; X is (…, n, h) with n ≥ h."""
    s = torch.linalg.svdvals(X / power_of_two(largest(X)))
    return torch.where(s[..., 0] > 0, s[..., -1] / s[..., 0], 0)


def rank_tolerance(X: Tensor) -> float:
    """Return the smallest σ_min/σ_max that is not rounding, for X (…, n, h)."""
    return max(X.shape[-2:]) * torch.finfo(X.dtype).eps


def hermitian_power(S: Tensor, exponent: float) -> Tensor:
    """Return S^exponent of a Hermitian positive definite S, (…, h, h)."""
    values, vectors = torch.linalg.eigh(S)
    return (vectors * values.clamp_min(0).pow(exponent).unsqueeze(-2)) @ vectors.mH


class _NearDiagonalSylvester(torch.autograd.Function):
    """The division that solves A₁X + XA₂ = B for diagonal A₁, A₂, with the derivatives of the general equation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(A1: Tensor, A2: Tensor, B: Tensor) -> Tensor:
        d1 = A1.diagonal(dim1=-2, dim2=-1).real
        d2 = A2.diagonal(dim1=-2, dim2=-1).real
        denominator = d1.unsqueeze(-1) + d2.unsqueeze(-2)
        # 0/0 := 0: an absent direction (σ_i = σ_j = 0) has no vertical part to remove.
        present = denominator > 0
        return torch.where(present, B / torch.where(present, denominator, 1), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        A1, A2, _ = inputs
        ctx.save_for_backward(A1, A2, output)
        ctx.save_for_forward(A1, A2, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        A1, A2, X = ctx.saved_tensors
        Y = sylvester(A1.mH, A2.mH, grad)
        return -Y @ X.mH, -X.mH @ Y, Y

    @staticmethod
    def jvp(ctx: Any, dA1: Tensor, dA2: Tensor, dB: Tensor) -> Tensor:
        A1, A2, X = ctx.saved_tensors
        return sylvester(A1, A2, dB - dA1 @ X - X @ dA2)


def sylvester(A1: Tensor, A2: Tensor, B: Tensor) -> Tensor:
    r"""Solve a Sylvester equation whose coefficients are diagonal up to rounding, with non-negative entries.

    .. math:: A_1 X + X A_2 = B, \qquad X_{ij} = B_{ij} / (A_{1,ii} + A_{2,jj})

    The canonical gauge makes the coefficients diagonal in value, so the solve is one division, batched and on any
    device; entries with a zero denominator give 0. The *derivatives* of the coefficients need not be diagonal:
    differentiation (to any order, forward or reverse mode) is that of the general equation.
    """
    reverse = torch.is_grad_enabled() and (A1.requires_grad or A2.requires_grad or B.requires_grad)
    if not reverse and forward_ad._current_level < 0:
        return _NearDiagonalSylvester.forward(A1, A2, B)  # without the overhead, that of ten small products
    return _NearDiagonalSylvester.apply(A1, A2, B)


def weighted_sylvester(M: Tensor, N: Tensor, R_H: Tensor, R_G: Tensor) -> Callable[[Tensor], Tensor]:
    r"""Return the solver B ↦ X of :math:`M X W_G + W_H X N = B`, given roots :math:`R R^H = W^{-1}` of the weights.

    M and N are Hermitian and not both singular, everything is (…, h, h). With the eigenvalues and eigenvectors of
    :math:`R_H^H M R_H = Q d Q^H`, :math:`P = R_H Q`, and likewise for N: :math:`X = P (P^H B P' / (d_i + d'_j)) P'^H`.
    """
    d, Q = torch.linalg.eigh(R_H.mH @ M @ R_H)
    e, S = torch.linalg.eigh(R_G.mH @ N @ R_G)
    left, right, denominator = R_H @ Q, R_G @ S, d.unsqueeze(-1) + e.unsqueeze(-2)
    return lambda B: left @ ((left.mH @ B @ right) / denominator) @ right.mH
