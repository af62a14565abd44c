"""Sharpness-aware minimisation on the quotient."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quotient_manifolds.checks import as_count
from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.optim.base import QuotientOptimizer
from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.certificate import Certification

from .building import build_blocks, divide, trainable, warn_of_unknown
from .measures import Block, ElementwiseBlock, Measure, PairBlock, get_measure

__all__ = ["GeodesicSAM"]


class _Restore:
    """Hook that restores weights before they are saved or evaluated; a pickled hook has no optimiser."""

    def __init__(self, sam: GeodesicSAM, always: bool) -> None:
        self._sam: weakref.ref[GeodesicSAM] | None = weakref.ref(sam)
        self._always = always

    def __call__(self, *_: Any) -> None:
        sam = self._sam() if self._sam is not None else None
        if sam is None:
            return
        evaluated = not (sam._held or torch.is_grad_enabled() or sam.model.training)  # noqa: SLF001, of this file
        if self._always or evaluated:
            sam.restore()
            sam._pending = False  # noqa: SLF001

    def __getstate__(self) -> dict[str, Any]:
        return {"_sam": None, "_always": self._always}


def _check(measure: Measure, rho: Any, refresh: Any) -> None:
    if measure.form != "own" or measure.elementwise == "vector":
        raise ValueError(f"GeodesicSAM moves a model's own weights, one by one; the measure {measure.name!r} does not")
    if isinstance(rho, bool) or not isinstance(rho, (int, float)):
        raise TypeError(f"rho must be a number, got {rho!r}")
    if not 0 < rho < 1e30:
        raise ValueError(
            f"rho must be positive and at most 1e30, got {rho}; without a perturbation, use the base optimiser itself"
        )
    if measure.pair_block is not None:
        raise ValueError("GeodesicSAM moves pairs by closed forms, which this measure does not have")
    as_count("refresh", refresh)


def _watch(sam: GeodesicSAM) -> None:
    """Let the model restore its weights before they are saved, replaced or evaluated."""
    sam.model.register_state_dict_pre_hook(_Restore(sam, always=True))
    sam.model.register_load_state_dict_pre_hook(_Restore(sam, always=True))
    sam.model.register_forward_pre_hook(_Restore(sam, always=False))


def _skipped(sam: Optimizer) -> bool:
    """Do what ``GradScaler`` leaves to this kind of optimiser: skip the step, or unscale the gradients."""
    found_inf, scale = getattr(sam, "found_inf", None), getattr(sam, "grad_scale", None)
    if found_inf is not None and float(found_inf) > 0:
        return True
    if scale is not None:
        for p in (p for group in sam.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.div_(scale.to(p.grad.device, p.grad.dtype))
    return False


class _InnerStep:
    """The step along the gradient; parameters point to its result until it is undone."""

    def __init__(self, parameters: list[Tensor], blocks: list[Block]) -> None:
        self.parameters, self.blocks = parameters, blocks
        self.count, self.stale = 0, False
        found = [b.stack for b in blocks if isinstance(b, PairBlock)]
        self.certification = Certification(found)
        dropped = {b.tensor for s in found for p in s.pairs for b in p.dropped}
        self._dropped = dropped.intersection(parameters)  # these are written by no block
        self._original: dict[Tensor, Tensor] = {}
        self._work: dict[Tensor, Tensor] = {}  # kept, because allocating memory costs more than the arithmetic

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_work": {}}

    @torch.no_grad()
    def take(self, rho: float, refresh: int) -> None:
        """Move by a given length along the parameters' gradients; do not move for a gradient without direction."""
        self.undo()
        self._original = {}
        with torch.autocast(self.parameters[0].device.type, enabled=False):
            found = {p: p.grad for p in self.parameters if p.grad is not None}
            moved = self._moved({p: g.to_dense() if g.is_sparse else g for p, g in found.items()}, rho, refresh)
        for p, data in moved.items():
            self._original[p] = p.data
            p.data = data

    def undo(self) -> None:
        """Restore the weights."""
        for p, data in self._original.items():
            # Whoever set the parameter to the copy for a while may set it so again after this: keep the weights.
            if p not in self._work or p.data_ptr() == self._work[p].data_ptr():
                p.data = data
        if not self._work:  # this is a copy of an optimiser, whose weights are restored once
            self._original = {}

    def _moved(self, gradients: dict[Tensor, Tensor], rho: float, refresh: int) -> dict[Tensor, Tensor]:
        make = partial(torch.empty_like, memory_format=torch.contiguous_format)
        self._work = {p: self._work[p] if p in self._work else make(p) for p in self.parameters}
        if self.certification.open:
            self.certification.see(gradients).check()
        factorise, steps = self.count % refresh == 0 or self.stale, list[tuple[Block, Tensor]]()
        squares: list[Tensor] = []
        for p in self._dropped:
            self._work[p].copy_(p)
        for block in self.blocks:
            if isinstance(block, PairBlock):
                block.refresh(factorise=factorise)
                u = block.tangent.egrad2rgrad(block.stack.gather(gradients))
                squares.append(block.tangent.inner(u).sum())
            elif isinstance(block, ElementwiseBlock):
                block.refresh()
                u = self._work[block.parameter].view(-1)
                block.pull_back_(u, gradients, None)
                squares.append(torch.linalg.vector_norm(u).square())
            steps.append((block, u))
        self.count, self.stale = self.count + 1, False
        norm = float(torch.stack([s.double() if s.device.type != "mps" else s for s in squares]).sum().sqrt())
        if not 0 < norm < math.inf:
            return {}
        for block, u in steps:
            u.mul_(rho / norm)
            if isinstance(block, PairBlock):
                block.stack.scatter_(block.retract(u), self._work)
            else:
                block.move_(self._work, u)
        return self._work


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
    pairs : sequence of SymmetricPair, optional
        By default those that ``quotient_manifolds.symmetries.find_symmetric_pairs`` names. There is no batch yet on
        which attention of unknown classes could be examined: for them, pass what it finds with one.

    Raises
    ------
    ValueError
        Weights are in half precision, the measure's ball is not round, ρ is not positive, or ``refresh`` is below 1.

    Notes
    -----
    Foret et al. 2021 (SAM), Kwon et al. 2021 (ASAM). Three ways to use it::

        loss = sam.step(closure)  # the closure sets gradients to zero, computes the loss and its gradients

        loss_fn(model, batch).backward()
        with sam.perturbed(zero_grad=True):
            loss_fn(model, batch).backward()
        sam.step()

        loss_fn(model, batch).backward()
        sam.first_step(zero_grad=True)
        loss_fn(model, batch).backward()
        sam.second_step(zero_grad=True)

    The first two restore the weights even after an error. After an exception between the steps of the third, the
    weights are restored by the model's next ``state_dict`` or ``load_state_dict``, its next forward pass in evaluation
    mode without gradients, the next ``first_step`` or ``step``, or :meth:`restore`. If one of the first three comes
    between the two steps, ``second_step`` refuses, because gradients may belong to either place. The weights' own
    storage is never written to: meanwhile parameters point to a copy, which takes as much memory as they do. Only what
    the base optimiser trains is perturbed.

    The gradient's scale does not matter to ξ, so a ``GradScaler`` needs no unscaling before the first step; pass the
    optimiser to ``scaler.step`` for the second. Under DDP all ranks apply the same perturbation, along the mean
    gradient. A gradient that is zero, NaN or infinite causes no perturbation.

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

    #: ``GradScaler`` then always calls :meth:`step`, which restores the weights and skips the step.
    _step_supports_amp_scaling = True

    def __init__(
        self, model: nn.Module, base_optimizer: Optimizer, *,
        rho: float, measure: str | Measure = "geodesic-inv", refresh: int = 20,
        pairs: Sequence[SymmetricPair] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(base_optimizer, Optimizer):
            raise TypeError(f"base_optimizer must be a torch optimiser, got {type(base_optimizer).__name__}")
        measure = get_measure(measure)
        _check(measure, rho, refresh)
        trained = {p for group in base_optimizer.param_groups for p in group["params"]}
        known = trainable(model)
        parameters = {name: p for name, p in known.items() if p in trained}
        if not parameters:
            raise ValueError(
                f"{type(base_optimizer).__name__} trains no parameter of this {type(model).__name__}; make it from "
                "model.parameters()"
            )
        for name, p in parameters.items():
            if p.dtype != at_least_float32(p.dtype):
                raise ValueError(
                    f"parameter {name!r} is {p.dtype}, in which a perturbation of rho = {rho:g} would be rounded away; "
                    "keep the weights in float32 and train under torch.autocast"
                )
        self.model, self.base_optimizer = model, base_optimizer
        self.rho, self.measure, self.refresh = float(rho), measure, refresh
        if pairs is None and measure.divides:
            warn_of_unknown(model)
        dtype = next(iter(parameters.values())).dtype
        division = divide(model, measure, pairs, parameters, only_some=len(parameters) < len(known))
        self._inner = _InnerStep(list(parameters.values()), build_blocks(measure, parameters, dtype, division))
        self._pending = False
        self._held = False
        super().__init__(base_optimizer.param_groups, base_optimizer.defaults)
        if isinstance(base_optimizer, QuotientOptimizer) and measure.divides:
            base_optimizer.certify = False  # its gradients will belong to other weights
        _watch(self)

    # Groups and state are the base optimiser's, so that schedulers and scalers reach it.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the base optimiser."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Keep the base optimiser's, whatever torch sets."""

    @property
    def state(self) -> Any:
        """State of the base optimiser."""
        return self.base_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        """Keep the base optimiser's, whatever torch sets."""

    def __getstate__(self) -> dict[str, Any]:
        self.restore()
        return {k: v for k, v in self.__dict__.items() if k != "step"}  # schedulers replace step

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _watch(self)

    # -- the inner step --------------------------------------------------------------------------------------------

    def first_step(self, zero_grad: bool = False) -> None:
        """Move the model to the perturbed weights, along its parameters' ``.grad``, and optionally set that to zero."""
        self._inner.take(self.rho, self.refresh)
        self._pending = True
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Restore the weights; harmless at any time."""
        self._inner.undo()

    @contextmanager
    def perturbed(self, zero_grad: bool = False) -> Iterator[nn.Module]:
        """Keep the model at the perturbed weights within a ``with`` block; then call :meth:`step`.

        Parameters
        ----------
        zero_grad : bool
            Set gradients to zero at the start of the block.

        Yields
        ------
        nn.Module
            The model.
        """
        try:
            self.first_step(zero_grad)
            self._held = True
            yield self.model
        except BaseException:
            self._pending = False
            raise
        finally:
            self._held = False
            self.restore()

    # -- the outer step --------------------------------------------------------------------------------------------

    def second_step(self, zero_grad: bool = False) -> None:
        """Restore the weights, and let the base optimiser step; raise a ValueError if there was no first step."""
        self.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take both steps with a closure, or the second one after :meth:`first_step` or :meth:`perturbed`.

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
            There was neither a closure nor a first step.
        """
        loss = None
        if closure is not None:
            self.restore()
            with torch.enable_grad():
                loss = closure()
                with self.perturbed():
                    closure()
        elif not self._pending:
            raise ValueError(
                "GeodesicSAM.step() needs a closure, or a first_step() or perturbed() before it, "
                "which no state_dict(), load_state_dict() or pass in evaluation mode has undone"
            )
        self.restore()
        self._pending = False
        if not _skipped(self):
            self.base_optimizer.step()
        return loss

    # -- the base optimiser ----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimiser; only parameters that were trainable at the start are perturbed."""
        known = {id(p) for g in self.base_optimizer.param_groups for p in g["params"]}
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
        if any(id(p) not in known for p in params):  # torch refuses a set, which has no order
            self.base_optimizer.add_param_group({**param_group, "params": params})

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimiser's state as ``"base"``, and the number of steps as ``"count"``."""
        return {"base": self.base_optimizer.state_dict(), "count": self._inner.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. The pairs are factorised again immediately."""
        self.restore()
        self.base_optimizer.load_state_dict(state_dict["base"])
        self._inner.count, self._inner.stale, self._pending = state_dict["count"], True, False
