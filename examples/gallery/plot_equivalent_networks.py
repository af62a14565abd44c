r"""
Sharpness along an orbit
========================

Attention scores depend on :math:`W_Q W_K^T` only. Here the factors of every head of a small vision transformer are
multiplied by :math:`A^{-1}` and :math:`A^T`, for random matrices :math:`A` with larger and larger condition numbers.
The network computes the same function throughout. Which measures of sharpness change?

Needs ``pip install '.[demo]'``.
"""

import copy

import matplotlib.pyplot as plt
import torch

import sharpness
from quotient_manifolds.symmetries import move_
from sharpness.demo import digits, train, vision_transformer

# %%
# A vision transformer, trained for a few seconds on scanned digits.

torch.manual_seed(0)
images, labels, test_images, _ = digits()
model = vision_transformer()
train(model, images, labels, epochs=6, progress=False)
batches = [(images[:128], labels[:128])]

# %%
# Equivalent networks, one for each condition number, and their sharpness relative to the original's.

radii = {"euclidean": 0.05, "adaptive": 0.5, "geodesic-inv": 0.1}
conditions = [1, 10, 100]


def measured(network):
    return {m: float(sharpness.evaluate(network, batches, measure=m, rho=r, progress=False)) for m, r in radii.items()}


original = measured(model)
relative = {measure: [] for measure in radii}
for condition in conditions:
    twin = copy.deepcopy(model)
    move_(twin, condition=condition)
    with torch.no_grad():
        change = (model(test_images).logits - twin(test_images).logits).abs().max()
    found = measured(twin)
    print(f"condition {condition:>3}: scores change by at most {change:.0e}")
    for measure in radii:
        relative[measure].append(found[measure] / original[measure])

# %%
# Only the measure on the quotient gives the same number to all of them.

for (measure, values), marker in zip(relative.items(), "os^", strict=True):
    plt.loglog(conditions, values, marker=marker, label=measure)
plt.axhline(1, color="0.6", linewidth=1, zorder=0)
plt.xlabel("condition number of the matrices that act on the heads")
plt.ylabel("sharpness / sharpness of the original network")
plt.legend()
plt.show()
