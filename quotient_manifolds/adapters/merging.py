"""Merge, resize, balance and compare adapters by the products of their factors."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..linalg import in_double
from ..manifold import MANIFOLDS
from ..passes import drawing_again
from .configs import merged_config, module_of, parameters
from .folders import HEADER, Adapter, read, read_each, write_card, write_config
from .products import NEGLIGIBLE, Factors, Method, check_kept, common_dtype, present, product_svd, signed_sum
from .storage import TensorFile, checked, new_folder

Path = str | os.PathLike[str]
#: Metadata that tell whether a file was changed.
_HASHES = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")


def merge(
    adapters: Sequence[Path | Adapter],
    out: Path | None = None,
    *,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    energy: float | None = 1.0,
    method: str = "sum",
    space: str = "core",
    density: float = 0.5,
    seed: int = 0,
) -> Adapter:
    r"""Merge LoRA adapters into one, by the products of their factors and without the model.

    .. math:: \hat B \hat A = \sum_i w_i s_i B_i A_i

    Adapters may differ in ranks, scales :math:`s_i` and layers; a layer that one lacks is a product of 0. A warning
    says if they name different models. The factors in which a product is stored make no difference. Those of the result
    are balanced, :math:`\hat B^T \hat B = \hat A \hat A^T`, of scale 1.

    Parameters
    ----------
    adapters : sequence of path or Adapter
        Folders that peft saved; names of such on the Hugging Face Hub (``owner/name``, ``owner/name@revision``), of
        which config and safetensors weights are fetched; files with the names of kohya's scripts or of diffusers; or
        adapters in memory; all of one kind. Scales are those of the config, of the keys ``alpha`` or of diffusers'
        metadata; a file without any of them has 1.
    out : path, optional
        Folder to create, or empty. It appears when it is complete; a file in it has the name, keys and metadata of the
        first, and one rank in all layers if nothing in it says a scale. Without it the result is in memory.
    weights : sequence of float, optional
        One for each adapter, of any sign. By default 1/k, a mean, and 1 for ``"ties"``, which takes a mean by itself.
    rank : int, optional
        Largest rank of a layer, whose product is the nearest in the Frobenius norm. By default nothing is lost: a layer
        gets the rank of its sum.
    energy : float or None
        Keep as many singular values as hold this share of the sum of their squares; None keeps those that are 0, too,
        so that every layer has ``rank`` if it is given.
    method : {"sum", "ties", "dare", "inv", "mix"}
        The sum; of what is left of the terms when small entries are trimmed and a sign is elected (TIES, Yadav et al.
        2023), or entries dropped by chance and the others enlarged (DARE, Yu et al. 2024). Terms are products times
        weights, so w times an adapter is the adapter of scale w. Or the Fréchet mean on the quotient in
        a metric, for equal layers and ranks and weights that are not negative, which are divided by their sum.
    space : {"core", "knots"}
        In which coordinates TIES and DARE take entries: common bases of all B and all A (Core Space, Panariello et al.
        2025), or of all products side by side (KnOTS, Stoica et al. 2025).
    density, seed : float and int
        Share of the entries that TIES and DARE keep, and seed of DARE.

    Returns
    -------
    Adapter
        The merged adapter; ``lost`` has what a smaller rank has cut off from each product.

    Raises
    ------
    ValueError, OSError, ConvergenceError
        Adapters are no LoRA of plain products, say no scale, or do not fit; a folder is missing, ``out`` is not empty,
        or another process is writing it; or adapters are too far apart for a mean on the quotient.

    Notes
    -----
    A bias of B is merged like products. What is saved as a whole, as modules, tokens and biases of the model, is
    averaged over the adapters that have it, so that their weights must not be negative. DoRA divides by the norm of
    W + BA, so that only a mean of it is defined: weights of sum 1.

    Examples
    --------
    >>> import peft, tempfile, torch
    >>> from quotient_manifolds.adapters import compare, merge
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config)
    >>> model.save_pretrained(f"{folder.name}/a")
    >>> _ = merge([f"{folder.name}/a"] * 2, f"{folder.name}/twice", weights=[1, 1])
    >>> f"{compare(f'{folder.name}/a', f'{folder.name}/twice')['layers']['0']['distance']:.3f}"
    '0.500'
    >>> folder.cleanup()
    """
    parents = read_each(*adapters)
    how = Method(method, _checked_weights(parents, weights, method), space, density, rank, energy, seed)
    _check_alike(parents, how)
    first = parents[0]
    if out is None:
        state = dict[str, Tensor]()
        ranks, lost = _fill(state, parents, _of_one_rank(parents, how))
        config = {} if first.single else merged_config([p.config for p in parents], ranks)
        return replace(Adapter.from_state(checked(state), config), lost=lost)
    with new_folder(out) as folder, TensorFile(folder / first.saved_as) as file:
        ranks, lost = _fill(file, parents, _of_one_rank(parents, how))
        file.finish(_metadata(parents, ranks))
        if not first.single:
            write_config(folder, merged_config([p.config for p in parents], ranks))
        names = (name if (name := str(p.origin or p.place)).isprintable() else ascii(name) for p in parents)
        made_of = (f"- {w:g} × {name}\n" for name, w in zip(names, how.weights, strict=True))
        made = f"Made by quotient-lora, method {method}, from\n\n{''.join(made_of)}"
        write_card(folder, first.config.get("base_model_name_or_path") or "", made)
    return replace(read(os.path.join(out, first.saved_as if first.single else "")), lost=lost)


def _of_one_rank(parents: list[Adapter], how: Method) -> Method:
    """Return how to merge files without any scale: readers may take that of one layer for all, so all have one rank."""
    if not parents[0].single or parents[0].has_alphas or parents[0].configs:
        return how
    with _seeded(how):
        return replace(how, rank=max(_merged(parents, how, layer)[1] for layer in _layers(parents)), energy=None)


def _fill(
    tensors: dict[str, Tensor] | TensorFile, parents: list[Adapter], how: Method
) -> tuple[dict[str, int], dict[str, float]]:
    """Add the tensors of a merged adapter; return the rank of each layer, and what this has cut off."""
    ranks, lost = dict[str, int](), dict[str, float]()
    with _seeded(how):
        for layer in _layers(parents):
            found, ranks[layer], lost[layer] = _merged(parents, how, layer)
            tensors.update(found)
    for key in sorted({key for p in parents for key in p.averaged}):
        own = [(p, w) for p, w in zip(parents, how.weights, strict=True) if key in p.averaged and w]
        tensors.update({key: _mean(key, own)})
    return ranks, lost


@contextmanager
def _seeded(how: Method) -> Iterator[None]:
    """Let PEFT draw from torch's generator, which is that of all threads."""
    if how.name != "dare":
        yield
        return
    with drawing_again([]):
        torch.manual_seed(how.seed)
        yield


def resize(
    adapter: Path | Adapter, out: Path | None = None, *, rank: int | None = None, energy: float | None = None
) -> Adapter:
    """Write the nearest adapter of another rank, in the Frobenius norm of each layer's product.

    A larger rank keeps the product: in the new directions B is 0 and A is not, so that they can be trained.

    Parameters
    ----------
    adapter, out : path or Adapter, path
        As for :func:`merge`.
    rank : int, optional
        The rank of every layer; with ``energy`` the largest.
    energy : float, optional
        Keep as many singular values as hold this share of the sum of their squares.

    Returns
    -------
    Adapter

    Examples
    --------
    >>> import peft, torch
    >>> from quotient_manifolds.adapters import Adapter, compare, resize
    >>> config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    >>> adapter = Adapter.from_model(peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config))
    >>> compare(adapter, resize(adapter, rank=2))["layers"]["0"]["rank"]
    [4, 2]
    """
    check_kept(rank, energy)
    return merge([adapter], out, rank=rank, energy=energy)


def balance(adapter: Path | Adapter, out: Path | None = None) -> Adapter:
    r"""Write an adapter of the same products with balanced factors, :math:`B^T B = A A^T` = diag(σ).

    Training goes on from them at rates that suit factors of equal size. Ranks remain, and scales become 1. Where a
    product lacks full rank, as at B = 0 or where the rank exceeds the outputs or inputs of the layer, columns of B are
    0 and rows of A are not, so that they can be trained. A rank above the inputs repeats rows of A.

    Parameters
    ----------
    adapter, out : path or Adapter, path
        As for :func:`merge`.

    Returns
    -------
    Adapter

    Examples
    --------
    >>> import peft, torch
    >>> from quotient_manifolds.adapters import Adapter, balance
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config)
    >>> A, B = balance(Adapter.from_model(model)).state.values()
    >>> torch.allclose(B.mT @ B, A @ A.mT, atol=1e-6)
    True
    """
    return merge([adapter], out, energy=None)


def compare(one: Path | Adapter, other: Path | Adapter) -> dict[str, Any]:
    r"""Compare two adapters of any ranks, layer by layer, by their products.

    Parameters
    ----------
    one, other : path or Adapter
        As for :func:`merge`.

    Returns
    -------
    dict
        ``"layers"``: for each its ``"rank"``, ``"norm"`` and ``"singular_values"``, a pair each (0 and none for a layer
        that one lacks), and ``"distance"``, :math:`\|X - Y\|` divided by the larger norm. ``"differs"``: options
        with two values, and tensors outside products (biases of B times the scale) with two norms, where they differ.

    Examples
    --------
    >>> import peft, torch
    >>> from quotient_manifolds.adapters import Adapter, balance, compare
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> adapter = Adapter.from_model(peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config))
    >>> compare(adapter, balance(adapter))["layers"]["0"]["distance"] < 1e-6
    True
    """
    both = read_each(one, other)
    found: dict[str, Any] = {"layers": {}, "differs": {}}
    for layer in _layers(both):
        with _named(layer):
            parts, groups = _factors(both, layer), next(p for p in both if layer in p.layers).groups(layer)
            values = [product_svd(*part)[1] for part in parts]
            apart = product_svd(*signed_sum(parts, [1, -1]))[1].norm()
            biases = [p.bias(layer, groups * parts[0][0].shape[-2]).to(parts[0][0]) for p in both]
        norms = [float(v.norm()) for v in values]
        found["layers"][module_of(layer)] = {
            "rank": [groups * int(present(v).sum(-1).max()) for v in values],
            "norm": norms,
            "distance": float(apart) / max(norms) if max(norms) > 0 else 0.0,
            "singular_values": [v.flatten().tolist() for v in values],
        }
        sizes = [float(b.norm()) for b in biases]
        if float((biases[0] - biases[1]).norm()) > NEGLIGIBLE * sum(sizes):
            found["differs"][f"{module_of(layer)}.lora_B.bias"] = sizes
    for key in sorted({key for p in both for key in p.config}):
        options = [p.config.get(key) for p in both]
        if options[0] != options[1]:
            found["differs"][key] = options
    for key in sorted({key for p in both for key in p.averaged}):
        tensors = [p.tensor(key) if key in p.averaged else torch.zeros(0) for p in both]
        if not torch.equal(*tensors):
            found["differs"][key] = [float(t.double().norm()) for t in tensors]
    return found


def _merged(parents: list[Adapter], how: Method, layer: str) -> tuple[dict[str, Tensor], int, float]:
    """Return the tensors of a layer of a merged adapter, its rank, and what the rank has cut off, as a share."""
    holders = [p for p in parents if layer in p.layers]
    first = holders[0]
    # The experts of a module share a rank with its other parameters, which the file does not name.
    whole = bool(parameters(layer, first.config))
    with _named(layer):
        parts, groups = _factors(parents, layer), first.groups(layer)
        if how.rank and how.rank < groups:
            raise ValueError(f"a convolution in {groups} groups has a rank of at least {groups}, not {how.rank}")
        G, H, lost = replace(how, rank=how.rank and how.rank // groups).factors(parts, whole)
    dtype = common_dtype([p.tensor(p.layers[layer]["A"]) for p in holders])
    tensors = first.packed(layer, G, H, dtype, parents[0].has_alphas)
    biased = any(p.config.get("lora_bias") for p in parents) and "embedding_B" not in first.layers[layer]["B"]
    if biased or any("bias" in p.layers[layer] for p in holders):
        key = next((p.layers[layer]["bias"] for p in holders if "bias" in p.layers[layer]), f"{layer}.lora_B.bias")
        tensors[key] = how.array([p.bias(layer, groups * G.shape[-2]).to(G) for p in parents]).to(dtype)
    return tensors, G.shape[-1] * groups, lost


def _mean(key: str, own: list[tuple[Adapter, float]]) -> Tensor:
    """Return the mean of what is no product, over the adapters that have it."""
    shapes = {str(p.place): tuple(p.tensor(key).shape) for p, _ in own}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"{key} is no product: adapters of weight above 0 have no mean of the shapes {shapes}")
    total = sum(w for _, w in own)
    mean = reduce(torch.add, (w / total * in_double(p.tensor(key)) for p, w in own))
    dtype = common_dtype([p.tensor(key) for p, _ in own])
    return (mean if dtype.is_floating_point or dtype.is_complex else mean.round()).to(dtype)


def _layers(parents: Iterable[Adapter]) -> list[str]:
    return sorted({layer for p in parents for layer in p.layers})


@contextmanager
def _named(layer: str) -> Iterator[None]:
    """Let errors begin with the path of the layer."""
    try:
        yield
    except (ValueError, ArithmeticError) as error:
        error.args = (f"{module_of(layer)}: {error}", *error.args[1:])
        raise


def _factors(parents: list[Adapter], layer: str) -> list[Factors]:
    """Read s B and Aᵀ of a layer from each adapter, of rank 0 if it lacks the layer; raise if widths differ."""
    found = {i: p.factors(layer) for i, p in enumerate(parents) if layer in p.layers}
    shapes = [(len(G), G.shape[-2], H.shape[-2]) for G, H in found.values()]
    places = [str(parents[i].place) for i in found]
    layouts = {parents[i].layout for i in found if parameters(layer, parents[i].config)}
    swapped = "; PEFT 0.19.0 and 0.19.1 changed which side of an expert is its input" if len(layouts) > 1 else ""
    if len(set(shapes)) > 1:
        raise ValueError(f"experts, outputs and inputs are {shapes} in {places}{swapped}")
    if swapped and shapes[0][1] == shapes[0][2]:
        raise ValueError(
            f"experts with as many outputs as inputs cannot be told from their transposes in {places}{swapped}"
        )
    G, H = next(iter(found.values()))
    return [found.get(i, (G[..., :0], H[..., :0])) for i in range(len(parents))]


def _checked_weights(parents: list[Adapter], weights: Sequence[float] | None, method: str) -> list[float]:
    """Return the weights of a merge, or raise."""
    given = [1.0 if method == "ties" else 1 / len(parents) for _ in parents] if weights is None else [*weights]
    if not parents or len(given) != len(parents) or not all(map(math.isfinite, given)):
        raise ValueError(f"{len(parents)} adapters need as many weights, finite, got {given}")
    if method in MANIFOLDS and (min(given) < 0 or sum(given) <= 0):
        raise ValueError(f"a mean on the quotient needs weights that are not negative, not all zero, got {given}")
    return [w / sum(given) for w in given] if method in MANIFOLDS else given


def _check_alike(parents: list[Adapter], how: Method) -> None:
    """Raise if adapters cannot be merged, and warn if they name different models."""
    first, *rest = parents
    tokens = [p.config["trainable_token_indices"] for p in parents if p.config.get("trainable_token_indices")]
    if any(indices != tokens[0] for indices in tokens):
        raise ValueError(f"the adapters trained different tokens, so they cannot be merged: {tokens}")
    for p in rest:
        if odd := [name for name, value in first.common.items() if p.common[name] != value]:
            raise ValueError(f"{first.place} and {p.place} differ in {odd[0]}, so they cannot be merged")
        pair = first.layers.keys(), p.layers.keys()
        bare = [{layer.partition(".")[2] for layer in layers} for layers in pair]  # without transformer., unet., …
        if not pair[0] & pair[1] and (pair[0] & bare[1] or pair[1] & bare[0]):
            raise ValueError(f"only one of {first.place} and {p.place} has names with a prefix: rename the keys of one")
        bases = [of.config.get("base_model_name_or_path") for of in (first, p)]
        if bases[0] != bases[1]:
            warnings.warn(f"{first.place} is of the model {bases[0]!r}, {p.place} of {bases[1]!r}", stacklevel=3)
    magnitudes = [{layer for layer, parts in p.layers.items() if "magnitude" in parts} for p in parents]
    is_mean = how.name not in ("ties", "dare") and min(how.weights) >= 0 and abs(sum(how.weights) - 1) < 1e-6
    if any(magnitudes) and not (is_mean and all(m == magnitudes[0] for m in magnitudes)):
        raise ValueError(
            "DoRA divides by the norm of the adapted weight, so that only a mean is defined: all adapters have DoRA in "
            "the same layers, and weights are not negative and have the sum 1"
        )
    for key in sorted({key for p in parents for key in p.averaged}):
        of = [w for p, w in zip(parents, how.weights, strict=True) if key in p.averaged]
        if min(of) < 0 or max(of) == 0:
            raise ValueError(
                f"{key} is saved as a whole, as a task's head or trained tokens are, which has a mean over adapters of "
                f"weights above 0 but no meaning with {of}: give such weights, or leave it out of the adapters"
            )


def _metadata(parents: list[Adapter], ranks: dict[str, int]) -> dict[str, str]:
    """Return the metadata of a merged file: those of the first, with what follows from the new ranks."""
    metadata = {k: v for k, v in parents[0].metadata.items() if k not in _HASHES}
    rank = str(max(ranks.values())) if len(set(ranks.values())) == 1 else "Dynamic"
    metadata |= {k: rank for k in ("ss_network_dim", "ss_network_alpha") if k in metadata}
    if HEADER in metadata:
        config = dict[str, Any]()
        for prefix in sorted({prefix for p in parents for prefix in p.configs}):
            own = {layer: r for layer, r in ranks.items() if layer.startswith(prefix)}
            configs = [p.options(next(iter(at)))[1] for p in parents if (at := own.keys() & p.layers.keys())]
            merged = merged_config(configs, {layer.removeprefix(prefix): r for layer, r in own.items()})
            config |= {f"{prefix}{option}": value for option, value in merged.items()}
        metadata[HEADER] = json.dumps(config, indent=2, sort_keys=True)
    return metadata
