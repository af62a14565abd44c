"""Adapters of a model whose base was rewritten by symmetries."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import in_double, standard_normal
from ..networks import network_of
from ..symmetries.lora import is_lora
from ..weights import first_names, naming, weights_of
from .configs import merged_config, module_of
from .folders import Adapter, read_each
from .merging import merge
from .products import Factors, balanced, common_dtype
from .storage import check_free

#: Options under which a layer adds something else than a product, or not to all tokens, or to several weights.
_NOT_CARRIED = ("use_dora", "alora_invocation_tokens", "target_parameters", "layer_replication")
#: Rows of trained tokens.
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")
#: What is rounding, relative to weights in float64.
_ROUNDING = 1e-11


def carry(
    adapter: str | os.PathLike[str] | Adapter,
    base: str | os.PathLike[str] | nn.Module,
    other: str | os.PathLike[str] | nn.Module,
    out: str | os.PathLike[str] | None = None,
) -> Adapter:
    r"""Write the adapter that does to a rewritten base what an adapter does to the base itself.

    .. math:: W' = L W R + C, \qquad B'A' = L\, BA\, R, \qquad b' = b - W t ⟹ Δb' = -s\, BA\, t

    The rewriting is found from the two models. It is any that symmetries do, see
    :func:`~quotient_manifolds.symmetries.whole.rewriting`: a canonical form, random moves, norms folded, a stream that
    was rotated, heads and neurons in another order or basis. Ranks stay. Factors are balanced, of scale 1.

    Parameters
    ----------
    adapter : path or Adapter
        An adapter of peft, as for :func:`merge`.
    base, other : path or nn.Module
        The model of the adapter, and the rewritten one: folders of transformers, names of such on the Hub, or networks,
        of an architecture that :func:`~quotient_manifolds.symmetries.whole.align_models` knows.
    out : path, optional
        As for :func:`merge`.

    Returns
    -------
    Adapter
        The carried adapter in memory, if there is no ``out``. Where a shift was folded, what the adapter does to it is
        a constant, a bias of B (``lora_bias``). PEFT has no such for embeddings; an adapter of some holds the model's
        own biases instead (``bias="all"``). Saved modules, such as a classifier, are carried, too.

    Raises
    ------
    ValueError, OSError
        No symmetries lead from one model to the other; or the adapter is no LoRA of plain products in the names of
        peft, has DoRA, trained tokens that were rewritten, or other parts that cannot be carried.

    Notes
    -----
    Both models are in memory as copies in float64, on the CPU.

    Examples
    --------
    >>> import copy, peft, torch
    >>> from quotient_manifolds.adapters import Adapter, carry
    >>> from quotient_manifolds.symmetries import ALL, find, move_
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> base = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> other, x = copy.deepcopy(base), torch.randn(3, 5, 8)
    >>> _ = move_(other, find(other, scope=ALL))
    >>> config = peft.LoraConfig(r=2, target_modules=["linear1", "linear2"], init_lora_weights=False)
    >>> adapted = peft.get_peft_model(copy.deepcopy(base), config)
    >>> carried = carry(Adapter.from_model(adapted), base, other)
    >>> rewritten = peft.get_peft_model(other, peft.LoraConfig(target_modules=["linear1"]), "none")
    >>> carried.add_to(rewritten, "carried")
    >>> rewritten.set_adapter("carried")
    >>> torch.allclose(rewritten(x), adapted(x), atol=1e-4), torch.allclose(adapted(x), base(x), atol=1e-2)
    (True, False)
    """
    from ..symmetries.whole import rewriting  # with it scipy, which merging needs not

    (parent,) = read_each(adapter)
    _check(parent)
    if out is not None:
        check_free(Path(out))  # before work of minutes
    (network, coarse), (target, coarser) = map(_network, (base, other))
    weights, layers, saved = weights_of(network), _layers(parent, network), _saved(parent, network)
    changed = _changed(parent, layers, saved, weights)
    # A thousand times the precision of the files: what rounding a rewritten model leaves.
    way = rewriting(network, target, tolerance=max(1e-8, min(1e3 * max(coarse, coarser), 0.03)))
    before, after = way.of(weights), way.of({**weights, **changed})
    _check_others(before, after, changed.keys() | {layer.bias for layer in layers.values()})
    _check_saved(saved, weights, before, way.gains)
    state, ranks = dict[str, Tensor](), dict[str, int]()
    for key, layer in layers.items():
        ranks[key] = parent.rank_and_scale(key)[0]
        change = layer.matrix(after[layer.weight] - before[layer.weight])
        G, H = _factors(change, ranks[key], module_of(key), _ROUNDING * float(before[layer.weight].norm()))
        dtype = common_dtype([parent.tensor(parent.layers[key][factor]) for factor in "AB"])
        state |= parent.packed(key, G, H, dtype, alphas=False)
    biases, options = _biases({k: at for k, at in layers.items() if at.bias not in saved.values()}, before, after)
    state |= {key: b.to(dtype) for key, b in biases.items()}
    adapted = {layer.weight for layer in layers.values()}
    for key, name in saved.items():
        kept = parent.tensor(key)
        state[key] = kept if _TOKENS.fullmatch(key) else (before if name in adapted else after)[name].to(kept.dtype)
    config = merged_config([parent.config], ranks) | options
    if not isinstance(other, nn.Module):
        config["base_model_name_or_path"] = os.fspath(other)
    return merge([Adapter.from_state(state, config, name=parent.origin or str(parent.place))], out, energy=None)


def _check(parent: Adapter) -> None:
    """Raise for what cannot be carried."""
    if parent.single:
        raise ValueError(f"{parent.place} has not the names of PEFT, so its layers in the model are unknown")
    odd = [option for option in _NOT_CARRIED if parent.config.get(option)]
    if odd := odd or [parts["magnitude"] for parts in parent.layers.values() if "magnitude" in parts]:
        raise ValueError(f"{parent.place} has {odd[0]}, so it cannot be carried; merge it into its model before")


def _network(model: str | os.PathLike[str] | nn.Module) -> tuple[nn.Module, float]:
    """Return a copy of a network in float64, and the precision of its weights."""
    network = copy.deepcopy(model) if isinstance(model, nn.Module) else network_of(model)
    if any(map(is_lora, network.modules())):
        raise ValueError(f"this {type(network).__name__} has adapters; pass the model without them, by unload()")
    dtypes = {p.dtype for p in network.parameters() if p.is_floating_point()}
    return network.to("cpu", torch.float64).eval(), max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


@dataclass(frozen=True)
class _Adapted:
    """A layer of a model, with the names of its weight and bias ("" for none), to which an adapter adds."""

    module: nn.Module
    weight: str
    bias: str

    @property
    def names(self) -> list[str]:
        """The weight and the bias."""
        return [self.weight, self.bias]

    @property
    def transposed(self) -> bool:
        """Whether the weight has inputs as rows."""
        return type(self.module).__name__ == "Conv1D" or isinstance(self.module, nn.Embedding)

    def matrix(self, weight: Tensor) -> Tensor:
        """View a weight as (outputs, inputs)."""
        return weight.mT if self.transposed else weight.flatten(1)


def _layers(parent: Adapter, network: nn.Module) -> dict[str, _Adapted]:
    """Find the layers of an adapter in its model, by their keys."""
    name_of, found, modules = naming(network), dict[str, _Adapted](), dict(network.named_modules())
    for key in parent.layers:
        module = modules.get(path := module_of(key))
        if isinstance(module, nn.MultiheadAttention):
            raise ValueError(
                f"{parent.place} adapts {path}, torch's MultiheadAttention, to which PEFT adds the product of out_proj "
                "twice, so it cannot be carried; leave out this layer"
            )
        if not isinstance(getattr(module, "weight", None), Tensor) or parent.groups(key) > 1:
            raise ValueError(f"{parent.place}: {path} is no layer of {type(network).__name__} whose weight it can move")
        assert module is not None
        biased = getattr(module, "bias", None) is not None
        if "bias" in parent.layers[key] and not biased:
            raise ValueError(f"{parent.place} adds a bias to {path}, which has none that symmetries could move")
        layer = _Adapted(module, name_of(path, "weight"), name_of(path, "bias") if biased else "")
        if any(layer.weight == one.weight for one in found.values()):
            raise ValueError(f"{parent.place} has two adapters of {layer.weight}, which layers share")
        found[key] = layer
    return found


def _saved(parent: Adapter, network: nn.Module) -> dict[str, str]:
    """Return the names of the weights that an adapter holds as a whole or, of tokens, in part, by their keys."""
    first, weights, found = first_names(network), weights_of(network), dict[str, str]()
    for key in parent.others:
        tokens = _TOKENS.fullmatch(key)
        name = module_of(f"{tokens[1]}.weight" if tokens else key)
        found[key] = name = first.get(name, name)
        if name not in weights:
            raise ValueError(f"{parent.place} holds {key}, which is no weight of this {type(network).__name__}")
        if not tokens and (shape := parent.tensor(key).shape) != weights[name].shape:
            raise ValueError(f"{parent.place} holds {key} of shape {[*shape]}, not {[*weights[name].shape]}")
    return found


def _changed(
    parent: Adapter, layers: Mapping[str, _Adapted], saved: Mapping[str, str], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of the model with its adapter."""
    found = {name: in_double(parent.tensor(key)) for key, name in saved.items() if not _TOKENS.fullmatch(key)}
    for key, layer in layers.items():
        W, path = in_double(weights[layer.weight].detach()), module_of(key)
        kept = found.pop(layer.weight, W)  # peft saves embeddings that it adapts
        if not torch.equal(kept.to(W), W):
            raise ValueError(f"{parent.place}: the weight of {path} is adapted and has other values than in the model")
        (G,), (H,) = parent.factors(key)
        if (change := G @ H.mT).shape != layer.matrix(W).shape:
            raise ValueError(
                f"{parent.place}: {path} has {[*layer.matrix(W).shape]} entries, but {[*change.shape]} in it"
            )
        found[layer.weight] = W + (change.mT if layer.transposed else change).reshape(W.shape)
        if "bias" in parent.layers[key]:
            b = found.get(layer.bias, in_double(weights[layer.bias].detach()))
            found[layer.bias] = b + parent.bias(key, len(b))
    return found


def _check_others(before: Mapping[str, Tensor], after: Mapping[str, Tensor], changed: Collection[str]) -> None:
    """Raise if an adapter would have to change more weights than it does."""
    for name in before.keys() - changed:
        value = before[name]
        if float((after[name] - value).norm()) > _ROUNDING * (1 + float(value.norm())):
            raise ValueError(f"the rewriting takes a part of the adapter to {name}, which the adapter does not change")


def _check_saved(
    saved: Mapping[str, str], weights: Mapping[str, Tensor], before: Mapping[str, Tensor], gains: Collection[str]
) -> None:
    """Raise if tokens were trained whose embeddings have moved, or gains where the basis of the stream has."""
    for key, name in saved.items():
        value = in_double(weights[name].detach())
        rewritten = float((before[name] - value).norm()) > _ROUNDING * float(value.norm())
        if name in gains or (_TOKENS.fullmatch(key) and rewritten):
            what = "has moved the basis of what it scales" if name in gains else "changes its trained tokens"
            raise ValueError(f"the adapter holds {key}, but the rewriting {what}; merge it into its model before")


def _biases(
    layers: Mapping[str, _Adapted], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """Return what an adapter's file holds of what its products add to folded shifts, and the options that say so.

    That is a bias of B or, as PEFT has none for an adapter with embeddings, the model's own bias.
    """
    found = dict[str, Tensor]()
    for key, layer in layers.items():
        if layer.bias:
            change, sizes = after[layer.bias] - before[layer.bias], (after[n].norm() for n in layer.names)
            if float(change.norm()) > _ROUNDING * float(sum(sizes)):
                found[key] = change
    if found and any(isinstance(at.module, nn.Embedding) for at in layers.values()):
        whole = {f"{key}.base_layer.bias": after[layers[key].bias] for key in found}
        return whole, {"lora_bias": False, "bias": "all"}
    return {f"{key}.lora_B.bias": change for key, change in found.items()}, {"lora_bias": bool(found)}


def _factors(change: Tensor, rank: int, path: str, rounding: float) -> Factors:
    """Return balanced factors of a product, without a decomposition of the whole."""
    columns = min(rank + 8, *change.shape)  # a few more, so that none of its directions is missed
    drawn = standard_normal((change.shape[1], columns), change, torch.Generator().manual_seed(0))
    Q = torch.linalg.qr(change @ drawn).Q
    H = change.mT @ Q
    G, H = balanced(Q[None], H[None], rank, whole=True)
    if float((change - G[0] @ H[0].mT).norm()) > 1e-8 * float(change.norm()) + rounding:
        raise ValueError(f"what the adapter adds to {path} has a larger rank than {rank} in the rewritten model")
    return G, H
