"""Pairs of networks trained apart: vision transformers on MNIST, and byte-level GPTs on the texts of AG News."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .lora_text import ag_news
from .pretraining import windows

WIDTHS, PAIRS, HEADS, LAYERS = (64, 128, 256), 5, 4, 2
TASKS = ("vit", "gpt")
STEPS = {"vit": 800, "gpt": 600}
BATCH = {"vit": 64, "gpt": 16}
CONTEXT, TEST = 64, {"vit": 1000, "gpt": 250}


class Trained(NamedTuple):
    """One network: its task, width and seed; those with seeds 2 i and 2 i + 1 are a pair."""

    task: str
    width: int
    seed: int

    def __str__(self) -> str:
        return f"{self.task}-{self.width}-{self.seed}"


def network(task: str, width: int) -> nn.Module:
    """A transformer with random weights, without dropout."""
    import transformers

    if task == "vit":
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=width,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                intermediate_size=4 * width,
                image_size=28,
                patch_size=7,
                num_channels=1,
                num_labels=10,
                initializer_range=width**-0.5,
            )
        )
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=LAYERS,
        n_head=HEADS,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=width**-0.5,
    )
    return transformers.GPT2LMHeadModel(config)


def idx(path: Path) -> Tensor:
    """Read a file of MNIST: its images or its labels."""
    with gzip.open(path) as file:
        numbers = np.frombuffer(file.read(), np.uint8)
    rank = int(numbers[3])
    sizes = numbers[4 : 4 + 4 * rank].view(">i4")
    return torch.from_numpy(numbers[4 + 4 * rank :].reshape(tuple(sizes)).copy())


@cache
def digits(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) with mean about 0 and deviation about 1, and labels."""
    images = idx(folder / f"{split}-images-idx3-ubyte.gz")
    return (images[:, None].float() / 255 - 0.13) / 0.31, idx(folder / f"{split}-labels-idx1-ubyte.gz").long()


@cache
def texts(folder: Path) -> tuple[Tensor, Tensor]:
    """The bytes of the training and of the test texts."""
    train, test = (
        torch.frombuffer(bytearray("\n".join(text for text, _ in rows).encode()), dtype=torch.uint8).long()
        for rows in ag_news(folder)
    )
    return train, test


class Data(NamedTuple):
    """Where the data are."""

    mnist: Path
    ag_news: Path

    def batch(self, task: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets for a step of training."""
        if task == "vit":
            x, y = digits(self.mnist, "train")
            chosen = torch.randint(len(y), (BATCH[task],), generator=generator)
            return x[chosen], y[chosen]
        text = texts(self.ag_news)[0]
        drawn = windows(text, torch.randint(len(text) - CONTEXT, (BATCH[task],), generator=generator))
        return drawn[:, :-1], drawn[:, 1:]

    def test(self, task: str) -> tuple[Tensor, Tensor]:
        """A fixed part of the test data: every tenth image, or windows at equal distances."""
        if task == "vit":
            x, y = digits(self.mnist, "t10k")
            apart = len(y) // TEST[task]
            return x[::apart], y[::apart]
        text = texts(self.ag_news)[1]
        drawn = windows(text, torch.arange(TEST[task]) * ((len(text) - CONTEXT - 1) // TEST[task]))
        return drawn[:, :-1], drawn[:, 1:]


def scores_of(model: nn.Module, x: Tensor) -> Tensor:
    """Logits (…, classes)."""
    found: Tensor = model(x).logits
    return found


def train(one: Trained, data: Data, path: Path) -> None:
    """Train a network, and save it."""
    torch.manual_seed(one.seed)
    model = network(one.task, one.width).train()
    generator, steps = torch.Generator().manual_seed(1000 + one.seed), STEPS[one.task]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.32 / one.width, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        x, y = data.batch(one.task, generator)
        loss = F.cross_entropy(scores_of(model, x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    partial = path.with_suffix(".part")
    save_file(model.state_dict(), partial)
    partial.rename(path)  # a file that is there is whole


def loaded(one: Trained, folder: Path) -> nn.Module:
    """The network, as it was trained."""
    model = network(one.task, one.width).eval()
    model.load_state_dict(load_file(folder / f"{one}.safetensors"))
    return model
