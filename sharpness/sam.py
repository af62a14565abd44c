"""Sharpness-aware minimisation on the quotient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quotient_manifolds.linalg import as_count, at_least_float32, in_double
from quotient_manifolds.optim.base import QuotientOptimizer
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.symmetries.found import certify
from quotient_manifolds.weights import pointing_to, weights_of

from .measures import Measure, divides, get_measure
from .patch import Patch
from .patches import build_patches, known, stacks_of, trainable, warn_of_unknown
from .points import check_points


class GeodesicSAM(Optimizer):
    r"""Sharpness-aware minimisation whose inner step is taken on the quotient.

    .. math:: θ \leftarrow \text{base step with } \nabla \ell\big(R_θ(ξ)\big), \qquad
              ξ = ρ\, \frac{\operatorname{grad} \ell(θ)}{\|\operatorname{grad} \ell(θ)\|_θ}

    The gradient, the norm and the retraction R are those of the measure, as in :func:`sharpness.evaluate`: horizontal
    vectors and the second-order retraction for attention and LoRA pairs, and the elementwise metric for every other
    weight. ξ is the first ascent step of the measure, and does not depend on the representative. With
    ``measure="euclidean"`` this is SAM, with ``"adaptive"`` ASAM (without its η).

    Parameters
    ----------
    model : nn.Module
        Its trainable weights must be float32 or wider; use autocast for mixed precision.
    base_optimizer : torch.optim.Optimizer
        The optimiser that takes the step: any of torch's that needs no closure, or one of
        :mod:`quotient_manifolds.optim`, with which the whole training run is the same from all equivalent weights. It
        keeps its own learning rates, decay and schedule.
    rho : float
        ρ, in the metric of the measure.
    measure : str or Measure
        ``"geodesic-inv"``, ``"geodesic-mix"``, ``"adaptive"``, ``"euclidean"``, or a :class:`sharpness.Measure`.
    refresh : int
        Number of steps between factorisations of the pairs. Every step uses the metric of the current weights; only the
        frame that keeps its inverses well conditioned is older.
    symmetries : Symmetries, optional
        By default those that ``quotient_manifolds.symmetries.find`` finds. There is no batch yet on which attention of
        unknown classes could be examined: for them, pass what it finds with one.

    Raises
    ------
    ValueError
        Weights are in half precision; the measure is at a canonical form, measures vectors or has a ``pair_patch``; ρ
        is not positive, or ``refresh`` is below 1.

    Notes
    -----
    Foret et al. 2021 (SAM), Kwon et al. 2021 (ASAM). Two ways to use it::

        loss = sam.step(closure)  # the closure sets gradients to zero, computes the loss and its gradients

        loss_fn(model, batch).backward()
        with sam.perturbed(zero_grad=True):
            loss_fn(model, batch).backward()
        sam.step()

    Both restore the weights even after an error. The weights' own storage is never written to: meanwhile parameters
    point to a copy, which takes as much memory as they do. Only what the base optimiser trains is perturbed.

    The gradient's scale does not matter to ξ, so a ``GradScaler`` needs no unscaling before the block; pass the
    optimiser to ``scaler.step`` after it. Under DDP all ranks apply the same perturbation, along the mean gradient. A
    gradient that is zero, NaN or infinite causes no perturbation.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> sam = GeodesicSAM(model, torch.optim.SGD(model.parameters(), lr=0.01), rho=0.05)
    >>> x = torch.randn(4, 3, 8)
    >>> def closure():
    ...     sam.zero_grad()
    ...     loss = (model(x) - x).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> losses = [sam.step(closure).item() for _ in range(10)]
    >>> losses[-1] < losses[0]
    True
    """

    #: ``GradScaler`` unscales the gradients and skips steps itself, whatever the base optimiser could do.
    _step_supports_amp_scaling = False

    def __init__(
        self, model: nn.Module, base_optimizer: Optimizer, *,
        rho: float, measure: str | Measure = "geodesic-inv", refresh: int = 20,
        symmetries: Symmetries | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(base_optimizer, Optimizer):
            raise TypeError(f"base_optimizer must be a torch optimiser, got {type(base_optimizer).__name__}")
        measure = get_measure(measure)
        if measure.form != "own" or measure.elementwise == "vector":
            raise ValueError(
                f"GeodesicSAM moves a model's own weights, one by one; the measure {measure.name!r} does not"
            )
        if isinstance(rho, bool) or not isinstance(rho, (int, float)) or not 0 < rho < 1e30:
            raise ValueError(
                f"rho must be positive and at most 1e30, got {rho!r}; without a perturbation, use the base optimiser "
                "itself"
            )
        self.model, self.base_optimizer = model, base_optimizer
        self.rho, self.measure, self.refresh = float(rho), measure, as_count("refresh", refresh)
        if measure.pair_patch is not None:
            raise ValueError("GeodesicSAM moves pairs by closed forms, which this measure does not have")
        trained = {p for group in base_optimizer.param_groups for p in group["params"]}
        parameters: dict[str, Tensor] = {name: p for name, p in trainable(model).items() if p in trained}
        if not parameters:
            raise ValueError(
                f"{type(base_optimizer).__name__} trains no parameter of this {type(model).__name__}; make it from "
                "model.parameters()"
            )
        for name, p in parameters.items():
            if p.dtype != at_least_float32(p.dtype):
                raise ValueError(
                    f"parameter {name!r} is {p.dtype}, in which a small perturbation would be rounded away; keep the "
                    "weights in float32 and train under torch.autocast"
                )
        if symmetries is None and divides(measure):
            warn_of_unknown(model)
        check_points(measure, parameters)
        stacks = stacks_of(measure, known(model, measure, symmetries).restricted(parameters).of_full_rank(), parameters)
        self._names, self._device = list(parameters), next(iter(parameters.values())).device.type
        dtype = functools.reduce(torch.promote_types, (p.dtype.to_real() for p in parameters.values()))
        single, pairs = build_patches(measure, parameters, dtype, stacks, {}, {})
        self._patches: list[Patch] = [*single, *pairs]
        self._stacks, self.uncertified = stacks, {p for stack in stacks for p in stack.pairs}
        dropped = {s.name for stack in stacks for p in stack.pairs for s in p.dropped}
        self._dropped = dropped.intersection(self._names)  # these are written by no patch
        self._copies: dict[str, Tensor] = {}  # kept: to allocate memory costs more than the arithmetic
        self._count, self._pending = 0, False
        if isinstance(base_optimizer, QuotientOptimizer):
            base_optimizer.certify = False  # its gradients will belong to other weights

    def __getattr__(self, name: str) -> Any:
        """Be the base optimiser in all else: schedulers and scalers reach its groups and state."""
        return getattr(self.__dict__["base_optimizer"], name)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "step"} | {"_copies": {}}  # schedulers replace step

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # -- the two steps ---------------------------------------------------------------------------------------------

    @contextmanager
    def perturbed(self, zero_grad: bool = False) -> Iterator[nn.Module]:
        """Move the model along its parameters' ``.grad`` within a ``with`` block; then call :meth:`step`.

        Parameters
        ----------
        zero_grad : bool
            Set gradients to zero at the start of the block.

        Yields
        ------
        nn.Module
            The model.
        """
        self._pending = False
        with pointing_to(self.model, self._moved()):
            if zero_grad:
                self.zero_grad()
            yield self.model
        self._pending = True

    @torch.no_grad()
    def _moved(self) -> dict[str, Tensor]:
        """Write weights that lie ρ along the gradient to copies, and return these; none without a direction."""
        every = weights_of(self.model)
        weights = {name: every[name] for name in self._names}
        copies = self._copies = self._copies or {name: torch.empty_like(p) for name, p in weights.items()}
        found = {name: p.grad for name, p in weights.items() if p.grad is not None}
        gradients = {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}
        near = self._count % self.refresh != 0
        self._count += 1
        with torch.autocast(self._device, enabled=False):
            if self.uncertified:
                certify(self._stacks, weights, gradients, waiting=self.uncertified).check()
            for name in self._dropped:
                copies[name].copy_(weights[name])
            self._patches = [patch.at(weights, near=near) for patch in self._patches]
            steps = [patch.steepest(gradients, copies) for patch in self._patches]
            norm = float(torch.stack([in_double(square) for _, square in steps]).sum().sqrt())
            if not 0 < norm < math.inf:
                return {}
            for patch, (u, _) in zip(self._patches, steps, strict=True):
                patch.follow_(copies, u.mul_(self.rho / norm))
        return copies

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take both steps with a closure, or the second one after :meth:`perturbed`.

        Parameters
        ----------
        closure : callable, optional
            Sets gradients to zero, computes the loss and its gradients; called twice.

        Returns
        -------
        Tensor or None
            The closure's loss at the weights.

        Raises
        ------
        ValueError
            There was neither a closure nor a perturbation.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
                with self.perturbed():
                    closure()
        if not self._pending:
            raise ValueError("GeodesicSAM.step() needs a closure, or a pass within `with sam.perturbed():` before it")
        self._pending = False
        self.base_optimizer.step()
        return loss

    # -- the base optimiser ----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimiser; only parameters that were trainable at the start are perturbed."""
        self.base_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimiser's state, which is all there is."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. The pairs are factorised again immediately."""
        self.base_optimizer.load_state_dict(state_dict)
        self._count = 0
