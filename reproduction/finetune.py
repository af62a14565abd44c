"""Training by a recipe: the data of a step, and the loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpness.data import Examples
from sharpness.errors import require_extra

from .recipes import Recipe
from .vision import ImageTransform

__all__ = ["TrainingImages", "TrainingTexts", "finetune"]


# -- what a step sees --------------------------------------------------------------------------------------------------


def _augmentation(name: str) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Augment images (examples, channels, height, width) in [0, 1]; the result has the same form."""
    if name == "none":
        return lambda images, generator: images
    if name == "flip":
        return _flip_and_shift
    strength, number = (int(part[1:]) for part in name.split("-")[1:])

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
    how : ImageTransform
        Its mean and std normalise the images after augmentation.
    classes : int
        Number of scores that the model gives.

    Examples
    --------
    Mix-up makes every target a mixture of two labels:

    >>> import torch
    >>> from sharpness.data import Examples
    >>> from reproduction.vision import ImageTransform
    >>> x, y = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> examples = Examples(6, lambda chosen: (x[chosen], y[chosen]))
    >>> data = TrainingImages(examples, range(6), ImageTransform((8, 8), (0.5,), (0.5,)), classes=3)
    >>> inputs, targets = next(data.steps(Recipe(mixup=0.5), data.labels, torch.arange(6), torch.Generator()))
    >>> inputs.shape, targets.sum(1)
    (torch.Size([6, 1, 8, 8]), tensor([1., 1., 1., 1., 1., 1.]))
    """

    def __init__(self, examples: Examples, chosen: Sequence[int], how: ImageTransform, classes: int) -> None:
        self.images, self.labels = examples.batch(chosen)
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (how.mean, how.std))
        self.classes = classes

    def steps(
        self, recipe: Recipe, labels: Tensor, order: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[Any, Tensor]]:
        """Return inputs and targets (examples, classes) of an epoch's steps."""
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
    """Training texts as tokens; texts of similar length share a step, so there is little padding.

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
    >>> from sharpness.data import Examples
    >>> texts = ([5, 7, 6], [5, 6], [5, 8, 9, 6], [5, 9, 6])
    >>> def batch(chosen):
    ...     ids = torch.tensor([texts[i] for i in chosen])
    ...     return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(chosen) % 2}
    >>> data = TrainingTexts(Examples(4, batch), range(4), padding=0, classes=2)
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
        """Return inputs and targets (examples, classes) of an epoch's steps."""
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
        elif isinstance(getattr(module, "dropout", None), float):  # torch's attention stores the rate as a number
            setattr(module, "dropout", rate)  # noqa: B010


def freeze_(model: nn.Module, layers: int) -> None:
    """Freeze the first layers of a model's longest list of layers, and every parameter before them."""
    if layers == 0:
        return
    stack = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    if layers >= len(stack):
        raise ValueError(f"{type(model).__name__} has {len(stack)} layers, so fewer can be frozen, not {layers}")
    first = next(stack[layers].parameters())
    for p in itertools.takewhile(lambda p: p is not first, model.parameters()):
        p.requires_grad_(False)


def scores_of(model: nn.Module, inputs: Any) -> Tensor:
    """Compute the scores of the classes, (examples, classes), for a tensor or a dict of inputs."""
    output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def finetune(
    model: nn.Module, data: TrainingImages | TrainingTexts, recipe: Recipe, *, autocast: bool = False,
    device: torch.device | str = "cpu",
) -> list[float]:  # fmt: skip
    """Train a model in place by a recipe.

    Parameters
    ----------
    model : nn.Module
        A model from inputs to the scores of classes (examples, classes), or to an output with ``logits``. It ends in
        evaluation mode, on the device.
    data : TrainingImages or TrainingTexts
        Training data.
    recipe : Recipe
        Hyperparameters of the training.
    autocast : bool
        Compute passes in bfloat16 where torch considers it safe; weights and steps stay in single precision.
    device : device
        Device for training.

    Returns
    -------
    list of float
        The loss of every step, a cross-entropy with the targets after noise, mix-up and smoothing.

    Examples
    --------
    Random labels can be memorised:

    >>> import torch
    >>> from sharpness.data import Examples
    >>> from reproduction.vision import ImageTransform
    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.rand(32, 1, 8, 8), torch.randint(2, (32,))
    >>> examples = Examples(32, lambda chosen: (x[chosen], y[chosen]))
    >>> data = TrainingImages(examples, range(32), ImageTransform((8, 8), (0.5,), (0.5,)), classes=2)
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
    model.to(device)  # before the optimizer is made: on some devices that replaces the parameters
    freeze_(model, recipe.frozen)
    trained, decay = [p for p in model.parameters() if p.requires_grad], recipe.weight_decay
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "sgd":  # its decay is multiplied by the learning rate, like AdamW's
        optimizer = torch.optim.SGD(trained, recipe.lr, momentum=0.9, weight_decay=decay)
    else:
        optimizer = torch.optim.AdamW(trained, recipe.lr, weight_decay=decay, fused=True)
    warm = max(1, total // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min((t + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, t - warm) / max(1, total - warm)))),
    )
    losses = []
    if recipe.dropout is not None:
        set_dropout_(model, recipe.dropout)
    model.train()
    for _ in range(recipe.epochs):
        order = torch.randperm(len(labels), generator=generator)
        for inputs, targets in data.steps(recipe, labels, order, generator):
            moved = {k: v.to(device) for k, v in inputs.items()} if isinstance(inputs, Mapping) else inputs.to(device)
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                scores = scores_of(model, moved)
            loss = F.cross_entropy(scores.float(), targets.to(device), label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    model.eval()
    return losses
