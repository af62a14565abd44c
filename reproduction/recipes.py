"""Recipes: the hyperparameters of a training run, fixed or drawn at random."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Recipe", "random_recipe"]


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training run, with linear warm-up of the learning rate and cosine decay to zero.

    Attributes
    ----------
    lr : float
        Peak learning rate.
    weight_decay : float
        Weight decay: decoupled for AdamW, ordinary for SGD.
    epochs : int
        Passes through the training data.
    batch : int
        Examples per step.
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
    frozen : int
        Number of first layers that are not trained, along with everything before them.
    optimizer : {"adamw", "sgd"}
        SGD has a momentum of 0.9.
    init_scale : float
        Factor of every matrix before training, see :func:`reproduction.collection.train_collection`.
    seed : int
        Seed of the order, the shifts, mix-up and the label noise; in :func:`reproduction.collection.train_collection`
        also of the head, RandAugment and dropout, which use torch's global seed.

    Raises
    ------
    ValueError
        A value is out of range, or the augmentation is unknown.

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
    frozen: int = 0
    optimizer: str = "adamw"
    init_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.lr < math.inf and self.epochs >= 1 and self.batch >= 1 and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"a recipe needs lr > 0, weight_decay ≥ 0, epochs and batch ≥ 1, got {self}")
        if not (self.mixup >= 0 and 0 <= self.label_smoothing < 1 and 0 <= self.label_noise <= 1):
            raise ValueError(f"mixup must be ≥ 0, label_smoothing in [0, 1) and label_noise in [0, 1], got {self}")
        if not (self.frozen >= 0 and 0 < self.init_scale < math.inf and self.optimizer in ("adamw", "sgd")):
            raise ValueError(f'a recipe needs frozen ≥ 0, init_scale > 0 and optimizer "adamw" or "sgd", got {self}')
        if not re.fullmatch(r"none|flip|rand-m\d+-n\d+", self.augmentation):
            raise ValueError(f'augmentation is "none", "flip" or "rand-mM-nN", not {self.augmentation!r}')


def random_recipe(
    seed: int,
    *,
    lr: tuple[float, float] = (3e-5, 1e-3),
    epochs: tuple[int, int] = (2, 6),
    batch: int | Sequence[int] = 64,
    images: bool = True,
    noise: float = 0.3,
    dropout: float = 0.0,
    frozen: int = 0,
    scale: float = 1.0,
    optimizers: Sequence[str] = ("adamw",),
) -> Recipe:
    """Draw a random recipe, so that models of one collection differ in how well they generalise.

    Parameters
    ----------
    seed : int
        Seed of the draw and of the training.
    lr : (float, float)
        Range of the learning rate, log-uniform.
    epochs : (int, int)
        Range of the epochs, both ends included.
    batch : int or sequence of int
        Examples per step, or values from which they are drawn.
    images : bool
        Whether to vary augmentation and mix-up.
    noise : float
        Largest label noise.
    dropout : float
        Largest dropout rate; half of the models get a random part of it. At 0 images are trained without dropout, and
        texts with the model's own.
    frozen : int
        Largest number of frozen layers; half of the models have none.
    scale : float
        Largest factor of the initial weights, and one over the smallest; log-uniform.
    optimizers : sequence of str
        Optimisers to choose from; SGD's learning rate is a hundred times the drawn one.

    Returns
    -------
    Recipe

    Raises
    ------
    ValueError
        A range is out of bounds.

    Notes
    -----
    After Wortsman et al. 2022 (*Model soups*), as far as it does not depend on the model's size: weight decay
    10^U(-4, -0.2), half of the models with label smoothing U(0, 0.25), half with mix-up U(0, 0.9), RandAugment with M
    of 1 to 20 and N of 0 to 2, or none. Label noise (half of the models, U(0, ``noise``)) and what follows it are
    added.

    Examples
    --------
    >>> recipes = [random_recipe(seed, epochs=(2, 4)) for seed in range(24)]
    >>> all(3e-5 <= recipe.lr <= 1e-3 for recipe in recipes), {recipe.epochs for recipe in recipes}
    (True, {2, 3, 4})
    >>> recipes[7] == random_recipe(7, epochs=(2, 4))
    True
    """
    if not (0 < lr[0] <= lr[1] <= 1e3 and 1 <= epochs[0] <= epochs[1]):
        raise ValueError(
            "ranges go from the smaller value to the larger; learning rates lie between 0 and 1e3, epochs are at least "
            f"1: got {lr} and {epochs}"
        )
    rng = np.random.default_rng(seed)
    rate = float(np.exp(rng.uniform(*np.log(lr))))
    decay = float(10 ** rng.uniform(-4, -0.2))
    count = int(rng.integers(epochs[0], epochs[1] + 1))
    smoothing, mixup, noisy = (float(rng.uniform(0, top)) * int(rng.integers(2)) for top in (0.25, 0.9, noise))
    strength, number = int(rng.integers(1, 21)), int(rng.integers(0, 3))
    kind = ("none", "flip", f"rand-m{strength}-n{number}")[rng.integers(3)]
    if not images:
        kind, mixup = "none", 0.0
    # Optional settings are drawn last, so that they do not change the rest of the draw.
    sizes = [batch] if isinstance(batch, int) else list(batch)
    size = sizes[int(rng.integers(len(sizes)))]
    rate_of_dropout = float(rng.uniform(0, dropout)) * int(rng.integers(2)) if dropout else 0.0 if images else None
    layers = int(rng.integers(frozen + 1)) * int(rng.integers(2))
    factor = float(np.exp(rng.uniform(-1, 1) * math.log(scale)))
    optimizer = optimizers[int(rng.integers(len(optimizers)))]
    return Recipe(
        rate * (100 if optimizer == "sgd" else 1), decay, count, size, kind, mixup, smoothing, noisy, rate_of_dropout,
        layers, optimizer, factor, seed,
    )  # fmt: skip
