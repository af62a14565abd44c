"""What sharpness to expect: five small models of different kinds at every measure's default radius.

``python -m studies.reference_values --weights W --images I --mnist N --minilm M --sst2 S --ag-news A``. W and I
are as in ``_vit_cifar10.py``; N is a folder of MNIST's idx files; M is a transformers folder of all-MiniLM-L6-v2; S
and A are the folders of ``lora_text.py``. Four of the models are trained here, which takes minutes. Each is measured
on 512 of its training examples, in four batches of 128. ``--only`` measures one model and keeps the rows of the others.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sharpness
from benchmarks._common import RESULTS, write
from sharpness import demo

from . import _vit_cifar10

MEASURES = ("geodesic-inv", "adaptive", "complete-inv", "euclidean")
EXAMPLES, BATCH = 512, 128
Loss = Callable[[Tensor], Tensor]
Found = tuple[nn.Module, list[Any]]


def fit(model: nn.Module, loss: Loss, count: int, steps: int, batch: int, lr: float) -> nn.Module:
    """Train by AdamW with a one-cycle rate; the loss takes the numbers of examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randint(count, (batch,))).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def digits(_: argparse.Namespace) -> Found:
    x, y, _, _ = demo.digits()
    model = demo.vision_transformer()
    demo.train(model, x, y, progress=False)
    return model, list(zip(x[:EXAMPLES].split(BATCH), y[:EXAMPLES].split(BATCH), strict=True))


def cifar10(paths: argparse.Namespace) -> Found:
    x, y = _vit_cifar10.images(paths.images, "train", EXAMPLES, seed=0)
    return _vit_cifar10.model(paths.weights), list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def timm_mnist(paths: argparse.Namespace) -> Found:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=28, patch_size=7, in_chans=1, num_classes=10)
    images, labels = (gzip.decompress(next(paths.mnist.glob(f"train-{k}*")).read_bytes()) for k in ("images", "labels"))
    x = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)[:20_000] / 127.5 - 1
    y = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)[:20_000].long()
    fit(model, lambda at: F.cross_entropy(model(x[at]), y[at]), len(y), 200, 64, 1e-3)
    return model, list(zip(x[:EXAMPLES].split(BATCH), y[:EXAMPLES].split(BATCH), strict=True))


def minilm_sst2(paths: argparse.Namespace) -> Found:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from .lora_text import sst2

    model = AutoModelForSequenceClassification.from_pretrained(paths.minilm, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(paths.minilm)
    rows = sst2(paths.sst2)[0]

    def coded(at: list[int]) -> dict[str, Tensor]:
        made = tokenizer(
            [rows[i][0] for i in at], truncation=True, max_length=32, padding="longest", return_tensors="pt"
        )
        return {**made, "labels": torch.tensor([rows[i][1] for i in at])}

    fit(model, lambda at: model(**coded(at.tolist())).loss, len(rows), 80, 16, 1e-4)
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:EXAMPLES]
    return model, [coded(at.tolist()) for at in chosen.split(BATCH)]


def llama_bytes(paths: argparse.Namespace) -> Found:
    from transformers import LlamaConfig, LlamaForCausalLM

    from .lora_text import ag_news

    text = "\n".join(t for t, _ in ag_news(paths.ag_news)[0]).encode()
    ids = torch.tensor(list(text)).unfold(0, 64, 64)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=256, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    fit(model, lambda at: model(input_ids=ids[at], labels=ids[at]).loss, len(ids), 400, 32, 3e-3)
    return model, [{"input_ids": b, "labels": b} for b in ids[:EXAMPLES].split(BATCH)]


MODELS: dict[str, tuple[str, Callable[[argparse.Namespace], Found]]] = {
    "ViT, scanned digits": ("transformers, 60 epochs from scratch (the demo's)", digits),
    "ViT, CIFAR-10": ("torch.nn.TransformerEncoder, public vit_cifar10 weights", cifar10),
    "ViT of timm, MNIST": ("vit_tiny of 3 layers, patches of 7, 200 steps of 64 from scratch", timm_mnist),
    "Llama, bytes of AG News": ("4 layers of width 96, 400 steps of 32 × 64 bytes from scratch", llama_bytes),
    "MiniLM, SST-2": ("all-MiniLM-L6-v2, all weights fine-tuned for 80 steps of 16", minilm_sst2),
}


def rows_of(name: str, paths: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train a model if need be, and measure it."""
    torch.manual_seed(0)
    training, make = MODELS[name]
    model, batches = make(paths)
    for measure in MEASURES:
        result = sharpness.evaluate(model, batches, measure=measure, keep_directions=False, progress=False)
        values = [b.value for b in result.batches]
        yield {
            "model": name, "training": training, "weights": sum(p.numel() for p in model.parameters()),
            "measure": measure, "rho": result.rhos[0], "base_loss": fmean(b.base_loss for b in result.batches),
            "sharpness": fmean(values), "std_error": stdev(values) / len(values) ** 0.5,
            "error_increase": result.error_increase, "passes": sum(b.passes for b in result.batches),
            "unconverged": sum(b.converged is False for b in result.batches),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _vit_cifar10.arguments(parser)
    for name in ("--mnist", "--minilm", "--sst2", "--ag-news"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--only", choices=MODELS, help="measure this model; the rows of the others stay")
    paths = parser.parse_args()
    recorded = RESULTS / "reference_values.json"
    for name in MODELS if paths.only is None else [paths.only]:
        for row in rows_of(name, paths):
            rows = json.loads(recorded.read_text(encoding="utf-8"))["rows"] if recorded.exists() else []
            rows = [r for r in rows if (r["model"], r["measure"]) != (name, row["measure"])]
            write("reference_values", [*rows, row])


if __name__ == "__main__":
    main()
