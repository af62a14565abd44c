"""Paths of least energy: a batched quasi-Newton method."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..linalg import hermitian_power, standard_normal, weighted_sylvester
from ..metrics import Pair
from .paths import Bent, Path, energy, flat, hermitian, unflat, weights

#: Coefficients that follow the end. The others hardly would, and half of the time goes into this.
_FOLLOWING = 3
#: Pairs of steps and changes of the gradient that are kept.
_MEMORY = 8
#: Steps after which a path is so far from where its preconditioner was computed that a new one saves time.
_FRESH = 12


class Preconditioner:
    r"""An approximate inverse of the energy's second derivative.

    For the coefficients c_k, k ≥ 1, the second derivative is roughly the average weight W of the metric. The end moves
    along its orbit by Λ, and the first coefficients change with it as those of a bent path do. The skew-Hermitian part
    Ω of Λ rotates the end: where the spans of both ends are orthogonal, all rotated ends are equally far away, and the
    second derivative is small. With :math:`S_G = W^{1/2} G_1^H G_0 W^{1/2}` and :math:`T = S_G + S_H` (cosines of the
    angles), it is about :math:`\tfrac12(T'Ω + ΩT')` there, :math:`T' = θ \cot θ` for :math:`T = \cos θ`.
    """

    def __init__(self, path: Path) -> None:
        path = path.in_single()
        w = path.rule()[0]
        averages = [torch.einsum("q,bqij->bij", w.to(X.dtype), X.mH @ X) for X in path.points()]
        inverse = weights(path.metric, averages[0], averages[1], inverse=True)
        # Of paths that failed nothing counts, but what is not finite, or has no finite square, would stop the
        # decompositions of a whole batch.
        self._inverse = [hermitian(V).nan_to_num(0, 0, 0) / 2 for V in inverse]
        sane = path.y.abs() < torch.finfo(path.y.dtype).max ** 0.25
        ends, starts = path.split(torch.where(sane, path.y, 0)), path.split(path.x)
        roots = [hermitian_power(V, 0.5) for V in self._inverse]
        back = [torch.linalg.inv_ex(R)[0] for R in roots]
        grams = [X.mH @ X for X in ends]
        self._stretch = weighted_sylvester(grams[0], grams[1], roots[1], roots[0])
        T = hermitian(sum(R @ (Y.mH @ X) @ R for R, X, Y in zip(back, starts, ends, strict=True)))
        size = sum((R @ M @ R).diagonal(dim1=-2, dim2=-1).real.mean(-1) for R, M in zip(back, grams, strict=True))
        cosine, self._turn = torch.linalg.eigh((T / size[..., None, None]).nan_to_num(0, 0, 0))
        self.cosine, cosine = cosine[:, 0], cosine.clamp(0.01, 1 - 1e-6)
        stiffness = size.unsqueeze(-1) * cosine * cosine.arccos() / (1 - cosine**2).sqrt()
        self._stiffness = (stiffness.unsqueeze(-1) + stiffness.unsqueeze(-2)) / 2
        like = replace(path, c=path.c[:, :_FOLLOWING])
        self._later = path.c.shape[1] - like.c.shape[1]
        # Both factors are worked on as one batch; rows of zeros that make them equally large stay zero.
        self._rows = [X.shape[-2] for X in starts]
        self._bent = Bent(self._stacked(starts), self._stacked(ends), like)
        self._bent.prepare()
        # It is linear in Λ, so automatic differentiation gives the adjoint from one recorded graph.
        with torch.enable_grad():
            self._still = torch.zeros_like(T, requires_grad=True)
            self._followed = self._following(self._still)

    def _stacked(self, factors: Pair) -> Tensor:
        most = max(self._rows)
        return torch.cat([torch.nn.functional.pad(X, (0, 0, 0, most - X.shape[-2])) for X in factors])

    def _following(self, L: Tensor) -> Tensor:
        """Return the change of the coefficients when the end moves by Λ."""
        found = self._bent.following(torch.cat([L, -L.mH])).chunk(2)
        own = torch.cat([part[..., :rows, :] for part, rows in zip(found, self._rows, strict=True)], -2)
        return torch.nn.functional.pad(own, (0, 0, 0, 0, 0, self._later))

    def __call__(self, g: Tensor, path: Path) -> Tensor:
        """Apply the preconditioner to a gradient at a path with the same number of coefficients."""
        gc, K = unflat(g.to(self._turn.dtype), path)
        K = K + torch.autograd.grad(self._followed, self._still, gc, retain_graph=True)[0]
        Q = self._turn
        L = Q @ ((Q.mH @ ((K - K.mH) / 2) @ Q) / self._stiffness) @ Q.mH
        L = L + hermitian(self._stretch(hermitian(K)))
        own = [P @ V.unsqueeze(1) for P, V in zip(path.split(gc), self._inverse, strict=True)]
        return flat(torch.cat(own, -2) + self._following(L), L).to(g.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return Re⟨a, b⟩, item by item."""
    return torch.linalg.vecdot(a, b).real


class Minimiser:
    """L-BFGS for a batch of paths, in which every item has its own step length and stopping test.

    ``value`` is the energy, ``error`` the length of the preconditioned gradient relative to that of the path (to a
    thousandth of the size of the point, for shorter paths).
    """

    def __init__(self, path: Path) -> None:
        self.path, self._known = path, energy(path)
        M, N = (X.mH @ X for X in path.split(path.x))
        W_G, W_H = weights(path.metric, M, N, inverse=False)
        self._least = 1e-6 * (W_G.mT * M + W_H.mT * N).real.sum((-2, -1))
        self.value = self.error = torch.full_like(self._least, torch.inf)
        self.renew()

    def renew(self) -> None:
        """Compute the preconditioner at the present path."""
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self._preconditioner = Preconditioner(self.path)
        self.cosine = self._preconditioner.cosine

    def _direction(self, g: Tensor) -> Tensor:
        d, factors = g, []
        for s, y, rho in reversed(self._pairs):
            factors.append(rho * _dot(s, d))
            d = torch.addcmul(d, factors[-1].unsqueeze(-1).to(d.dtype), y, value=-1)
        d = self._preconditioner(d, self.path)
        for (s, y, rho), a in zip(self._pairs, reversed(factors), strict=True):
            d = torch.addcmul(d, (a - rho * _dot(y, d)).unsqueeze(-1).to(d.dtype), s)
        return -d

    def disturbed(self, share: float) -> Path:
        """Return the paths after one random step, of a share of the size of their start."""
        path, g = self.path, self._known[1]
        drawn = standard_normal((1, g.shape[1]), g, torch.Generator().manual_seed(0))
        d = self._preconditioner(drawn.expand_as(g), path)
        size = torch.linalg.matrix_norm(path.x) / torch.linalg.vector_norm(d, dim=1)
        return path.moved(share * size.unsqueeze(-1) * d)

    def run(self, steps: int, tol: float | Tensor) -> Path:
        """Take steps until the error of every item, relative to its length, is below the tolerance, or give up."""
        value, g = self._known
        rounding = 500 * torch.finfo(value.dtype).eps
        stuck, again = torch.zeros_like(value, dtype=torch.bool), True
        for count in range(steps):
            if count and count % _FRESH == 0:
                self.renew()
                stuck = torch.zeros_like(stuck)
            d = self._direction(g)
            slope = _dot(g, d)
            self.value, self.error = value, (-slope / (value + self._least)).clamp_min(0).sqrt()
            unfinished = (self.error > tol) & (slope < 0)
            moving = unfinished & ~stuck
            if not bool(moving.any()):
                if not (again and bool(unfinished.any())):
                    break
                self.renew()
                stuck, again = torch.zeros_like(stuck), False
                continue
            step = torch.where(moving, 1.0, 0.0).to(value)
            for attempt in range(10):
                trial = self.path.moved(step.unsqueeze(-1) * d)
                new_value, new_g = energy(trial)
                # The energy must fall; where its change is below rounding error, the slope must.
                new_slope = _dot(new_g, d)
                falls = new_value <= value * (1 - rounding) + 1e-4 * step * slope
                flatter = (new_slope.abs() <= 0.9 * slope.abs()) & (new_value <= value * (1 + rounding))
                fine = falls | flatter | (step == 0)
                if bool(fine.all()):
                    break
                secant = (slope / (slope - new_slope)).nan_to_num(0.1).clamp(0.1, 0.5)
                step = torch.where(fine, step, 0.0 if attempt == 8 else secant * step)
            stuck = stuck | (moving & (step == 0))  # a new preconditioner may free them
            s, y = step.unsqueeze(-1) * d, new_g - g
            sy = _dot(s, y)
            good = sy > 1e-10 * (_dot(s, s) * _dot(y, y)).sqrt()
            self._pairs = [*self._pairs, (s, y, torch.where(good, 1 / torch.where(good, sy, 1), 0))][-_MEMORY:]
            self.path, value, g = trial, new_value, new_g
            self._known = value, g
        return self.path

    def follow(self, way: Tensor, goal: Tensor) -> Path:
        """Move the ends of paths by ``way``, and the paths so that the gradient is unchanged to first order.

        For a path of least energy the gradient stays zero. A path close to one changes by the same amount to first
        order, so it need not be minimised further. Solved by conjugate gradients until the residual is below ``goal``,
        item by item.
        """
        self.path = replace(self.path, y=self.path.y + way)
        g = energy(self.path)[1]
        r, d = self._known[1] - g, torch.zeros_like(g)
        z = self._preconditioner(r, self.path)
        p, square = z, _dot(r, z)
        first, going = square, square > 0
        for _ in range(40):
            epsilon = (1e-6 * (1e6 * self._least).sqrt() / square.sqrt()).nan_to_num(0, 0, 0).unsqueeze(-1)
            Hp = (energy(self.path.moved(epsilon * p))[1] - g) / epsilon
            bend = _dot(p, Hp)
            going = going & (bend > 0)
            alpha = torch.where(going, square / bend, 0).unsqueeze(-1).to(g.dtype)
            d = torch.addcmul(d, alpha, p)
            r = torch.addcmul(r, alpha, torch.where(going.unsqueeze(-1), Hp, 0), value=-1)
            z = self._preconditioner(r, self.path)
            last, square = square, _dot(r, z)
            going = going & (square > goal**2 * first)
            if not bool(going.any()):
                break
            p = torch.addcmul(z, (square / last).nan_to_num(0, 0, 0).unsqueeze(-1).to(g.dtype), p)
        # Where the end would move far the first order means nothing.
        near = unflat(d, self.path)[1].abs().amax((-2, -1)) < 1
        self.path = self.path.moved(torch.where(near.unsqueeze(-1), d, 0))
        self._known = energy(self.path)
        return self.path
