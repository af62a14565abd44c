"""Batched linear algebra with small matrices that both metrics need, and the guard of the public doors.

Everything here works on stacks ``(…, h, h)``, on any device, real or complex, without a loop over the stack.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _DisableAutocast, _functorch
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class NotFiniteError(ValueError):
    """Numbers are NaN or infinite."""


def own_precision(function: F, finite_result: bool = False) -> F:
    """Let a function compute in the dtype of its arguments, because autocast would round products to half precision.

    With ``finite_result`` it is a method of a manifold, and returns no NaN or inf unless it was given one.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _DisableAutocast():
            result = function(*args, **kwargs)
            if not finite_result or kwargs.get("on_error") == "nan":
                return result
            if all(map(finite, result if isinstance(result, tuple) else (result,))):
                return result
            # A vector with NaN makes every result NaN: only now is it worth waiting for the answer of another look.
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            for name in given.keys() & {"u", "v"}:
                check_finite(given["self"], given[name], name)
            if not all(finite(a) for a in given.values() if isinstance(a, Tensor)):
                return result
        raise NotFiniteError(
            f"{given['self']}: {function.__name__} gives numbers that its dtype does not hold, or a decomposition has "
            "failed; rescale the point or the vector, or use float64; in an optimisation the learning rate is too high"
        )

    return wrapped  # type: ignore[return-value]


def exposed(x: Tensor) -> Tensor:
    """Return values that decide what is computed, without derivatives, and with the dimensions that ``vmap`` hides."""
    x = x.detach()
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def differentiated(*tensors: Tensor) -> bool:
    """Return whether autograd follows one of some tensors."""
    return any(t.requires_grad for t in tensors)


def transformed() -> bool:
    """Return whether forward mode or a transform of ``torch.func`` is active, of which tensors do not tell."""
    return forward_ad._current_level >= 0 or _are_functorch_transforms_active()


def holds(condition: Tensor) -> bool:
    """Return whether a condition holds everywhere, also in what ``torch.vmap`` hides."""
    return bool((exposed(condition) if _are_functorch_transforms_active() else condition).all())


def finite(X: Tensor) -> bool:
    """Return whether all entries of a tensor are finite."""
    # The sum is finite only if all entries are, and takes a twentieth of the time.
    if not _are_functorch_transforms_active() and bool(0 * X.detach().sum() == 0):
        return True
    return holds(X.isfinite())


def check_tensors(who: object, **arguments: Any) -> None:
    """Raise for an argument that is not a tensor, has no numbers, or is of another dtype or device than the first."""
    for name, value in arguments.items():
        first_name, first = next(iter(arguments.items()))
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: {name} must be a tensor, got {type(value).__name__}")
        if value.is_meta:
            raise ValueError(f"{who}: {name} is on the device meta, without numbers; load them first")
        for what in ("dtype", "device"):
            if getattr(value, what) != getattr(first, what):
                raise ValueError(
                    f"{who}: {first_name} of shape {tuple(first.shape)} has {what} {getattr(first, what)} but {name} "
                    f"of shape {tuple(value.shape)} has {what} {getattr(value, what)}; move one of them with .to()"
                )


def check_dtype(who: object, x: Tensor, allow_complex: bool = True) -> None:
    """Raise for a dtype without linear algebra."""
    allowed = _DTYPES if allow_complex else _DTYPES[:2]
    if x.dtype not in allowed:
        raise ValueError(
            f"{who}: a point of shape {tuple(x.shape)} has dtype {x.dtype}, which has no linear algebra here; convert "
            f"it to one of {', '.join(map(str, allowed))}"
        )


def check_finite(who: object, u: Tensor, name: str = "u") -> None:
    """Raise for a vector that is not finite."""
    if not finite(u):
        raise NotFiniteError(
            f"{who}: the vector {name} of shape {tuple(u.shape)} has NaN or infinite entries; if it is a "
            "gradient, check the loss, or lower the learning rate"
        )


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


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights are moved and differentiated: half precision would round a small step away."""
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def has_double(device: str) -> bool:
    """Return whether a type of device computes in double precision, which it is asked for once."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype == torch.float64
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False


def in_double(X: Tensor) -> Tensor:
    """Widen to double precision, on the CPU if the device has none; real stays real and complex stays complex."""
    X = X if has_double(X.device.type) else X.cpu()
    return X.to(torch.complex128 if X.is_complex() else torch.float64)


def choose(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Take a where a condition on the leading dimensions holds, else b."""
    return torch.where(condition.reshape(condition.shape + (1,) * (a.dim() - condition.dim())), a, b)


def pack(*factors: Tensor) -> Tensor:
    """Stack the rows of factors, broadcasting their batch dimensions."""
    batch = torch.broadcast_shapes(*(X.shape[:-2] for X in factors))
    return torch.cat([X.expand(*batch, *X.shape[-2:]) for X in factors], dim=-2)


def row_power(sigma: Tensor, present: Tensor, exponent: float) -> Tensor:
    """Return σ^exponent as a row (…, 1, h), with zeros for absent directions."""
    power = torch.where(present, sigma, 1) ** exponent
    return torch.where(present, power, 0).unsqueeze(-2)


def polar(X: Tensor) -> Tensor:
    """Return the unitary factor of X, the nearest to it; of one that is not finite any, so that no other fails."""
    U, _, Vh = torch.linalg.svd(X.nan_to_num(0, 0, 0), full_matrices=False)
    return U @ Vh


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


def sylvester(A1: Tensor, A2: Tensor, B: Tensor) -> Tensor:
    r"""Solve a Sylvester equation whose coefficients are diagonal up to rounding, with non-negative entries.

    .. math:: A_1 X + X A_2 = B, \qquad X_{ij} = B_{ij} / (A_{1,ii} + A_{2,jj})

    The canonical gauge makes the coefficients diagonal in value, so the solve is one division, batched and on any
    device; entries with a zero denominator give 0. The *derivatives* of the coefficients need not be diagonal: up to
    the third, in forward and reverse mode, they are those of the general equation, from the Neumann series in the
    difference between the coefficients and their values, which is zero.
    """
    D1, D2 = A1.detach(), A2.detach()
    denominator = D1.diagonal(dim1=-2, dim2=-1).real.unsqueeze(-1) + D2.diagonal(dim1=-2, dim2=-1).real.unsqueeze(-2)
    # 0/0 := 0: an absent direction (σ_i = σ_j = 0) has no vertical part to remove.
    present = denominator > 0
    denominator = torch.where(present, denominator, 1)
    X = torch.where(present, B / denominator, 0)
    if transformed() or differentiated(A1, A2):
        for _ in range(3):
            X = torch.where(present, (B - (A1 - D1) @ X - X @ (A2 - D2)) / denominator, 0)
    return X


def weighted_sylvester(M: Tensor, N: Tensor, R_H: Tensor, R_G: Tensor) -> Callable[[Tensor], Tensor]:
    r"""Return the solver B ↦ X of :math:`M X W_G + W_H X N = B`, given roots :math:`R R^H = W^{-1}` of the weights.

    M and N are Hermitian and not both singular, everything is (…, h, h). With the eigenvalues and eigenvectors of
    :math:`R_H^H M R_H = Q d Q^H`, :math:`P = R_H Q`, and likewise for N: :math:`X = P (P^H B P' / (d_i + d'_j)) P'^H`.
    """
    d, Q = torch.linalg.eigh(R_H.mH @ M @ R_H)
    e, S = torch.linalg.eigh(R_G.mH @ N @ R_G)
    left, right, denominator = R_H @ Q, R_G @ S, d.unsqueeze(-1) + e.unsqueeze(-2)
    return lambda B: left @ ((left.mH @ B @ right) / denominator) @ right.mH


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussians of unit variance per real coordinate, on the generator's device, and move them to ``like``."""
    size = (*shape, 2) if like.is_complex() else shape
    device = like.device if generator is None else generator.device
    drawn = torch.randn(size, dtype=like.dtype.to_real(), device=device, generator=generator).to(like.device)
    return torch.view_as_complex(drawn) if like.is_complex() else drawn


def as_count(name: str, value: Any, *, least: int = 1, most: float = math.inf) -> int:
    """Check a whole number, of Python or numpy, from ``least`` to below ``most``."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < most:
        above = "" if most == math.inf else f" and below {most}"
        raise ValueError(f"{name} must be a whole number of at least {least}{above}, got {value!r}")
    return number
