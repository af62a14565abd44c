"""The largest eigenvalue of the Hessian beside curvlinops and PyHessian, before and after a move along the symmetry.

``pip install curvlinops-for-pytorch pyhessian`` first. One process, CPU, float64; relative errors are against the dense
Hessian, by reverse-over-reverse differentiation.
"""

from __future__ import annotations

import copy
import warnings
from importlib.metadata import version
from typing import Any

import scipy.sparse.linalg
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sharpness
from quotient_manifolds.symmetries import move_

from ._common import write

WIDTH, HEADS, CLASSES = 8, 2, 3


class Network(nn.Module):
    """One attention layer and a linear head on the mean token."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Give scores, (batch, classes)."""
        found: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return found


def dense(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Compute the largest eigenvalue from the whole matrix."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(v: Tensor) -> Tensor:
        parts = v.split([s.numel() for s in shapes.values()])
        weights = {name: part.view(s) for (name, s), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    return float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))[-1])


def ours(measure: str, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Measure it by ``hessian``."""
    return float(sharpness.hessian(model, [(x, y)], measure=measure, num_matvecs=3))


def by_curvlinops(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Lanczos (scipy) on curvlinops' operator."""
    import curvlinops

    operator = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)])
    return float(scipy.sparse.linalg.eigsh(operator.to_scipy(), k=1, which="LA", return_eigenvectors=False)[0])


def by_pyhessian(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """PyHessian's power iteration with its defaults."""
    from pyhessian import hessian

    return float(hessian(copy.deepcopy(model), nn.CrossEntropyLoss(), data=(x, y), cuda=False).eigenvalues()[0][0])


def main() -> None:
    """Train the network a little, measure, move, measure."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    x, y = torch.randn(12, 5, WIDTH), torch.randint(CLASSES, (12,))
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    moved = copy.deepcopy(model).eval()
    move_(moved, condition=30.0, seed=1)
    ways: dict[str, Any] = {
        "sharpness, euclidean-hessian": lambda m: ours("euclidean", m, x, y),
        "curvlinops": lambda m: by_curvlinops(m, x, y),
        "PyHessian": lambda m: by_pyhessian(m, x, y),
        "sharpness, riemannian-hessian": lambda m: ours("geodesic-inv", m, x, y),
    }
    rows = []
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = [dense(m, x, y) for m in (model.eval(), moved)]
        for name, way in ways.items():
            values = [way(m) for m in (model, moved)]
            errors = [abs(v / t - 1) for v, t in zip(values, truth, strict=True)]
            euclidean = None if "riemannian" in name else max(errors)
            rows.append({"tool": name, "as it is": values[0], "moved": values[1], "relative error": euclidean})
    names = ("curvlinops-for-pytorch", "pyhessian")
    write("peers_curvature", rows, versions={name: version(name) for name in names})


if __name__ == "__main__":
    main()
