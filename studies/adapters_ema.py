"""Means of adapters in training: of products (``QuotientEMA``), of factors, and the last step, on MiniLM.

``python -m studies.adapters_ema --model M --ag-news A --sst2 S --mnli N``, with the paths of ``lora_text.py``. For each
task, five seeds, AdamW and QuotientAdam at their best rates there, rank 4, constant after a warm-up, for that is where
means are used; decay 0.98 after each step. Each run appends a line; those that are there are not done again.
``--report`` prints the means over seeds with 95 % intervals, and of the differences from the last step.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks._common import RESULTS, interval
from quotient_manifolds.adapters import QuotientEMA

from .lora_text import (
    BATCH,
    METHODS,
    SEEDS,
    STEPS,
    TASKS,
    TEST,
    TOKENS,
    adapted,
    arguments,
    best,
    data,
    keep,
    kept,
    scores,
)

DECAY = 0.98
HOW = ("last", "of factors", "of products")


@torch.no_grad()
def tested(model: Any, texts: list[Any], labels: Tensor, tokenizer: Any, tokens: int) -> dict[str, float]:
    """Loss and accuracy on the test set."""
    mode = model.training
    model.eval()
    logits = torch.cat([scores(model, tokenizer, texts[i : i + 100], tokens) for i in range(0, TEST, 100)])
    model.train(mode)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    return {"loss": round(float(F.cross_entropy(logits, labels)), 5), "accuracy": round(accuracy, 5)}


def run(task: str, method: str, lr: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, and test the last weights and both means."""
    (texts, labels), test, tokenizer = data(task, getattr(options, task), options.model)
    torch.manual_seed(seed)
    model = adapted(options.model, 4, 1 + int(labels.max()))
    head = [p for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    for p in head:
        p.requires_grad_(False)
    made = [METHODS[method](model, lr)]
    for p in head:
        p.requires_grad_(True)
    made.append(torch.optim.AdamW(head, 1e-3, weight_decay=0.0))
    products = QuotientEMA(model, DECAY)
    factors = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    steps = STEPS[task]
    warm = steps // 12
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda t: min((t + 1) / warm, 1.0)) for o in made]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[: steps * BATCH]
    model.train()
    for chosen in order.split(BATCH):
        with torch.autocast("cpu", torch.bfloat16):
            found = scores(model, tokenizer, [texts[i] for i in chosen], TOKENS[task])
        for o in made:
            o.zero_grad()
        F.cross_entropy(found.float(), labels[chosen]).backward()
        for o in made:
            o.step()
        for s in schedules:
            s.step()
        products.update()
        factors.update_parameters(model)
    ask = (test[0], test[1], tokenizer, TOKENS[task])
    rows = {"last": tested(model, *ask), "of factors": tested(factors.module, *ask)}
    with products.averaged():
        rows["of products"] = tested(model, *ask)
    lost = list(products.lost().values())
    return {"task": task, "method": method, "lr": lr, "seed": seed, **rows, "lost": round(max(lost), 5)}


def report(rows: list[dict[str, Any]]) -> None:
    """Print the test losses."""
    for task, method in itertools.product(TASKS, ("AdamW", "QuotientAdam")):
        own = [r for r in rows if (r["task"], r["method"]) == (task, method)]
        if len(own) < 2:
            continue
        for how in HOW:
            loss, off = interval([r[how]["loss"] for r in own])
            gain, by = interval([r[how]["loss"] - r["last"]["loss"] for r in own])
            print(f"{task},{method},{how},{len(own)},{loss:.4f},{off:.4f},{gain:+.4f},{by:.4f}")
        gain, by = interval([r["of products"]["loss"] - r["of factors"]["loss"] for r in own])
        print(f"{task},{method},products less factors,{len(own)},,,{gain:+.4f},{by:.4f}")


def main() -> None:
    parser = arguments(__doc__, RESULTS / "adapters_ema.jsonl")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.report:
        return report(kept(options.out))
    rates = kept(RESULTS / "lora_text.jsonl")
    for seed, task, method in itertools.product(SEEDS, TASKS, ("AdamW", "QuotientAdam")):
        if not any((r["task"], r["method"], r["seed"]) == (task, method, seed) for r in kept(options.out)):
            keep(run(task, method, best(rates, task, method), seed, options), options.out)
    return None


if __name__ == "__main__":
    main()
