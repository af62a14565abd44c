"""Gradient descent on the quotient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from ..symmetries import SymmetricPair
from .base import QuotientOptimizer
from .buckets import PairStep, Part, of_part

__all__ = ["QuotientSGD"]


class QuotientSGD(QuotientOptimizer):
    r"""Riemannian gradient descent with momentum for pairs (G, H); plain SGD for all other parameters.

    .. math:: m \leftarrow μ m + \nabla_G, \qquad G \leftarrow \sqrt{1 - ηλ}\, G - η\, m W_G^{-1}

    with the metric's weight :math:`W_G = s^2 H^H H`, and :math:`W_H = s^2 G^H G + (H^H H)^{-1}`; the covector m is
    transported. The run is the same from all equivalent factors.

    Parameters
    ----------
    params, pairs, max_grad_norm, maximize, foreach
        As for :class:`~quotient_manifolds.optim.QuotientAdam`.
    lr : float
        η.
    momentum : float
        μ.
    nesterov : bool
        Step along ∇ + μ m.
    weight_decay : float
        λ, decoupled: every step multiplies the product of a pair, and any other parameter, by 1 - ηλ.

    Raises
    ------
    ValueError
        As for :class:`~quotient_manifolds.optim.QuotientAdam`.

    Notes
    -----
    Where G = 0 the metric has the floor of :mod:`quotient_manifolds.optim.preconditioner`.

    Examples
    --------
    Factors of very different size, but of one product, take the same step:

    >>> import torch
    >>> from quotient_manifolds.optim import QuotientSGD
    >>> from quotient_manifolds.symmetries import GL, block, pair
    >>> def stepped(scale):
    ...     down, up = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
    ...     down.weight.data, up.weight.data = scale * torch.eye(2, 3), torch.eye(3, 2) / scale
    ...     p = pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(2))
    ...     up(down(torch.ones(1, 3))).square().sum().backward()
    ...     QuotientSGD([up.weight, down.weight], [p], lr=0.1).step()
    ...     return up.weight @ down.weight
    >>> torch.allclose(stepped(1.0), stepped(100.0), atol=1e-5)
    True
    """

    def __init__(
        self,
        params: Any,
        pairs: Iterable[SymmetricPair],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm, "maximize": maximize, "foreach": foreach,
        }  # fmt: skip
        super().__init__(params, pairs, defaults)

    def _step_pairs(self, group: Mapping[str, Any], s: PairStep) -> None:
        K_inv = s.preconditioner.inverse_roots
        lr, weight_decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
        if momentum and "moment G" not in s.bucket.state:
            s.make_room("moment")

        coordinates = s.scaled(K_inv.mH)

        def direction(part: Part) -> Tensor:
            g = s.gradient(part)
            if momentum:
                m = s.state("moment", part).mul_(s.keep(momentum, 1.0)).add_(g)
                g = torch.add(g, m, alpha=momentum) if group["nesterov"] else m
            return g @ of_part(coordinates, part)

        s.advance_(direction, K_inv, lr, weight_decay)

    _others = "SGD"

    def _step_others(self, group: Mapping[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        for p in params:
            p.mul_(1 - float(group["lr"]) * group["weight_decay"])
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        sgd(
            params,
            gradients,
            buffers,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=0.0,
            nesterov=group["nesterov"],
            foreach=group["foreach"],
            maximize=False,  # the sign of the gradients is set already
        )
        for p, buffer in zip(params, buffers, strict=True):
            if buffer is not None:
                self.state[p]["momentum_buffer"] = buffer
