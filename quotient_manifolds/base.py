"""The interface of a quotient manifold: geoopt's manifold for points modulo a group action."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._geoopt import ScalingInfo, geoopt
from .linalg import (
    NotFiniteError,
    as_count,
    check_dtype,
    check_finite,
    check_tensors,
    differentiated,
    finite,
    holds,
    own_precision,
    pack,
    root,
    transformed,
)

C = TypeVar("C", bound=type)
#: The operations of manifolds whose results are numbers; those that call another one are not looked at twice.
_OPERATIONS = {
    *("acceleration", "inner", "norm", "proju", "egrad2rgrad", "retr", "expmap", "geodesic", "transp"),
    *("logmap", "dist", "mean", "act", "vertical", "to_matrix", "canonical"),
}


def in_own_precision(cls: C) -> C:
    """Apply :func:`own_precision` to the public methods that a class defines."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            looked_at = name in _OPERATIONS and issubclass(cls, geoopt.Manifold)
            setattr(cls, name, own_precision(method, looked_at))
    return cls


def check_vector(who: object, x: Tensor, u: Tensor, name: str = "u") -> None:
    """Raise for a vector that does not fit a point."""
    tensors = isinstance(x, Tensor) and isinstance(u, Tensor)
    if not tensors or x.is_meta or u.is_meta or u.dtype != x.dtype or u.device != x.device:
        check_tensors(who, x=x, **{name: u})
    if u.shape[-2:] != x.shape[-2:]:
        raise ValueError(
            f"{who}: the vector {name} of shape {tuple(u.shape)} does not fit the point x of shape "
            f"{tuple(x.shape)}; their last two dimensions must agree"
        )


@in_own_precision
class TangentSpace(ABC):
    r"""The horizontal space at one point, with the point's factorisation done once.

    :meth:`QuotientManifold.tangent_space_at` makes it, for many vectors at the same point. Vectors are tensors of the
    point's shape (batch dimensions broadcast). The manifold's own methods remember that of the last point.

    Attributes
    ----------
    x : Tensor
        The point.

    Notes
    -----
    Abstract; for the GL(h) quotients it is a :class:`~quotient_manifolds.GLTangentSpace`.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> manifold = GLQuotientMix(4, 3)
    >>> space = manifold.tangent_space_at(manifold.origin(4 + 3, 2))
    >>> u = space.proju(torch.arange(14.0).reshape(7, 2))
    >>> space.norm(u), space.norm(space.proju(u) - u)
    (tensor(26.2679), tensor(0.))
    """

    x: Tensor

    @abstractmethod
    def inner(self, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute the metric's inner product ⟨u, v⟩ (v = u if omitted) of ambient vectors; real, (…) or (…, 1, 1)."""

    @abstractmethod
    def proju(self, u: Tensor) -> Tensor:
        """Project an ambient vector on the horizontal space, orthogonally in the metric; shape of u."""

    @abstractmethod
    def egrad2rgrad(self, u: Tensor) -> Tensor:
        """Turn a Euclidean gradient into the Riemannian gradient (horizontal); shape of u."""

    @abstractmethod
    def acceleration(self, u: Tensor) -> Tensor:
        """Compute the geodesic acceleration −Γ(u, u), so that γ̈ = acceleration(γ̇); shape of u."""

    @abstractmethod
    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw a standard Gaussian horizontal vector of the point's shape; its law depends only on the orbit."""

    def norm(self, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute ‖u‖ = √⟨u, u⟩, whose derivative at 0 is defined as 0; real, shape (…) or (…, 1, 1)."""
        return root(self.inner(u, keepdim=keepdim))

    def retr(self, u: Tensor) -> Tensor:
        """Follow the geodesic to second order: x + u + ½ acceleration(u); shape of u."""
        return torch.add(self.x + u, self.acceleration(u), alpha=0.5)


class _Remembering(geoopt.Manifold):
    """A manifold that factorises a point once for all that follows at it."""

    _complex_allowed = True
    #: A reference to the last point, a copy of it, and the tangent space at the copy.
    _last: tuple[weakref.ref[Tensor], Tensor, TangentSpace] | None = None

    @abstractmethod
    def _tangent_space(self, x: Tensor, differentiable: bool) -> TangentSpace:
        """Factorise the checked point x."""

    def _vector_space(self, x: Tensor, u: Tensor, name: str = "u") -> TangentSpace:
        """Return the tangent space at x for a vector that fits: the last one, if x lives and has not changed since."""
        check_vector(self, x, u, name)
        differentiable = transformed() or (differentiated(x) and torch.is_grad_enabled())
        last = self._last  # another thread may replace it
        if last is not None and not differentiable:
            reference, copy, space = last
            if reference() is x and x.dtype == copy.dtype and x.device == copy.device and torch.equal(x, copy):
                return space
        self._assert_check_shape(x.shape, "x")
        check_dtype(self, x, self._complex_allowed)
        if differentiable:
            return self._tangent_space(x, True)
        copy = x.detach().clone()
        space = self._tangent_space(copy, False)
        if not torch.is_inference_mode_enabled():
            forget = functools.partial(self.__dict__.pop, "_last")  # called with the reference, pop's default
            self.__dict__["_last"] = weakref.ref(x, forget), copy, space
        return space

    def _horizontal(self, x: Tensor, u: Tensor) -> tuple[Any, Tensor]:
        """Return the tangent space at x, and the horizontal part of a finite vector."""
        space = self._vector_space(x, u)
        check_finite(self, u)
        return space, space.proju(u)

    def __getstate__(self) -> dict[str, Any]:
        """Leave what is remembered behind when the manifold is copied or pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_last"}


@in_own_precision
class QuotientManifold(_Remembering):
    r"""Base class of manifolds whose points are orbits of a group that acts on full-rank tensors.

    A point is one real or complex tensor, a representative of its orbit; a tangent vector is the horizontal lift at
    that representative. Every operation is equivariant: a group element that acts on all arguments acts on the result.
    Every operation is homogeneous in the sizes of the factors, and is computed in units of them. A result that its
    dtype does not hold is a ValueError: no operation returns NaN or inf unless it was given one.

    Notes
    -----
    A subclass implements what is abstract here; :func:`quotient_manifolds.testing.check_manifold` tests it. Inside
    :class:`geoopt.Scaled`, call ``pack_point``, ``unpack_tensor`` and ``origin`` on the base, and not
    :meth:`tangent_space_at`, ``geodesic`` and ``exit_time``, whose vectors would escape the scaling.

    Examples
    --------
    geoopt's optimisers accept it like any other manifold:

    >>> import geoopt, quotient_manifolds, torch
    >>> manifold = quotient_manifolds.GLQuotientMix(4, 3)
    >>> x = geoopt.ManifoldParameter(manifold.origin(4 + 3, 2), manifold=manifold)
    >>> optimizer = geoopt.optim.RiemannianAdam([x], lr=0.1)
    >>> loss = (manifold.to_matrix(x) - torch.ones(4, 3)).square().mean()
    >>> loss.backward()
    >>> optimizer.step()
    >>> bool((manifold.to_matrix(x) - torch.ones(4, 3)).square().mean() < loss)
    True
    """

    __scaling__ = geoopt.Manifold.__scaling__.copy()
    ndim = 2
    reversible = False

    @abstractmethod
    def row_split(self) -> list[int]:
        """Return the number of rows of each factor of a point."""

    @abstractmethod
    def act(self, x: Tensor, A: Tensor) -> Tensor:
        """Move x along its orbit by the group element A; shape of x."""

    @abstractmethod
    def vertical(self, x: Tensor, L: Tensor) -> Tensor:
        """Return the vertical vector at x that the Lie algebra element L generates; shape of x."""

    @abstractmethod
    def to_matrix(self, x: Tensor) -> Tensor:
        """Compute what the network sees of x, which is the same for the whole orbit."""

    @abstractmethod
    def canonical(self, x: Tensor) -> Tensor:
        """Return the canonical representative of the orbit of x; shape of x."""

    def random_algebra(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw an element of the Lie algebra that acts on x, for :meth:`vertical`; override it for a new group."""
        raise NotImplementedError(f"{self} does not define how to draw from its Lie algebra; override random_algebra")

    def random_element(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a group element for :meth:`act`: here, for groups of matrices, the exponential of a random one."""
        return torch.linalg.matrix_exp(self.random_algebra(x, generator))

    # -- geometry ----------------------------------------------------------------------------------------------

    @__scaling__(ScalingInfo.NotCompatible)
    def tangent_space_at(self, x: Tensor) -> TangentSpace:
        """Factorise the point x once, for use with many vectors.

        The result is differentiable with respect to x if x requires gradients, on its device and in its dtype: float32,
        float64 or their complex counterparts.

        Raises
        ------
        ValueError
            Wrong shape or dtype, NaN or infinite entries, a rank-deficient point.
        """
        return self._vector_space(x, x)

    @__scaling__(ScalingInfo(u=-1))
    def acceleration(self, x: Tensor, u: Tensor) -> Tensor:
        """Compute the geodesic acceleration −Γ(u, u) at x; shape of u."""
        return self._vector_space(x, u).acceleration(u)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute the metric's inner product ⟨u, v⟩ at x (v = u if omitted); real, shape (…) or (…, 1, 1)."""
        if v is not None:
            check_vector(self, x, v, "v")
        return self._vector_space(x, u).inner(u, v, keepdim=keepdim)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute ‖u‖ at x, whose derivative at u = 0 is defined as 0; real, shape (…) or (…, 1, 1)."""
        return self._vector_space(x, u).norm(u, keepdim=keepdim)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Project an ambient vector u on the horizontal space at x, orthogonally in the metric; shape of u."""
        return self._vector_space(x, u).proju(u)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Turn the Euclidean gradient u at x into the Riemannian gradient; shape of u."""
        return self._vector_space(x, u).egrad2rgrad(u)

    @__scaling__(ScalingInfo(u=-1))
    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Retract by the second-order geodesic x + u + ½ acceleration(x, u); shape of x + u.

        Here, and wherever a geodesic is followed, u is projected first: a vector stands for the tangent vector of the
        quotient that it represents.

        Notes
        -----
        Paper, §5.2 and Eq. 12. The error against the exact geodesic falls by a factor of 8 when u is halved.
        """
        space = self._vector_space(x, u)
        return space.retr(space.proju(u))

    @__scaling__(ScalingInfo(u=-1))
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the end of the exact geodesic at time 1, see :meth:`geodesic`; of :meth:`retr` where there is none.

        :meth:`retr` is the cheaper second-order approximation that optimisers use; it never leaves the manifold.
        """
        space, u = self._horizontal(x, u)
        return space.geodesic(u)[0] if hasattr(space, "geodesic") else space.retr(u)

    @__scaling__(ScalingInfo.NotCompatible)
    def geodesic(self, x: Tensor, u: Tensor, t: Any) -> tuple[Tensor, Tensor]:
        """Return points and velocities at many times of the geodesic from x with velocity u, differentiable.

        Parameters
        ----------
        x, u : Tensor
            Point and vector, which is projected, (…, n + m, h).
        t : float or Tensor
            Times of any shape (k…) and sign.

        Returns
        -------
        tuple of Tensor
            Both (k…, …, n + m, h).

        Raises
        ------
        GeodesicExitError
            A mix geodesic reaches a rank-deficient matrix before the last time (``time``; item by item in ``times``).

        Notes
        -----
        A tangent space with a method ``geodesic(u, t)`` has exact ones. inv has a closed form, and so have both metrics
        of :class:`RescaleQuotient`; the equation of mix is solved to a relative tolerance of 1e-12 in float64 and 2e-6
        in float32.
        """
        space, u = self._horizontal(x, u)
        return space.geodesic(u, t)

    def geodesic_between(self, x: Tensor, y: Tensor, t: Any) -> Tensor:
        """Interpolate from x (t = 0) to the orbit of y (t = 1); t is (k…), the result (k…, …), differentiable in t."""
        return self.geodesic(x.detach(), self.logmap(x, y), t)[0]

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Transport v from x to y by horizontal projection at y; shape of v."""
        return self._vector_space(y, v, "v").proju(v)

    def projx(self, x: Tensor) -> Tensor:
        """Project an ambient tensor on the manifold: the identity on valid points.

        Raises
        ------
        ValueError
            For NaN, infinite entries or a dtype without linear algebra.
        """
        self.unpack_tensor(x)  # the checks
        QuotientManifold._check_point(self, x)
        return self._projx(x)

    @abstractmethod
    def _projx(self, x: Tensor) -> Tensor:
        """Project a finite tensor of the right shape and dtype."""

    # -- points ------------------------------------------------------------------------------------------------

    def pack_point(self, *tensors: Tensor) -> Tensor:
        """Stack the factors G (…, n, h) and H (…, m, h) along the rows into one point, (…, n + m, h).

        Raises
        ------
        ValueError
            The number of factors or their rows do not fit, or the factors differ in dtype or device.
        """
        check_tensors(self, **{f"factor {i}": t for i, t in enumerate(tensors, 1)})
        rows, shapes = self.row_split(), [tuple(t.shape) for t in tensors]
        if [s[-2] for s in shapes if len(s) > 1] != rows or len({s[-1] for s in shapes}) > 1:
            raise ValueError(
                f"{self} packs {len(rows)} factors with {rows} rows and the same number of columns, not shapes {shapes}"
            )
        return pack(*tensors)

    def unpack_tensor(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split a point (or vector) into its factors (G, H), views of it."""
        check_tensors(self, x=tensor)
        self._assert_check_shape(tensor.shape, "x")
        return tensor.split(self.row_split(), dim=-2)

    def random(self, *size: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        """Draw a point of shape ``size`` with standard Gaussian entries (full rank with probability one).

        dtype, device and further arguments (such as ``generator``) are those of :func:`torch.randn`.
        """
        return self._as_point(torch.randn, size, dtype=dtype, device=device, **kwargs)

    def _as_point(self, make: Callable[..., Tensor], size: tuple[Any, ...], **options: Any) -> Tensor:
        """Make a tensor that knows its manifold, as geoopt's own do; its shape is one tuple or separate numbers."""
        size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], tuple | list) else size
        x = make(tuple(as_count("a size", s, least=0) for s in size), **options)
        self._assert_check_shape(x.shape, "x")
        return geoopt.ManifoldTensor(x, manifold=self, requires_grad=differentiated(x))

    def _check_point(self, x: Tensor) -> None:
        """Raise a ValueError for a tensor of the right shape that is no point; a subclass adds what it demands."""
        check_dtype(self, x, self._complex_allowed)
        if not finite(x):
            raise NotFiniteError(
                f"{self}: the point of shape {tuple(x.shape)} has NaN or infinite entries; in an optimisation the "
                "learning rate is too high"
            )

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        check_tensors(self, x=x)
        try:
            self._check_point(x.detach())
        except ValueError as error:
            return False, str(error)
        return True, None

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        space, v = self._horizontal(x, u)
        horizontal = holds(space.norm(u - v) <= atol + rtol * space.norm(u))
        return horizontal, None if horizontal else "the vector is not horizontal in the metric; use proju"
