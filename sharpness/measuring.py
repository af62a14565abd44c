"""Around the loop: the space that the first batch helps to find, where directions lie, and what is said at last."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.passes import to_device
from quotient_manifolds.symmetries import Cause, Refusal, Slot, SymmetricPair, Symmetries
from quotient_manifolds.symmetries.attention import HANDLERS, candidates, check_coverage
from quotient_manifolds.symmetries.lora import zero_norm
from quotient_manifolds.symmetries.refusals import UnknownAttentionError
from quotient_manifolds.symmetries.roles import roles_of
from quotient_manifolds.weights import naming, plain_class, plain_names, weights_of

from .batches import to_float32
from .direction import PARTS, Direction, Place, WeightParts
from .distributed import world_of
from .losses import SMALL, Objective, check_batches, rounding_error
from .measures import Measure, divides, get_measure
from .patch import Patch
from .patches import trainable
from .space import Unreached, WeightSpace
from .watching import computed_in

#: Number of modules or weights that a remark names.
_NAMED = 12
_NO_GRADIENT = "got no gradient from any batch, so the result says nothing about them"
_ZERO_GRADIENT = "have a gradient of exactly 0 on every batch, so to first order no loss changes with them"
#: Up to so much the loss at the canonical form, in which every weight is computed anew, may differ relatively: in
#: roundings of the space's dtype or of what the model computes in, float32 at least; and in those of anything rougher.
_REWRITTEN, _ROUNDED = 1e4, 4
_OF_PAIRS = {"qk": "Q–K", "vo": "V–O", "lora": "LoRA", "glu": "MLP", "relu": "MLP"}
_LETTERS = {"Q–K": "qk", "V–O": "vo"}
_EMBEDDING = re.compile(
    r"embed|cls_token|dist_token|distillation_token|mask_token|(^|[._])(wte|wpe|shared)\b|patch|conv1"
)
_HEAD = re.compile(
    r"(^|\.)(classifier|pre_classifier|score|lm_head|head|fc|fc_out|pooler|cls|proj|visual_projection)(\.|$)"
)
#: A path up to its last number, and what is below: ``vit.layers.3.attention`` is in ``vit.layers.3``.
_BELOW = re.compile(r"^((?:.*\.)?\d+)(?:\..*)?$")


@contextmanager
def attached_space(
    model: nn.Module, batches: Iterable[Any], measure: Measure, objective: Objective,
    symmetries: Symmetries | None = None, *, sharded: bool,
) -> Iterator[tuple[WeightSpace, Iterator[tuple[int, Any]]]]:  # fmt: skip
    """Attach the space of a model, of which :func:`check_whole` tells whether it is sharded, and number the batches.

    The first one helps to find the space.
    """
    check_batches(batches)
    with torch.inference_mode(False), torch.enable_grad():
        stream = world_of(model).alike(batches) if sharded else iter(batches)
        first = next(stream, stream)  # an end is told by what no batch can be
        if first is stream:
            raise ValueError("batches is empty; pass at least one batch")
        moving, remarks, dividing = trainable(model, whole=False), list[str](), divides(measure)
        make = partial(_space_of_shards(), model) if sharded else partial(WeightSpace, model, moving=moving)
        first = to_device(first, next(iter(moving.values())).device)
        loss, symmetries = _check_first(
            model, objective, first, symmetries, remarks, dividing=dividing, sharded=sharded
        )
        if measure.form == "own":
            space = make(measure, symmetries)
        else:
            make = partial(make, symmetries=symmetries)
            space = _at_canonical_form(make, measure, objective, first, loss, remarks)
        space.remarks = remarks
        if symmetries is None and not dividing and not sharded:
            space.examine = partial(_heads_of, model, objective, to_float32(first) if space.in_float32 else first)
        with space.attached():
            yield space, enumerate(itertools.chain([first], stream))


def _space_of_shards() -> type[WeightSpace]:
    """Import what only sharded models need."""
    from .sharded import ShardedSpace

    return ShardedSpace


def _check_first(
    model: nn.Module, objective: Objective, batch: Any, symmetries: Symmetries | None, remarks: list[str], *,
    dividing: bool, sharded: bool,
) -> tuple[float, Symmetries | None]:  # fmt: skip
    """Check that the loss is finite, and examine layers of unknown classes unless symmetries are given.

    Returns the loss, and the symmetries: those given, those found by examination, or None if the model's classes name
    them.
    """
    if symmetries is not None and not isinstance(symmetries, Symmetries):
        raise TypeError(f"symmetries must be as find(model) returns them, got {type(symmetries).__name__}")
    run = partial(objective.value, model, batch)
    try:
        loss: float = check_coverage(model, run, symmetries) if dividing else run()
    except UnknownAttentionError as error:
        if symmetries is not None:
            remarks.append(f"outside of the pairs that were given, {error}")
            warnings.warn(remarks[-1], stacklevel=2)  # it stands in the result too: a warning is easily lost
            loss = run()
        elif sharded:
            how = "a sharded model is not examined, so pass symmetries=find(model, batch) of before"
            raise UnknownAttentionError(error.path, error.cls, f"{error.call}; {how} fully_shard") from error
        else:
            symmetries = _examined(model, objective, batch, remarks)
            loss = check_coverage(model, run, symmetries)
    if not math.isfinite(loss):
        why = zero_norm(model) or "a sharpness needs a finite loss to start from"
        raise ValueError(f"the loss of batch 0 is {loss}; {why}")
    return loss, symmetries


def _examined(model: nn.Module, objective: Objective, batch: Any, remarks: list[str]) -> Symmetries:
    """Find symmetries by an examination on the first batch, and remark what was examined and what came of it."""
    from quotient_manifolds.symmetries import find

    def losses(model: nn.Module, batch: Any) -> list[Tensor]:
        return [objective(model, part, graph=False).loss for _, part in objective.pieces(model, batch)]

    found, plain = find(model, batch, forward=losses), plain_names(model)
    classes = {plain(name): type(m).__name__ for name, m in model.named_modules() if HANDLERS.of(m) is None}
    counts, reasons = Counter[str](), dict[str, dict[str, None]]()
    for p in found.claims:
        if p.module in classes:
            counts[classes[p.module]] += isinstance(p, SymmetricPair)
            of_class = reasons.setdefault(classes[p.module], {})
            of_class |= {p.reason: None} if isinstance(p, Refusal) else {}
    if reasons:
        said = [f"{cls} ({counts[cls]} pairs{''.join(f'; {r}' for r in of)})" for cls, of in reasons.items()]
        remarks.append(f"layers of classes without a handler were examined on the first batch: {', '.join(said)}")
    refused = [r.name for r in found.refused if r.cause is Cause.CHANGES and r.module not in classes]
    if refused:
        remarks.append(f"left out, for {Cause.CHANGES.value}: {', '.join(refused)}")
    return found


def _heads_of(model: nn.Module, objective: Objective, batch: Any) -> list[SymmetricPair]:
    """List the pairs of layers of unknown classes, one by one; with names that tell all, none is examined."""
    from quotient_manifolds.symmetries.examination import examine_model
    from quotient_manifolds.symmetries.found import placed, settled

    roles = map(roles_of, candidates(model).values())
    if all(r is not None and all(len(p.letters) == 1 for p in r.values()) for r in roles):
        return []
    name_of, found = naming(model), examine_model(model, partial(objective.value, model, batch))
    claims = [p for path, of_module in found.items() for p in placed(of_module, path, name_of)]
    return list(Symmetries.of_claims(settled(claims, model)).pairs)


def _at_canonical_form(
    make: Callable[..., WeightSpace], measure: Measure, objective: Objective, batch: Any, loss: float,
    remarks: list[str],
) -> WeightSpace:  # fmt: skip
    """Build the space at the canonical form, where the loss must be unchanged, with or without centred logits."""
    for classes in (True, False):
        space = make(measure, classes=classes)
        model = space.model
        if space.in_float32 and classes:
            batch = to_float32(batch)
            with make(get_measure("euclidean")).attached():
                loss = objective.value(model, batch)
        with space.attached():
            run = partial(objective.value, model, batch)
            moved, rounding = run(), rounding_error(model)
            alike = _alike(space, moved, loss, rounding)
            alike = alike or _alike(space, moved, loss, max(rounding, computed_in(run)))
        if alike:
            break
    else:
        raise ValueError(
            f"in the canonical form of {plain_class(model).__name__} the loss is {moved:.8g} instead of {loss:.8g}: it "
            "is not wired, or not used, as its class says (hooks, replaced layers, unusual inputs?); register its "
            "wiring, or use the measure 'geodesic-inv'"
        )
    assert space.form is not None
    found = space.form.symmetries
    inside_pairs = {name for pair in found.pairs for name in pair.names}  # of a sharded model perhaps a few rows
    told = not found.unwired or (space.given is not None and bool(space.given.actions))  # or a user knows them
    if not told and not inside_pairs.issuperset(space.parameters):
        remarks.append(
            f"{plain_class(model).__name__}: {found.unwired}, so {measure.name} divides out "
            "its heads and key biases alone, and other symmetries move the result; describe it with "
            "register_wiring, or use the measure 'geodesic-inv'"
        )
        warnings.warn(remarks[-1], stacklevel=2)
    some = len(space.parameters) < len(space.weights)  # of the weights move
    if some and (halting := _halting(found, space.parameters)):
        names = _listed(weights_of(model), halting)
        remarks.append(
            f"frozen weights keep {measure.name} from dividing out symmetries that move trained ones too, so that "
            f"networks of one function may differ in it; train these as well: {names}"
        )
    return space


def _halting(symmetries: Symmetries, moving: Collection[str]) -> set[str]:
    """Name the weights that, not moving, keep symmetries from being divided out that would move lengths of others."""
    adapters = {name for p in (*symmetries.pairs, *symmetries.refused) if p.kind == "lora" for name in p.names}
    # The lengths of neurons go with their scale, and those of vectors do not depend on a rotation of the stream.
    halves = [
        set(r.names)
        for r in symmetries.refused
        if r.cause is Cause.FROZEN and r.kind != "rotation" and r.part != "neurons"
    ]
    return {name for half in halves if (half - adapters) & set(moving) for name in half if name not in moving}


def _alike(space: WeightSpace, moved: float, loss: float, rounding: float) -> bool:
    """Whether the loss at the canonical form is the same on all processes."""
    single, own = torch.finfo(torch.float32).eps, torch.finfo(space.dtype).eps
    tolerance = max(_REWRITTEN * max(own, min(rounding, single)), _ROUNDED * rounding)
    return space.agree(abs(moved - loss) <= tolerance * max(abs(loss), 10 * SMALL))


def remarks_on(space: WeightSpace, unreached: Unreached) -> tuple[str, ...]:
    """Say all that was noticed of a space, and which of its weights no gradient reached."""
    remarks = list(space.remarks)
    sizes = {name: p.numel() for name, p in space.parameters.items()}
    for some, what in ((unreached.weights, _NO_GRADIENT), (unreached.flat - unreached.weights, _ZERO_GRADIENT)):
        if some:
            count = f"{sum(sizes[name] for name in some):,} of {sum(sizes.values()):,}"
            remarks.append(f"{count} weights {what}: {_listed(sizes, some)}")
    return tuple(remarks)


def _listed(every: Iterable[str], chosen: Collection[str]) -> str:
    """List chosen parameters among all; a module of which all are chosen is one name."""
    met = {part for name in every if name not in chosen for part in _within(name)}
    names = list(dict.fromkeys(next(m for m in _within(name) if m not in met) for name in every if name in chosen))
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _within(name: str) -> list[str]:
    """List the modules that hold a parameter, from the outside, and its own name."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


# -- where a direction lies --------------------------------------------------------------------------------------------


@torch.no_grad()
def direction_of(space: WeightSpace, xi: Tensor) -> Direction:
    """Return the tangent vector with some coordinates, such as an eigenvector, at the model's own weights, on the CPU.

    The attached model has other factors. Its velocity is that of :meth:`WeightSpace.push_forward_to_copies`.

    Parameters
    ----------
    space : WeightSpace
        Attached.
    xi : Tensor
        Horizontal coordinates, (dim,).

    Returns
    -------
    Direction
        For :func:`perturbed` and the plots, with its share in every layer.

    Examples
    --------
    >>> import torch
    >>> from sharpness import MEASURES, WeightSpace, direction_of
    >>> space = WeightSpace(torch.nn.Linear(2, 1, bias=False), MEASURES["euclidean"])
    >>> with space.attached():
    ...     direction_of(space, torch.tensor([3.0, 4.0])).norm
    5.0
    """
    out = {name: torch.zeros_like(copy) for name, copy in space.copies.items()}
    vector = list(space.each(xi))
    for patch, c in vector:
        patch.vector_(out, c, at_model=True)
    tensors = {name: out[name].cpu() for name in space.parameters}
    if not space.parts:
        pairs = [p for p in space.known.pairs if p.part != "neurons"]
        if space.given is not None or not divides(space.measure):  # labels, which it does not need otherwise
            from quotient_manifolds.symmetries import find

            pairs = [*find(space.model).pairs, *(space.examine() if space.given is None else space.given.pairs)]
        space.parts.update(parts_of(space.model, space.parameters, pairs))
    return Direction(space.measure, tensors, space.norm(xi), squares_of(vector, space.parts), space.divided)


def parts_of(
    model: nn.Module, weights: Mapping[str, Tensor], pairs: Collection[SymmetricPair]
) -> dict[str, WeightParts]:
    """Return the layer and parts to which the entries of every weight belong.

    Queries and keys, values and outputs are known from the model's pairs, trainable or not, and from the roles of the
    weights of attention layers without a symmetry; the others from the kind of their module: weights of embeddings and
    convolutions, and parameters named as tokens, count as embeddings, all vectors as norms and biases, a last linear
    layer as the head, and all other matrices as MLP.

    Parameters
    ----------
    model : nn.Module
    weights : mapping of str to Tensor
        Its parameters that move, by name.
    pairs : collection of SymmetricPair
        All its pairs, frozen ones too.
    """
    inside: dict[str, list[tuple[str, Slot]]] = {}
    for pair in pairs:
        for s in dict.fromkeys(pair.slots + pair.null):
            inside.setdefault(s.name, []).append((_OF_PAIRS.get(pair.kind, "other pairs"), s))
    plain, found = plain_names(model), dict[str, WeightParts]()
    known = {name: m for name, m in model.named_modules() if HANDLERS.of(m) is not None}
    layers = {plain(name): m for name, m in (known | candidates(model)).items()}
    heads = [p.module for p in pairs if p.head is not None and p.kind != "lora"]
    blocks = {_BELOW.sub(r"\1", path) for path in (*heads, *layers)}
    roles = dict[str, str]()
    for path, layer in layers.items():
        for letter, where in (roles_of(layer) or {}).items():
            for own in [where.weight] + [where.bias] * (letter != "o"):
                name = f"{path}.{where.name(own)}".removeprefix(".")
                claimed = {one for part, _ in inside.get(name, ()) for one in _LETTERS.get(part, "")}
                roles[name] = "Q–K" if {"q", "k"} & set(where.letters) - claimed else "V–O"
    tables = {f"{plain(n)}.weight" for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.Conv2d))}
    for name, p in weights.items():
        around = [b for b in blocks if name.startswith(f"{b}.")]
        block = max(around, key=len) if around else _BELOW.sub(r"\1", name.rpartition(".")[0]) or name
        embeds, part = name in tables or bool(_EMBEDDING.search(name)), roles.get(name, "MLP")
        if name not in roles:
            if block not in blocks and _HEAD.search(name) and not embeds:
                part = "head"
            elif name in tables or (p.dim() > 1 and embeds):
                part = "embeddings"
            elif p.squeeze().dim() < 2:
                part = "norms and biases"
        found[name] = WeightParts(block, part, inside.get(name, ()))
    return found


def squares_of(vector: Iterable[tuple[Patch, Tensor]], weights: Mapping[str, WeightParts]) -> dict[Place, float]:
    """Add up the squared coordinates of a vector at every place, in the order of the parameters.

    Coordinates of single weights have the shape of their parameter, or as many numbers.
    """
    found = defaultdict[Place, float](float)
    for patch, c in vector:
        lengths = c.view(len(patch.pairs), -1).square().sum(1).tolist() if patch.pairs else []
        for pair, square in zip(patch.pairs, lengths, strict=True):
            layer = weights[pair.G[0].name].layer
            if pair.metric and pair.kind != "point":  # weights that are computed from a point
                layer = _BELOW.sub(r"\1", pair.module)
            found[layer, _OF_PAIRS.get(pair.kind, "other pairs"), pair.head] += square
        for name in () if patch.pairs else patch.names:
            squares, (layer, rest, inside) = c.square(), weights[name]
            for part, s in inside:
                found[layer, part, None] += float(s.of(squares).sum())
                s.of(squares).zero_()
            found[layer, rest, None] += float(squares.sum())
    layers = list(dict.fromkeys([*(of.layer for of in weights.values()), *(layer for layer, *_ in found)]))
    places = sorted(found, key=lambda place: (layers.index(place[0]), PARTS.index(place[1]), place[2] or 0))
    return {place: found[place] for place in places if found[place] > 0}
