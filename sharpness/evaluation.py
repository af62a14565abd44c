"""Batches in, sharpness out."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from quotient_manifolds import symmetries
from quotient_manifolds.symmetries import SymmetricPair

from .ascent import Ascent, Buffers, auto_pgd
from .measures import Measure
from .measures import measure as look_up
from .results import BatchResult, SharpnessResult
from .space import Direction, WeightSpace

__all__ = ["evaluate"]

#: Bytes of directions that are kept unasked.
_DIRECTIONS = 2 * 2**30
#: ``loss_fn(model, batch) -> scalar tensor``
LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class _Outcome:
    loss: Tensor
    error: float | None  # fraction classified wrongly


def default_loss(model: nn.Module, batch: Any) -> _Outcome:
    """The ``.loss`` of a transformers model for a dict, else the cross-entropy of ``model(x)`` against ``y``."""
    if isinstance(batch, Mapping):
        output = model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            raise ValueError(
                f"{type(model).__name__} returned no loss for a dict with the keys {sorted(batch)}; "
                "add the labels, or pass loss_fn"
            )
        scores, labels = getattr(output, "logits", None), batch.get("labels")
    elif isinstance(batch, Sequence) and len(batch) == 2:
        x, labels = batch
        output = model(x)
        scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if scores is None:
            raise ValueError(f"{type(model).__name__} returned {type(output).__name__} without logits; pass loss_fn")
        if scores.dim() > 1 and scores.shape[1] == 1:
            raise ValueError(
                f"{type(model).__name__} returned one score an example, for which cross-entropy is always 0; "
                "pass loss_fn for a regression"
            )
        loss = F.cross_entropy(scores, labels)
    else:
        raise ValueError(
            f"a batch is a dict for a transformers model or a pair (x, y), but this one is {type(batch).__name__}; "
            "pass loss_fn(model, batch) for anything else, and wrap a single batch in a list"
        )
    return _Outcome(loss, _error_rate(scores, labels))


def _error_rate(scores: Any, labels: Any) -> float | None:
    """Fraction of a batch that is classified wrongly, if this is a classification."""
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor)):
        return None
    if scores.dim() != 2 or labels.dim() != 1 or scores.shape[1] < 2 or labels.is_floating_point():
        return None
    return float((scores.detach().argmax(1) != labels).double().mean())


def _outcome(loss_fn: LossFunction | None, model: nn.Module, batch: Any) -> _Outcome:
    if loss_fn is None:
        found = default_loss(model, batch)
    else:
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor):
            raise ValueError(f"loss_fn must return a scalar tensor, but it returned {type(loss).__name__}")
        found = _Outcome(loss, None)
    if found.loss.numel() != 1:
        raise ValueError(f"the loss must be a scalar, but it has shape {tuple(found.loss.shape)}; take the mean")
    return found


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients on; afterwards modes, buffers, random state and switches are as before."""
    modes = {m: m.training for m in model.modules()}
    buffers = [
        (m, name, b, b.detach().clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    autocast_cache = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        try:
            # The fast path of torch's encoder layers reads weights behind autograd's (and adapters') back.
            torch.backends.mha.set_fastpath_enabled(False)
            # Not model.eval(): some layers merge weights when they are told to.
            for module in modes:
                module.training = False
            torch.set_autocast_cache_enabled(False)  # it would keep casts of the weights while they move
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            torch.set_autocast_cache_enabled(autocast_cache)
            for module, training in modes.items():
                module.training = training
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for v in batch.values():
            yield from _tensors(v)
    elif isinstance(batch, (list, tuple)):
        for v in batch:
            yield from _tensors(v)


def _check_device(batch: Any, index: int, device: torch.device) -> None:
    for t in _tensors(batch):
        if t.device != device:
            raise ValueError(
                f"batch {index} has a tensor on {t.device}, but the model's weights are on {device}; "
                f'move the batch with .to("{device}")'
            )


def _verify(
    model: nn.Module, loss_fn: LossFunction | None, batch: Any, seed: int, pairs: Sequence[SymmetricPair] | None
) -> None:
    """Raise if a pair that is about to be divided out is no symmetry of the loss or of the outputs."""
    forward = symmetries.default_forward if loss_fn is None else loss_fn
    known = {p.name for p in symmetries.find(model)}
    extra = [p for p in pairs or () if p.group is not None and p.name not in known]
    report = symmetries.verify(model, batch, seed, forward=forward, extra=extra)
    if not report.ok:
        raise ValueError(f"verify=True found weights that are no symmetry of {type(model).__name__}:\n{report}")


def _check_first(
    model: nn.Module, loss_fn: LossFunction | None, batch: Any, measure: Measure, *, covered: bool
) -> None:
    """Two identical passes must agree, and every attention layer must be known if the measure needs it."""

    def run() -> float:
        with torch.set_grad_enabled(loss_fn is not None):  # a loss of one's own may contain gradients
            return float(_outcome(loss_fn, model, batch).loss.detach())

    one = symmetries.check_coverage(model, run) if measure.pairs is not None and not covered else run()
    two = run()
    if not math.isfinite(one):
        raise ValueError(f"the loss of batch 0 is {one}; a sharpness needs a finite loss to start from")
    scale = max(abs(one), abs(two), 1e-3)
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    if abs(one - two) > min(200 * eps, 1e-3) * scale:
        raise ValueError(
            f"two identical passes gave different losses ({one:.8g} and {two:.8g}): switch off dropout that ignores "
            "eval(), random augmentation and sampling inside the model or loss_fn"
        )


def _generator(*entropy: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed % 2**63)


class _Task:
    """The ascents on one batch: shares the pass at the weights between radii and starts."""

    def __init__(
        self, space: WeightSpace, loss_fn: LossFunction | None, batch: Any, index: int, seed: int, buffers: Buffers
    ) -> None:
        self.space, self.loss_fn, self.batch, self.index, self.seed = space, loss_fn, batch, index, seed
        self.buffers = buffers
        self.worst_error: float | None = None
        base_gradient = space.zero()
        self.base = self(space.zero(), base_gradient)
        if not bool(base_gradient.isfinite().all()):
            raise ValueError(
                f"the gradient of batch {index} at the weights has NaN or infinite entries although the loss is "
                f"{self.base:.6g}; look for a square root or logarithm at zero in the model or loss_fn"
            )
        self.base_gradient = base_gradient
        self.base_error = self.worst_error

    def __call__(self, xi: Tensor, out: Tensor | None) -> float:
        self.space.move_to(xi)
        with torch.set_grad_enabled(out is not None or self.loss_fn is not None):
            outcome = _outcome(self.loss_fn, self.space.model, self.batch)
        value = float(outcome.loss.detach())
        if not math.isfinite(value):
            distance = float(torch.linalg.vector_norm(xi))
            if distance == 0:
                raise ValueError(
                    f"the loss of batch {self.index} is {value}; look for NaN in the data, or labels out of range"
                )
            word = "NaN" if math.isnan(value) else "infinite"
            raise ValueError(
                f"the loss of batch {self.index} became {word} at a distance of {distance:.4g} from the weights; "
                "use a smaller rho"
            )
        if outcome.error is not None:
            self.worst_error = max(outcome.error, self.worst_error or 0.0)
        if out is None:
            return value
        if not outcome.loss.requires_grad:
            raise ValueError("the loss does not depend on any trainable parameter; check loss_fn and requires_grad")
        self.space.gradient(outcome.loss, out)
        return value

    def run(self, rho: float, steps: int, restarts: int, bar: tqdm[Any]) -> tuple[BatchResult, Tensor]:
        began = time.perf_counter()
        self.worst_error = self.base_error
        eps = torch.finfo(self.space.dtype).eps
        slope = float(torch.linalg.vector_norm(self.base_gradient))
        flat = rho * slope <= 10 * eps * abs(self.base)
        best: Ascent | None = None
        for start in range(restarts + 1):
            known = None
            if start == 0 and not flat:
                xi, known = self.space.zero(), (self.base, self.base_gradient)
            else:
                xi = self.space.random(_generator(self.seed, self.index, start))
                length = float(torch.linalg.vector_norm(xi))
                if length == 0:
                    raise ValueError(
                        "there is no direction to move in: all trainable weights are zero or belong to pairs of rank 0 "
                        "(LoRA's B = 0 before training); measure a trained model"
                    )
                xi = xi * (rho / length)

            def show(value: float, top: float) -> None:
                bar.update()
                bar.set_postfix(rho=rho, loss=f"{value:.4f}", best=f"{top:.4f}", refresh=False)

            found = auto_pgd(self, xi, rho, steps, first=known, buffers=self.buffers, callback=show)
            worse: Ascent | None = found
            if best is None or found.value > best.value:
                worse, best = best, found
            if worse is not None:
                self.buffers.adopt(worse.point)
        assert best is not None
        point, value = best.point, best.value
        if value < self.base:  # a random start that never rose: the centre belongs to the ball
            point, value = self.space.zero(), self.base
        seconds = time.perf_counter() - began
        result = BatchResult(
            self.index, rho, self.base, value, self.base_error, self.worst_error, flat, steps, best.history, seconds
        )
        return result, point


def _checked_radii(rho: float | Iterable[float]) -> tuple[tuple[float, ...], bool]:
    scalar = isinstance(rho, Real) or (isinstance(rho, Tensor) and rho.dim() == 0)
    try:
        if isinstance(rho, str):
            raise TypeError
        radii = tuple(float(r) for r in ([rho] if scalar else rho))  # type: ignore[union-attr, arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}") from None
    if not radii or any(not (math.isfinite(r) and r > 0) for r in radii):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}")
    if len(set(radii)) < len(radii):
        raise ValueError(f"rho names a radius twice: {rho!r}")
    return radii, scalar


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    measure: str | Measure = "geodesic-inv",
    rho: float | Iterable[float],
    steps: int = 20,
    geodesic: str | None = None,
    restarts: int = 0,
    seed: int = 0,
    progress: bool = True,
    keep_directions: bool | None = None,
    pairs: Sequence[SymmetricPair] | None = None,
    verify: bool = False,
) -> SharpnessResult:
    r"""Measure the sharpness of a model: the worst rise of the loss within a ball around its weights.

    .. math:: S(θ) = \operatorname{mean}_{\text{batches}}\; \max_{ξ \text{ horizontal},\, \|ξ\|_θ \le ρ}
              L_{\text{batch}}(R_θ(ξ)) - L_{\text{batch}}(θ)

    Parameters
    ----------
    model : nn.Module
        Any network whose attention layers are known (``quotient_manifolds.symmetries.find``); any network at all for
        ``"adaptive"`` and ``"euclidean"``. Its trainable parameters are measured.
    batches : iterable
        Batches on the model's device: dicts with labels for a transformers model, pairs (x, y), or what ``loss_fn``
        takes.
    loss_fn : callable, optional
        ``loss_fn(model, batch)`` → scalar tensor. By default ``model(**batch).loss`` for a dict, else the
        cross-entropy of ``model(x)`` against y.
    measure : str or Measure
        ``"geodesic-inv"``, ``"geodesic-mix"`` (attention pairs on the GL(h) quotient, every other weight in units of
        its own size), ``"adaptive"`` (every weight in units of its own size) or ``"euclidean"``.
    rho : float or iterable of float
        Radius of the ball in the measure's metric; for "adaptive" a fraction of the weights' size.
    steps : int
        Steps of Auto-PGD; one forward and one backward pass each.
    geodesic : {"second-order", "first-order"}, optional
        How attention pairs move: x + ξ + ½ acceleration(ξ), the default, or x + ξ.
    restarts : int
        Further ascents from random directions; the best counts.
    seed : int
        The random directions depend on (seed, batch, start) alone.
    progress : bool
        Show a progress bar (on a terminal only).
    keep_directions : bool, optional
        Keep the worst direction of every batch and radius for ``result.direction``, in main memory; each is as large
        as the model. By default the first ones, up to 2 GiB in all.
    pairs : sequence of SymmetricPair, optional
        The pairs to divide out, for example ``symmetries.find(model, extra=[…])`` or ``find(model,
        key_bias="drop")``; by default ``find(model)``. A pair without a group counts as any other weight.
    verify : bool
        First act on every pair by a random group element and compare the outputs (``symmetries.verify``).

    Returns
    -------
    SharpnessResult
        ``value`` is a float, or a dict by radius if ``rho`` is not a number.

    Raises
    ------
    UnknownAttentionError
        A module computes attention and no adapter knows it (geodesic measures only).
    ValueError
        No batches, a batch on another device, no trainable parameter, a loss that is NaN or differs between two
        identical passes, or an argument out of range.

    Notes
    -----
    Paper, §5.2 and Algorithm 1. The model is measured in evaluation mode; weights, gradients, modes, buffers and
    ``requires_grad`` are as before afterwards, bit for bit, whatever happens: the weights are never written to.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> x, y = torch.randn(4, 3, 8), torch.randint(8, (4,))
    >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])
    >>> result = evaluate(layer, [(x, y)], loss, rho=0.1, steps=5)
    >>> result.value > 0
    True
    """
    radii, scalar = _checked_radii(rho)
    if steps < 1 or restarts < 0:
        raise ValueError(
            f"steps must be at least 1 and restarts at least 0, got steps = {steps}, restarts = {restarts}"
        )
    how = look_up(measure)
    if geodesic is not None:
        how = replace(how, geodesic=geodesic)
    if isinstance(loss_fn, nn.Module):
        raise ValueError(
            f"loss_fn is called as loss_fn(model, batch), so {type(loss_fn).__name__} cannot be one; write "
            "lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    if isinstance(batches, Mapping):
        raise ValueError("batches is a single dict; wrap it in a list")
    stream = iter(batches)
    try:
        first = next(stream)
    except StopIteration:
        raise ValueError("batches is empty; give at least one batch") from None
    try:
        total = len(batches)  # type: ignore[arg-type]
    except TypeError:
        total = None
    found: list[BatchResult] = []
    directions: dict[tuple[int, float], Direction] = {}
    with ExitStack() as stack:
        stack.enter_context(_undisturbed(model))
        space = WeightSpace(model, how, pairs)
        _check_device(first, 0, space.device)
        _check_first(model, loss_fn, first, how, covered=pairs is not None)
        if verify and how.pairs is not None:
            _verify(model, loss_fn, first, seed, pairs)
        stack.enter_context(space.attached())
        per_batch = len(radii) * (restarts + 1) * steps
        bar = tqdm(
            total=None if total is None else total * per_batch, desc=how.name, unit="step",
            disable=None if progress else True,
        )  # fmt: skip
        stack.enter_context(bar)
        buffers = Buffers(space.zero())
        for index, batch in enumerate(itertools.chain([first], stream)):
            _check_device(batch, index, space.device)
            task = _Task(space, loss_fn, batch, index, seed, buffers)
            for r in radii:
                result, point = task.run(r, steps, restarts, bar)
                found.append(result)
                room = keep_directions is None and len(directions) * space.dim * point.element_size() < _DIRECTIONS
                if keep_directions or room:
                    directions[index, r] = space.direction(point)
                buffers.adopt(point)
    return SharpnessResult(
        how,
        radii,
        steps,
        restarts,
        seed,
        type(model).__name__,
        space.weakest(),
        space.absent(),
        tuple(found),
        scalar,
        directions,
    )
