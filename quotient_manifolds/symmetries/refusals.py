"""What is no symmetry, or none that can be used, and why: causes, refusals, and the errors that say so."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .pairs import Place, SymmetricPair, place_name
from .slots import Slot


class Cause(Enum):
    """Why weights have no symmetry that can be used; the value says it in words.

    Examples
    --------
    >>> from quotient_manifolds.symmetries import Cause
    >>> Cause.FROZEN.value
    'frozen'
    """

    TIED = "both factors contain the same weights; only an orthogonal group is left"
    SHARED = "its weights are used in another place too (shared or overlapping memory)"
    COMPUTED = "computed, not a parameter"
    FROZEN = "frozen"
    THIN = "a factor has fewer rows than columns"
    #: It may reach full rank later.
    DEFICIENT = "both factors lack full rank"
    CHANGES = "moves along its orbit change the outputs of the model on this batch"
    #: The module could not be examined.
    UNREACHED = "the batch does not reach it"
    UNCERTIFIED = "not certified: the gradient is zero"
    UNNAMED = "the names of its weights do not tell its queries, keys, values and outputs"
    FAILED = "could not be examined"
    #: Something in the layer breaks it; the detail says what.
    BROKEN = "no symmetry"
    SKIPPED = "skipped on request"
    #: The same numbers belong to another symmetry.
    OVERLAPS = "its weights belong to another pair"
    UNFOLDED = "what must be folded before it cannot be"

    @property
    def unexamined(self) -> bool:
        """Whether it says that a module could not be examined."""
        return self in (Cause.UNREACHED, Cause.UNCERTIFIED, Cause.UNNAMED, Cause.FAILED)


@dataclass(frozen=True)
class Refusal(Place):
    """What has no symmetry, or none that can be used, and why.

    Attributes
    ----------
    module, kind, head, part, name
        As those of :class:`SymmetricPair`; the kind of a whole layer is ``"attention"``.
    cause : Cause
    detail : str
        More words, for people.
    G, H : tuple of Slot
        The weights, as far as they are known, one column for every dimension of a head.
    null : tuple of Slot
        As that of the pair that was refused.
    slots, names : tuple of Slot, tuple of str
        The slots of G and H, and the names of the weights that they lie in, each once.

    Examples
    --------
    >>> from quotient_manifolds.symmetries import Cause, Refusal
    >>> print(Refusal("layers.0", "attention", Cause.SKIPPED))
    layers.0: skipped on request
    """

    module: str
    kind: str
    cause: Cause
    detail: str = ""
    head: int | None = None
    part: str = ""
    G: tuple[Slot, ...] = field(default=(), repr=False)
    H: tuple[Slot, ...] = field(default=(), repr=False)
    null: tuple[Slot, ...] = field(default=(), repr=False)
    name: str = field(init=False, repr=False, compare=False)
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        slots = self.G + self.H
        vars(self).update(name=place_name(self), slots=slots, names=tuple(dict.fromkeys(s.name for s in slots)))

    @property
    def reason(self) -> str:
        """The cause in words."""
        if self.cause is Cause.BROKEN and self.detail:
            return self.detail
        between = " " if self.cause is Cause.FAILED else ": "
        return f"{self.cause.value}{between}{self.detail}" if self.detail else self.cause.value

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


#: What is known of a place in a network.
Claim = SymmetricPair | Refusal


def refused(p: Claim, cause: Cause, detail: str = "") -> Refusal:
    """Refuse a pair, and say why; what is refused already stays as it is."""
    if isinstance(p, Refusal):
        return p
    return Refusal(p.module, p.kind, cause, detail, p.head, p.part, p.G, p.H, p.null)


class NotASymmetryError(ValueError):
    """A pair that was to be divided out is not a symmetry of the loss.

    Attributes
    ----------
    pair : SymmetricPair
        The worst one.
    residual, tolerance : float
        Its residual, see :class:`Certificate`, and up to where it counts as rounding.

    Examples
    --------
    There is a ReLU between the factors:

    >>> import torch
    >>> from quotient_manifolds.symmetries import GL, NotASymmetryError, PairStack, certify, pair, slot
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    >>> G = [slot(model, "0.weight", transpose=True), slot(model, "0.bias")]
    >>> wrong, weights = pair(G, [slot(model, "2.weight")], GL(3), name="layers"), dict(model.named_parameters())
    >>> model(torch.randn(8, 5)).square().sum().backward()
    >>> found = certify([PairStack([wrong])], weights, {name: p.grad for name, p in weights.items()})
    >>> try:
    ...     found.check()
    ... except NotASymmetryError as error:
    ...     print(error.pair.name, error.residual > 0.1)
    layers True
    """

    def __init__(self, pair: SymmetricPair, residual: float, tolerance: float) -> None:
        super().__init__(pair, residual, tolerance)  # all of them, so that pickle can make it anew
        self.pair, self.residual, self.tolerance = pair, residual, tolerance

    def __str__(self) -> str:
        return (
            f"the pair {self.pair.name!r} is not a symmetry of the loss: along its orbit the gradient does not vanish "
            f"(residual {self.residual:.1e}, rounding is up to {self.tolerance:.0e}); something acts between its "
            "factors (a hook, an adapter, a subclass, shared memory), or the loss has a penalty on the weights, or the "
            "gradient was clipped entry by entry, or was not taken at these weights (no zero_grad since they moved; or "
            "on purpose: optimizer.certify = False); leave the pair out of the symmetries, or skip its layer with "
            "quotient_manifolds.symmetries.skip"
        )


class UnknownAttentionError(ValueError):
    """A module computes attention, but no handler knows which symmetries its weights have.

    Attributes
    ----------
    path : str
        The module's name in the model.
    cls : type
        Its class.
    call : str
        What it calls.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import UnknownAttentionError, check_coverage
    >>> class SelfSimilarity(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return (x @ x.mT).softmax(-1) @ super().forward(x)
    >>> model = torch.nn.Sequential(SelfSimilarity(4, 4))
    >>> try:
    ...     check_coverage(model, lambda: model(torch.ones(1, 3, 4)))
    ... except UnknownAttentionError as error:
    ...     print(error.path, error.cls.__name__)
    0 SelfSimilarity
    """

    def __init__(self, path: str, cls: type, call: str) -> None:
        super().__init__(path, cls, call)  # all of them, so that pickle can make it anew
        self.path, self.cls, self.call = path, cls, call

    def __str__(self) -> str:
        name = f"{self.cls.__module__}.{self.cls.__qualname__}"
        return (
            f"module {self.path!r} of class {name} computes attention (it calls {self.call}), but no handler knows the "
            "symmetries of this class; write a handler with quotient_manifolds.symmetries.register_attention, treat "
            f"its weights as having no symmetry with quotient_manifolds.symmetries.skip({name!r}), or use "
            'measure="adaptive", which needs none'
        )
