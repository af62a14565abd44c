"""The three collections of ``second_task.py``: networks, their first and second task, and training on either.

``minilm``: all-MiniLM-L6-v2 on SST-2, then on the topics of AG News. ``vit``: the public CIFAR-10 ViT on CIFAR-10, then
on MNIST as colour images. ``gpt``: a byte-level language model from scratch on the texts of AG News, then on SST-2's.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.optim import create_quotient_lora_optimizer
from sharpness import GeodesicSAM

from . import _vit_cifar10
from ._apart import digits
from .lora_text import ag_news, sst2
from .pretraining import windows

#: A pair (images, labels), or inputs and labels by name, as ``sharpness.evaluate`` takes them.
Batch = Any
TOKENS, CONTEXT = 24, 64
OPTIMIZERS = ("plain", "SAM", "GeodesicSAM")


class Data(NamedTuple):
    """Where the data are."""

    minilm: Path
    sst2: Path
    ag_news: Path
    weights: Path
    images: Path
    mnist: Path


class Recipe(NamedTuple):
    """A point of the grid: the first three are 0 for the lower and 1 for the higher setting of a collection."""

    rate: int
    decay: int
    smoothing: int
    optimizer: str
    seed: int


class Collection(NamedTuple):
    """What the networks of a collection share: settings of the grid, and sizes of trainings and measurements.

    ``radii`` are those of SAM and GeodesicSAM; ``rho`` has two of the worst case and two of the average for every
    measure; ``lora`` names the adapted layers, and ``head`` the layer that each task has for itself.
    """

    rates: list[float]
    decays: list[float]
    smoothings: list[float]
    radii: dict[str, float]
    steps: int
    batch: int
    second_rate: float
    second_steps: int
    head: str
    lora: list[str]
    points: int
    curvature_points: int
    sizes: dict[str, int]
    rho: dict[str, list[float]]


COLLECTIONS = {
    name: Collection(**settings)
    for name, settings in json.loads(Path(__file__).with_name("second_task.json").read_text(encoding="utf-8")).items()
}


# -- data --------------------------------------------------------------------------------------------------------------


def take(batch: Batch, chosen: Tensor) -> Batch:
    """Choose examples; texts are cut to the longest of them, so that little is padded."""
    if not isinstance(batch, dict):
        return tuple(t[chosen] for t in batch)
    found = {name: t[chosen] for name, t in batch.items()}
    if "attention_mask" not in found:
        return found
    longest = int(found["attention_mask"].sum(1).max())
    return {name: t[:, :longest] if t.dim() == 2 else t for name, t in found.items()}


def labels_of(batch: Batch) -> Tensor:
    """Return the labels, whose first dimension is that of the examples."""
    return batch["labels"] if isinstance(batch, dict) else batch[1]


def classes_of(batch: Batch) -> int:
    """Count the classes."""
    return int(labels_of(batch).max()) + 1


def scores_and_labels(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run a model: scores (n, classes) and labels (n,); a language model predicts every byte but the first."""
    if not isinstance(batch, dict):
        return model(batch[0]), batch[1]
    labels = batch["labels"]
    scores = model(**{name: t for name, t in batch.items() if name != "labels"}).logits
    if labels.dim() == 1:
        return scores, labels
    return scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


@torch.no_grad()
def tested(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Mean loss and error over test data."""
    parts = [scores_and_labels(model, take(batch, c)) for c in torch.arange(len(labels_of(batch))).split(64)]
    scores, labels = (torch.cat(t) for t in zip(*parts, strict=True))
    return float(F.cross_entropy(scores.double(), labels)), float((scores.argmax(1) != labels).double().mean())


def _texts(tokenizer: Any, rows: list[Any]) -> Batch:
    coded = tokenizer(
        [t for t, _ in rows], truncation=True, max_length=TOKENS, padding="max_length", return_tensors="pt"
    )
    return {**{k: coded[k] for k in ("input_ids", "attention_mask")}, "labels": torch.tensor([y for _, y in rows])}


@cache
def minilm_data(data: Data, sizes: tuple[int, ...]) -> tuple[list[Batch], Tensor]:
    """Return both tasks' training and test texts, and the tokens that occur in them, which are numbered anew.

    A network without the embeddings of all other tokens computes the same, and is cheaper to train and to measure.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data.minilm)
    parts = [*sst2(data.sst2), *ag_news(data.ag_news)]
    chosen = [random.Random(0).sample(rows, n) for rows, n in zip(parts, sizes, strict=True)]
    found = [_texts(tokenizer, rows) for rows in chosen]
    used = torch.cat([torch.tensor([tokenizer.pad_token_id]), *(b["input_ids"].flatten() for b in found)]).unique()
    for b in found:
        b["input_ids"] = torch.searchsorted(used, b["input_ids"])
    return found, used


@cache
def vit_data(data: Data, sizes: tuple[int, ...]) -> list[Batch]:
    """Return CIFAR-10's training and test images, and MNIST's, padded to their size, in three equal channels."""
    found = [_vit_cifar10.images(data.images, s, n, seed=5) for s, n in zip(("train", "test"), sizes, strict=False)]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (_vit_cifar10.MEAN, _vit_cifar10.STD))
    for split, n in zip(("train", "t10k"), sizes[2:], strict=True):
        x, y = digits(data.mnist, split)
        drawn = torch.randperm(len(y), generator=torch.Generator().manual_seed(5))[:n]
        pixels = F.pad(x[drawn] * 0.31 + 0.13, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
        found.append(((pixels - mean) / std, y[drawn]))
    return found


@cache
def gpt_data(data: Data, sizes: tuple[int, ...]) -> list[Batch]:
    """Return windows of the bytes of AG News, for training and for tests, and of SST-2's sentences."""
    found = []
    for rows, n in zip((*ag_news(data.ag_news), *sst2(data.sst2)), sizes, strict=True):
        text = torch.frombuffer(bytearray("\n".join(t for t, _ in rows).encode()), dtype=torch.uint8).long()
        starts = torch.randint(len(text) - CONTEXT, (n,), generator=torch.Generator().manual_seed(5))
        ids = windows(text, starts)
        found.append({"input_ids": ids, "labels": ids})
    return found


# -- networks ----------------------------------------------------------------------------------------------------------


def minilm(data: Data, used: Tensor, seed: int) -> nn.Module:
    """Load the pre-trained network with the embeddings of the tokens that are used, and a new head for two classes."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(data.minilm, num_labels=2)
    table = model.bert.embeddings.word_embeddings.weight.detach()[used]
    model.bert.embeddings.word_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
    model.config.vocab_size = len(used)
    return model.eval()


def gpt(seed: int) -> nn.Module:
    """Build a pre-norm language model over bytes, with random weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.OPTConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, ffn_dim=256, dropout=0.0,
        word_embed_proj_dim=64, max_position_embeddings=CONTEXT + 1, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).eval()


def start(name: str, data: Data, sizes: dict[str, int], seed: int) -> tuple[nn.Module, list[Batch]]:
    """Return a network before its first task, and training and test data of the first task and of the second."""
    every = tuple(sizes[k] for k in ("train", "test", "second_train", "second_test"))
    if name == "minilm":
        batches, used = minilm_data(data, every)
        return minilm(data, used, seed), batches
    if name == "vit":
        return _vit_cifar10.model(data.weights), vit_data(data, every)
    return gpt(seed), gpt_data(data, every)


def with_new_head(model: nn.Module, head: str, classes: int, seed: int) -> nn.Module:
    """Copy a network and give it another last layer; a language model keeps its own (``head`` is empty)."""
    found = copy.deepcopy(model)
    if head:
        torch.manual_seed(seed)
        features = found.get_submodule(head).in_features
        found.set_submodule(head, nn.Linear(features, classes))
        nn.init.normal_(found.get_submodule(head).weight, std=0.02)
    return found


# -- training ----------------------------------------------------------------------------------------------------------


def order(count: int, batch: int, steps: int, seed: int) -> Iterable[Tensor]:
    """Return the examples of every step: epoch after epoch in random order."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-steps * batch // count)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)]).split(batch)[:steps]


def train(model: nn.Module, optimizer: Any, batches: Iterable[Batch], steps: int, smoothing: float = 0.0) -> None:
    """Train with a linear warm-up of a tenth of the steps, then a linear decay to 0, and without dropout."""
    warm = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warm, (steps - t) / max(steps - warm, 1))
    )
    for batch in batches:

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(*scores_and_labels(model, batch), label_smoothing=smoothing)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        schedule.step()


def first_training(model: nn.Module, c: Collection, recipe: Recipe, data: Batch) -> None:
    """Train on the first task by a recipe."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), c.rates[recipe.rate], weight_decay=c.decays[recipe.decay])
    if recipe.optimizer != "plain":
        measure = {"SAM": "euclidean", "GeodesicSAM": "geodesic-inv"}[recipe.optimizer]
        optimizer = GeodesicSAM(model, optimizer, rho=c.radii[recipe.optimizer], measure=measure)
    chosen = order(len(labels_of(data)), c.batch, c.steps, 1000 + recipe.seed)
    train(model, optimizer, (take(data, i) for i in chosen), c.steps, c.smoothings[recipe.smoothing])


def adapted(model: nn.Module, c: Collection, seed: int) -> nn.Module:
    """Freeze all but the head, and add adapters of rank 8; without a head of its own the task trains these alone."""
    import peft

    torch.manual_seed(seed)
    found = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=c.lora))
    for p in model.get_submodule(c.head).parameters() if c.head else ():
        p.requires_grad_(True)
    return found


def _adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0.0)


def _quotient_adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    heads = any(p.requires_grad and "lora_" not in n for n, p in model.named_parameters())
    return create_quotient_lora_optimizer(model, lr=rate, **({"other_params_lr": 1e-3} if heads else {}))


#: How the second task is trained: all weights, or adapters, each at a fixed rate (None: the collection's).
METHODS: dict[str, tuple[float | None, Callable[[nn.Module, float], Any]]] = {
    "AdamW": (None, _adamw),
    "LoRA, AdamW": (1e-3, _adamw),
    "LoRA, QuotientAdam": (3e-3, _quotient_adam),
}


def second_training(model: nn.Module, c: Collection, method: str, seed: int, data: Batch) -> nn.Module:
    """Train a copy with a new head on the second task; return it with that head, adapters merged."""
    moved = with_new_head(model, c.head, classes_of(data), seed)
    lora = method.startswith("LoRA")
    trained = adapted(moved, c, seed) if lora else moved
    rate, make = METHODS[method]
    chosen = order(len(labels_of(data)), c.batch, c.second_steps, 2000 + seed)
    train(trained, make(trained, rate or c.second_rate), (take(data, i) for i in chosen), c.second_steps)
    return trained.merge_and_unload() if lora else moved  # type: ignore[operator]


def grid(seed: int = 0) -> list[Recipe]:
    """Order the 48 recipes so that any multiple of twelve of them is balanced in every axis.

    Each block of twelve has all three optimisers at four settings in which every two-valued axis takes both values
    twice; within a block smoothing and seed are tied to rate and decay, in each of the four blocks otherwise.
    """
    found = list[Recipe]()
    for flip, other in product((0, 1), repeat=2):
        block = [
            Recipe(rate, decay, (rate + decay + flip) % 2, optimizer, (decay + other) % 2)
            for rate, decay, optimizer in product((0, 1), (0, 1), OPTIMIZERS)
        ]
        random.Random(f"{seed} {flip} {other}").shuffle(block)
        found += block
    return found
