r"""Measures at the weights themselves, without a radius: the gradient's length, and the Riemannian Hessian.

.. math:: \langle H ξ, ξ \rangle = \frac{d^2}{dt^2} \ell(γ_ξ(t))\big|_{t=0}

along the geodesics of the measure's metric for attention pairs and straight lines for other weights, for horizontal ξ.
In terms of the weights this is the second derivative of ℓ plus the derivative of ℓ in the direction of the geodesic's
acceleration. Without that term it would depend on the representative wherever the gradient is not 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.checks import as_count
from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.modules import plain_class

from .distributed import World
from .losses import LossFunction, Objective
from .measures import MEASURES, Measure, PairBlock, get_measure
from .measuring import BatchLoss, collected, measured
from .perturb import preserved
from .shards import is_sharded_model
from .space import WeightSpace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HessianOperator", "LocalResult", "gradient_norm", "hessian"]


@dataclass(frozen=True)
class LocalBatch:
    """Results at the weights on one batch.

    Attributes
    ----------
    batch : int
        Position of the batch.
    base_loss : float
    base_error : float or None
        Fraction of the batch that is misclassified; None if labels or scores are not known.
    gradient_norm : float
        Length of the loss's gradient in the metric, the limit of sharpness/ρ for small ρ.
    max_eigenvalue, trace, std_error : float or None
        Largest eigenvalue and trace of the Hessian in the metric, and the standard error of the trace.
    passes : int
        Passes through the model; a product with the Hessian counts as one.
    seconds : float
        Wall time.
    """

    batch: int
    base_loss: float
    base_error: float | None
    gradient_norm: float
    max_eigenvalue: float | None
    trace: float | None
    std_error: float | None
    passes: int
    seconds: float


@dataclass(frozen=True)
class LocalResult:
    """Results at a model's weights, averaged over batches; ``print`` shows one line.

    Attributes
    ----------
    measure : Measure
        The measure whose metric is used.
    model : str
        Class of the model.
    batches : tuple of LocalBatch
    remarks : tuple of str
        As in :class:`sharpness.SharpnessResult`.
    gradient_norm : float
        Length of the gradient in the metric.
    max_eigenvalue, trace : float or None
        Largest eigenvalue of the Hessian, and an estimate of its trace; None if they were not computed.
    std_error : float or None
        Standard error of the trace's estimate, at most: the batches share the random vectors; None without one.

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> print(sharpness.hessian(model, [batch], lambda f, x: f(x).square().sum(), measure="euclidean"))
    euclidean Hessian of Linear: largest eigenvalue 2, trace 2 ± 0, 1 batch
    """

    measure: Measure
    model: str
    batches: tuple[LocalBatch, ...]
    remarks: tuple[str, ...]
    gradient_norm: float
    max_eigenvalue: float | None
    trace: float | None
    std_error: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts."""
        return {**asdict(self), "batches": [asdict(b) for b in self.batches], "remarks": list(self.remarks)}

    def __str__(self) -> str:
        batches = f"{len(self.batches)} batch{'es' * (len(self.batches) > 1)}"
        if self.trace is None:
            metric = f"in the metric of {self.measure.name}"
            line = f"gradient norm of {self.model} {metric}: {self.gradient_norm:.6g}, {batches}"
        else:
            line = (
                f"{self.measure.name} Hessian of {self.model}: largest eigenvalue {self.max_eigenvalue:.6g}, "
                f"trace {self.trace:.6g} ± {self.std_error or 0.0:.2g}, {batches}"
            )
        return "\n".join([line, *self.remarks])


class HessianOperator(scipy.sparse.linalg.LinearOperator):
    r"""The Hessian as a symmetric operator on coordinates in which the metric is the identity.

    .. math:: \langle H ξ, ξ \rangle = \frac{d^2}{dt^2} \ell(R_θ(tξ))\big|_{t=0}

    It is 0 on vectors orthogonal to the horizontal space. Use it while the space is attached
    (:meth:`sharpness.space.WeightSpace.attached`).

    Parameters
    ----------
    space : WeightSpace
        The space of the model under the measure with the desired metric.
    losses : callable
        Returns the loss at the model's current weights, or an iterable of losses that add up to it; called for every
        product.

    Attributes
    ----------
    num_matvecs : int
        Number of products computed so far.

    Notes
    -----
    As a scipy operator it takes and returns numpy arrays on the CPU, float64 where the space's vectors are, else
    float32; :meth:`product` stays on the model's device. Fused attention has no second derivative on a CPU, so the
    plain kernel of ``scaled_dot_product_attention`` is used meanwhile. With a first-order retraction, the term of the
    geodesic's acceleration is left out.

    Examples
    --------
    In the adaptive metric the Hessian of :math:`\tfrac12 \sum_i w_i^2` is diag(w²):

    >>> import torch
    >>> import numpy as np
    >>> from sharpness import MEASURES, WeightSpace
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[1.0, 3.0]])
    >>> space = WeightSpace(model, MEASURES["adaptive"])
    >>> with space.attached():
    ...     H = HessianOperator(space, lambda: model.weight.square().sum() / 2)
    ...     H @ np.eye(2, dtype=np.float32), H.eigenvalues().round(4)
    (array([[1., 0.],
           [0., 9.]], dtype=float32), array([9.], dtype=float32))
    """

    def __init__(self, space: WeightSpace, losses: Callable[[], Tensor | Iterable[Tensor]]) -> None:
        if not all(b.quadratic for b in space.blocks if isinstance(b, PairBlock)):
            raise ValueError(
                "the Hessian needs a quadratic retraction; use geodesic='second-order', which has the same Hessian"
            )
        self.space, self.losses, self.num_matvecs = space, losses, 0
        dtype = np.float64 if space.dtype == torch.float64 else np.float32
        super().__init__(dtype=dtype, shape=(space.dim, space.dim))

    def _matvec(self, v: np.ndarray) -> np.ndarray:
        x = torch.as_tensor(np.ascontiguousarray(v).reshape(-1), dtype=self.space.dtype).to(self.space.device)
        return self.product(x).cpu().numpy()

    def _rmatvec(self, v: np.ndarray) -> np.ndarray:
        return self._matvec(v)

    def product(self, v: Tensor) -> Tensor:
        """Multiply a vector of coordinates, (dim,), of the space's dtype and device; the product is horizontal."""
        space = self.space
        self.num_matvecs += 1
        space.move_to(None)
        v = space.project(v)
        velocity = {p: torch.zeros_like(copy) for p, copy in space.copies.items()}
        with torch.no_grad():
            for block, c in space.each(v):
                block.vector_(velocity, c, at_model=False)
        with sdpa_kernel(SDPBackend.MATH):
            found = self.losses()
            losses = [found] if isinstance(found, Tensor) else found
            first, second = space.gradients.with_hessian_product(losses, velocity)
        # With J(ξ) the derivative of R, linear in ξ: J(0)* ∇²ℓ J(0) v + (J(v) − J(0))* ∇ℓ.
        straight = space.pull_back(dict(first), None)
        return space.pull_back(second, None).add_(space.pull_back(first, v)).sub_(straight)

    def eigenvalues(self, count: int = 1, *, seed: int = 0, tol: float = 1e-4) -> np.ndarray:
        """Find the largest eigenvalues (in value, not in size) by Lanczos' method.

        Parameters
        ----------
        count : int
            Number of eigenvalues.
        seed : int
            Seed of the horizontal starting vector.
        tol : float
            Relative accuracy.

        Returns
        -------
        array of float
            (count,), in descending order, in the operator's dtype.

        Notes
        -----
        ARPACK's implicitly restarted method (Lehoucq, Sorensen, Yang 1998) through ``scipy.sparse.linalg.eigsh``, which
        raises ArpackNoConvergence where the accuracy is not reached.
        """
        dim = self.space.dim
        if dim <= count + 1:
            values = np.linalg.eigvalsh(self.matmat(np.eye(dim, dtype=self.dtype)))
            return values[::-1][:count]
        start = self.space.random(torch.Generator().manual_seed(seed)).cpu().numpy()
        options: Any = {"which": "LA", "v0": start, "ncv": min(dim, max(2 * count + 1, 12)), "tol": tol}
        try:
            values = scipy.sparse.linalg.eigsh(self, count, return_eigenvectors=False, **options)
        except scipy.sparse.linalg.ArpackNoConvergence:
            raise
        except scipy.sparse.linalg.ArpackError:
            if self.matvec(start).any():
                raise
            values = np.zeros(count, dtype=self.dtype)  # only zero has a random vector in its kernel
        return np.sort(values)[::-1]

    def trace(self, num_matvecs: int = 30, *, seed: int = 0) -> tuple[float, float | None]:
        r"""Estimate the trace by Hutch++ from about ``num_matvecs`` products.

        .. math:: \operatorname{tr} A \approx \operatorname{tr}(Q^T A Q) + \operatorname{mean}_g\, g^T A g

        with A S = Q R, where a third of the products goes to random vectors S, and a third to random vectors g
        orthogonal to Q.

        Parameters
        ----------
        num_matvecs : int
            Number of products with the Hessian, at least 3; it is rounded down to a multiple of 3.
        seed : int
            Of the random vectors.

        Returns
        -------
        float, float or None
            The estimate, which is unbiased, and its standard error; None from a single random vector.

        Notes
        -----
        Meyer, Musco, Musco, Woodruff 2021. The random vectors are horizontal and depend on the orbit alone, so the
        estimate is invariant too.
        """
        each, generator = max(1, num_matvecs // 3), torch.Generator().manual_seed(seed)
        S = torch.stack([self.product(self.space.random(generator)) for _ in range(each)], dim=1)
        Q = torch.linalg.qr(S)[0]
        inside = sum(float(q @ self.product(q)) for q in Q.unbind(1))
        outside = []
        for _ in range(each):
            g = self.space.random(generator)
            g = g - Q @ (Q.T @ g)
            outside.append(float(g @ self.product(g)))
        std_error = float(np.std(outside, ddof=1) / np.sqrt(each)) if each > 1 else None
        return inside + float(np.mean(outside)), std_error


def gradient_norm(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", pairs: Sequence[SymmetricPair] | None = None,
    normalize_logits: bool = False, micro_batch: int | None = None, group: ProcessGroup | None = None,
) -> LocalResult:  # fmt: skip
    """Measure the length of the loss's gradient in a metric: the limit of sharpness/ρ for small ρ.

    Parameters
    ----------
    model, batches, loss_fn, measure, pairs, normalize_logits, micro_batch, group
        As :func:`sharpness.evaluate` takes them.

    Returns
    -------
    LocalResult

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> sharpness.gradient_norm(model, [batch], lambda f, x: f(x).sum(), measure="euclidean").gradient_norm
    5.0
    """
    objective = Objective(loss_fn, normalize_logits, micro_batch)
    return _at_the_weights(model, batches, objective, get_measure(measure), pairs, group)


def hessian(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", num_matvecs: int = 20, seed: int = 0,
    pairs: Sequence[SymmetricPair] | None = None, normalize_logits: bool = False, micro_batch: int | None = None,
    group: ProcessGroup | None = None,
) -> LocalResult:  # fmt: skip
    """Measure the largest eigenvalue and the trace of the Riemannian Hessian by Lanczos' method and Hutch++.

    With ``measure="euclidean"`` the results are those of the ordinary Hessian.

    Parameters
    ----------
    model, batches, loss_fn, measure, pairs, normalize_logits, micro_batch, group
        As :func:`sharpness.evaluate` takes them.
    num_matvecs : int
        Products with the Hessian for its trace, rounded down to a multiple of 3.
    seed : int
        Seed of the random vectors.

    Returns
    -------
    LocalResult

    Raises
    ------
    ValueError
        As for :func:`sharpness.evaluate`; or ``num_matvecs`` is below 1, or the seed is negative.

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> loss = lambda f, x: (f(x)[0] - 2 * f(x)[1]).square().sum() / 2
    >>> found = sharpness.hessian(model, [batch], loss, measure="euclidean")
    >>> round(found.max_eigenvalue, 4), round(found.trace, 4)
    (5.0, 5.0)
    """
    measure = get_measure(measure)
    num_matvecs, seed = as_count("num_matvecs", num_matvecs), as_count("seed", seed, least=0, most=2**63)
    if measure.divides and measure.geodesic == "exact":  # the same Hessian
        measure = replace(measure, geodesic="second-order")
    objective = Objective(loss_fn, normalize_logits, micro_batch)
    return _at_the_weights(model, batches, objective, measure, pairs, group, num_matvecs, seed)


def _at_the_weights(
    model: nn.Module, batches: Iterable[Any], objective: Objective, measure: Measure,
    pairs: Sequence[SymmetricPair] | None, group: ProcessGroup | None, num_matvecs: int = 0, seed: int = 0,
) -> LocalResult:  # fmt: skip
    """Measure every batch; the Hessian, if products with it are asked for."""
    found: list[LocalBatch] = []
    world, state = World(None if is_sharded_model(model) else group), preserved(model)
    with World(group).losing_others():
        with state, state, measured(model, batches, measure, objective, pairs=pairs, group=group) as (space, each):
            for index, batch in each:
                if not world.owns(index):
                    continue
                began, loss = time.perf_counter(), BatchLoss(space, objective, batch, index)
                length, passes = space.norm(loss.base_gradient), loss.passes
                top = trace = error = None
                if num_matvecs:
                    operator = HessianOperator(space, loss.losses)
                    top = float(operator.eigenvalues(seed=seed)[0])
                    trace, error = operator.trace(num_matvecs, seed=seed)
                    passes = loss.passes + operator.num_matvecs
                seconds = time.perf_counter() - began
                found.append(LocalBatch(index, loss.base, loss.base_error, length, top, trace, error, passes, seconds))
        found, _, remarks = collected(space, world, found)
    found.sort(key=lambda b: b.batch)
    means: dict[str, Any] = {}
    for name in ("gradient_norm", "max_eigenvalue", "trace", "std_error"):
        values = [getattr(b, name) for b in found]
        means[name] = None if None in values else fmean(values)
    return LocalResult(measure, plain_class(model).__name__, tuple(found), remarks, **means)


#: Quantities besides the measures in ``sharpness run`` and sweeps, by name: the function and its measure.
LOCAL: dict[str, tuple[Callable[..., LocalResult], str]] = {
    "gradient-norm": (gradient_norm, "geodesic-inv"),
    "riemannian-hessian": (hessian, "geodesic-inv"),
    "euclidean-hessian": (hessian, "euclidean"),
}


def measure_of(name: str, **changes: Any) -> Measure:
    """Return the measure with a name in MEASURES or LOCAL, with some fields changed."""
    if name not in MEASURES and name not in LOCAL:
        raise ValueError(f"unknown measure {name!r}; choose one of {', '.join([*MEASURES, *LOCAL])}")
    return get_measure(LOCAL[name][1] if name in LOCAL else name, **changes)
