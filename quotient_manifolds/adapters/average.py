"""Running means of adapters while they train, by the products of their factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import as_count, at_least_float32, in_double
from ..symmetries import PairStack, Symmetries, adapter_pairs, stacks
from ..symmetries.folding import write_values
from ..weights import pointing_to, trained, weights_of
from .products import Factors, balanced, product_svd

#: What a Trainer's checkpoint has beside the model.
_FILE = "quotient_ema.pt"


class QuotientEMA:
    r"""A running mean of a model's adapters, which does not depend on the factors of their products.

    .. math:: M_t = β_t M_{t-1} + (1 - β_t)\, s B_t A_t, \qquad β_1 = 0

    with β the decay, or :math:`β_t = 1 - 1/t` for the mean of all checkpoints. Averages of factors, as
    ``torch.optim.swa_utils.AveragedModel`` takes them, break where an optimiser moves factors while their product
    stays, as those of :mod:`quotient_manifolds.optim` do. All other trained weights are averaged entry by entry.

    Parameters
    ----------
    model : nn.Module
        With adapters of peft, or with the pairs of ``symmetries``. Its trained weights are averaged.
    decay : float or None
        β, from 0 to below 1; None for the mean of all checkpoints.
    rank : int, optional
        Largest rank of the mean of a product, by default twice that of the adapter. The mean is exact as long as it has
        no larger rank; what is cut off is counted in :meth:`lost`.
    symmetries : Symmetries, optional
        The pairs, by default ``adapter_pairs(model)``; of layers that are not peft's ``lora_pairs_by_name(model)``.

    Raises
    ------
    ValueError
        No trained weight belongs to a pair, or an argument is out of range.

    Notes
    -----
    Means are kept in float32 at least and computed in float64. An update costs an SVD of a matrix of rank + r rows
    for each layer.

    Examples
    --------
    >>> import peft, torch
    >>> from quotient_manifolds.adapters import QuotientEMA
    >>> from quotient_manifolds.optim import create_quotient_lora_optimizer
    >>> _ = torch.manual_seed(0)
    >>> config = peft.LoraConfig(r=2, target_modules=["0"])
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config)
    >>> optimizer, ema = create_quotient_lora_optimizer(model, lr=0.1), QuotientEMA(model, decay=0.9)
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 6)).square().mean().backward()
    ...     optimizer.step()
    ...     ema.update()
    >>> with ema.averaged():
    ...     loss = model(torch.randn(8, 6)).square().mean()
    >>> max(ema.lost().values()) < 0.5
    True
    """

    def __init__(
        self, model: nn.Module, decay: float | None = 0.999, *, rank: int | None = None,
        symmetries: Symmetries | None = None,
    ) -> None:  # fmt: skip
        if decay is not None and not (isinstance(decay, Real) and 0 <= decay < 1):
            raise ValueError(
                f"decay must be at least 0 and below 1, or None for the mean of checkpoints, got {decay!r}"
            )
        self.model, self.decay, self.count = model, decay, 0
        self.rank = None if rank is None else as_count("rank", rank, most=2**31)
        if not isinstance(symmetries, Symmetries | None):
            raise TypeError(f"symmetries must be Symmetries, as adapter_pairs returns, got {type(symmetries).__name__}")
        weights = trained(weights_of(model))
        found = (adapter_pairs(model) if symmetries is None else symmetries).restricted(weights)
        pairs = [p for p in found.pairs if not p.group.diagonal and p.group.field == "real"]
        if not pairs:
            raise ValueError(
                f"no trained weight of this {type(model).__name__} belongs to an adapter; train one, or pass symmetries"
            )
        self._stacks = stacks(pairs, weights)
        self._means: list[Factors] = []
        self._cut = [torch.zeros(len(stack), dtype=torch.float64) for stack in self._stacks]
        self._others: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's present weights to the mean: after every step of the optimiser, or every few."""
        weights, t = trained(weights_of(self.model)), self.count + 1
        keep = 0.0 if t == 1 else 1 - 1 / t if self.decay is None else self.decay
        means, cut = list[Factors](), list[Tensor]()
        for i, stack in enumerate(self._stacks):
            G, H = self._product(stack, weights)
            if not bool(G.isfinite().all() and H.isfinite().all()):
                raise ValueError("the adapters have NaN or infinite entries; the mean stays as it was")
            if keep:
                mean = map(in_double, self._means[i])
                G, H = (torch.cat(sides, -1) for sides in zip(mean, (G, H), strict=True))
                weight = G.new_full((G.shape[-1],), keep)
                weight[-stack.group.h :] = 1 - keep
                G = G * weight
            U, sigma, V = product_svd(G, H)
            size = self.rank or 2 * stack.group.h
            root = sigma[..., None, :size].sqrt()
            like = weights[stack.names[0]]
            means.append((_stored(U[..., :size] * root, like), _stored(V[..., :size] * root, like)))
            cut.append(keep * self._cut[i] + sigma[..., size:].norm(dim=-1).cpu())
        others = {name: p.detach().to(at_least_float32(p.dtype), copy=True) for name, p in weights.items()}
        if keep:
            others = {name: torch.lerp(p, self._others[name].to(p), keep) for name, p in others.items()}
        self._means, self._cut, self._others, self.count = means, cut, others, t

    def _product(self, stack: PairStack, weights: Mapping[str, Tensor]) -> Factors:
        """Return s G and H of a stack in float64."""
        G, H = in_double(stack.gather(weights)).split([stack.n, stack.m], dim=-2)
        return G * G.new_tensor([p.scale for p in stack.pairs]).view(-1, 1, 1), H

    # -- the averaged weights --------------------------------------------------------------------------------------

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Return the averaged weights by name: balanced factors of the nearest products of the adapters' own ranks."""
        if not self.count:
            raise ValueError("there is no mean yet; call update() after a step")
        weights = trained(weights_of(self.model))
        found = {name: torch.empty_like(weights[name]).copy_(mean) for name, mean in self._others.items()}
        for stack, mean in zip(self._stacks, self._means, strict=True):
            G, H = map(in_double, mean)
            scales = G.new_tensor([p.scale for p in stack.pairs]).view(-1, 1, 1)
            stack.scatter_(torch.cat(balanced(G / scales, H, stack.group.h, whole=True), -2), found)
        return found

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Let the model have the averaged weights within a ``with`` block, to evaluate or save it."""
        with pointing_to(self.model, self.values()):
            yield self.model

    @torch.no_grad()
    def copy_(self) -> None:
        """Write the averaged weights to the model."""
        write_values(weights_of(self.model), self.values())

    def lost(self) -> dict[str, float]:
        """Bound, for every pair, how far :meth:`values` is from the exact mean, relative to the size of the product.

        It adds up what was cut off above ``rank``, decayed like the mean, and what the adapter's own rank lacks.
        """
        found = dict[str, float]()
        for stack, mean, cut in zip(self._stacks, self._means, self._cut, strict=True):
            G, H = map(in_double, mean)
            sigma = product_svd(G, H)[1].cpu()
            tail = sigma[..., stack.group.h :].norm(dim=-1)
            relative = (cut + tail) / sigma.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
            found.update(zip((p.name for p in stack.pairs), relative.tolist(), strict=True))
        return found

    # -- saved and resumed -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and numbers."""
        return {"count": self.count, "means": self._means, "cut": self._cut, "others": self._others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; raise a ValueError if it is of other adapters."""
        weights = weights_of(self.model)
        self._check_state(state, trained(weights))
        like = [weights[stack.names[0]] for stack in self._stacks]
        self._means = [(_stored(G, w), _stored(H, w)) for w, (G, H) in zip(like, state["means"], strict=False)]
        self.count, self._cut, self._others = int(state["count"]), list(state["cut"]), dict(state["others"])

    def _check_state(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Raise unless a state is one of these adapters."""
        try:
            means, cut, others = [[*mean] for mean in state["means"]], [*state["cut"]], dict(state["others"])
            count = as_count("count", state["count"], least=0)
            tensors = [*(side for mean in means for side in mean), *cut, *others.values()]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of QuotientEMA.state_dict ({error!r})") from error
        if not all(isinstance(t, Tensor) and bool(t.isfinite().all()) for t in tensors):
            raise ValueError("the state has other entries than tensors of finite numbers; the mean stays as it was")
        shapes = [[(len(s), rows) for rows in (s.n, s.m)] for s in self._stacks]
        alike = [[tuple(side.shape[:2]) for side in mean] for mean in means] == shapes
        alike = alike and {k: t.shape for k, t in others.items()} == {k: p.shape for k, p in weights.items()}
        alike = alike and all(G.shape[2:] == H.shape[2:] and G.dim() == 3 for G, H in means)
        if [t.shape for t in cut] != [(len(s),) for s in self._stacks] or (count and not alike):
            raise ValueError("the state is of other adapters than the model has")

    def callback(self) -> Any:
        """Return a callback for transformers' ``Trainer``: it updates after every step, saves and resumes."""
        from transformers import TrainerCallback

        ema = self

        class AverageCallback(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                file = Path(args.output_dir, f"checkpoint-{state.global_step}", _FILE)
                if state.global_step and file.is_file():
                    ema.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                ema.update()

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if args.should_save:
                    torch.save(ema.state_dict(), Path(args.output_dir, f"checkpoint-{state.global_step}", _FILE))

        return AverageCallback()


def _stored(side: Tensor, like: Tensor) -> Tensor:
    """Put a factor of a mean where the weights are, in float32 at least."""
    return side.to(like.device, at_least_float32(like.dtype))
