r"""The Riemannian Hessian of the loss.

.. math:: \langle H ξ, ξ \rangle = \frac{d^2}{dt^2} \ell(γ_ξ(t))\big|_{t=0}

along the geodesics of the measure's metric for attention pairs and straight lines for other weights, for horizontal ξ.
In terms of the weights this is the second derivative of ℓ plus the derivative of ℓ in the direction of the geodesic's
acceleration. Without that term it would depend on the representative wherever the gradient is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.passes import Shared

from .space import WeightSpace


def _attend_plainly(undo: list[Callable[[], object]]) -> None:
    kernel = sdpa_kernel(SDPBackend.MATH)
    undo.append(partial(kernel.__exit__, None, None, None))
    kernel.__enter__()


#: Torch chooses the kernel of attention for all threads.
plain_attention = Shared(_attend_plainly)


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
    plain kernel of ``scaled_dot_product_attention`` is used meanwhile. Where a retraction is not quadratic (points of
    geoopt's manifolds, exact geodesics), products are differences of gradients. With a first-order retraction, the term
    of the geodesic's acceleration is left out.

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
    ...     H @ np.eye(2, dtype=np.float32), round(H.largest_eigenvalue(), 4)
    (array([[1., 0.],
           [0., 9.]], dtype=float32), 9.0)
    """

    def __init__(self, space: WeightSpace, losses: Callable[[], Tensor | Iterable[Tensor]]) -> None:
        if space.world is not None:
            raise ValueError(
                "the Hessian of a sharded model is not measured: FSDP2 has no second derivatives; load it whole"
            )
        self._quadratic = all(patch.quadratic for patch in space.patches)
        self.space, self.losses, self.num_matvecs = space, losses, 0
        dtype = np.float64 if space.dtype == torch.float64 else np.float32
        super().__init__(dtype=dtype, shape=(space.dim, space.dim))

    def _tensor(self, v: np.ndarray) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(v).reshape(-1), dtype=self.space.dtype).to(self.space.device)

    def _matvec(self, v: np.ndarray) -> np.ndarray:
        return self.product(self._tensor(v)).cpu().numpy()

    _rmatvec = _matvec

    def product(self, v: Tensor) -> Tensor:
        """Multiply a vector of coordinates, (dim,), of the space's dtype and device; the product is horizontal."""
        space = self.space
        self.num_matvecs += 1
        space.move_to(None)
        v = space.project(v)
        if not self._quadratic:
            return self._by_differences(v)
        velocity = space.push_forward_to_copies(v)
        with plain_attention():
            found = self.losses()
            losses = [found] if isinstance(found, Tensor) else found
            gradient, second = _with_product(losses, space.parameters, velocity)
        # R is quadratic, so its derivative J(ξ) is affine, and H v = J(0)* ∇²ℓ J(0) v + (J(v) − J(0))* ∇ℓ.
        product = space.pull_back_from_copies(second, None, torch.empty_like(v))
        with torch.no_grad(), torch.autocast(space.device.type, enabled=False):
            for (patch, part), (_, c) in zip(space.each(product), space.each(v), strict=True):
                if patch.pairs:  # others move along straight lines
                    for at, sign in ((c, 1), (None, -1)):
                        patch.pull_back_(term := torch.empty_like(part), gradient, at)
                        part.add_(term, alpha=sign)
        return product

    def _by_differences(self, v: Tensor) -> Tensor:
        """Differentiate the gradient along ±hv, with h³ the rounding error."""
        space, length = self.space, self.space.norm(v)
        h, sides = torch.finfo(space.dtype).eps ** (1 / 3) / (length or 1.0), list[Tensor]()
        for side in (h, -h):
            space.move_to(v * side)
            sides.append(space.gradient(self.losses()))
        return sides[0].sub_(sides[1]).div_(2 * h)

    def largest_eigenvalue(self, *, seed: int = 0) -> float:
        """Find the largest eigenvalue on the horizontal space (in value, not in size), to a relative accuracy of 1e-4.

        Parameters
        ----------
        seed : int
            Seed of the horizontal starting vector.

        Returns
        -------
        float

        Notes
        -----
        ARPACK's implicitly restarted Lanczos method (Lehoucq, Sorensen, Yang 1998) through
        ``scipy.sparse.linalg.eigsh``, which raises ArpackNoConvergence where the accuracy is not reached, and which
        finds several eigenvalues too.
        """
        space, dim = self.space, self.space.dim
        start = space.random(torch.Generator().manual_seed(seed))
        slope = self.product(start)
        if not bool(slope.any()):
            return 0.0  # only zero has a random vector in its kernel
        # The 0 of vectors off the horizontal space may be above all eigenvalues in it, of which no mean value can be.
        mean = float(start @ slope / (start @ start))

        def product(v: np.ndarray) -> np.ndarray:
            x = self._tensor(v)
            return self.product(x).add_(x - space.project(x), alpha=mean).cpu().numpy()

        shifted = scipy.sparse.linalg.LinearOperator(self.shape, product, dtype=self.dtype)
        if dim <= 2:
            return float(np.linalg.eigvalsh(shifted.matmat(np.eye(dim, dtype=self.dtype)))[-1])
        options: Any = {"which": "LA", "ncv": min(dim, 12), "tol": 1e-4, "return_eigenvectors": False}
        return float(scipy.sparse.linalg.eigsh(shifted, 1, v0=start.cpu().numpy(), **options)[0])

    def trace(self, num_matvecs: int = 20, *, seed: int = 0) -> tuple[float, float | None]:
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


def _with_product(
    losses: Iterable[Tensor], weights: Mapping[str, Tensor], velocity: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add up the gradients ∇ℓ by name, and the products ∇²ℓ v with the velocities v of the weights."""
    moving, gradient, product = [weights[name] for name in velocity], dict[str, Tensor](), dict[str, Tensor]()
    for loss in losses:
        slopes = torch.autograd.grad(loss, moving, create_graph=True, materialize_grads=True)
        curved = [(g, v) for g, v in zip(slopes, velocity.values(), strict=True) if g.requires_grad]
        terms: Sequence[Tensor] = ()  # the loss may be linear in all weights
        if curved:
            terms = torch.autograd.grad([g for g, _ in curved], moving, [v for _, v in curved], materialize_grads=True)
        for total, each in ((gradient, slopes), (product, terms)):
            for name, term in zip(velocity, each, strict=False):
                total[name] = total[name] + term.detach() if name in total else term.detach()
    return gradient, product
