"""Cost of a LoRA training step on the quotient: the whole step, and the optimiser alone.

ViT-B/32 (transformers, random weights) with LoRA of rank 16 on all attention projections. Steps of the optimisers
alternate in one process; ratios are of medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quotient_manifolds.optim import create_quotient_lora_optimizer

from ._common import write


def optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    from peft.optimizers import create_riemannian_optimizer

    def trainable(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    return {
        "AdamW": lambda m: torch.optim.AdamW(trainable(m), 1e-4),
        "Riemannian (peft)": lambda m: create_riemannian_optimizer(m, torch.optim.AdamW, lr=1e-4),
        "quotient, matrix": lambda m: create_quotient_lora_optimizer(m, lr=1e-4),
    }


def main() -> None:
    import peft
    from transformers import ViTConfig, ViTForImageClassification

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    net = ViTForImageClassification(ViTConfig(patch_size=32, num_labels=10))
    config = peft.LoraConfig(r=options.rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(net, config).to(options.device)
    x = torch.randn(options.batch, 3, 224, 224, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    made: dict[str, tuple[Any, torch.optim.Optimizer]] = {}
    for name, make in optimizers().items():
        own = copy.deepcopy(model)
        made[name] = own, make(own)
    whole: dict[str, list[float]] = {name: [] for name in made}
    alone: dict[str, list[float]] = {name: [] for name in made}

    def now() -> float:
        if options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    for repeat in range(options.repeats + 1):
        for name, (own, optimizer) in made.items():
            start = now()
            optimizer.zero_grad()
            F.cross_entropy(own(x).logits, y).backward()
            middle = now()
            optimizer.step()
            end = now()
            if repeat:  # the first one makes room
                whole[name].append(end - start)
                alone[name].append(end - middle)
    base, base_alone = (statistics.median(times["AdamW"]) for times in (whole, alone))
    rows = []
    for name in made:
        step, own_part = statistics.median(whole[name]), statistics.median(alone[name])
        rows.append(
            {
                "optimiser": name, "pairs": 4 * net.config.num_hidden_layers, "batch": options.batch,
                "step_s": round(step, 3), "throughput_over_AdamW": round(base / step, 3),
                # The passes through the model are the same for all; this ratio is free of their noise.
                "throughput_over_AdamW_equal_passes": round(base / (base - base_alone + own_part), 3),
                "optimiser_ms": round(1e3 * own_part, 1), "optimiser_over_AdamW": round(own_part / base_alone, 1),
            }
        )  # fmt: skip
    write("lora_cost" if options.device == "cpu" else f"lora_cost_{options.device}", rows)


if __name__ == "__main__":
    main()
