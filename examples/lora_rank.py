"""Does LoRA's learning rate, found at rank 4, serve at rank 64? AdamW and ``QuotientAdam`` on your model and texts.

``python examples/lora_rank.py path/to/bert train.tsv --lr 0.001`` trains both ranks at this rate and prints the loss on
held-out texts. AdamW's steps depend on LoRA's α, so it is tried with the three usual ones, which agree at rank 4. Six
runs of 60 steps take three minutes on one core for six layers of width 384.
Needs ``pip install '.[transformers,lora]'``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from quotient_manifolds.optim import create_quotient_lora_optimizer
from sharpness.data import DataChoice
from sharpness.models import LoadedModel, quiet

RANKS = (4, 64)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Train the factors as unrelated numbers."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)


def ours(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Train the products; the classifier at AdamW's rate of 1e-3, as the study in docs/results/lora.md does."""
    return create_quotient_lora_optimizer(model, lr=lr, other_params_lr=1e-3)


#: Optimiser, and PEFT's options at a rank.
RUNS: dict[str, tuple[Any, Callable[[int], dict[str, Any]]]] = {
    "AdamW, α = 2r": (adamw, lambda rank: {"lora_alpha": 2 * rank}),
    "AdamW, rsLoRA": (adamw, lambda rank: {"lora_alpha": 4, "use_rslora": True}),
    "AdamW, α = 8": (adamw, lambda rank: {"lora_alpha": 8}),
    "QuotientAdam": (ours, lambda rank: {"lora_alpha": 2 * rank}),
}


def train(folder: str, data: DataChoice, make: Any, lr: float, adapter: dict[str, Any], seed: int) -> float:
    """Train a fresh adapter at a learning rate; give the loss on the last quarter of the texts."""
    torch.manual_seed(seed)
    with quiet():
        network = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    base = LoadedModel(network, folder=Path(folder))
    batches = data.load(base)
    held_out = [batches.pop() for _ in range(len(batches) // 4)]
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", **adapter)
    model: Any = peft.get_peft_model(base.model, config)
    optimizer = make(model, lr)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float(torch.stack([model(**batch).loss for batch in held_out]).mean())


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Run it; give the held-out losses of each row at both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of transformers; without a classifier it gets one of two classes")
    parser.add_argument("data", help="table of texts and labels")
    parser.add_argument("--text", default="sentence", help="its column of texts")
    parser.add_argument("--label", default="label", help="its column of labels")
    parser.add_argument("--lr", type=float, default=1e-3, help="the learning rate that is best at rank 4")
    parser.add_argument("--steps", type=int, default=60, help="of 16 texts each")
    parser.add_argument("--seed", type=int, default=0, help="of the texts, the adapters and the dropout")
    options = parser.parse_args(arguments)
    data = DataChoice(
        options.data,
        text=options.text,
        label=options.label,
        num_examples=options.steps * 16 * 4 // 3,
        batch_size=16,
        subset_seed=options.seed,
        max_length=32,
    )
    print(f"held-out loss after {options.steps} steps at learning rate {options.lr:g}:")
    print(f"{'':<15}" + "".join(f"{f'rank {rank}':>10}" for rank in RANKS), flush=True)

    def loss(make: Any, rank: int, adapter: Callable[[int], dict[str, Any]]) -> float:
        return train(options.model, data, make, options.lr, {"r": rank, **adapter(rank)}, options.seed)

    small, found = {}, {}
    for name, (make, adapter) in RUNS.items():
        if make not in small:  # at rank 4 one run serves for all α
            small[make] = loss(make, RANKS[0], adapter)
        found[name] = [small[make], loss(make, RANKS[1], adapter)]
        print(f"{name:<15}" + "".join(f"{value:>10.3f}" for value in found[name]), flush=True)
    return found


if __name__ == "__main__":
    main()
