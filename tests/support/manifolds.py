"""Points of every manifold of geoopt, a small problem on each, and a slow oracle of its sharpness."""

import geoopt
import scipy.optimize
import torch
from torch import nn


def lorentz(manifold):
    space = torch.tensor([[0.3, -0.5, 0.2], [0.1, 0.4, -0.6]])
    return torch.cat([(1 + space.square().sum(-1, keepdim=True)).sqrt(), space], dim=-1)


#: By the name of the class: a manifold (made when it is asked for, in the default dtype of then), and a point of it.
CASES = {
    "Euclidean": (lambda: geoopt.Euclidean(ndim=1), lambda m: m.random(2, 3)),
    "EuclideanStiefel": (lambda: geoopt.EuclideanStiefel(), lambda m: m.random(4, 2)),
    "EuclideanStiefelExact": (lambda: geoopt.EuclideanStiefelExact(), lambda m: m.random(4, 2)),
    "CanonicalStiefel": (lambda: geoopt.CanonicalStiefel(), lambda m: m.random(4, 2)),
    "Sphere": (lambda: geoopt.Sphere(), lambda m: m.random(2, 4)),
    "SphereExact": (lambda: geoopt.SphereExact(), lambda m: m.random(4)),
    "BirkhoffPolytope": (lambda: geoopt.BirkhoffPolytope(max_iter=300, tol=1e-9), lambda m: m.random(3, 3)),
    "SymmetricPositiveDefinite": (lambda: geoopt.SymmetricPositiveDefinite(), lambda m: m.random(3, 3)),
    "UpperHalf": (lambda: geoopt.manifolds.UpperHalf(), lambda m: m.random(2, 2, dtype=torch.complex128)),
    "BoundedDomain": (lambda: geoopt.manifolds.BoundedDomain(), lambda m: m.random(2, 2, dtype=torch.complex128)),
    "PoincareBall": (lambda: geoopt.PoincareBall(), lambda m: m.random(2, 3, std=0.5)),
    "PoincareBallExact": (lambda: geoopt.PoincareBallExact(), lambda m: m.random(3, std=0.5)),
    "Stereographic": (lambda: geoopt.Stereographic(0.5), lambda m: m.random(3)),
    "StereographicExact": (lambda: geoopt.StereographicExact(-0.5), lambda m: m.random(3)),
    "SphereProjection": (lambda: geoopt.SphereProjection(), lambda m: m.random(3)),
    "SphereProjectionExact": (lambda: geoopt.SphereProjectionExact(), lambda m: m.random(3)),
    "ProductManifold": (
        lambda: geoopt.ProductManifold((geoopt.Sphere(), 3), (geoopt.PoincareBall(), 2)), lambda m: m.random(5)
    ),
    "StereographicProductManifold": (
        lambda: geoopt.StereographicProductManifold((geoopt.Stereographic(-1.0), 2), (geoopt.Stereographic(0.5), 2)),
        lambda m: m.random(4),
    ),
    "Lorentz": (lambda: geoopt.Lorentz(), lorentz),
    "Scaled": (lambda: geoopt.Scaled(geoopt.Sphere(), 2.0), lambda m: m.random(4)),
}  # fmt: skip


def point(name):
    """A point as a parameter."""
    make, draw = CASES[name]
    manifold = make()
    torch.manual_seed(3)
    return geoopt.ManifoldParameter(draw(manifold).detach().clone(), manifold=manifold)


def real(x):
    return torch.view_as_real(x) if x.is_complex() else x


class Problem(nn.Module):
    """A smooth function of a point and of data."""

    def __init__(self, x, chart=lambda x: x):
        super().__init__()
        self.x, self.chart = x, chart

    def forward(self, data):
        return (data * real(self.chart(self.x)).flatten()).sum(-1).tanh().square().mean()  # no product: no attention


def loss(model, data):
    return model(data)


def data_of(x):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(6, real(x.detach()).numel(), generator=generator)


def dense_basis(manifold, x):
    """An orthonormal basis of the tangent space, from ``proju`` and ``inner`` of every two vectors of one point."""
    found = []
    points = x.reshape(-1, *x.shape[x.dim() - manifold.ndim :])
    for i, one in enumerate(points):
        units = torch.eye(real(one).numel()).reshape(-1, *real(one).shape)
        units = torch.view_as_complex(units) if one.is_complex() else units
        P = [manifold.proju(one, u) for u in units]
        gram = torch.stack([torch.stack([manifold.inner(one, u, v).real.sum() for v in P]) for u in P])
        values, vectors = torch.linalg.eigh(gram)
        for value, v in zip(values, vectors.T, strict=True):
            if value > 1e-9 * values[-1]:
                whole = torch.zeros_like(points)
                whole[i] = sum(c * p for c, p in zip(v, P, strict=True)) / value.sqrt()
                found.append(whole.reshape(x.shape))
    return torch.stack(found)


def retraction(manifold):
    return manifold.retr if type(manifold).__name__ in ("UpperHalf", "BoundedDomain") else manifold.expmap


def oracle(problem, data, rho, found, starts=14):
    """The largest increase of the loss in the ball: by SLSQP from the best of many points, others, and one found."""
    manifold, x = problem.x.manifold, problem.x.detach().clone()
    basis = dense_basis(manifold, x)

    def losses(c):
        end = retraction(manifold)(x.expand(len(c), *x.shape), torch.tensordot(c.to(basis.dtype), basis, 1))
        return (real(end).flatten(1) @ data.T).tanh().square().mean(-1)

    def decrease(c):
        c = torch.tensor(c).unsqueeze(0).requires_grad_()
        value = losses(c)
        return -value.item(), -torch.autograd.grad(value, c)[0][0].numpy()

    c = torch.randn(2000, len(basis), generator=torch.Generator().manual_seed(0))
    c = rho * c / c.norm(dim=-1, keepdim=True) * torch.linspace(0.2, 1, 2000).unsqueeze(-1)
    known = torch.linalg.lstsq(real(basis).flatten(1).T, real(found).reshape(-1, 1)).solution.T
    known = known * min(1, rho / float(known.norm()))  # whatever it is of, it is judged in the ball
    inside = {"type": "ineq", "fun": lambda c: rho**2 - c @ c, "jac": lambda c: -2 * c}
    ends = [
        scipy.optimize.minimize(decrease, start.numpy(), jac=True, method="SLSQP", constraints=[inside])
        for start in torch.cat([known, c[losses(c).topk(starts // 2).indices], c[:: len(c) // (starts // 2)]])
    ]
    return max(-end.fun for end in ends) - problem(data).item()
