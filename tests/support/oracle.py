"""Slow, obvious reference implementations, written from the definitions and sharing no code with the packages."""

import numpy as np
import torch
from scipy.integrate import solve_ivp


def split(x, n):
    return x[..., :n, :], x[..., n:, :]


def metric(name, n, x, u, v):
    """The inv or mix inner product, with the Gram matrices inverted as they stand."""
    G, H = split(x, n)
    (uG, uH), (vG, vH) = split(u, n), split(v, n)
    M, N = G.mH @ G, H.mH @ H
    if name == "inv":
        forms = torch.linalg.inv(M) @ uG.mH @ vG + torch.linalg.inv(N) @ uH.mH @ vH
    else:
        forms = N @ uG.mH @ vG + M @ uH.mH @ vH
    return forms.diagonal(dim1=-2, dim2=-1).sum(-1).real


def real_basis(h, dtype):
    """A real basis of the h × h matrices over the field of ``dtype``."""
    units = []
    for i in range(h):
        for j in range(h):
            E = torch.zeros(h, h, dtype=dtype)
            E[i, j] = 1
            units.append(E)
            if dtype.is_complex:
                units.append(1j * E)
    return units


def project(name, n, x, u):
    """Horizontal projection by least squares against every vertical vector."""
    G, H = split(x, n)
    vertical = [torch.cat([G @ E, -H @ E.mH]) for E in real_basis(x.shape[-1], x.dtype)]
    gram = torch.stack([torch.stack([metric(name, n, x, a, b) for b in vertical]) for a in vertical])
    rhs = torch.stack([metric(name, n, x, a, u) for a in vertical])
    weights = torch.linalg.solve(gram, rhs)
    return u - sum(w * v for w, v in zip(weights, vertical, strict=True))


def to_real(x):
    return torch.view_as_real(x).reshape(-1) if x.is_complex() else x.reshape(-1)


def from_real(v, like):
    return torch.view_as_complex(v.reshape(*like.shape, 2)) if like.is_complex() else v.reshape(like.shape)


def euler_lagrange(name, n, x, u):
    """Acceleration from the energy ½⟨v, v⟩_x by automatic differentiation, in real coordinates."""

    def energy(xr, vr):
        p, v = from_real(xr, x), from_real(vr, x)
        return 0.5 * metric(name, n, p, v, v)

    xr, vr = to_real(x), to_real(u)
    momentum = torch.func.grad(energy, argnums=1)
    drift, mass = torch.func.jacrev(momentum, argnums=(0, 1))(xr, vr)
    force = torch.func.grad(energy, argnums=0)(xr, vr)
    return from_real(torch.linalg.solve(mass, force - drift @ vr), x)


def geodesic(name, n, x, u, rtol=1e-12):
    """Endpoint at time 1 of the geodesic, by an adaptive solver on the Euler–Lagrange equation."""
    size = to_real(x).numel()

    def field(_, state):
        q, v = (torch.from_numpy(s.copy()) for s in (state[:size], state[size:]))
        a = euler_lagrange(name, n, from_real(q, x), from_real(v, x))
        return np.concatenate([v.numpy(), to_real(a).numpy()])

    start = np.concatenate([to_real(x).numpy(), to_real(u).numpy()])
    end = solve_ivp(field, (0, 1), start, method="DOP853", rtol=rtol, atol=1e-13).y[:, -1]
    return from_real(torch.from_numpy(end[:size].copy()), x)


def plain_adaptive_sharpness(model, batch, rho, steps):
    """Adaptive sharpness by Auto-PGD (L2) on the weights themselves, written plainly.

    The gradient step is scaled by |w|, as in adaptive sharpness-aware minimisation; the projection on the ellipsoid
    ‖δ ⊘ |w|‖ ≤ ρ is the Euclidean one, δ / (1 + λ/w²), with λ found by bisection to rounding.
    """
    x, y = batch
    weights = [p.detach().clone() for p in model.parameters()]
    sizes = [w.abs() for w in weights]

    def loss_and_gradient(delta):
        with torch.no_grad():
            for p, w, d in zip(model.parameters(), weights, delta, strict=True):
                p.copy_(w + d)
        output = model(x)
        loss = torch.nn.functional.cross_entropy(getattr(output, "logits", output), y)
        return float(loss), torch.autograd.grad(loss, list(model.parameters()))

    def norm(vectors):
        return float(torch.sqrt(sum((v.double() ** 2).sum() for v in vectors)))

    def length(delta):
        return norm([d / torch.where(s > 0, s, 1.0) for d, s in zip(delta, sizes, strict=True)])

    def project(delta):
        if length(delta) <= rho:
            return delta

        def shrunk(factor):
            return [d * s**2 / (s**2 + factor) for d, s in zip(delta, sizes, strict=True)]

        low, high = 0.0, 1e-12
        while length(shrunk(high)) > rho:
            high *= 4
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if length(shrunk(middle)) > rho else (low, middle)
        return shrunk(high)

    marks, before, now = [], 0, 22
    while now <= 100:
        marks.append(-(-now * steps // 100))
        before, now = now, now + max(now - before - 3, 6)
    try:
        delta = previous = [torch.zeros_like(w) for w in weights]
        value, gradient = loss_and_gradient(delta)
        base = value
        best, best_delta, best_gradient = value, delta, gradient
        eta, raised, last, halved, best_at_mark = 2 * rho, 0, 0, False, value
        for k in range(1, steps + 1):
            scaled = [g * s for g, s in zip(gradient, sizes, strict=True)]
            size = norm(scaled) + 1e-12
            z = project([d + eta * g * s / size for d, g, s in zip(delta, scaled, sizes, strict=True)])
            a = 1.0 if k == 1 else 0.75
            new = project([d + a * (q - d) + (1 - a) * (d - p) for d, q, p in zip(delta, z, previous, strict=True)])
            previous, delta = delta, new
            after, gradient = loss_and_gradient(delta)
            raised += after > value
            value = after
            if value > best:
                best, best_delta, best_gradient = value, delta, gradient
            if k in marks:
                stuck = not halved and best == best_at_mark
                halved = raised < 0.75 * (k - last) or stuck
                if halved:
                    eta /= 2
                    value, delta, gradient = best, best_delta, best_gradient
                    previous = delta
                last, raised, best_at_mark = k, 0, best
        return best - base
    finally:
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights, strict=True):
                p.copy_(w)
