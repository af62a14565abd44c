r"""Spectra of curvature matrices on the quotient: Hessian, Gauss–Newton and empirical Fisher matrix of a mean loss.

With C the push-forward from coordinates, in which the metric is the identity, to velocities of the weights,

.. math:: C^* G C

is the Gauss–Newton or Fisher matrix of the quotient for that matrix G of the weights. The Hessian has one more term,
of the acceleration of geodesics (:mod:`sharpness.curvature`). Operators are those of ``curvlinops``, so that its
estimators (spectral density, trace, norm) and scipy's ``eigsh`` take them. Install the extra ``curvature``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.linalg import as_count
from quotient_manifolds.passes import default_forward
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.weights import plain_class, preserve_model_state

from .batch_loss import BatchLoss
from .curvature import HessianOperator, plain_attention
from .distributed import is_sharded_model
from .errors import require_extra
from .losses import IGNORED, LossFunction, Objective, count_labels, labels_of
from .measures import Measure, get_measure
from .measuring import attached_space
from .space import WeightSpace

with require_extra("spectra need curvlinops", "curvature"):
    from curvlinops import EFLinearOperator, GGNLinearOperator

    # Its base class has no public name.
    from curvlinops._torch_base import PyTorchLinearOperator

#: Two values of one loss differ less than this, relatively.
_ALIKE = 1e-4


class _OnSpace(PyTorchLinearOperator):
    """An operator from or to the coordinates of a space."""

    space: WeightSpace

    @property
    def device(self) -> torch.device:
        """Of vectors."""
        return self.space.device

    @property
    def dtype(self) -> torch.dtype:
        """Of vectors."""
        return self.space.dtype


class PushForward(_OnSpace):
    r"""C: coordinates, (dim,), to velocities of the weights at the base point, a tensor for each of ``parameters``.

    It projects on the horizontal space first, so :math:`C^* G C` is 0 on vectors orthogonal to that. Use it while the
    space is attached.

    Parameters
    ----------
    space : WeightSpace
        The space of a model under a measure.

    Attributes
    ----------
    parameters : list of Tensor
        The model's parameters in the order of the tensors, for operators of curvlinops.

    Examples
    --------
    The Gauss–Newton matrix of a network with heads, modulo their symmetries, is the same for all equivalent weights:

    >>> import torch
    >>> from curvlinops import GGNLinearOperator
    >>> from scipy.sparse.linalg import eigsh
    >>> from torch import nn
    >>> from torch.nn.attention import SDPBackend, sdpa_kernel
    >>> from quotient_manifolds.symmetries import move_
    >>> from sharpness import MEASURES, WeightSpace
    >>> _ = torch.manual_seed(0)
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    ...         self.head = nn.Linear(8, 3)
    ...     def forward(self, x):
    ...         return self.head(self.body(x).mean(1))
    >>> model, data = Net().double(), [(torch.randn(6, 4, 8).double(), torch.arange(6) % 3)]
    >>> def largest():
    ...     space = WeightSpace(model, MEASURES["geodesic-inv"])
    ...     with space.attached(), sdpa_kernel(SDPBackend.MATH):  # fused kernels have no forward derivative
    ...         C = PushForward(space)
    ...         G = GGNLinearOperator(model, nn.CrossEntropyLoss(), C.parameters, data)
    ...         return eigsh((C.adjoint() @ G @ C).to_scipy(), 1, return_eigenvectors=False)[0]
    >>> before, _ = largest(), move_(model)
    >>> bool(abs(largest() / before - 1) < 1e-8)
    True
    """

    def __init__(self, space: WeightSpace) -> None:
        if not space.copies:
            raise ValueError("the space is not attached; use the operator within `with space.attached():`")
        self.space, self.parameters = space, [space.weights[name] for name in space.copies]
        super().__init__([(space.dim,)], [tuple(copy.shape) for copy in space.copies.values()])

    def _matmat(self, X: list[Tensor]) -> list[Tensor]:
        columns = [list(self.space.velocity(v).values()) for v in X[0].unbind(-1)]
        return [torch.stack(parts, -1) for parts in zip(*columns, strict=True)]

    def _adjoint(self) -> PyTorchLinearOperator:
        return PullBack(self)


class PullBack(_OnSpace):
    """The adjoint of a push-forward: gradients with respect to the weights, to coordinates."""

    def __init__(self, forward: PushForward) -> None:
        self.forward, self.space = forward, forward.space
        super().__init__(forward._out_shape, forward._in_shape)  # noqa: SLF001

    def _matmat(self, X: list[Tensor]) -> list[Tensor]:
        each = zip(*(x.unbind(-1) for x in X), strict=True)
        columns = [dict(zip(self.space.copies, parts, strict=True)) for parts in each]
        return [torch.stack([self.space.pull_back(gradient, None) for gradient in columns], -1)]

    def _adjoint(self) -> PyTorchLinearOperator:
        return self.forward


class QuotientHessian(_OnSpace):
    """The Riemannian Hessian, see :class:`sharpness.HessianOperator`, for curvlinops.

    Parameters
    ----------
    hessian : HessianOperator
    """

    SELF_ADJOINT = True

    def __init__(self, hessian: HessianOperator) -> None:
        self.hessian, self.space = hessian, hessian.space
        super().__init__([(hessian.space.dim,)], [(hessian.space.dim,)])

    def _matmat(self, X: list[Tensor]) -> list[Tensor]:
        return [torch.stack([self.hessian.product(v) for v in X[0].unbind(-1)], -1)]


@dataclass(frozen=True)
class Spectrum:
    """The largest eigenvalues of a curvature matrix of the mean loss; ``print`` shows them.

    Attributes
    ----------
    measure : Measure
        The metric.
    matrix : {"hessian", "ggn", "fisher"}
        The Riemannian Hessian, the Gauss–Newton or the empirical Fisher matrix.
    model : str
        Class of the model.
    eigenvalues : tuple of float
        The largest, in falling order.
    loss : float
        The mean loss.
    num_matvecs : int
        Number of products that were computed.
    remarks : tuple of str
        What else was noticed, as in a :class:`sharpness.SharpnessResult`.
    """

    measure: Measure
    matrix: str
    model: str
    eigenvalues: tuple[float, ...]
    loss: float
    num_matvecs: int
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts."""
        return {**asdict(self), "eigenvalues": list(self.eigenvalues), "remarks": list(self.remarks)}

    def __str__(self) -> str:
        shown = "\n".join(f"{i:>4}  {value:.4g}" for i, value in enumerate(self.eigenvalues, 1))
        what = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix", "fisher": "empirical Fisher matrix"}[self.matrix]
        head = f"largest eigenvalues of the {what} ({self.measure.name}), loss {self.loss:.3f}"
        return "\n".join([head, shown, *self.remarks])


def spectrum(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    matrix: Literal["hessian", "ggn", "fisher"] = "hessian", measure: str | Measure = "geodesic-inv", k: int = 10,
    symmetries: Symmetries | None = None, micro_batch: int | None = None, seed: int = 0,
) -> Spectrum:  # fmt: skip
    """Compute the largest eigenvalues of a curvature matrix of the mean loss over all batches, modulo symmetries.

    Every example counts alike, or every label that is not −100. (:func:`sharpness.hessian` averages the eigenvalues of
    the batches instead, which is at least as much.)

    Parameters
    ----------
    model, batches, loss_fn, measure, symmetries, micro_batch
        As :func:`sharpness.evaluate` takes them; all batches are kept.
    matrix : {"hessian", "ggn", "fisher"}
        The Hessian of any loss; the Gauss–Newton or the empirical Fisher matrix of a cross-entropy of the logits, or of
        a mean squared error. The Fisher matrix has a gradient for each label.
    k : int
        Number of eigenvalues.
    seed : int
        Seed of the starting vector.

    Returns
    -------
    Spectrum

    Raises
    ------
    ValueError
        As for :func:`sharpness.evaluate`; the model is sharded; or the loss is neither a cross-entropy nor a squared
        error, but the matrix needs one.

    Examples
    --------
    >>> import torch
    >>> from sharpness.spectra import spectrum
    >>> _ = torch.manual_seed(0)
    >>> batches = [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(2)]
    >>> found = spectrum(torch.nn.Linear(4, 3), batches, matrix="ggn", measure="adaptive", k=2)
    >>> 0 < found.eigenvalues[1] < found.eigenvalues[0]
    True
    """
    if matrix not in ("hessian", "ggn", "fisher"):
        raise ValueError(f"matrix must be 'hessian', 'ggn' or 'fisher', got {matrix!r}")
    if is_sharded_model(model):
        raise ValueError("the spectrum of a sharded model is not measured; load it whole")
    measure, objective, k = get_measure(measure), Objective(loss_fn, micro_batch), as_count("k", k)
    if measure.divides and measure.geodesic == "exact":  # the same Hessian
        measure = replace(measure, geodesic="second-order")
    state = preserve_model_state(model)
    with state, state, attached_space(model, batches, measure, objective, symmetries) as (space, numbered):
        losses, counts = list[BatchLoss](), list[int]()
        for index, batch in numbered:
            losses.append(loss := BatchLoss(space, objective, batch, index))
            loss.release_gradient()
            counts.append(sum(count_labels(model, piece) for _, piece in loss.pieces))
        shares = [count / sum(counts) for count in counts]
        if matrix == "hessian":
            operator: Any = QuotientHessian(HessianOperator(space, lambda: _weighted(losses, shares)))
        else:
            C = PushForward(space)
            operator = C.adjoint() @ _of_outputs(matrix, model, losses, C.parameters) @ C
        with plain_attention():
            values, count = _largest(operator, space, k, seed)
        mean = sum(share * loss.base for share, loss in zip(shares, losses, strict=True))
        return Spectrum(measure, matrix, plain_class(model).__name__, values, mean, count, tuple(space.remarks))


def _weighted(losses: Iterable[BatchLoss], shares: Iterable[float]) -> Iterator[Tensor]:
    """Iterate over losses that add up to the mean one."""
    for loss, share in zip(losses, shares, strict=True):
        yield from (share * part for part in loss.losses())


def _largest(operator: Any, space: WeightSpace, k: int, seed: int) -> tuple[tuple[float, ...], int]:
    """Find the largest eigenvalues on the horizontal space by Lanczos' method, and count the products."""
    start = space.random(torch.Generator().manual_seed(seed))
    slope = operator @ start
    # Vectors off the horizontal space get an eigenvalue below those that count.
    below, count = float(slope.norm() / start.norm()), 1

    def product(v: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        x = torch.as_tensor(np.ascontiguousarray(v).reshape(-1), dtype=space.dtype).to(space.device)
        inside = space.project(x)
        return (operator @ inside - below * (x - inside)).cpu().numpy()

    dtype = np.float64 if space.dtype == torch.float64 else np.float32
    shifted = scipy.sparse.linalg.LinearOperator((space.dim, space.dim), product, dtype=dtype)
    if space.dim <= max(2 * k + 1, 20):
        dense = shifted.matmat(np.eye(space.dim, dtype=dtype))
        found = np.linalg.eigvalsh((dense + dense.T) / 2)[-k:]
    else:
        found = scipy.sparse.linalg.eigsh(
            shifted, k, v0=start.cpu().numpy(), which="LA", tol=1e-4, return_eigenvectors=False
        )
    return tuple(sorted(map(float, found), reverse=True)), count


# -- losses of outputs -------------------------------------------------------------------------------------------------


class _Predictor(nn.Module):
    """The outputs of a model that a loss is a mean over, (rows, classes), for ``{"batch": …, "rows": …, "dim": …}``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, X: dict[str, Any]) -> Tensor:
        scores = _scores(default_forward(self.model, X["batch"])).movedim(X["dim"], -1)
        return scores.reshape(-1, scores.shape[-1])[X["rows"]]


def _scores(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor) or found.dim() < 1:
        raise ValueError(f"the model returned {type(output).__name__} without logits, of which the matrix is made")
    return found if found.dim() > 1 else found[:, None]


def _of_outputs(matrix: str, model: nn.Module, losses: list[BatchLoss], parameters: list[Tensor]) -> Any:
    """Return the matrix of curvlinops, after a check that the loss is one that it knows."""
    data, kinds = list[tuple[dict[str, Any], Tensor]](), set[type[nn.Module]]()
    with torch.no_grad():
        for loss in losses:
            for _, piece in loss.pieces:
                value = float(loss.objective(model, piece).loss)
                X, y, kind = _read(model, piece, value)
                data.append((X, y))
                kinds.add(kind)
    if len(kinds) != 1:
        raise ValueError("the loss is a cross-entropy of some batches and a squared error of others")
    made = GGNLinearOperator if matrix == "ggn" else EFLinearOperator
    return made(
        _Predictor(model), kinds.pop()(), parameters, data, check_deterministic=False,
        num_data=sum(len(X["rows"]) for X, _ in data), batch_size_fn=lambda X: len(X["rows"]),
    )  # fmt: skip


def _read(model: nn.Module, batch: Any, value: float) -> tuple[dict[str, Any], Tensor, type[nn.Module]]:
    """Find of which outputs a loss of this value is the cross-entropy, or the squared error."""
    labels, scores = labels_of(batch), _scores(default_forward(model, batch))
    if labels is not None:
        dim = 1 if isinstance(batch, (list, tuple)) else -1
        last = scores.movedim(dim, -1)
        rows = torch.arange(last.shape[:-1].numel(), device=scores.device).view(last.shape[:-1])
        flat = last.reshape(-1, last.shape[-1])
        if not labels.is_floating_point() and rows.shape == labels.shape:
            shifted = [(rows[:, :-1], labels[:, 1:])] if labels.dim() == 2 else []
            for at, target in ((rows, labels), *shifted):
                counted = target != IGNORED
                if _alike(F.cross_entropy(flat[at[counted]], target[counted]), value):
                    return {"batch": batch, "rows": at[counted], "dim": dim}, target[counted], nn.CrossEntropyLoss
        if labels.is_floating_point() and labels.numel() == scores.numel():
            target = labels.reshape(scores.shape).movedim(dim, -1).reshape(flat.shape)
            if _alike(F.mse_loss(flat, target.to(flat)), value):
                return {"batch": batch, "rows": rows.flatten(), "dim": dim}, target.to(flat), nn.MSELoss
    raise ValueError(
        "the Gauss–Newton and Fisher matrix need a loss that is the cross-entropy of the logits or the mean squared "
        "error of the outputs, and this one is neither; take matrix='hessian'"
    )


def _alike(loss: Tensor, value: float) -> bool:
    return abs(float(loss) - value) <= _ALIKE * max(abs(value), 1e-3)
