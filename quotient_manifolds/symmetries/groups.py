"""The groups that act on the columns of a pair."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..base import standard_normal

__all__ = ["GL", "random_elements"]


@dataclass(frozen=True)
class GL:
    """The group of invertible matrices, or of diagonal ones, that acts on the columns of a pair.

    Attributes
    ----------
    h : int
        Number of columns of G and H, over the field.
    diagonal : bool
        Every column is multiplied by its own non-zero number.
    positive : bool
        These numbers are positive, as is needed before a ReLU.
    field : {"real", "complex"}
        Over the complex numbers a column is a pair of real columns, such as a plane that RoPE rotates.

    Raises
    ------
    ValueError
        There is no such group.

    Examples
    --------
    An attention head of size 64, and the same under RoPE:

    >>> from quotient_manifolds.symmetries import GL
    >>> for group in (GL(64), GL(32, diagonal=True, field="complex")):
    ...     print(group, group.dimension)
    GL(64) 4096
    (ℂ*)^32 64
    """

    h: int
    _: KW_ONLY
    diagonal: bool = False
    positive: bool = False
    field: str = "real"

    def __post_init__(self) -> None:
        whole = isinstance(self.h, int) and not isinstance(self.h, bool)
        known = all(isinstance(v, bool) for v in (self.diagonal, self.positive)) and self.field in ("real", "complex")
        if not known or not whole or self.h < 1 or (self.positive and not self.diagonal):
            raise ValueError(
                f"no such group: {self.h} columns, diagonal {self.diagonal!r}, positive {self.positive!r}, field "
                f"{self.field!r}; numbers of a diagonal group may be positive"
            )

    def __str__(self) -> str:
        if self.diagonal:
            return f"({'ℂ*' if self.field == 'complex' else 'ℝ+' if self.positive else 'ℝ*'})^{self.h}"
        return f"GL({self.h}, ℂ)" if self.field == "complex" else f"GL({self.h})"

    @property
    def dimension(self) -> int:
        """Number of real parameters of the group."""
        return (self.h if self.diagonal else self.h**2) * (2 if self.field == "complex" else 1)

    @property
    def columns(self) -> tuple[int, ...]:
        """Shape of one row of a block on which the group acts: (h,), or (h, 2) for complex columns."""
        return (self.h, 2) if self.field == "complex" else (self.h,)

    def to_point(self, rows: Tensor) -> Tensor:
        """Turn real rows (pairs, n + m, h[, 2]) into points: (pairs, n + m, h), or (pairs, h, n + m, 1) if diagonal."""
        if self.field == "complex":  # complex numbers in half precision are hardly supported
            rows = torch.view_as_complex(rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous())
        return rows.transpose(1, 2).unsqueeze(-1) if self.diagonal else rows

    def from_point(self, x: Tensor) -> Tensor:
        """Turn points back into real rows."""
        if self.diagonal:
            x = x.squeeze(-1).transpose(1, 2)
        return torch.view_as_real(x) if self.field == "complex" else x


def random_elements(x: Tensor, condition: float, generator: torch.Generator) -> Tensor:
    """Draw U diag(s) Vᴴ for each of some points, in double precision.

    U and V are random orthogonal, numbers have random signs or phases; s is log-uniform, from condition^-½ to its root.
    """
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-1])
    like = torch.empty(0, dtype=torch.promote_types(x.dtype, torch.float64), device="cpu")
    draws = [standard_normal(shape, like, generator) for _ in range(2)]
    U, V = (d / d.abs() if shape[-1] == 1 else torch.linalg.qr(d).Q for d in draws)
    exponent = torch.rand(shape[:-1], dtype=torch.float64, device="cpu", generator=generator) - 0.5
    if shape[-1] > 1:
        exponent[..., 0], exponent[..., -1] = -0.5, 0.5
    return ((U * (condition**exponent).unsqueeze(-2)) @ V.mH).to(x.device)
