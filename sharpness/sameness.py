"""Whether two checkpoints are one function, fine-tunes of one another, or unrelated, and what lies between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.errors import is_mendable
from quotient_manifolds.passes import floats, tree_map, widened
from quotient_manifolds.symmetries import ALL, Slot, default_forward, find
from quotient_manifolds.symmetries.orbits import change
from quotient_manifolds.symmetries.whole import Alignment, align_models, independence_test
from quotient_manifolds.weights import weights_of

from .errors import require_extra
from .models import LoadedModel

with require_extra("comparing two models needs pandas", "plot"):
    import pandas as pd


class Verdict(Enum):
    """What two networks are to each other; the value says it in words.

    Examples
    --------
    >>> Verdict.UNRELATED.value
    'unrelated'
    """

    SAME = "one function"
    FORMATS = "one function in two formats"
    TUNED = "fine-tunes of one another, or of one model"
    UNRELATED = "unrelated"
    #: Nothing says whether they are related.
    DIFFERENT = "not one function"

    @property
    def same(self) -> bool:
        """Whether they are one function."""
        return self in (Verdict.SAME, Verdict.FORMATS)


@dataclass(frozen=True)
class Sameness:
    """What :func:`judge` has found.

    Attributes
    ----------
    verdict : Verdict
    evidence : tuple of str
    distances : pandas.DataFrame
        Distances of the weights by kind, before and after the alignment, relative to the norm of all; empty if the
        models could not be aligned.

    Examples
    --------
    See :func:`judge`.

    >>> Sameness(Verdict.UNRELATED, ("p = 0.3",), pd.DataFrame()).evidence
    ('p = 0.3',)
    """

    verdict: Verdict
    evidence: tuple[str, ...]
    distances: pd.DataFrame


@torch.no_grad()
def judge(one: LoadedModel, other: LoadedModel) -> Sameness:
    """Compare two models of one architecture, modulo every symmetry; neither is changed.

    They are *one function* if their outputs on random inputs or their aligned weights differ by rounding alone, a
    thousand times the precision of the coarser dtype. Else they are *fine-tunes* if
    :func:`~quotient_manifolds.symmetries.whole.independence_test` has p < 0.001, and *unrelated* if not. Where it has
    no p-value, because no layer has more neurons than the stream is wide, they are *not one function*.

    Parameters
    ----------
    one, other : LoadedModel

    Returns
    -------
    Sameness

    Raises
    ------
    ValueError
        The models are not found to be one function, and weights are not finite, no wiring is known of a model, or their
        layers differ.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import move_
    >>> layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
    >>> one = LoadedModel(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 3, 8))
    >>> other = copy.deepcopy(one)
    >>> _ = move_(other.model)
    >>> judge(one, other).verdict.value
    'one function'
    """
    dtypes = {p.dtype for m in (one, other) for p in m.model.parameters()}
    tolerance = max(1e-8, min(1e3 * max(torch.finfo(t).eps for t in dtypes), 0.03))
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    a, b = (copy.deepcopy(m.model).to(wide) for m in (one, other))
    apart = _difference(a, b, *(widened(m.example, wide) for m in (one, other)))
    formats = [f"{type(a).__name__} and {type(b).__name__}"] if type(a) is not type(b) else _untied(a, b)
    evidence, distances, near = list[str](), pd.DataFrame(), False
    try:
        found = align_models(a, b)[1]
    except ValueError as error:
        if not is_mendable(error):
            raise
        evidence.append(f"weights: not aligned ({error})")
    else:
        if found.after.get("qk", 0) > tolerance * found.size:
            for x, y in _reordered(a, b):
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
    # Outputs amplify the rounding of weights; those of another format may be anything.
    same = apart <= tolerance or (near and (bool(formats) or not apart > 100 * tolerance))
    verdict, of_neurons = _kinship(a, b, needed=not same and distances.empty)
    if same:
        verdict = Verdict.FORMATS if formats else Verdict.SAME
    of_outputs = "not compared" if math.isnan(apart) else f"largest relative change {apart:.0e}"
    return Sameness(verdict, (f"outputs on random inputs: {of_outputs}", of_neurons, *evidence), distances)


def _kinship(a: nn.Module, b: nn.Module, *, needed: bool) -> tuple[Verdict, str]:
    """Return the verdict on two functions and its evidence; without a p-value raise if it is needed."""
    try:
        test = independence_test(a, b)
    except ValueError as error:
        if needed or not is_mendable(error):
            raise
        return Verdict.DIFFERENT, f"no p-value: {error}"
    p = f"= {test.p_value:.2g}" if test.p_value > 1e-99 else "< 1e-99"
    said = f"neurons matched alike by both sides: {test.agreeing:,} of {test.neurons:,}, by chance {test.layers}; p {p}"
    return Verdict.TUNED if test.p_value < 1e-3 else Verdict.UNRELATED, said


def _difference(a: nn.Module, b: nn.Module, inputs: Any, others: Any) -> float:
    """Return the largest change of an output, on random tokens or images; NaN if they cannot be compared."""
    shapes, other_shapes = (tree_map(lambda t: t.shape, each) for each in (inputs, others))
    if inputs is None or shapes != other_shapes:
        return math.nan
    if isinstance(inputs, dict):
        words, drawn = min(getattr(m.config, "vocab_size", 2) for m in (a, b)), torch.Generator().manual_seed(0)
        tokens = [k for k in inputs if k.endswith("input_ids")]
        inputs |= {k: torch.randint(words, inputs[k].shape, generator=drawn) for k in tokens}
    x, y = ([t for t in floats(default_forward(m, inputs)) if t.dim()][:1] for m in (a, b))
    comparable = [t.shape for t in x] == [t.shape for t in y] and all(bool(t.isfinite().all()) for t in x)
    return change(x, y) if comparable else math.nan


def _untied(a: nn.Module, b: nn.Module) -> list[str]:
    """Give the weights that only one of two models ties a copy of their own, and say which."""
    listed, uses = ([{*dict(m.named_parameters(remove_duplicate=once))} for m in (a, b)] for once in (True, False))
    names = sorted((listed[0] ^ listed[1]) & uses[0] & uses[1])
    for model, name in product((a, b), names):
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, nn.Parameter(model.get_parameter(name).clone()))
    return [f"{', '.join(names)} tied in one alone"] if names else []


def _reordered(a: nn.Module, b: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Give both, with the queries and keys of one of them read as if RoPE's planes were interleaved, not in halves."""
    for k in range(2):
        two = [copy.deepcopy(m) for m in (a, b)]
        weights = {name: p.data for name, p in weights_of(two[k]).items()}
        slots = dict.fromkeys(s for p in find(two[k]).pairs if p.part == "rotary" for s in p.slots)
        for rows in (s.of(weights[s.name]) for s in slots):
            rows.copy_(rows.transpose(1, 2).reshape(rows.shape).clone())
        if slots:
            yield two[0], two[1]


def _between(a: nn.Module, b: nn.Module, found: Alignment) -> list[str]:
    """Name the symmetries that lead from one model to the other."""
    one, other = (weights_of(m) for m in (a, b))
    actions = zip(*(find(m, scope=ALL).actions for m in (a, b)), strict=True)
    kinds = [x.kind for x, y in actions if not _alike(x.constant, one, y.constant, other)]
    Q = found.element.stream
    kinds += ["rotation of the stream"] * (Q is not None and not _is_identity(Q))
    for name, move in found.element.cells.items():
        what = "neurons" if name.endswith("neurons") else "heads"
        kinds += [f"permutation of {what}"] * bool((move.order.diff() != 1).any())
        kinds += [f"group elements of {what}"] * (not all(map(_is_identity, move.inner.values())))
    return list(dict.fromkeys(kinds))


def _alike(
    slots: Iterable[Slot], one: Mapping[str, Tensor], others: Iterable[Slot], other: Mapping[str, Tensor]
) -> bool:
    return all(torch.allclose(s.read(one), t.read(other)) for s, t in zip(slots, others, strict=True))


def _is_identity(A: Tensor) -> bool:
    return torch.allclose(A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), atol=1e-3)
