"""Merge, resize, balance and compare adapters by the products of their factors."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..linalg import in_double
from ..manifold import MANIFOLDS
from .folders import CONFIG, Adapter, module_of, new_folder, parameters, read, write_tensors
from .products import Factors, Method, balanced, present, product_svd

Path = str | os.PathLike[str]
#: Options that say which layers are adapted, and those in which adapters that are merged have to agree.
_SELECTION = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_COMMON = ("target_parameters", "trainable_token_indices", "alora_invocation_tokens", "layer_replication")


def merge(
    adapters: Sequence[Path],
    out: Path,
    *,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    energy: float | None = None,
    method: str = "sum",
    space: str = "core",
    density: float = 0.5,
    seed: int = 0,
) -> None:
    r"""Merge LoRA adapters into one, by the products of their factors and without the model.

    .. math:: \hat B \hat A = \sum_i w_i s_i B_i A_i

    Adapters may differ in ranks, scales :math:`s_i` and layers; a layer that one lacks is a product of 0. A warning
    says if they name different models. The result does not depend on the factors in which a product is stored. Its own
    are balanced, :math:`\hat B^T \hat B = \hat A \hat A^T`, and its scale is 1.

    Parameters
    ----------
    adapters : sequence of path
        Folders that peft saved, with ``adapter_config.json`` and ``adapter_model.safetensors``; or single files with
        the names of kohya's scripts or of diffusers, all of one kind.
    out : path
        Folder to create; an existing one has to be empty. It appears when it is complete. What is made of single files
        has the name and the keys of the first.
    weights : sequence of float, optional
        One for each adapter, of any sign. By default all are 1/k, so that the sum is a mean, and 1 for ``"ties"``,
        which takes a mean by itself.
    rank : int, optional
        Largest rank of a layer. By default nothing is lost: a layer gets the rank of its sum, which is the sum of the
        ranks or less. A smaller one gives the nearest product of that rank in the Frobenius norm.
    energy : float, optional
        Keep as many singular values as hold this share of the sum of their squares, such as 0.99.
    method : {"sum", "ties", "dare", "inv", "mix"}
        The sum; of what is left when small entries are trimmed and a sign is elected (TIES, Yadav et al. 2023); or when
        entries are dropped by chance, the others enlarged (DARE, Yu et al. 2024). Or the Fréchet mean on the quotient
        in a metric, for equal layers and ranks and weights that are not negative, which are divided by their sum.
    space : {"core", "knots"}
        In which coordinates TIES and DARE take entries: common bases of all B and all A (Core Space, Panariello et al.
        2025), or of all products side by side (KnOTS, Stoica et al. 2025).
    density, seed : float and int
        Share of the entries that TIES and DARE keep, and seed of DARE.

    Raises
    ------
    ValueError, OSError, ConvergenceError
        A folder holds no LoRA of plain products, adapters or options do not fit; a folder is missing, or ``out`` is not
        empty; or adapters are too far apart for a mean on the quotient.

    Notes
    -----
    What is no product has no such freedom. A bias of B is merged like products. Saved modules and tokens, and
    magnitudes of DoRA, are averaged over the adapters that have them and a weight above 0, by weights divided by their
    sum. DoRA divides by the norm of W + BA, so that of several adapters only a mean is defined: weights of sum 1.

    Examples
    --------
    >>> import peft, tempfile, torch
    >>> from quotient_manifolds.adapters import compare, merge
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config)
    >>> model.save_pretrained(f"{folder.name}/a")
    >>> merge([f"{folder.name}/a"] * 2, f"{folder.name}/twice", weights=[1, 1])
    >>> f"{compare(f'{folder.name}/a', f'{folder.name}/twice')['layers']['0']['distance']:.3f}"
    '0.500'
    >>> folder.cleanup()
    """
    parents = [read(place) for place in adapters]
    how = Method(method, space, density, torch.Generator().manual_seed(seed))
    if (rank is not None and rank < 1) or (energy is not None and not 0 < energy <= 1):
        raise ValueError(f"rank is at least 1, energy a share above 0 and at most 1, got {rank} and {energy}")
    weighted, ranks = list(zip(parents, _checked_weights(parents, weights, method), strict=True)), dict[str, int]()
    _check_alike(weighted, method)
    with new_folder(out) as folder:
        write_tensors(folder / parents[0].weights.name, _tensors(weighted, how, ranks, rank, energy or 1.0))
        if config := _config(parents, ranks):
            (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        base = json.dumps(parents[0].config.get("base_model_name_or_path") or "")
        card = f"---\nbase_model: {base}\nlibrary_name: peft\n---\n\nMerged by quotient-lora, method {method}, from\n\n"
        (folder / "README.md").write_text(card + "".join(f"- {w:g} × {p.place}\n" for p, w in weighted))


def resize(adapter: Path, out: Path, *, rank: int | None = None, energy: float | None = None) -> None:
    """Write the nearest adapter of a smaller rank, in the Frobenius norm of each layer's product.

    Parameters
    ----------
    adapter, out : path
        As for :func:`merge`.
    rank, energy : int and float, optional
        As for :func:`merge`; one of them.

    Examples
    --------
    >>> import peft, tempfile, torch
    >>> from quotient_manifolds.adapters import compare, resize
    >>> config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config)
    >>> model.save_pretrained(f"{folder.name}/a")
    >>> resize(f"{folder.name}/a", f"{folder.name}/small", rank=2)
    >>> compare(f"{folder.name}/a", f"{folder.name}/small")["layers"]["0"]["rank"]
    [4, 2]
    >>> folder.cleanup()
    """
    if rank is None and energy is None:
        raise ValueError("say to which rank, or which share of energy to keep")
    merge([adapter], out, rank=rank, energy=energy)


def balance(adapter: Path, out: Path) -> None:
    r"""Write an adapter of the same products with balanced factors, :math:`B^T B = A A^T` = diag(σ).

    Training goes on from them at rates that suit factors of equal size. Ranks and scales remain. A layer whose product
    lacks full rank, as at B = 0, has no balanced factors from which all its directions could be trained, and keeps its
    own.

    Parameters
    ----------
    adapter, out : path
        As for :func:`merge`.

    Examples
    --------
    >>> import peft, safetensors.torch, tempfile, torch
    >>> from quotient_manifolds.adapters import balance
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config)
    >>> model.save_pretrained(f"{folder.name}/a")
    >>> balance(f"{folder.name}/a", f"{folder.name}/balanced")
    >>> A, B = safetensors.torch.load_file(f"{folder.name}/balanced/adapter_model.safetensors").values()
    >>> torch.allclose(B.mT @ B, A @ A.mT, atol=1e-6)
    True
    >>> folder.cleanup()
    """
    parent = read(adapter)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for layer in parent.layers:
            U, sigma, V = product_svd(*parent.factors(layer))
            root = sigma.sqrt().unsqueeze(-2)
            full = sigma.shape[-1] == parent.rank_and_scale(layer)[0] and bool(present(sigma).all())
            new = parent.packed(layer, U * root, V * root) if full else {}
            for key in parent.layers[layer].values():
                own = parent.tensor(key)
                yield key, new.get(key, own).to(own.dtype)
        yield from ((key, parent.tensor(key)) for key in parent.others)

    with new_folder(out) as folder:
        write_tensors(folder / parent.weights.name, tensors())
        if parent.config:
            (folder / CONFIG).write_text((parent.place / CONFIG).read_text())


def compare(one: Path, other: Path) -> dict[str, Any]:
    r"""Compare two adapters of any ranks, layer by layer, by their products.

    Parameters
    ----------
    one, other : path
        As for :func:`merge`.

    Returns
    -------
    dict
        ``"layers"``: for each its ``"rank"``, ``"norm"`` and ``"singular_values"``, a pair each (0 and none for a layer
        that one lacks), and ``"distance"``, :math:`\|X - Y\|` divided by the larger norm. ``"differs"``: options
        with their two values, and tensors outside products with their two norms, where they are not the same.

    Examples
    --------
    >>> import peft, tempfile, torch
    >>> from quotient_manifolds.adapters import balance, compare
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config)
    >>> model.save_pretrained(f"{folder.name}/a")
    >>> balance(f"{folder.name}/a", f"{folder.name}/b")
    >>> compare(f"{folder.name}/a", f"{folder.name}/b")["layers"]["0"]["distance"] < 1e-6
    True
    >>> folder.cleanup()
    """
    both = [read(one), read(other)]
    found: dict[str, Any] = {"layers": {}, "differs": {}}
    for layer in _layers(both):
        parts = _factors([p for p in both if layer in p.layers], layer)
        sigmas = iter([product_svd(*part)[1] for part in parts])
        values = [next(sigmas) if layer in p.layers else parts[0][0].new_zeros(1, 0) for p in both]
        signed = [(-G if i else G, H) for i, (G, H) in enumerate(parts)]
        apart = product_svd(*(torch.cat(side, -1) for side in zip(*signed, strict=True)))[1].norm()
        norms = [float(v.norm()) for v in values]
        found["layers"][module_of(layer)] = {
            "rank": [int(present(v).sum(-1).max()) for v in values],
            "norm": norms,
            "distance": float(apart) / max(norms) if max(norms) > 0 else 0.0,
            "singular_values": [v.flatten().tolist() for v in values],
        }
    configs = [p.config for p in both]
    for key in sorted({key for c in configs for key in c}):
        if configs[0].get(key) != configs[1].get(key):
            found["differs"][key] = [c.get(key) for c in configs]
    for key in sorted({key for p in both for key in p.others}):
        tensors = [p.tensor(key) if key in p.others else torch.zeros(0) for p in both]
        if not torch.equal(*tensors):
            found["differs"][key] = [float(t.double().norm()) for t in tensors]
    return found


def _tensors(
    parents: list[tuple[Adapter, float]], how: Method, ranks: dict[str, int], rank: int | None, energy: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a merged adapter, and note the rank of each layer."""
    biased = any(p.config.get("lora_bias") for p, _ in parents)
    for layer in _layers(p for p, _ in parents):
        own = [(p, w) for p, w in parents if layer in p.layers]
        holders, weights = [p for p, _ in own], [w for _, w in own]
        parts = _factors(holders, layer)
        try:
            if how.name in MANIFOLDS and len(own) < len(parents):
                raise ValueError("it is not in all adapters, and a product of 0 has no place on the quotient")
            G, H = how.factors(parts, weights)
        except (ValueError, ArithmeticError) as error:
            error.args = (f"{module_of(layer)}: {error}", *error.args[1:])
            raise
        del parts  # as large as what follows
        first, total = holders[0], sum(p.rank_and_scale(layer)[0] for p in holders)
        # The experts of a module share a rank with its other parameters, which the file does not name.
        G, H = balanced(G, H, min(rank or total, total), energy, whole=bool(parameters(layer, first.config)))
        ranks[layer] = G.shape[-1]
        dtype = reduce(torch.promote_types, [p.tensor(p.layers[layer]["A"]).dtype for p in holders])
        yield from ((key, t.to(dtype)) for key, t in first.packed(layer, G, H).items())
        if "alpha" in first.layers[layer]:
            yield first.layers[layer]["alpha"], torch.tensor(float(ranks[layer]))
        if biased and not first.layers[layer]["B"].endswith("embedding_B"):
            # peft multiplies the bias of B by the scale, too.
            key, absent = f"{layer}.lora_B.bias", G.new_zeros(G.shape[-2])
            biases = [
                p.rank_and_scale(layer)[1] * in_double(p.tensor(key)) if key in p.others else absent for p in holders
            ]
            yield key, how.array(biases, weights).to(dtype)
    for key in sorted({key for p, _ in parents for key in p.others if not key.endswith(".lora_B.bias")}):
        yield key, _mean_of_others(key, [(p, w) for p, w in parents if key in p.others and w > 0])


def _mean_of_others(key: str, own: list[tuple[Adapter, float]]) -> Tensor:
    """Return the mean of what is no product, over the adapters that have it."""
    if not own:
        raise ValueError(f"{key} is no product: it is averaged by weights above 0, and no adapter that has it has one")
    shapes, total = [tuple(p.tensor(key).shape) for p, _ in own], sum(w for _, w in own)
    if len(set(shapes)) > 1:
        raise ValueError(f"{key} has no mean, for its shapes are {shapes} in {[str(p.place) for p, _ in own]}")
    mean = torch.zeros(shapes[0], dtype=torch.float64)
    for p, w in own:
        mean.add_(p.tensor(key), alpha=w / total)
    dtype = reduce(torch.promote_types, [p.tensor(key).dtype for p, _ in own])
    return (mean if dtype.is_floating_point else mean.round()).to(dtype)


def _layers(parents: Iterable[Adapter]) -> list[str]:
    return sorted({layer for p in parents for layer in p.layers})


def _factors(parents: list[Adapter], layer: str) -> list[Factors]:
    """Read s B and Aᵀ of a layer from each adapter that has it, or raise if its widths differ."""
    found = [(p.rank_and_scale(layer)[1] * G, H) for p in parents for G, H in [p.factors(layer)]]
    shapes = [(len(G), G.shape[-2], H.shape[-2]) for G, H in found]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{module_of(layer)} has experts, outputs and inputs {shapes} in {[str(p.place) for p in parents]}"
        )
    return found


def _checked_weights(parents: list[Adapter], weights: Sequence[float] | None, method: str) -> list[float]:
    """Return the weights of a merge, or raise."""
    given = [1.0 if method == "ties" else 1 / len(parents) for _ in parents] if weights is None else [*weights]
    if not parents or len(given) != len(parents) or not all(map(math.isfinite, given)):
        raise ValueError(f"{len(parents)} adapters need as many weights, finite, got {given}")
    if method in MANIFOLDS and (min(given) < 0 or sum(given) <= 0):
        raise ValueError(f"a mean on the quotient needs weights that are not negative, not all zero, got {given}")
    return [w / sum(given) for w in given] if method in MANIFOLDS else given


def _check_alike(parents: list[tuple[Adapter, float]], method: str) -> None:
    """Raise if adapters cannot be merged, and warn if they name different models."""
    (first, *rest), weights = zip(*parents, strict=True)
    for p in rest:
        for option in _COMMON:
            if (first.config.get(option) or None) != (p.config.get(option) or None):
                raise ValueError(f"{first.place} and {p.place} differ in {option}, so they cannot be merged")
        if first.names != p.names:
            raise ValueError(f"{first.place} and {p.place} are of different formats, in which layers have other names")
        bases = [of.config.get("base_model_name_or_path") for of in (first, p)]
        if bases[0] != bases[1]:
            warnings.warn(f"{first.place} is of the model {bases[0]!r}, {p.place} of {bases[1]!r}", stacklevel=3)
    magnitudes = [{key for key in p.others if "lora_magnitude_vector" in key} for p in (first, *rest)]
    is_mean = method not in ("ties", "dare") and min(weights) >= 0 and abs(sum(weights) - 1) < 1e-6
    if any(magnitudes) and rest and not (is_mean and all(m == magnitudes[0] for m in magnitudes)):
        raise ValueError(
            "DoRA divides by the norm of the adapted weight, so that of several adapters only a mean is defined: all "
            "have DoRA in the same layers, and weights are not negative and have the sum 1"
        )


def _config(parents: list[Adapter], ranks: dict[str, int]) -> dict[str, Any]:
    """Return the config of a merged adapter: that of the first, with what follows from all."""
    configs, most = [p.config for p in parents], max(ranks.values())
    less = {layer: r for layer, r in ranks.items() if r < most}
    pattern = {f"^{name}": r for at, r in less.items() for name in parameters(at, configs[0]) or [module_of(at)]}
    new = {"r": most, "lora_alpha": most, "rank_pattern": pattern, "alpha_pattern": pattern, "use_rslora": False}
    new |= {"init_lora_weights": True, "eva_config": None, "lora_bias": any(c.get("lora_bias") for c in configs)}
    new |= next(({"bias": c["bias"]} for c in configs if c.get("bias", "none") != "none"), {})
    new["modules_to_save"] = sorted({name for c in configs for name in c.get("modules_to_save") or ()}) or None
    if any(c.get(name) != configs[0].get(name) for c in configs for name in _SELECTION):
        paths = sorted(module_of(layer) for layer in ranks if not parameters(layer, configs[0]))
        new |= {**dict.fromkeys(_SELECTION), "target_modules": paths}
    # Older versions of peft know fewer options.
    return configs[0] and configs[0] | {k: v for k, v in new.items() if v or k in configs[0]}
