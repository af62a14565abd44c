"""Does LoRA's learning rate, found at rank 4, serve at rank 64? AdamW and ``QuotientAdam`` on your model and texts.

``python examples/lora_rank.py path/to/bert train.tsv`` tries three learning rates at rank 4 for each optimiser, takes
the one with the smallest loss on held-out texts, and trains rank 64 with it. Eight runs of 120 steps, about half a
minute each for six layers of width 384 on one core. Needs ``pip install '.[transformers,lora]'``.
"""

from __future__ import annotations

import argparse
from typing import Any

import peft
import torch
from torch import nn

from quotient_manifolds.optim import create_quotient_lora_optimizer
from sharpness.data import DataChoice
from sharpness.models import load

RATES = (1e-3, 3e-3, 1e-2)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Train the factors as unrelated numbers."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)


def ours(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Train the products; the classifier at AdamW's rate of 1e-3, as the study in docs/results/lora.md does."""
    return create_quotient_lora_optimizer(model, lr=lr, other_params_lr=1e-3)


def train(folder: str, data: DataChoice, make: Any, lr: float, rank: int) -> float:
    """Train a fresh adapter of a rank at a learning rate; give the loss on the last quarter of the texts."""
    torch.manual_seed(0)
    base = load(folder)
    batches = data.load(base)
    held_out = [batches.pop() for _ in range(len(batches) // 4)]
    config = peft.LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model: Any = peft.get_peft_model(base.model, config)
    optimizer = make(model, lr)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float(torch.stack([model(**batch).loss for batch in held_out]).mean())


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run it; give the held-out loss at rank 64 for each optimiser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of transformers, with a classifier")
    parser.add_argument("data", help="table of texts and labels")
    parser.add_argument("--text", default="sentence", help="its column of texts")
    parser.add_argument("--label", default="label", help="its column of labels")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args(arguments)
    data = DataChoice(
        options.data, text=options.text, label=options.label, num_examples=options.steps * 16 * 4 // 3, batch_size=16,
        subset_seed=0, max_length=32,
    )  # fmt: skip
    found = {}
    print("held-out loss at rank 4 for each learning rate, and at rank 64 for the best of them:")
    print(f"{'':<14}" + "".join(f"{f'lr {lr:g}':>10}" for lr in RATES) + f"{'rank 64':>10}")
    for name, make in (("AdamW", adamw), ("QuotientAdam", ours)):
        losses = {lr: train(options.model, data, make, lr, 4) for lr in RATES}
        best = min(losses, key=lambda lr: losses[lr])
        found[name] = train(options.model, data, make, best, 64)
        print(f"{name:<14}" + "".join(f"{loss:>10.3f}" for loss in (*losses.values(), found[name])))
    return found


if __name__ == "__main__":
    main()
