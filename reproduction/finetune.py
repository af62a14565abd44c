"""Fine-tuning by a recipe: what a step sees, and the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpness.data.examples import Examples
from sharpness.extras import require_extra
from sharpness.models import ImageFormat

__all__ = ["Recipe", "TrainingImages", "TrainingTexts", "finetune", "random_recipe"]


@dataclass(frozen=True)
class Recipe:
    """How a model is fine-tuned, by AdamW with a linear warm-up and a cosine to zero.

    Attributes
    ----------
    lr : float
        Peak learning rate.
    weight_decay : float
        AdamW's, decoupled.
    epochs : int
        Passes through the training data.
    batch : int
        Examples a step.
    augmentation : str
        ``"none"``, ``"flip"`` (mirrored and shifted by up to an eighth of the side) or ``"rand-mM-nN"``: that and
        RandAugment of N operations of magnitude M. Images only.
    mixup : float
        α of mix-up's Beta(α, α); 0 is off. Images only.
    label_smoothing : float
        Share of a target that is spread evenly over all classes.
    label_noise : float
        Probability with which a training label is drawn anew, evenly from all classes.
    dropout : float or None
        Every dropout rate of the model; None leaves them.
    seed : int
        Of the order, the shifts, mix-up and the label noise; in :func:`reproduction.collection.train_collection` also
        of the head, RandAugment and dropout, which follow torch's global seed.

    Raises
    ------
    ValueError
        A value out of range, or an unknown augmentation.

    Notes
    -----
    AdamW: Loshchilov and Hutter 2019. The warm-up is a tenth of the steps; gradients are clipped to norm 1.

    Examples
    --------
    Models that differ in their seed alone, and a model that has to memorise a fifth of its labels:

    >>> from dataclasses import replace
    >>> same = [Recipe(epochs=2, seed=seed) for seed in range(3)]
    >>> noisy = replace(same[0], label_noise=0.2)
    >>> noisy.label_noise, noisy.seed
    (0.2, 0)
    """

    lr: float = 1e-4
    weight_decay: float = 0.01
    epochs: int = 3
    batch: int = 64
    augmentation: str = "none"
    mixup: float = 0.0
    label_smoothing: float = 0.0
    label_noise: float = 0.0
    dropout: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.lr < math.inf and self.epochs >= 1 and self.batch >= 1 and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"a recipe needs lr > 0, weight_decay ≥ 0, epochs and batch ≥ 1, got {self}")
        if not (self.mixup >= 0 and 0 <= self.label_smoothing < 1 and 0 <= self.label_noise <= 1):
            raise ValueError(f"mixup must be ≥ 0, label_smoothing in [0, 1) and label_noise in [0, 1], got {self}")
        _augmentation(self.augmentation)


def random_recipe(
    seed: int,
    *,
    lr: tuple[float, float] = (3e-5, 1e-3),
    epochs: tuple[int, int] = (2, 6),
    batch: int = 64,
    images: bool = True,
) -> Recipe:
    """Draw a recipe at random, so that models of one collection differ in how well they generalise.

    Parameters
    ----------
    seed : int
        Of the draw, and of the training.
    lr : (float, float)
        Range of the learning rate, log-uniform.
    epochs : (int, int)
        Range of the epochs, both ends included.
    batch : int
        Examples a step, which does not vary.
    images : bool
        Whether augmentation and mix-up are among what varies.

    Returns
    -------
    Recipe

    Raises
    ------
    ValueError
        A range out of bounds.

    Notes
    -----
    After Wortsman et al. 2022 (*Model soups*), as far as it does not depend on the model's size: weight decay
    10^U(-4, -0.2), half of the models with label smoothing U(0, 0.25), half with mix-up U(0, 0.9), RandAugment with M
    of 1 to 20 and N of 0 to 2, or none. Label noise (half of the models, U(0, 0.3)) is added. Models of images are
    trained without dropout, as theirs.

    Examples
    --------
    >>> recipes = [random_recipe(seed, epochs=(2, 4)) for seed in range(24)]
    >>> all(3e-5 <= recipe.lr <= 1e-3 for recipe in recipes), {recipe.epochs for recipe in recipes}
    (True, {2, 3, 4})
    >>> recipes[7] == random_recipe(7, epochs=(2, 4))
    True
    """
    if not 0 < min(lr) <= max(lr) <= 1e3 or min(epochs) < 1:
        raise ValueError(f"learning rates must lie between 0 and 1e3 and epochs be at least 1, got {lr} and {epochs}")
    rng = np.random.default_rng(seed)
    rate = float(np.exp(rng.uniform(*np.log(lr))))
    decay = float(10 ** rng.uniform(-4, -0.2))
    count = int(rng.integers(epochs[0], epochs[1] + 1))
    smoothing, mixup, noise = (float(rng.uniform(0, top)) * int(rng.integers(2)) for top in (0.25, 0.9, 0.3))
    strength, number = int(rng.integers(1, 21)), int(rng.integers(0, 3))
    kind = ("none", "flip", f"rand-m{strength}-n{number}")[rng.integers(3)]
    if not images:
        kind, mixup = "none", 0.0
    return Recipe(rate, decay, count, batch, kind, mixup, smoothing, noise, 0.0 if images else None, seed)


# -- what a step sees --------------------------------------------------------------------------------------------------


def _augmentation(name: str) -> Callable[[Tensor, torch.Generator], Tensor]:
    """From (examples, channels, height, width) in [0, 1] to such images."""
    if name == "none":
        return lambda images, generator: images
    if name == "flip":
        return _flip_and_shift
    parts = name.split("-")
    if len(parts) != 3 or parts[0] != "rand" or parts[1][:1] != "m" or parts[2][:1] != "n":
        raise ValueError(f'augmentation is "none", "flip" or "rand-mM-nN", not {name!r}')
    try:
        strength, number = int(parts[1][1:]), int(parts[2][1:])
    except ValueError:
        raise ValueError(f'augmentation is "none", "flip" or "rand-mM-nN", not {name!r}') from None

    def randomly(images: Tensor, generator: torch.Generator) -> Tensor:
        with require_extra("RandAugment needs torchvision", "studies"):
            from PIL import Image
            from torchvision.transforms.v2 import RandAugment
        change = RandAugment(number, strength)
        images = _flip_and_shift(images, generator)
        if number == 0:
            return images
        pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        # Pillow is many times faster than torch on small images.
        changed = np.stack([np.asarray(change(Image.fromarray(image.squeeze(-1).numpy()))) for image in pixels])
        return torch.from_numpy(changed).view(pixels.shape).permute(0, 3, 1, 2).float() / 255

    return randomly


def _flip_and_shift(images: Tensor, generator: torch.Generator) -> Tensor:
    count, _, height, width = images.shape
    mirrored = torch.rand(count, generator=generator) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    down, right = height // 8, width // 8
    padded = F.pad(images, (right, right, down, down), mode="reflect")
    top = torch.randint(2 * down + 1, (count,), generator=generator).tolist()
    left = torch.randint(2 * right + 1, (count,), generator=generator).tolist()
    return torch.stack(
        [x[:, t : t + height, s : s + width] for x, t, s in zip(padded, top, left, strict=True)]
    )  # fmt: skip


class TrainingImages:
    """Training images in memory, and a step's inputs and targets.

    Parameters
    ----------
    examples : Examples
        Batches are images (examples, channels, height, width) in [0, 1] and labels (examples,).
    chosen : sequence of int
        Which examples to train on.
    how : ImageFormat
        Its mean and std normalise the images after augmentation.
    classes : int
        Number of scores that the model gives.

    Examples
    --------
    Mix-up makes every target a mixture of two labels:

    >>> import torch
    >>> from sharpness.data.examples import Examples
    >>> from sharpness.models import ImageFormat
    >>> x, y = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> examples = Examples("random", 6, lambda chosen: (x[chosen], y[chosen]))
    >>> data = TrainingImages(examples, range(6), ImageFormat((8, 8), (0.5,), (0.5,), channels=1), classes=3)
    >>> inputs, targets = next(data.steps(Recipe(mixup=0.5), data.labels, torch.arange(6), torch.Generator()))
    >>> inputs.shape, targets.sum(1)
    (torch.Size([6, 1, 8, 8]), tensor([1., 1., 1., 1., 1., 1.]))
    """

    def __init__(self, examples: Examples, chosen: Sequence[int], how: ImageFormat, classes: int) -> None:
        self.images, self.labels = examples.batch(chosen)
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (how.mean, how.std))
        self.classes = classes

    def steps(
        self, recipe: Recipe, labels: Tensor, order: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[Any, Tensor]]:
        """Give inputs and targets (examples, classes) of an epoch's steps."""
        change = _augmentation(recipe.augmentation)
        for part in order.split(recipe.batch):
            x = (change(self.images[part], generator) - self.mean) / self.std
            y = F.one_hot(labels[part], self.classes).float()
            if recipe.mixup > 0:
                share = float(np.random.default_rng(int(part[0]) + recipe.seed).beta(recipe.mixup, recipe.mixup))
                other = torch.randperm(len(part), generator=generator)
                x, y = share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]
            yield x, y


class TrainingTexts:
    """Training texts as tokens; those of like length share a step, so that little is padding.

    Parameters
    ----------
    examples : Examples
        Batches are dicts of tokens (examples, length), with ``labels`` (examples,).
    chosen : sequence of int
        Which examples to train on.
    padding : int
        The token ``input_ids`` are padded with; everything else is padded with 0.
    classes : int
        Number of scores that the model gives.

    Examples
    --------
    >>> import torch
    >>> from sharpness.data.examples import Examples
    >>> texts = ([5, 7, 6], [5, 6], [5, 8, 9, 6], [5, 9, 6])
    >>> def batch(chosen):
    ...     ids = torch.tensor([texts[i] for i in chosen])
    ...     return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(chosen) % 2}
    >>> data = TrainingTexts(Examples("texts", 4, batch), range(4), padding=0, classes=2)
    >>> steps = data.steps(Recipe(batch=2), data.labels, torch.arange(4), torch.Generator().manual_seed(0))
    >>> sorted(inputs["input_ids"].shape for inputs, targets in steps)  # the short ones together
    [torch.Size([2, 3]), torch.Size([2, 4])]
    """

    def __init__(self, examples: Examples, chosen: Sequence[int], padding: int, classes: int) -> None:
        rows = [examples.batch([i]) for i in chosen]
        self.labels = torch.cat([row.pop("labels") for row in rows])
        self.rows = [{k: v[0] for k, v in row.items()} for row in rows]
        self.padding, self.classes = padding, classes

    def steps(
        self, recipe: Recipe, labels: Tensor, order: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[Any, Tensor]]:
        """Give inputs and targets (examples, classes) of an epoch's steps."""
        parts: list[list[int]] = []
        for block in order.split(20 * recipe.batch):
            by_length = sorted(block.tolist(), key=lambda i: len(self.rows[i]["input_ids"]))
            parts += [by_length[i : i + recipe.batch] for i in range(0, len(by_length), recipe.batch)]
        for i in torch.randperm(len(parts), generator=generator).tolist():
            rows = [self.rows[j] for j in parts[i]]
            batch = {
                key: nn.utils.rnn.pad_sequence(
                    [row[key] for row in rows], True, self.padding if key == "input_ids" else 0
                )
                for key in rows[0]
            }
            yield batch, F.one_hot(labels[parts[i]], self.classes).float()


def set_dropout_(model: nn.Module, rate: float) -> None:
    """Set every dropout rate of a model."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = rate
        elif isinstance(getattr(module, "dropout", None), float):  # torch's attention holds a number
            setattr(module, "dropout", rate)  # noqa: B010


def scores_of(model: nn.Module, inputs: Any) -> Tensor:
    """Compute the scores of the classes, (examples, classes), for a tensor or a dict of inputs."""
    output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def finetune(
    model: nn.Module, data: TrainingImages | TrainingTexts, recipe: Recipe, *, device: torch.device | str = "cpu"
) -> list[float]:
    """Train a model in place by a recipe.

    Parameters
    ----------
    model : nn.Module
        From inputs to the classes' scores (examples, classes), or to an output with ``logits``. It is left in
        evaluation mode, on the device.
    data : TrainingImages or TrainingTexts
        What to train on.
    recipe : Recipe
        How to train.
    device : device
        Where to train.

    Returns
    -------
    list of float
        The loss of every step, a cross-entropy with the targets after noise, mix-up and smoothing.

    Examples
    --------
    Random labels can be memorised:

    >>> import torch
    >>> from sharpness.data.examples import Examples
    >>> from sharpness.models import ImageFormat
    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.rand(32, 1, 8, 8), torch.randint(2, (32,))
    >>> examples = Examples("random", 32, lambda chosen: (x[chosen], y[chosen]))
    >>> data = TrainingImages(examples, range(32), ImageFormat((8, 8), (0.5,), (0.5,), channels=1), classes=2)
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    >>> losses = finetune(net, data, Recipe(lr=1e-2, epochs=30))
    >>> losses[-1] < 0.5 * losses[0]
    True
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    labels = data.labels.clone()
    noisy = torch.rand(len(labels), generator=generator) < recipe.label_noise
    labels[noisy] = torch.randint(data.classes, (int(noisy.sum()),), generator=generator)
    total = recipe.epochs * math.ceil(len(labels) / recipe.batch)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    warm = max(1, total // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min((t + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, t - warm) / max(1, total - warm)))),
    )
    losses = []
    if recipe.dropout is not None:
        set_dropout_(model, recipe.dropout)
    model.to(device).train()
    for _ in range(recipe.epochs):
        order = torch.randperm(len(labels), generator=generator)
        for inputs, targets in data.steps(recipe, labels, order, generator):
            moved = {k: v.to(device) for k, v in inputs.items()} if isinstance(inputs, Mapping) else inputs.to(device)
            loss = F.cross_entropy(
                scores_of(model, moved), targets.to(device), label_smoothing=recipe.label_smoothing
            )  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    model.eval()
    return losses
