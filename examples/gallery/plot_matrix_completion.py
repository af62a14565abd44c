r"""
Matrix completion from unbalanced factors
=========================================

A 200 × 150 matrix of rank 4 is sought from 30 % of its entries, as a product :math:`GH^T`. The start is unbalanced:
:math:`G` is :math:`c^2` times as large as :math:`H`. Gradient descent on the factors slows down with :math:`c`.
geoopt's ``RiemannianSGD`` with ``GLQuotientMix`` does not depend on it: this is ScaledGD (Tong, Ma, Chi 2021).
"""

import math

import geoopt
import matplotlib.pyplot as plt
import torch

from quotient_manifolds import GLQuotientMix

N, M, RANK, KNOWN = 200, 150, 4, 0.3

torch.manual_seed(0)
quotient = GLQuotientMix(n=N, m=M)
target = quotient.to_matrix(torch.randn(N + M, RANK, dtype=torch.float64))
known = torch.rand(N, M) < KNOWN
start = torch.randn(N + M, RANK, dtype=torch.float64)

# %%
# The same loop for both: only the manifold of the parameter and the learning rate differ.


def errors(manifold, imbalance, lr, steps=100):
    scale = torch.cat([torch.full((N, 1), imbalance), torch.full((M, 1), 1 / imbalance)])
    point = geoopt.ManifoldParameter(start * scale, manifold=manifold)
    optimizer = geoopt.optim.RiemannianSGD([point], lr=lr)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        difference = point[:N] @ point[N:].mT - target
        (difference[known].square().sum() / (2 * KNOWN)).backward()
        optimizer.step()
        found.append(float(difference[~known].detach().norm() / target[~known].norm()))
    return found


# %%
# The three curves on the quotient coincide, because the manifold depends on the product only. On the factors the best
# of six rates is shown; with a large imbalance, a rate that does not diverge is too small for the smaller factor.

for imbalance, style in ((1.0, "-"), (1.5, "--"), (2.0, ":")):
    plt.semilogy(errors(quotient, imbalance, 0.5), "C0", linestyle=style, label=f"quotient, c = {imbalance:g}")
    tried = [errors(geoopt.Euclidean(ndim=2), imbalance, 2.0**-k) for k in range(6, 12)]
    factors = min(tried, key=lambda found: found[-1] if math.isfinite(found[-1]) else math.inf)
    plt.semilogy(factors, "C1", linestyle=style, label=f"factors, c = {imbalance:g}")
plt.xlabel("step")
plt.ylabel("relative error of the unknown entries")
plt.legend()
plt.show()
