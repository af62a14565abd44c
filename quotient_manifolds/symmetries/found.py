"""What a network does not see of its weights, as one value; how it is settled, and what a gradient says of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..weights import is_sharded, places_of, unwrapped, weights_of
from .certificate import Certificate
from .pairs import PairStack, SymmetricPair, check_pairs, orbit_residuals
from .refusals import Cause, Claim, Refusal, refused
from .slots import Slot

if TYPE_CHECKING:
    from .actions import Action
    from .wiring import Wiring


@dataclass(frozen=True)
class Symmetries:
    """The continuous symmetries of a network's weights: a value of names and numbers, without the network.

    Attributes
    ----------
    pairs : tuple of SymmetricPair
        The weights that the network sees only through products.
    refused : tuple of Refusal
        What has no symmetry, or none that can be used, and why.
    actions : tuple of Action
        All other symmetries, in the order of folding.
    wiring : Wiring or None
        How the network is wired, if it was asked for and is known.
    tied : tuple of (str, str)
        Further names of tied weights in the model's state dict, each with the first one, which slots have.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find
    >>> print(found := find(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)))
    self_attn qk    2 × GL(4), 9+9 rows
    self_attn vo    2 × GL(4), 9+8 rows
    >>> found.dimension, len(found.restricted(["self_attn.in_proj_weight"]).pairs)
    (64, 0)
    """

    pairs: tuple[SymmetricPair, ...] = ()
    refused: tuple[Refusal, ...] = ()
    actions: tuple[Action, ...] = field(default=(), repr=False)
    wiring: Wiring | None = field(default=None, repr=False)
    tied: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[SymmetricPair | Action]:
        """Iterate over pairs, then all other symmetries in the order of folding."""
        yield from self.pairs
        yield from self.actions

    @classmethod
    def of_claims(cls, claims: Sequence[Claim]) -> Symmetries:
        """Sort pairs and refusals."""
        pairs = tuple(p for p in claims if isinstance(p, SymmetricPair))
        return cls(pairs, tuple(p for p in claims if isinstance(p, Refusal)))

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Pairs and refusals."""
        return (*self.pairs, *self.refused)

    @property
    def dimension(self) -> int:
        """Number of real parameters of the group."""
        return sum(self.dimensions.values())

    @property
    def dimensions(self) -> dict[str, int]:
        """The dimension of every kind of symmetry."""
        found: Counter[str] = Counter()
        for s in self:
            found[s.kind] += s.dimension
        return dict(found)

    @property
    def wired(self) -> bool:
        """Whether an adapter describes the network; else only heads, adapters and key biases are known."""
        return not self.unwired

    @property
    def unwired(self) -> str:
        """Why the network is not wired; empty if it is."""
        if self.wiring is None or not (self.wiring.sites or self.wiring.reason):
            return "no adapter describes how this network is wired"
        return "" if self.wiring.sites else f"its adapter does not fit: {self.wiring.reason}"

    def restricted(self, names: Iterable[str]) -> Symmetries:
        """Return what is left where only the weights of some names move, which a wrapper such as DDP may have changed.

        Pairs with other weights are refused. Of two with the same weights, as LoRA's factors that also are rows of an
        attention pair, that of the attention stays, unless it is too thin for a point and LoRA's is not. A symmetry
        without those that must be folded before it is refused.
        """
        names = [names] if isinstance(names, str) else list(names)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                "names of weights are strings, as in dict(model.named_parameters()), not weights themselves"
            )
        known = {name for p in (*self.pairs, *self.refused) for name in p.names}
        moving = set(unwrapped(names, known.union(*(a.names for a in self.actions))))
        whole = [p for p in self.pairs if moving.issuperset(p.names)]
        best_last = sorted(whole, key=lambda p: (p.thin, p.kind == "lora"), reverse=True)
        by_lora = {name: p.kind == "lora" for p in best_last for name in p.names}  # whose a weight is
        found, out = list[SymmetricPair](), list(self.refused)
        for p in self.pairs:
            if still := sorted(set(p.names) - moving):
                out.append(refused(p, Cause.FROZEN, ", ".join(still)))
            elif all(by_lora[name] == (p.kind == "lora") for name in p.names):
                found.append(p)
            elif p.kind == "lora":
                out.append(refused(p, Cause.OVERLAPS, "that of the attention, whose weights are trained"))
            else:
                out.append(_thin(p))
        actions = _closed(a for a in self.actions if moving.issuperset(a.names)) if self.actions else ()
        if len(actions) < len(self.actions):
            folded = {a.label for a in actions}
            for a in (a for a in self.actions if a.label not in folded):
                still = sorted(set(a.names) - moving)
                missing = [label for label in a.after if label not in folded]
                cause, why = (Cause.FROZEN, still) if still else (Cause.UNFOLDED, missing)
                out.append(Refusal(a.name, a.kind, cause, ", ".join(why), G=a.slots))
        return replace(self, pairs=tuple(found), refused=tuple(out), actions=actions)

    def adding(self, *more: SymmetricPair | Action) -> Symmetries:
        """Add pairs of your own, and other symmetries, which are folded after those that are there.

        Raises
        ------
        TypeError
            One is neither.
        ValueError
            One has the name of another, or a pair shares numbers with one.
        """
        from .actions import Action  # what heads alone do not need

        actions = [s for s in more if isinstance(s, Action)]
        pairs = check_pairs(s for s in more if not isinstance(s, Action))
        labels = {s.label for s in self} | {r.name for r in self.refused if r.H}
        for label in [p.label for p in pairs] + [a.label for a in actions]:
            if label in labels:
                raise ValueError(f"two symmetries are called {label!r}; give each of yours another name")
            labels.add(label)
        _check_disjoint(self.pairs, pairs)
        mine = {name for p in pairs for name in p.names}
        left = tuple(r for r in self.refused if r.cause is not Cause.UNNAMED or not _holds(r.module, mine))
        return replace(self, pairs=(*self.pairs, *pairs), actions=(*self.actions, *actions), refused=left)

    def without_null(self) -> Symmetries:
        """Divide the key biases out too: they add one number to all scores of a query, which softmax ignores.

        Left in H as one more row, as in the paper, moving one has a length, and sharpness depends on its value. (Under
        RoPE it is not a null direction, and stays.)
        """
        return replace(self, pairs=tuple(replace(p, H=tuple(s for s in p.H if s not in p.null)) for p in self.pairs))

    def of_full_rank(self) -> Symmetries:
        """Refuse the pairs whose factors have fewer rows than columns; they are no points of a manifold."""
        kept, thin = (tuple(p for p in self.pairs if p.thin == is_thin) for is_thin in (False, True))
        return replace(self, pairs=kept, refused=(*self.refused, *map(_thin, thin)))

    def of_kind(self, kinds: Collection[str]) -> Symmetries:
        """Return the pairs and actions of some kinds, but for actions that need others to be folded before."""
        actions = _closed(a for a in self.actions if a.kind in kinds)
        return replace(self, pairs=tuple(p for p in self.pairs if p.kind in kinds), actions=actions)

    def _lines(self) -> Counter[tuple[str, str]]:
        """Count claims by their place and what is said of them."""
        lines: Counter[tuple[str, str]] = Counter()
        for p in self.claims:
            place = p.name if p.head is None else f"{p.module} {p.kind}"
            what = f"none ({p.reason})" if isinstance(p, Refusal) else f"{p.group}, {p.n}+{p.m} rows"
            lines[place, what] += 1
        return lines

    def _repr_html_(self) -> str:
        """Show the kinds with their dimensions, and the layers, in a notebook."""
        from ..notebook import Bar, html_table

        kinds = html_table(["kind", "dimension"], [[kind, Bar(size)] for kind, size in self.dimensions.items()])
        layers = [[place, count, what] for (place, what), count in self._lines().items()]
        return kinds + html_table(["layer", "heads", "what acts on them"], layers)

    def __str__(self) -> str:
        lines = self._lines()
        wide = max((len(place) for place, _ in lines), default=0)
        rows = [f"{place:<{wide}}  {count:>3} × {what}" for (place, what), count in lines.items()]
        return "\n".join(rows) or "no symmetric pairs"

    def table(self) -> str:
        """Return the dimension of every kind of symmetry as text, and what was refused."""
        lines = [f"{kind:<12} {dimension:>9,}" for kind, dimension in self.dimensions.items()]
        lines.append(f"{'all':<12} {self.dimension:>9,}")
        if not self.wired:
            lines.append(f"only heads and key biases: {self.unwired} (register_wiring)")
        reasons = Counter((r.kind, r.reason) for r in self.refused if r.kind not in _OF_HEADS)
        return "\n".join([*lines, *(f"not folded: {n} × {kind} ({why})" for (kind, why), n in reasons.items())])


_OF_HEADS = ("qk", "vo", "lora", "attention")


def _closed(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return actions as they are where only these are left: without those that need others to be folded before."""
    kept = tuple(actions)
    while lost := {label for a in kept for label in a.after} - {a.label for a in kept}:
        kept = tuple(a for a in kept if lost.isdisjoint(a.after))
    left = set(kept)
    return tuple(a.among(left) for a in kept)


def check_symmetries(symmetries: object) -> None:
    """Raise for anything but symmetries."""
    if not isinstance(symmetries, Symmetries):
        raise TypeError(f"symmetries must be as find(model) returns them, got {type(symmetries).__name__}")


def check_names(symmetries: Symmetries, weights: Collection[str], model: str) -> None:
    """Raise for symmetries with weights that a model has not."""
    for s in symmetries:
        if lost := next((name for name in s.names if name not in weights), None):
            raise ValueError(f"the symmetry {s.label!r} belongs to another model: {model} has no weight {lost!r}")


def _thin(p: SymmetricPair) -> Refusal:
    """Refuse a pair of which a factor has too few rows."""
    return refused(p, Cause.THIN, f"{p.group.h} columns, {p.n} and {p.m} rows")


def _holds(module: str, names: Iterable[str]) -> bool:
    """Return whether a module holds a weight of some names."""
    return any(not module or name.startswith(f"{module}.") for name in names)


def _check_disjoint(pairs: Sequence[SymmetricPair], new: Sequence[SymmetricPair]) -> None:
    """Raise for a new pair that shares numbers with another one."""
    every, mine = (*pairs, *new), {name for p in new for name in p.names}
    places = Counter(s.name for p in every for s in p.slots)
    owners: dict[object, Tensor] = {}  # of every number of the weights in several slots: the pair it belongs to, from 1
    for i, p in enumerate(every):
        for s in p.slots if mine.intersection(p.names) else ():
            if places[s.name] > 1:
                own = s.of(owners.setdefault((s.name, s.shape), torch.zeros(s.shape, dtype=torch.int32)))
                if i >= len(pairs) and (owner := int(own.max())):
                    raise ValueError(
                        f"pair {p.name!r} uses numbers of {s.name!r} that already belong to pair "
                        f"{every[owner - 1].name!r}"
                    )
                own.fill_(i + 1)


# -- from what layers claim to what holds in the model -----------------------------------------------------------------


def placed(claims: Iterable[Claim], path: str, name_of: Callable[[str, str], str]) -> Iterator[Claim]:
    """Name the weights of claims on the module at a path as in the model, by its ``naming``: tied ones by the first."""
    for p in claims:
        G, H, null = (tuple(replace(s, name=name_of(path, s.name)) for s in side) for side in (p.G, p.H, p.null))
        p = p if set(G).isdisjoint(H) else refused(p, Cause.TIED)
        yield replace(p, module=name_of(path, ""), G=G, H=H, null=null)


def merged(claims: Iterable[Claim]) -> list[Claim]:
    """Merge pairs that share a slot (grouped queries, shared layers); refuse those without a common group."""
    found: dict[int, Claim] = {}
    home: dict[Slot, int] = {}
    for i, p in enumerate(claims):
        found[i] = p
        slots = p.slots if isinstance(p, SymmetricPair) else ()
        sharing = sorted({i, *(home[s] for s in slots if s in home)})
        home.update(dict.fromkeys(slots, sharing[0]))
        if len(sharing) > 1 or len(set(slots)) < len(slots):
            _merge_(found, home, sharing)
    return list(found.values())


def _merge_(found: dict[int, Claim], home: dict[Slot, int], numbers: Sequence[int]) -> None:
    """Let the first of some claims have the slots of all, each once, or refuse all of them."""
    (first, *others), parts = numbers, [found[i] for i in numbers]
    G, H, null = (tuple(dict.fromkeys(s for p in parts for s in getattr(p, name, ()))) for name in ("G", "H", "null"))
    home.update(dict.fromkeys(G + H, first))
    known = next((p for p in parts if isinstance(p, Refusal)), None)
    if known is not None or not set(G).isdisjoint(H):
        cause, detail = (known.cause, known.detail) if known is not None else (Cause.TIED, "")
        found.update((i, refused(found[i], cause, detail)) for i in numbers)
        return
    for i in others:
        del found[i]
    found[first] = replace(parts[0], G=G, H=H, null=null)


def settled(claims: Iterable[Claim], model: nn.Module, *, decided: bool = False) -> list[Claim]:
    """Merge pairs that share a slot; refuse those of weights that are computed, or that are held elsewhere too.

    Whether that matters is ``decided`` where the model is run: what holds a weight may not be used.

    LoRA's factors may be rows of attention pairs as well; these claims stand side by side.
    """
    weights, held, claims = weights_of(model), places_of(model), list(claims)
    places = {(p.kind == "lora", p.module, name) for p in claims for name in p.names}
    claimed = Counter((lora, name) for lora, _, name in places)
    found = list[Claim]()
    for p in merged(claims):
        computed = [name for name in p.names if name not in weights]
        shared = not decided and any(held[name] > claimed[p.kind == "lora", name] for name in p.names)
        cause = Cause.COMPUTED if computed else Cause.SHARED if shared else None
        found.append(p if cause is None else refused(p, cause, "".join(computed[:1])))
    return _without_sharing(found, weights)


def _without_sharing(claims: Sequence[Claim], weights: Mapping[str, Tensor]) -> list[Claim]:
    """Refuse the pairs of which a number belongs to two slots, whichever parameters have it in their memory."""
    memories: dict[object, list[tuple[int, Slot, Tensor]]] = {}
    for i, p in enumerate(claims):
        for s in p.slots if isinstance(p, SymmetricPair) else ():
            t = weights[s.name]
            # Expanded numbers stand in for weights elsewhere (the twin of a sharded model) and share their memory.
            if t.device.type != "meta" and not is_sharded(t) and 0 not in t.stride():
                home = (p.kind == "lora", t.untyped_storage().data_ptr(), t.dtype)
                memories.setdefault(home, []).append((i, s, t))
    shared = set[int]()
    for slots in memories.values():
        first = slots[0][2]
        memory = first.new_zeros(first.untyped_storage().nbytes() // first.element_size(), dtype=torch.uint8)
        places = {t: memory.as_strided(t.shape, t.stride(), t.storage_offset()) for *_, t in slots}
        counts = {t: memory.new_zeros(t.shape) for t in places}  # of slots, up to two
        for _, s, t in slots:
            s.of(counts[t]).add_(1).clamp_(max=2)
        for t, count in counts.items():
            places[t].add_(count).clamp_(max=2)
        shared.update(i for i, s, t in slots if bool((s.of(places[t].contiguous()) != 1).any()))
    return [refused(p, Cause.SHARED) if i in shared else p for i, p in enumerate(claims)]


# -- what a gradient says of it ----------------------------------------------------------------------------------------

#: Residuals up to this count as rounding of half-precision gradients, which under autocast float32 weights have too.
#: Measured on trained networks: up to 7e-3; in float32 up to 3e-6, in float64 up to 6e-15.
HALF_PRECISION = 0.1


def certify(
    found: Iterable[PairStack],
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    *,
    tolerance: float = HALF_PRECISION,
    waiting: set[SymmetricPair] | None = None,
) -> Certificate:
    """Check with the gradient of a loss whether assumed symmetries of the weights hold.

    Parameters
    ----------
    found : iterable of PairStack
    weights : mapping of str to Tensor
        Where the gradient was taken, by name.
    gradients : mapping of str to Tensor
        Of any scale; those absent count as zero.
    tolerance : float
        Residuals up to this count as rounding. The default is for half precision, because a float32 gradient does not
        show whether half precision was used; 1e-4 is enough for one that was computed in float32.
    waiting : set of SymmetricPair, optional
        The pairs that had no gradient yet: stacks of others are left out, and those that have one now are removed.

    Returns
    -------
    Certificate

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import certify, find, stacks
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x, weights = torch.randn(2, 3, 8), dict(layer.named_parameters())
    >>> layer(x, x, x)[0].square()[..., 0].sum().backward()
    >>> gradients = {name: p.grad for name, p in weights.items()}
    >>> certify(stacks(find(layer).pairs, weights), weights, gradients, tolerance=1e-4).failures
    ()
    """
    residuals = dict[Any, float]()
    for s in found if waiting is None else [s for s in found if not waiting.isdisjoint(s.pairs)]:
        residuals.update(zip(s.pairs, orbit_residuals(s, weights, gradients).tolist(), strict=True))
    unreached = tuple(p for p, r in residuals.items() if math.isnan(r))
    if waiting is not None:
        waiting.intersection_update(unreached)
    return Certificate({p: r for p, r in residuals.items() if not math.isnan(r)}, unreached, tolerance)
