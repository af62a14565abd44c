"""Two adapters of one model: the loss along straight interpolation of their factors and along the geodesic.

Two rank-r adapters of the given vision transformer's feed-forward layers are trained on different CIFAR-10 images with
inverted colours, from one common adapter. Their factors are then replaced by equivalent ones of a moderate condition
number, as any training may leave them. Paths: the factors as they are; the factors aligned; the geodesic.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import RESULTS, write
from quotient_manifolds import ConvergenceError, GLQuotientInv, GLQuotientMix
from quotient_manifolds.symmetries import adapter_pairs, move_
from reproduction.alignment import align
from sharpness.plots import figure

from . import _vit_cifar10

TIMES = torch.linspace(0, 1, 11)


def adapted(options: argparse.Namespace, seed: int, base: dict[str, Tensor] | None) -> nn.Module:
    """Train one adapter; ``base`` gives the adapter to continue from."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=["linear1", "linear2"])
    model = peft.get_peft_model(_vit_cifar10.model(options.weights), config)
    if base is not None:
        model.load_state_dict(base, strict=False)
    x, y = _vit_cifar10.images(options.images, "train", options.count, seed=50 + seed)
    x = -x
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], options.lr, weight_decay=0.0)
    torch.backends.mha.set_fastpath_enabled(False)  # it would read the adapted layers' own weights
    for _ in range(options.epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model.eval()


def points(model: nn.Module) -> list[Tensor]:
    """The adapters as points, one a layer, in float64."""
    weights = dict(model.named_parameters())
    return [p.gather(weights).detach().double() for p in adapter_pairs(model).pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--count", type=int, default=1280, help="training images an adapter")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--condition", type=float, default=3.0)
    parser.add_argument("--figure", type=Path, default=RESULTS.parent / "docs" / "images" / "adapters.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    test = _vit_cifar10.images(options.images, "test", 1000, seed=0)
    rows: list[dict[str, Any]] = []
    common = {k: v.clone() for k, v in adapted(options, 0, None).state_dict().items() if "lora" in k}
    for repeat in range(options.repeats):
        one, two = (adapted(options, 1 + 2 * repeat + k, common) for k in (0, 1))
        for k, model in enumerate((one, two)):
            move_(model, adapter_pairs(model), condition=options.condition, seed=100 * repeat + k)
        pairs, (a, b) = adapter_pairs(one).pairs, (points(m) for m in (one, two))

        def loss(at: list[Tensor], one: nn.Module = one, pairs: Any = pairs) -> tuple[float, float]:
            weights = dict(one.named_parameters())
            with torch.no_grad():
                before = [p.gather(weights) for p in pairs]
                for p, z in zip(pairs, at, strict=True):
                    p.scatter_(z.float(), weights)
                scores = one(-test[0])
                for p, z in zip(pairs, before, strict=True):
                    p.scatter_(z, weights)
            return float(F.cross_entropy(scores, test[1])), float((scores.argmax(1) == test[1]).double().mean())

        paths: dict[str, list[list[Tensor]]] = {
            "factors": [[x + t * (y - x) for x, y in zip(a, b, strict=True)] for t in TIMES]
        }
        failed: dict[str, int] = {}
        for name, cls in (("inv", GLQuotientInv), ("mix", GLQuotientMix)):
            aligned, geodesic = [], []
            failed[name] = 0
            for p, x, y in zip(pairs, a, b, strict=True):
                manifold = cls(p.n, p.m)
                z = align(manifold, x, y)
                aligned.append([x + t * (z - x) for t in TIMES])
                try:
                    geodesic.append(list(manifold.geodesic_between(x, y, TIMES)))
                except ConvergenceError:
                    failed[name] += 1
                    geodesic.append(aligned[-1])
            paths[f"aligned ({name})"] = [list(t) for t in zip(*aligned, strict=True)]
            paths[f"geodesic ({name})"] = [list(t) for t in zip(*geodesic, strict=True)]
        for name, path in paths.items():
            found = [loss(z) for z in path]
            rows.append(
                {
                    "repeat": repeat, "path": name, "pairs": len(pairs),
                    "replaced_by_aligned": failed.get(name.partition("(")[2].rstrip(")"), 0) if "geo" in name else 0,
                    "loss": [round(v, 4) for v, _ in found], "accuracy": [round(v, 4) for _, v in found],
                    "loss_in_the_middle": round(found[5][0], 4), "accuracy_in_the_middle": round(found[5][1], 4),
                }
            )  # fmt: skip
            print({k: v for k, v in rows[-1].items() if k not in ("loss", "accuracy")}, flush=True)
    draw(rows, options.figure)
    write("adapters", rows)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss on the way from one adapter to the other, of the first pair of adapters."""
    names = {"factors": ("average of the factors", "#D55E00", "s"),
             "geodesic (inv)": ("average on the quotient", "#0072B2", "o")}  # fmt: skip
    with figure(path, (6.4, 4.2)) as (_, ((axes,),)):
        for kind, (name, colour, marker) in names.items():
            losses = next(r["loss"] for r in rows if r["path"] == kind)
            axes.plot(TIMES, losses, marker=marker, color=colour, label=name, linewidth=2)
        axes.set_xticks([0, 0.5, 1], ["adapter 1", "middle", "adapter 2"])
        axes.set_ylabel("test loss")
        axes.legend()


if __name__ == "__main__":
    main()
