"""Whether two checkpoints are one function, fine-tunes of one another, or unrelated, and what lies between them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import default_forward, find_symmetric_pairs
from quotient_manifolds.symmetries.certificate import change
from quotient_manifolds.symmetries.modules import floats, tree_map
from quotient_manifolds.symmetries.whole import Alignment, align_models, canonical_form, independence_test

from .models import LoadedModel


@dataclass(frozen=True)
class Sameness:
    """What :func:`judge` has found.

    Attributes
    ----------
    verdict : str
        ``"one function"``, ``"one function in two formats"``, ``"fine-tunes of one another, or of one model"`` or
        ``"unrelated"``.
    evidence : tuple of str
    distances : pandas.DataFrame
        Distances of the weights by kind, before and after the alignment, relative to the norm of all; empty if the
        models could not be aligned.

    Examples
    --------
    See :func:`judge`.

    >>> Sameness("unrelated", ("p = 0.3",), pd.DataFrame()).evidence
    ('p = 0.3',)
    """

    verdict: str
    evidence: tuple[str, ...]
    distances: pd.DataFrame


@torch.no_grad()
def judge(one: LoadedModel, other: LoadedModel) -> Sameness:
    """Compare two models of one architecture, modulo every symmetry; neither is changed.

    They are *one function* if their outputs on random inputs or their aligned weights differ by rounding alone, a
    thousand times the precision of the coarser dtype. Else they are *fine-tunes* if
    :func:`~quotient_manifolds.symmetries.whole.independence_test` has p < 0.001, and *unrelated* if not.

    Parameters
    ----------
    one, other : LoadedModel

    Returns
    -------
    Sameness

    Raises
    ------
    ValueError
        Weights are not finite, no wiring is known of a model, their layers differ, or no layer has more neurons than
        the stream is wide.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import apply_random_symmetry_
    >>> layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
    >>> one = LoadedModel(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 3, 8))
    >>> other = copy.deepcopy(one)
    >>> _ = apply_random_symmetry_(other.model)
    >>> judge(one, other).verdict
    'one function'
    """
    dtypes = {p.dtype for m in (one, other) for p in m.model.parameters()}
    tolerance = max(1e-8, min(1e3 * max(torch.finfo(t).eps for t in dtypes), 0.03))
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    a, b = (copy.deepcopy(m.model).to(wide) for m in (one, other))
    example = tree_map(lambda t: t.to(wide) if t.is_floating_point() else t, one.example)
    test, apart = independence_test(a, b), _difference(a, b, example)
    evidence = [
        f"outputs on random inputs: {'not compared' if math.isnan(apart) else f'largest relative change {apart:.0e}'}",
        f"neurons matched alike by both sides: {test.agreeing:,} of {test.neurons:,}, by chance {test.layers}; "
        f"p {f'= {test.p_value:.2g}' if test.p_value > 1e-99 else '< 1e-99'}",
    ]
    formats = [f"{type(a).__name__} and {type(b).__name__}"] if type(a) is not type(b) else _untied(a, b)
    distances, near = pd.DataFrame(), False
    try:
        found = align_models(a, b)[1]
    except ValueError as error:
        evidence.append(f"weights: not aligned ({error})")
    else:
        if found.after.get("qk", 0) > tolerance * found.size:
            for x, y in ((a, _interleaved(b)), (_interleaved(a), b)):
                trial = align_models(x, y)[1]
                if trial.after["qk"] < found.after["qk"] / 2:
                    found = trial
                    formats.append("RoPE's planes in halves and interleaved")
        near = found.distance <= tolerance * found.size
        distances = pd.DataFrame({"before": found.before, "after": found.after}) / found.size
        distances.loc["all"] = distances.pow(2).sum().pow(0.5)
        evidence += [f"{kind}: distance {x:.2g}, aligned {y:.2g}" for kind, x, y in distances.itertuples()]
        evidence += [f"between them: {', '.join(_between(a, b, found)) or 'nothing'}"] if near else []
    evidence += [f"formats: {'; '.join(formats)}"] if formats else []
    verdict = "fine-tunes of one another, or of one model" if test.p_value < 1e-3 else "unrelated"
    # Outputs amplify the rounding of weights; those of another format may be anything.
    if apart <= tolerance or (near and (formats or not apart > 100 * tolerance)):
        verdict = "one function in two formats" if formats else "one function"
    return Sameness(verdict, tuple(evidence), distances)


def _difference(a: nn.Module, b: nn.Module, example: Any) -> float:
    """Return the largest change of an output, on random tokens or images; NaN where none are known or shapes differ."""
    if example is None:
        return math.nan
    if isinstance(example, dict):
        words, drawn = getattr(a.config, "vocab_size", 2), torch.Generator().manual_seed(0)
        example = {
            k: torch.randint(words, x.shape, generator=drawn) if k.endswith("input_ids") else x
            for k, x in example.items()
        }
    x, y = ([t for t in floats(default_forward(m, example)) if t.dim()][:1] for m in (a, b))
    return change(x, y) if [t.shape for t in x] == [t.shape for t in y] else math.nan


def _untied(a: nn.Module, b: nn.Module) -> list[str]:
    """Give the weights that only one of two models ties a copy of their own, and say which."""
    found, uses = [], [dict(m.named_parameters(remove_duplicate=False)) for m in (a, b)]
    for name in uses[0].keys() & uses[1].keys():
        tied = [sum(p is q for q in use.values()) > 1 for use in uses for p in (use[name],)]
        if tied[0] != tied[1]:
            model, (path, _, own) = (a, b)[tied[1]], name.rpartition(".")
            setattr(model.get_submodule(path), own, nn.Parameter(uses[tied[1]][name].clone()))
            found.append(name)
    return [f"{', '.join(sorted(found))} tied in one alone"] if found else []


def _interleaved(model: nn.Module) -> nn.Module:
    """Return a copy whose queries and keys are read as if RoPE's planes were interleaved, not in halves."""
    twin = copy.deepcopy(model)
    pairs = [p for p in find_symmetric_pairs(twin, include_frozen=True) if p.part == "rotary" and p.group is not None]
    for b in {b.key: b for p in pairs for b in p.G + p.H}.values():
        rows = b.of(b.tensor.data)
        rows.copy_(rows.transpose(1, 2).reshape(rows.shape).clone())
    return twin


def _between(a: nn.Module, b: nn.Module, found: Alignment) -> list[str]:
    """Name the symmetries that lead from one model to the other."""
    forms = [canonical_form(m.requires_grad_(True)).symmetries for m in (a, b)]
    kinds = [
        x.kind
        for x, y in zip(*forms, strict=True)
        if any(not torch.allclose(p.of(p.tensor), q.of(q.tensor)) for p, q in zip(x.constant, y.constant, strict=True))
    ]
    Q = found.element.stream
    kinds += ["rotation of the stream"] * (Q is not None and not _is_identity(Q))
    for name, move in found.element.cells.items():
        what = "neurons" if name.endswith("neurons") else "heads"
        kinds += [f"permutation of {what}"] * bool((move.order.diff() != 1).any())
        kinds += [f"group elements of {what}"] * (not all(_is_identity(A) for A in move.inner if A is not None))
    return list(dict.fromkeys(kinds))


def _is_identity(A: Tensor) -> bool:
    return torch.allclose(A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), atol=1e-3)
