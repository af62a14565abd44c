"""Barriers between networks trained apart: the loss between aligned weights, by the symmetries that align them.

``python barriers.py --mnist M --ag-news A --out O`` trains five pairs each of vision transformers on MNIST and of
byte-level GPTs on the texts of AG News (two pre-norm layers, four heads) at widths 64, 128 and 256; the two networks of
a pair differ in their initial weights and in the order of the data. Checkpoints are kept in the folder O.

Then the second network of every pair is aligned with the first by more and more symmetries, and the test loss is
measured at eleven points of the straight line between the weights. Its barrier is the largest excess over the straight
line between the losses of the ends. "heads not moved inside" has the rotation and the permutations of all kinds, but no
group elements inside heads; "geodesic" leads attention's pairs along geodesics (metric inv).

What is there is neither trained nor measured again. ``--report`` prints the table and draws the figure; ``--random N``
aligns N pairs of small networks with random weights, and counts where all symmetries lead nearer than permutations.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _common import RESULTS
from lora_text import ag_news
from pretraining import windows
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import find_symmetric_pairs, stacks
from quotient_manifolds.symmetries.whole import align_models

WIDTHS, PAIRS, HEADS, LAYERS = (64, 128, 256), 5, 4, 2
TASKS = ("vit", "gpt")
STEPS = {"vit": 800, "gpt": 600}
BATCH = {"vit": 64, "gpt": 16}
CONTEXT, TEST = 64, {"vit": 1000, "gpt": 250}
#: What aligns the second network with the first; None leaves both as they are.
METHODS: dict[str, tuple[str, ...] | None] = {
    "nothing": None,
    "canonical form": (),
    "permutations": ("permutations",),
    "rotation and permutations": ("rotation", "permutations"),
    "all kinds": ("rotation", "permutations", "heads", "scales"),
}
ALL = "all kinds"
TIMES = tuple(i / 10 for i in range(11))


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
                hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * width,
                image_size=28, patch_size=7, num_channels=1, num_labels=10, initializer_range=width**-0.5,
            )
        )  # fmt: skip
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=width, n_layer=LAYERS, n_head=HEADS, tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=None, eos_token_id=None, initializer_range=width**-0.5,
    )  # fmt: skip
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


@torch.no_grad()
def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and error over the test data."""
    found = torch.cat([scores_of(model, part) for part in x.split(250)])
    error = (found.argmax(-1) != y).double().mean()
    return float(F.cross_entropy(found.flatten(0, -2).double(), y.flatten())), float(error)


def straight(one: nn.Module, other: nn.Module) -> Callable[[float], nn.Module]:
    """The networks on the straight line between the weights; the same module at every time."""
    between = copy.deepcopy(one)

    @torch.no_grad()
    def at(t: float) -> nn.Module:
        for p, a, b in zip(between.parameters(), one.parameters(), other.parameters(), strict=True):
            p.copy_(a.lerp(b, t))
        return between

    return at


def geodesic(one: nn.Module, other: nn.Module) -> Callable[[float], nn.Module]:
    """The same, with attention's pairs on geodesics; a pair without a geodesic goes straight on."""
    line = straight(one, other)
    ways = []
    for a, b in zip(*(stacks(find_symmetric_pairs(m)) for m in (one, other)), strict=True):
        x, y = a.gather().detach().double(), b.gather().detach().double()
        ways.append((a.manifold("inv"), x, a.manifold("inv").logmap(x, y, on_error="nan")))

    @torch.no_grad()
    def at(t: float) -> nn.Module:
        between = line(t)
        for stack, (manifold, x, v) in zip(stacks(find_symmetric_pairs(between)), ways, strict=True):
            known = v.isfinite().flatten(1).all(1)
            there = stack.gather().detach()
            there[known] = manifold.expmap(x[known], t * v[known]).to(there)
            stack.scatter_(there)
        return between

    return at


def compared(first: Trained, options: argparse.Namespace, data: Data, done: set[Any]) -> None:
    """Measure the paths between the two networks of a pair, by all methods; append a row for each."""
    one, other = (loaded(first._replace(seed=first.seed + i), options.out) for i in range(2))
    x, y = data.test(first.task)
    for method, kinds in METHODS.items():
        names = (method, f"{method}, heads not moved inside", f"{method}, geodesic") if method == ALL else (method,)
        if all((*first, name) in done for name in names):
            continue
        start = time.process_time()
        a, paths = one, {method: straight(one, other)}
        if kinds is not None:
            b, found = align_models(one, other, kinds=kinds)
            a, paths = found.reference, {method: straight(found.reference, b)}
        seconds = round(time.process_time() - start, 1)
        if method == ALL:
            cells = {name: replace(m, inner=(None,) * len(m.inner)) for name, m in found.element.cells.items()}
            paths[names[1]] = straight(a, replace(found.element, cells=cells).of(other))
            paths[names[2]] = geodesic(a, b)
        for name, path in paths.items():
            losses, errors = zip(*(measured(path(t), x, y) for t in TIMES), strict=True)
            ends = [copy.deepcopy(path(t)) for t in (0.0, 1.0)]
            append({**first._asdict(), "method": name, "distance": apart(*ends), "losses": rounded(losses),
                    "errors": rounded(errors), "barrier": excess(losses), "barrier_of_error": excess(errors),
                    "seconds": seconds})  # fmt: skip


def apart(one: nn.Module, other: nn.Module) -> float:
    """The distance of all weights, relative to the norm of the first's."""
    a, b = (nn.utils.parameters_to_vector(m.parameters()).detach().double() for m in (one, other))
    return round(float((a - b).norm() / a.norm()), 4)


def rounded(values: Any) -> list[float]:
    """Three decimals."""
    return [round(v, 3) for v in values]


def excess(values: Any) -> float:
    """The largest excess over the straight line between the ends, at least 0 by the ends themselves."""
    a, b = values[0], values[-1]
    return round(max(v - ((1 - t) * a + t * b) for t, v in zip(TIMES, values, strict=True)), 4)


def append(row: dict[str, Any]) -> None:
    """Write a row, and say so."""
    with (RESULTS / "barriers.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print({k: v for k, v in row.items() if k not in ("losses", "errors")}, flush=True)


def recorded() -> list[dict[str, Any]]:
    """The rows that are there."""
    path = RESULTS / "barriers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Train, align, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--ag-news", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = Data(options.mnist, options.ag_news)
    done = {(r["task"], r["width"], r["seed"], r["method"]) for r in recorded()}
    for width in options.widths:
        for task in options.tasks:
            for seed in range(2 * PAIRS):
                one = Trained(task, width, seed)
                path = options.out / f"{one}.safetensors"
                if not path.exists():
                    start = time.process_time()
                    train(one, data, path)
                    loss, error = measured(loaded(one, options.out), *data.test(task))
                    print(f"{one}: loss {loss:.4f}, error {error:.4f}, {time.process_time() - start:.0f} s", flush=True)
                if seed % 2:
                    compared(Trained(task, width, seed - 1), options, data, done)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
