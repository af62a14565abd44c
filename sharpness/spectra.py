"""The spectrum of a curvature matrix of the mean loss: its largest eigenvalues, and the density of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import as_count
from quotient_manifolds.passes import tensors
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.weights import check_whole, plain_class, preserve_model_state

from .batches import count_labels
from .criteria import Scores, criterion_of
from .curvature import HessianOperator, plain_attention
from .errors import check_flags, naming
from .evaluation import progress_bar
from .lanczos import Products, largest, spectral_density
from .losses import BatchLoss, LossFunction, Objective
from .measures import Measure, get_measure
from .measuring import attached_space, remarks_on
from .space import WeightSpace

#: Names of the matrices in results.
MATRICES = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix", "fisher": "empirical Fisher matrix"}


@dataclass(frozen=True)
class Spectrum:
    r"""The spectrum of a curvature matrix; ``print`` shows its largest eigenvalues.

    Attributes
    ----------
    matrix : {"hessian", "ggn", "fisher"}
    measure : Measure
        Whose metric is the identity in the coordinates of the matrix.
    model : str
        Class of the model.
    eigenvalues : tuple of float
        The largest, in value and not in size, in descending order.
    density : tuple of (float, float) or None
        Points λ with weights w that add up to 1: :math:`\sum_i w_i f(λ_i)` estimates the mean of f over all eigenvalues
        on the horizontal space.
    loss : float
        The mean loss over all batches.
    num_matvecs : int
        Number of products with the matrix.
    num_uncertified : int
        Number of pairs that got no gradient from any batch, so that nothing certifies that they are symmetries.
    remarks : tuple of str
        What else was noticed, in sentences.

    Examples
    --------
    >>> import torch, sharpness
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> loss = lambda f, x: (f(x)[0] - 2 * f(x)[1]).square().sum() / 2
    >>> print(sharpness.spectrum(model, [batch], loss, measure="euclidean", k=2))
    largest eigenvalues of the Hessian (euclidean): 5, 0
    """

    matrix: str
    measure: Measure
    model: str
    eigenvalues: tuple[float, ...]
    density: tuple[tuple[float, float], ...] | None
    loss: float
    num_matvecs: int
    num_uncertified: int = 0
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def _repr_html_(self) -> str:
        """Show the eigenvalues with bars in a notebook."""
        from quotient_manifolds.notebook import Bar, html_table

        rows = [[i, Bar(value)] for i, value in enumerate(self.eigenvalues, 1)]
        return html_table(["", f"eigenvalue, {MATRICES[self.matrix]} ({self.measure.name})"], rows, self.remarks)

    def __str__(self) -> str:
        """Show the eigenvalues, and what else was noticed."""
        values = ", ".join(f"{value:.3g}" for value in self.eigenvalues)
        said = [f"largest eigenvalues of the {MATRICES[self.matrix]} ({self.measure.name}): {values}"]
        if self.num_uncertified:
            said.append(f"{self.num_uncertified} pairs got no gradient, so nothing certifies their symmetry")
        return "\n".join([*said, *self.remarks])


def spectrum(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, matrix: str = "hessian",
    measure: str | Measure = "geodesic-inv", k: int = 10, density: bool = False, symmetries: Symmetries | None = None,
    micro_batch: int | None = None, seed: int = 0, progress: bool = True,
) -> Spectrum:  # fmt: skip
    r"""Compute the largest eigenvalues of a curvature matrix of the mean loss over all batches, modulo symmetries.

    .. math:: \text{Hessian}, \qquad C^* \, \tfrac1N \sum_n J_n^T (\nabla^2 \ell_n) J_n \, C, \qquad
              C^* \, \tfrac1N \sum_n \nabla \ell_n \nabla \ell_n^T \, C

    N labels, with losses ℓₙ of scores that have the Jacobian Jₙ, give the last two; C maps coordinates in which the
    metric is the identity to velocities of the weights. :func:`sharpness.hessian` averages eigenvalues of batches, and
    has a trace: this is one matrix for all batches.

    Parameters
    ----------
    model, batches, loss_fn, symmetries, micro_batch, progress
        As :func:`evaluate` takes them. All batches are kept, and a batch counts by its labels that are not ignored.
    matrix : {"hessian", "ggn", "fisher"}
        The Riemannian Hessian of any loss; or, for a cross-entropy or a squared error, its Gauss–Newton matrix or
        empirical Fisher matrix, which need the extra ``curvature``.
    measure : str or Measure
        A name in :data:`MEASURES`; with ``"euclidean"`` it is the ordinary matrix.
    k : int
        Number of eigenvalues; there may be fewer.
    density : bool
        Estimate the spectral density too, from 96 further products.
    seed : int
        Of the random vectors.

    Returns
    -------
    Spectrum

    Raises
    ------
    ValueError
        As for :func:`evaluate`; or the matrix is not that of the loss, or the model is sharded.
    ImportError
        The extra ``curvature`` is missing.

    Notes
    -----
    The eigenvalues are to a relative accuracy of 1e-4, by ARPACK's Lanczos method; the density is that of stochastic
    Lanczos quadrature (Ghorbani, Krishnan, Xiao 2019). Random vectors depend on the orbit alone, so results do too.
    Each label is a term: each token of a language model. A squared error is the mean over all numbers, and its terms
    are means over those of an example. A product is a pass through all batches.

    Examples
    --------
    >>> import torch, sharpness
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> found = sharpness.spectrum(torch.nn.Linear(2, 2), [batch], measure="euclidean", k=3)
    >>> len(found.eigenvalues), found.eigenvalues[0] >= found.eigenvalues[1]
    (3, True)
    """
    measure, objective = get_measure(measure).at_weights, Objective(loss_fn, micro_batch)
    if matrix not in MATRICES:
        raise ValueError(f"matrix must be one of {', '.join(MATRICES)}, got {matrix!r}")
    k, seed = as_count("k", k), as_count("seed", seed, least=0, most=2**63)
    check_flags(density=density, progress=progress)
    if check_whole(model, or_rows=True):
        raise ValueError("the spectrum of a sharded model is not computed: load the model whole")
    state = preserve_model_state(model)
    with (
        state,
        state,  # twice: the second exit repeats a restoration that an interrupt cut short
        progress_bar(None, MATRICES[matrix], "product", progress=progress) as bar,
        attached_space(model, batches, measure, objective, symmetries, sharded=False) as (space, numbered),
        plain_attention(),
    ):
        loss, pieces = _examined(space, objective, numbered)
        product = _product(space, objective, pieces, matrix)
        products = Products(space, product, bar)
        values = largest(products, k, seed)
        points = spectral_density(products, seed) if density else None
        unreached = space.unreached
    return Spectrum(
        matrix, measure, plain_class(model).__name__, values, points, loss, products.number, len(unreached.pairs),
        remarks_on(space, unreached),
    )  # fmt: skip


def _examined(
    space: WeightSpace, objective: Objective, numbered: Iterable[tuple[int, Any]]
) -> tuple[float, list[tuple[float, Any]]]:
    """Check every batch; return the mean loss, and pieces of all batches with their weights in it."""
    model, losses, counts, parts = space.model, list[float](), list[int](), list[list[tuple[float, Any]]]()
    for index, batch in numbered:
        loss = BatchLoss(space, objective, batch, index)
        losses.append(loss.base)
        parts.append(loss.pieces)
        known = any(t.dim() for t in tensors(batch))  # else only loss_fn knows its size
        counts.append(sum(count_labels(model, piece) for _, piece in loss.pieces) if known else 1)
    shares = [count / sum(counts) for count in counts]
    mean = sum(share * value for share, value in zip(shares, losses, strict=True))
    return mean, [(share * w, piece) for share, part in zip(shares, parts, strict=True) for w, piece in part]


def _product(
    space: WeightSpace, objective: Objective, pieces: list[tuple[float, Any]], matrix: str
) -> Callable[[Tensor], Tensor]:
    """Return what multiplies a vector of coordinates, (dim,), with the matrix."""
    model = space.model
    if matrix == "hessian":

        def losses() -> Iterator[Tensor]:
            for weight, piece in pieces:
                yield objective(model, piece).loss * weight

        return HessianOperator(space, losses).product
    from .curvlinops import matrix_of_scores

    batches, fisher = [piece for _, piece in pieces], matrix == "fisher"
    criterion = criterion_of(model, objective, batches, fisher=fisher)
    with torch.no_grad():
        targets = [criterion.terms(model, batch)[1] for batch in batches]  # type: ignore[index]
    data, factor = list(zip(batches, targets, strict=True)), criterion.factor(targets, fisher=fisher)
    operator = matrix_of_scores(space, matrix, Scores(model, criterion), criterion.loss, data)

    def product(v: Tensor) -> Tensor:
        with naming(f"the {MATRICES[matrix]} cannot be multiplied; take matrix='hessian'"):
            found: Tensor = operator @ v
        return found.mul_(factor)

    return product
