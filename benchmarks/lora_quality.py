"""LoRA fine-tuning on the quotient against what people use instead: losses, accuracies, sensitivity to the rate.

Tasks: ``mnist`` (the given vision transformer adapted to MNIST at 32 × 32), ``corrupted`` (to 2,500 CIFAR-10 images
with inverted colours and noise) and ``sst2`` (a small BERT folder, see reproduction.pretrain, adapted to SST-2). Equal
grids of learning rates and equal steps for all methods at rank 4, then five seeds at each method's best rate at ranks
4 and 16. Finished runs are kept in a JSON-lines file; several processes may share it (``--shard i/n``).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import _vit_cifar10
import numpy as np
import torch
from _common import RESULTS
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.optim import create_quotient_lora_optimizer

TASKS = ("mnist", "corrupted", "sst2")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
BATCH = 32
Data = tuple[tuple[Any, Tensor], tuple[Any, Tensor]]


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)


def lora_plus(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=lr, loraplus_lr_ratio=16, weight_decay=0.0)


def riemannian(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    from peft.optimizers import create_riemannian_optimizer

    return create_riemannian_optimizer(model, torch.optim.AdamW, lr=lr, weight_decay=0.0)


def quotient(**options: Any) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    return lambda model, lr: create_quotient_lora_optimizer(model, lr=lr, **options)


METHODS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "LoRA+ (peft)": lora_plus,
    "Riemannian (peft)": riemannian,
    "quotient, matrix": quotient(optimizer="adam"),
}
#: Measured before it was dropped.
DROPPED = "quotient, scalar"


def mnist(folder: Path, split: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of the idx files, (count, 3, 32, 32) normalised as the network expects, and digits."""
    with gzip.open(folder / f"{split}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(folder / f"{split}-labels-idx1-ubyte.gz") as file:
        digits = np.frombuffer(file.read(), np.uint8, offset=8)
    chosen = np.random.default_rng(seed).choice(len(pixels), count, replace=False)
    x = F.interpolate(torch.tensor(pixels[chosen]) / 255, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (_vit_cifar10.MEAN, _vit_cifar10.STD))
    return (x - mean) / std, torch.tensor(digits[chosen].astype(np.int64))


def corrupted(archive: Path, split: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """CIFAR-10 images with inverted colours and Gaussian noise of .3 standard deviations of the data."""
    x, y = _vit_cifar10.images(archive, split, count, seed)
    return 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)) - x, y


def sentences(path: Path, count: int | None, seed: int, tokenizer: Any) -> tuple[Any, Tensor]:
    """Token ids (count, 64) of a tab-separated file of label and sentence below a header, and labels."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    if count is not None:
        rows = [rows[i] for i in np.random.default_rng(seed).choice(len(rows), count, replace=False)]
    coded = tokenizer([r[1] for r in rows], truncation=True, padding="longest", return_tensors="pt")
    return coded["input_ids"], torch.tensor([int(r[0]) for r in rows])


@cache
def data(task: str, options: Any) -> Data:
    """Training and test set."""
    if task == "mnist":
        return mnist(options.mnist, "train", 5000, 0), mnist(options.mnist, "t10k", 2000, 0)
    if task == "corrupted":
        return corrupted(options.images, "train", 2500, 0), corrupted(options.images, "test", 2000, 1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.bert)
    return sentences(options.sst2 / "train.tsv", 5000, 0, tokenizer), sentences(
        options.sst2 / "dev.tsv", None, 0, tokenizer
    )


class Scores(nn.Module):
    """Logits of a transformers classifier from token ids, cut to the longest of the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids[:, : int((ids != 0).sum(1).max())]
        return self.model(input_ids=ids, attention_mask=(ids != 0).long()).logits


def adapted(task: str, rank: int, options: Any) -> nn.Module:
    """The pre-trained network with a fresh adapter; its classifier is trained too."""
    import peft

    if task == "sst2":
        from transformers import AutoModelForSequenceClassification

        net = AutoModelForSequenceClassification.from_pretrained(options.bert, num_labels=2)
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, modules_to_save=["classifier", "pooler"],
            target_modules=["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"],
        )  # fmt: skip
        return Scores(peft.get_peft_model(net, config))
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["linear1", "linear2"], modules_to_save=["mlp_head"]
    )
    return peft.get_peft_model(_vit_cifar10.model(options.weights), config)


def run(task: str, method: str, lr: float, rank: int, seed: int, options: Any) -> dict[str, Any]:
    """Fine-tune once."""
    torch.manual_seed(seed)
    train, test = data(task, options)
    model = adapted(task, rank, options)
    torch.backends.mha.set_fastpath_enabled(False)  # it would read the adapted layers' own weights
    optimizer = METHODS[method](model, lr)
    warm = options.steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warm, (options.steps - t) / (options.steps - warm))
    )
    order = torch.cat([torch.randperm(len(train[1])) for _ in range(1 + options.steps * BATCH // len(train[1]))])
    losses = []
    spent = 0.0
    model.train()
    start = time.perf_counter()
    for part in order[: options.steps * BATCH].split(BATCH):
        loss = F.cross_entropy(model(train[0][part]), train[1][part])
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            break
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        spent += time.perf_counter() - before
        schedule.step()
        losses.append(float(loss.detach()))
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(x) for x in test[0].split(250)])
    diverged = len(losses) < options.steps or not bool(scores.isfinite().all())
    return {
        "task": task, "method": method, "lr": lr, "rank": rank, "seed": seed, "steps": options.steps,
        "diverged": diverged,
        "train_loss": None if diverged else round(statistics.fmean(losses[-10:]), 5),
        "test_loss": None if diverged else round(float(F.cross_entropy(scores, test[1])), 5),
        "accuracy": 0.0 if diverged else round(float((scores.argmax(1) == test[1]).double().mean()), 5),
        "seconds": round(seconds, 2), "optimizer_seconds": round(spent, 2),
        "losses": [round(v, 4) for v in losses],
    }  # fmt: skip


def best(rows: list[dict[str, Any]], task: str, method: str) -> float:
    """The rate with the least mean test loss over the grid's seeds at rank 4, among those that never diverged."""
    found: dict[float, list[float]] = {}
    for r in rows:
        if (r["task"], r["method"], r["rank"]) == (task, method, 4) and r["seed"] < 2:
            found.setdefault(r["lr"], []).append(float("inf") if r["diverged"] else r["test_loss"])
    return min(found, key=lambda lr: statistics.fmean(found[lr]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--mnist", type=Path, required=True, help="folder with the four idx files")
    parser.add_argument("--sst2", type=Path, required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--bert", type=Path, required=True, help="pre-trained transformers folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--grid-seeds", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=RESULTS / "lora_quality.jsonl")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--grid-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = argparse.Namespace(**vars(options))
    settings.__class__.__hash__ = lambda self: 0  # type: ignore[method-assign,assignment]  # one set of options a run
    shard, shards = map(int, options.shard.split("/"))

    def finished() -> list[dict[str, Any]]:
        if not options.runs.exists():
            return []
        return [json.loads(line) for line in options.runs.read_text().splitlines()]

    def work(units: list[tuple[str, str, float, int, int]]) -> None:
        done = {(r["task"], r["method"], r["lr"], r["rank"], r["seed"]) for r in finished()}
        for i, unit in enumerate(units):
            if i % shards != shard - 1 or unit in done:
                continue
            row = run(*unit, settings)
            with options.runs.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({k: v for k, v in row.items() if k != "losses"}, flush=True)

    for task in options.tasks:
        methods = options.methods
        work([(task, m, lr, 4, s) for lr in options.rates for m in methods for s in range(options.grid_seeds)])
        if options.grid_only:
            continue
        wanted = len(options.rates) * len(methods) * options.grid_seeds
        while sum(r["task"] == task and r["rank"] == 4 and r["seed"] < options.grid_seeds for r in finished()) < wanted:
            time.sleep(5)  # other shards still work on the grid
        rows = finished()
        work(
            [(task, m, best(rows, task, m), rank, s) for rank in (4, 16) for m in methods for s in range(options.seeds)]
        )


if __name__ == "__main__":
    main()
