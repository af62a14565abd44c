"""What attention as points costs: passes, and steps of geoopt's optimisers beside those of this package and AdamW.

Half of BERT-base (six layers, 72 heads) in float32. The variants take turns; ``python -m benchmarks.points``.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import geoopt
import torch
import transformers

from quotient_manifolds.optim import create_quotient_optimizer
from quotient_manifolds.symmetries import manifold_parameters_

from ._common import write


def seconds(run: Callable[[], object]) -> float:
    """Time one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(repeats: int = 5) -> None:
    """Measure in turns; the first turn does not count."""
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=6)
    plain = transformers.BertModel(config, add_pooling_layer=False).eval()
    points, ids = copy.deepcopy(plain), torch.randint(0, 1000, (4, 32))
    manifold_parameters_(points)

    def passes(model: torch.nn.Module) -> None:
        model(ids).last_hidden_state.square()[..., 0].mean().backward()

    variants = {
        "forward and backward, plain weights": lambda: passes(plain),
        "forward and backward, points": lambda: passes(points),
        "step of AdamW": torch.optim.AdamW(plain.parameters(), lr=1e-6).step,
        "step of QuotientAdam": create_quotient_optimizer(plain, lr=1e-6).step,
        "step of RiemannianSGD": geoopt.optim.RiemannianSGD(points.parameters(), lr=1e-6).step,
        "step of RiemannianAdam": geoopt.optim.RiemannianAdam(points.parameters(), lr=1e-6).step,
    }
    turns = [{name: seconds(run) for name, run in variants.items()} for _ in range(repeats + 1)][1:]
    base = "forward and backward, plain weights"
    rows = [{"what": name, "of a plain pass": statistics.median(t[name] / t[base] for t in turns)} for name in variants]
    write("points", rows)


if __name__ == "__main__":
    main()
