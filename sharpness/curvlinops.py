r"""Operators of `curvlinops <https://curvlinops.readthedocs.io>`_ on a model modulo its symmetries.

They act on coordinates in which the metric is the identity. Install the extra: ``pip install -e '.[curvature]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .curvature import HessianOperator
from .errors import require_extra
from .space import WeightSpace

with require_extra("Gauss–Newton and Fisher matrices need curvlinops", "curvature"):
    import curvlinops
    from curvlinops._torch_base import PyTorchLinearOperator  # it has no public name

__all__ = ["PushForward", "RiemannianHessian"]


class _OnSpace(PyTorchLinearOperator):
    """An operator on or into the coordinates of a space, column by column."""

    def __init__(self, space: WeightSpace, in_shape: list[Any], out_shape: list[Any]) -> None:
        if space.world is not None:
            raise ValueError("curvlinops does not multiply weights that are sharded; load the model whole")
        self.space = space
        super().__init__(in_shape, out_shape)

    @property
    def device(self) -> torch.device:
        return self.space.device

    @property
    def dtype(self) -> torch.dtype:
        return self.space.dtype

    def _column(self, x: list[Tensor]) -> list[Tensor]:
        """Multiply one vector."""
        raise NotImplementedError

    def __matmul__(self, X: Any) -> Any:
        """Multiply; a product that is one tensor already is not copied, as curvlinops would do."""
        alone = isinstance(X, Tensor) and X.shape == (self.shape[1],)
        if not alone or len(self._in_shape) > 1 or len(self._out_shape) > 1:
            return super().__matmul__(X)
        return self._matmat([X.unsqueeze(-1)])[0].squeeze(-1)

    def _matmat(self, X: list[Tensor]) -> list[Tensor]:
        if not self.space.copies:
            raise ValueError("the space is not attached; compute products in a block `with space.attached():`")
        self.space.move_to(None)
        columns = [
            self._column([part.contiguous() for part in x]) for x in zip(*(x.unbind(-1) for x in X), strict=True)
        ]
        if len(columns) == 1:
            return [part.unsqueeze(-1) for part in columns[0]]
        return [torch.stack(parts, -1) for parts in zip(*columns, strict=True)]


class PushForward(_OnSpace):
    r"""The map C from coordinates to velocities of the weights at the base point.

    .. math:: C v = \frac{d}{dt} R_θ(t v) \big|_{t=0}, \qquad C^* M C \text{ is the matrix } M \text{ on the quotient}

    M is any operator of curvlinops on ``list(space.parameters.values())``, made and multiplied while the space is
    attached, such as a Gauss–Newton or Fisher matrix. The attached model's pairs have canonical factors, and the
    velocities are at these. They are not the tensors of
    :func:`sharpness.direction_of`, which are at the model's own factors.

    Parameters
    ----------
    space : WeightSpace
        The space of the model under the measure with the desired metric.

    Raises
    ------
    ValueError
        The model is sharded or has complex weights; or, in a product, the space is not attached.

    Notes
    -----
    C is 0 on vectors orthogonal to the horizontal space, and ``C.adjoint()`` maps to the horizontal space. So the
    spectrum has 0 for each direction that the symmetries divide out. C* M C is the Riemannian Hessian for no M: that
    needs the acceleration of geodesics, which :class:`RiemannianHessian` has. Torch's fused attention has no forward
    derivative on a CPU; ``sdpa_kernel(SDPBackend.MATH)`` takes another kernel.

    Examples
    --------
    The Gauss–Newton matrix of :math:`\tfrac12 |w - y|^2`, that is the identity, in the adaptive metric:

    >>> import torch
    >>> from curvlinops import GGNLinearOperator
    >>> from sharpness import MEASURES, WeightSpace
    >>> model, data = torch.nn.Linear(2, 1, bias=False), [(torch.eye(2), torch.zeros(2, 1))]
    >>> model.weight.data = torch.tensor([[1.0, 3.0]])
    >>> space = WeightSpace(model, MEASURES["adaptive"])
    >>> with space.attached():
    ...     C = PushForward(space)
    ...     M = GGNLinearOperator(model, torch.nn.MSELoss(reduction="sum"), [*space.parameters.values()], data)
    ...     C.pull_back(0.5 * M) @ torch.eye(2)
    tensor([[1., 0.],
            [0., 9.]])
    """

    def __init__(self, space: WeightSpace) -> None:
        for name, p in space.parameters.items():
            if p.is_complex():
                raise ValueError(f"parameter {name!r} is complex, and curvlinops does not multiply such; freeze it")
        super().__init__(
            space, [(patch.dim,) for patch in space.patches], [tuple(p.shape) for p in space.parameters.values()]
        )

    def _column(self, x: list[Tensor]) -> list[Tensor]:
        return list(self.space.push_forward_to_copies(x).values())

    def _adjoint(self) -> PyTorchLinearOperator:
        return _Adjoint(self)

    def pull_back(self, matrix: PyTorchLinearOperator) -> PyTorchLinearOperator:
        """Return the matrix on the quotient, C* M C, whose products take less memory than the three one by one.

        Parameters
        ----------
        matrix : PyTorchLinearOperator
            M, a square operator of curvlinops on the velocities.

        Returns
        -------
        PyTorchLinearOperator
            Of shape (dim, dim).

        Raises
        ------
        ValueError
            M does not act on the velocities.
        """
        return _PulledBack(self, matrix)


class _Adjoint(_OnSpace):
    """The adjoint of a :class:`PushForward`."""

    def __init__(self, forward: PushForward) -> None:
        self._forward = forward
        super().__init__(forward.space, forward._out_shape, forward._in_shape)  # noqa: SLF001

    def _column(self, x: list[Tensor]) -> list[Tensor]:
        gradient = dict(zip(self.space.parameters, x, strict=True))
        # One whole vector would be new memory in each product, which takes 6 % of a product's time on MiniLM.
        parts = [torch.empty(patch.dim, dtype=self.dtype, device=self.device) for patch in self.space.patches]
        return self.space.pull_back_from_copies(gradient, None, parts)

    def _adjoint(self) -> PyTorchLinearOperator:
        return self._forward


class _PulledBack(_OnSpace):
    """The matrix C* M C."""

    def __init__(self, forward: PushForward, matrix: PyTorchLinearOperator) -> None:
        velocities = forward.shape[0]
        if tuple(matrix.shape) != (velocities, velocities):
            raise ValueError(f"the matrix has shape {tuple(matrix.shape)}, and velocities have {velocities} numbers")
        self._forward, self._matrix, self.SELF_ADJOINT = forward, matrix, matrix.SELF_ADJOINT
        super().__init__(forward.space, [(forward.space.dim,)], [(forward.space.dim,)])

    def _column(self, x: list[Tensor]) -> list[Tensor]:
        space = self.space
        # The velocity takes the memory of the product: new memory and copies of it took 7 % of the time on MiniLM.
        product = torch.empty_like(x[0])
        velocity = list(space.push_forward_to_copies(x[0], product).values())
        images = self._matrix @ velocity
        at = {t.untyped_storage().data_ptr() for t in velocity}
        apart = [t.clone() if t.untyped_storage().data_ptr() in at else t for t in images]  # M may be the identity
        return [space.pull_back_from_copies(dict(zip(space.parameters, apart, strict=True)), None, product)]

    def _adjoint(self) -> PyTorchLinearOperator:
        return self._forward.pull_back(self._matrix.adjoint())


class RiemannianHessian(_OnSpace):
    """The Riemannian Hessian as an operator of curvlinops, for its estimators of traces, diagonals and spectra.

    Parameters
    ----------
    space : WeightSpace
        The space of the model under the measure with the desired metric; attached whenever a product is computed.
    losses : callable
        Returns the loss at the model's current weights, or an iterable of losses that add up to it.

    Notes
    -----
    The products are those of :class:`sharpness.HessianOperator`, which is an operator of scipy.

    Examples
    --------
    >>> import torch
    >>> from sharpness import MEASURES, WeightSpace
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[1.0, 3.0]])
    >>> space = WeightSpace(model, MEASURES["adaptive"])
    >>> with space.attached():
    ...     RiemannianHessian(space, lambda: model.weight.square().sum() / 2) @ torch.eye(2)
    tensor([[1., 0.],
            [0., 9.]])
    """

    SELF_ADJOINT = True

    def __init__(self, space: WeightSpace, losses: Callable[[], Tensor | Iterable[Tensor]]) -> None:
        self._hessian = HessianOperator(space, losses)
        super().__init__(space, [(space.dim,)], [(space.dim,)])

    def _column(self, x: list[Tensor]) -> list[Tensor]:
        return [self._hessian.product(x[0])]


def matrix_of_scores(
    space: WeightSpace, kind: str, scores: nn.Module, loss: nn.Module, data: list[tuple[Any, Tensor]]
) -> PyTorchLinearOperator:
    """Return the Gauss–Newton matrix (``"ggn"``) or the empirical Fisher matrix (``"fisher"``) on the quotient.

    ``scores`` maps a batch to scores, (terms, numbers), of which ``loss`` adds up a value for each term; data are
    batches with their targets.
    """
    cls = {"ggn": curvlinops.GGNLinearOperator, "fisher": curvlinops.EFLinearOperator}[kind]
    # Of a sum it takes neither a number of data nor the size of a batch, but it asks for both.
    unused = {"num_data": 1, "batch_size_fn": lambda _: 1, "check_deterministic": False}
    return PushForward(space).pull_back(cls(scores, loss, list(space.parameters.values()), data, **unused))
