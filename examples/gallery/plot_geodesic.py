r"""
Interpolation between equivalent factors
========================================

The same low-rank product can be stored as many pairs of factors. On a straight line between unrelated factors of two
nearby products, the product moves far away from both. On the geodesic of the quotient it stays close to the straight
line between the two products.
"""

import matplotlib.pyplot as plt
import torch

from quotient_manifolds import GLQuotientInv

torch.manual_seed(0)
manifold = GLQuotientInv(n=30, m=20)
x = manifold.random(30 + 20, 4, dtype=torch.float64)
near = manifold.retr(x, 0.03 * manifold.tangent_space_at(x).random())  # another product, not far away
y = manifold.act(near, torch.randn(4, 4, dtype=torch.float64))  # given by unrelated factors

# %%
# Products along the two paths, compared with the straight line between the products themselves.

times = torch.linspace(0, 1, 41, dtype=torch.float64)
product_x, product_y = manifold.to_matrix(x), manifold.to_matrix(y)
chord = product_x + times[:, None, None] * (product_y - product_x)
paths = {
    "straight line of factors": manifold.to_matrix(x + times[:, None, None] * (y - x)),
    "geodesic": manifold.to_matrix(manifold.geodesic_between(x, y, times)),
}
for name, path in paths.items():
    plt.plot(times, (path - chord).flatten(1).norm(dim=1) / product_x.norm(), label=name)
plt.xlabel("t")
plt.ylabel("distance from the chord of the products, relative")
plt.legend()
plt.show()
print("distance of the two points:", round(float(manifold.dist(x, y)), 6))
