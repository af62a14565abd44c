"""An adapter from two models: the nearest products to the differences of their matrices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..linalg import in_double
from .checkpoints import WeightFiles, read_checkpoint
from .configs import merged_config
from .folders import WEIGHTS, write_card, write_config
from .products import Method, check_kept, present, truncated
from .storage import TensorFile, new_folder

Path = str | os.PathLike[str]
#: Layers of these names are embeddings, if they have no bias, and heads.
_EMBEDDING = re.compile(r"(.*\.)?(\w*emb\w*|wte|wpe|shared|relative_attention_bias)")
_HEAD = re.compile(r"(.*\.)?((\w+_)?head|classifier|score|cls)(\..*)?")
#: Numbers of a weight that are compared at once.
_AT_ONCE = 2**24


def extract(
    base: Path,
    tuned: Path,
    out: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    target_modules: Sequence[str] = (),
    modules_to_save: Sequence[str] = (),
) -> dict[str, Any]:
    r"""Write the LoRA adapter that turns one model into another, as nearly as its rank allows.

    .. math:: \hat B \hat A = \arg\min_{\operatorname{rank} X \le r} \|W' - W - X\|_F

    of every layer's matrices W and W′, by singular values (Eckart and Young 1936). Factors are balanced,
    :math:`\hat B^T \hat B = \hat A \hat A^T`, of scale 1. One layer is in memory at a time, and no model is built.

    Parameters
    ----------
    base, tuned : path
        Two models: folders that ``save_pretrained`` wrote, with one file or several and their index; files; or names on
        the Hugging Face Hub. Layers have the names of the files, which are those that peft meets in the base.
    out : path
        Folder of PEFT to create, or empty. It appears when it is complete.
    rank : int, optional
        The rank of every layer; with ``energy`` the largest.
    energy : float, optional
        Keep as many singular values as hold this share of the sum of their squares.
    target_modules : sequence of str, optional
        Last parts of the paths of the layers to adapt, as in peft's config. By default all that differ, except
        embeddings and heads, which are known by their names.
    modules_to_save : sequence of str, optional
        Layers that the adapter has whole, as in peft's config, such as a new classifier, embeddings or norms.

    Returns
    -------
    dict
        ``"layers"``: for each its ``"rank"``, ``"norm"`` and ``"singular_values"``, those of the difference and of the
        product, and their ``"distance"`` divided by the norm of the difference. ``"left"``: all other weights that are
        not the same, with :math:`\|W' - W\|` divided by the larger norm, 1 where one model lacks the weight.

    Raises
    ------
    ValueError, OSError
        There is nothing to adapt, a matrix has another shape or numbers that are not finite, files are missing, or
        ``out`` is not empty.

    Notes
    -----
    Inputs come first in the matrices of GPT-2's ``Conv1D``, which biases tell from others.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import save_file
    >>> from quotient_manifolds.adapters import extract
    >>> folder, W = Path((temporary := tempfile.TemporaryDirectory()).name), torch.eye(4)
    >>> save_file({"query.weight": W}, folder / "base.safetensors")
    >>> save_file({"query.weight": W + torch.ones(4, 4)}, folder / "tuned.safetensors")
    >>> found = extract(folder / "base.safetensors", folder / "tuned.safetensors", folder / "adapter", rank=1)
    >>> found["layers"]["query"]["rank"], found["left"]
    ([1, 1], {})
    >>> temporary.cleanup()
    """
    check_kept(rank, energy)
    how = Method("sum", [1], rank=rank, energy=energy)
    models = read_checkpoint(base), read_checkpoint(tuned)
    saved = _saved(models[1], modules_to_save)
    paths = [path for path in _chosen(*models, target_modules) if f"{path}.weight" not in saved]
    layers, first = dict[str, Any](), _inputs_first(models[0], paths)
    with new_folder(out) as folder, TensorFile(folder / WEIGHTS) as file:
        for path in paths:
            D, dtype = _difference(*models, f"{path}.weight")
            if bool(D.any()):
                B, A, layers[path] = _adapted(D.mT if path in first else D, how)
                start = f"base_model.model.{path}.lora"
                file.update({f"{start}_A.weight": A.to(dtype), f"{start}_B.weight": B.to(dtype)})
        if not layers:
            raise ValueError(f"{models[0].place} and {models[1].place} differ in no layer that may be adapted")
        shapes = models[0].matrices()
        biases = _biases(*models, {path: shapes[path][path in first] for path in layers})
        file.update({f"base_model.model.{path}.lora_B.bias": bias for path, bias in biases.items()})
        for name in saved:
            file.update({f"base_model.model.{name}": models[1].tensor(name)})
        file.finish({})
        config = merged_config([{}], {path: len(at["singular_values"][1]) for path, at in layers.items()})
        name, _, commit = models[0].origin.partition("@")
        config |= {"peft_type": "LORA", "base_model_name_or_path": name or os.fspath(base), "revision": commit or None}
        config |= {"modules_to_save": [*modules_to_save] or None, "fan_in_fan_out": any(p in first for p in layers)}
        config |= {"lora_bias": bool(biases)}
        write_config(folder, {option: value for option, value in config.items() if value})
        made = f"Made by quotient-lora extract from {models[1].origin or tuned}\n"
        write_card(folder, config["base_model_name_or_path"], made)
        left = dict(
            _left(*models, {*saved, *(f"{path}.weight" for path in layers), *(f"{path}.bias" for path in biases)})
        )
    return {"layers": layers, "left": left}


def _saved(tuned: WeightFiles, modules: Sequence[str]) -> list[str]:
    """List the weights within modules."""
    found = {part: [n for n in tuned.shapes if f".{part}." in f".{n.rpartition('.')[0]}."] for part in modules}
    if lost := [part for part, names in found.items() if not names]:
        raise ValueError(f"{tuned.place} has no weights in {lost[0]!r}, which modules_to_save names")
    return sorted({name for names in found.values() for name in names})


def _chosen(base: WeightFiles, tuned: WeightFiles, target_modules: Sequence[str]) -> list[str]:
    """List the paths of the layers that may be adapted."""
    before, after = base.matrices(), tuned.matrices()
    both = sorted(before.keys() & after.keys())
    if not both:
        one, other = (min(model.shapes, default="nothing") for model in (base, tuned))
        raise ValueError(
            f"{base.place} and {tuned.place} have no matrices of one name, but {one} and {other}: load the base by the "
            "class of the other model, and save it"
        )
    embeddings = {path for path in both if _EMBEDDING.fullmatch(path) and f"{path}.bias" not in base.shapes}
    named = {m: [path for path in both if f".{path}".endswith(f".{m}")] for m in target_modules}
    if odd := [m for m, paths in named.items() if not paths or embeddings.intersection(paths)]:
        why = "is an embedding, which modules_to_save may name" if named[odd[0]] else "names no matrix of both models"
        raise ValueError(f"{odd[0]!r} among target_modules {why}")
    default = (path for path in both if path not in embeddings and not _HEAD.fullmatch(path))
    chosen = sorted({path for paths in named.values() for path in paths}) if named else [*default]
    if odd := [path for path in chosen if before[path] != after[path]]:
        raise ValueError(f"{odd[0]} has the shapes {before[odd[0]]} and {after[odd[0]]}, so no product adapts it")
    return chosen


def _inputs_first(base: WeightFiles, paths: list[str]) -> set[str]:
    """Find layers with weights (in, out), as their biases tell, or those of others of the name."""
    shown = {
        path: base.shapes[f"{path}.bias"][0] == shape[1]
        for path, shape in base.matrices().items()
        if f"{path}.bias" in base.shapes and shape[0] != shape[1]
    }
    alike = dict[str, set[bool]]()
    for path, first in shown.items():
        alike.setdefault(path.rpartition(".")[2], set()).add(first)
    default = set[bool]() if any(shown.values()) else {False}
    sides = {path: {shown[path]} if path in shown else alike.get(path.rpartition(".")[2], default) for path in paths}
    if unclear := [path for path, side in sides.items() if len(side) != 1]:
        raise ValueError(f"nothing tells inputs from outputs in {unclear[0]}: name other layers in target_modules")
    return {path for path, side in sides.items() if True in side}


def _difference(base: WeightFiles, tuned: WeightFiles, name: str) -> tuple[Tensor, torch.dtype]:
    """Return how a weight differs, in float64, and its dtype in an adapter: half precision would lose more."""
    W = tuned.tensor(name)
    D = in_double(W) - in_double(base.tensor(name))
    if D.is_complex():
        raise ValueError(f"{name} is complex, and factors of LoRA are real: name other layers in target_modules")
    if not bool(D.isfinite().all()):
        raise ValueError(f"{name} has NaN or infinite entries in one of the models")
    return D, torch.promote_types(W.dtype, torch.float32)


def _adapted(D: Tensor, how: Method) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return B and A of a layer, and what they keep of its difference."""
    U, sigma, V = _svd(D)
    G, H, lost = truncated((U, sigma, V), how.rank or len(sigma), how.energy or 1.0, whole=how.energy is None)
    kept = int((G.norm(dim=0) > 0).sum())
    values = [sigma.tolist(), [*sigma[:kept].tolist(), *[0.0] * (G.shape[-1] - kept)]]
    norms = [float(sigma.norm()), float(sigma[:kept].norm())]
    return G, H.mT, {"rank": [len(sigma), kept], "norm": norms, "distance": lost, "singular_values": values}


def _svd(D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, σ and V of a matrix in float64, where σ is present, by the eigenvectors V of its smaller Gram matrix.

    σ are the sizes of the columns of D V. They and products are right to √ε σ₁, a tenth of what counts as present, and
    mostly to rounding: 2e-15 σ₁ and 5e-13 σ₁ beside torch's SVD at 4096 × 4096, in 22 s for 38 s of one thread.
    """
    if len(D) < D.shape[1]:
        V, sigma, U = _svd(D.mT)
        return U, sigma, V
    size = D.abs().max()
    D = D / size
    V = torch.linalg.eigh(D.mT @ D).eigenvectors
    U = D @ V
    sigma, order = U.norm(dim=0).sort(descending=True)
    kept = present(sigma)  # what is rounding alone has no directions
    return U[:, order[kept]] / sigma[kept], sigma[kept] * size, V[:, order[kept]]


def _biases(base: WeightFiles, tuned: WeightFiles, outputs: dict[str, int]) -> dict[str, Tensor]:
    """Return what is added to the biases of layers, of which PEFT has one in all or in none."""
    found = {path: torch.zeros(n) for path, n in outputs.items()}
    for path in outputs:
        if base.shapes.get(name := f"{path}.bias", 0) == tuned.shapes.get(name):
            bias, dtype = _difference(base, tuned, name)
            found[path] = bias.to(dtype)
    return found if any(bool(b.any()) for b in found.values()) else {}


def _left(base: WeightFiles, tuned: WeightFiles, taken: set[str]) -> Iterator[tuple[str, float]]:
    """Yield how much other weights differ, of those that do."""
    for name in sorted((base.shapes.keys() | tuned.shapes.keys()) - taken):
        if base.shapes.get(name) != tuned.shapes.get(name):
            yield name, 1.0
            continue
        sums = torch.zeros(3, dtype=torch.float64)
        for parts in zip(*(model.tensor(name).flatten().split(_AT_ONCE) for model in (base, tuned)), strict=True):
            X, Y = map(in_double, parts)
            sums += torch.stack([torch.linalg.vector_norm(v).square() for v in (X - Y, X, Y)])
        if not bool(sums.isfinite().all()):
            raise ValueError(f"{name} has NaN or infinite entries in one of the models")
        if sums[0]:
            yield name, float((sums[0] / sums[1:].max()).sqrt())
