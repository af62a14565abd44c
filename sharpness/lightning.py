"""Sharpness in the loggers of Lightning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from .errors import how_to_install
from .losses import LossFunction
from .measures import Measure
from .monitor import QUANTITIES, Monitor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import TQDMProgressBar
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.callbacks import TQDMProgressBar
    except ImportError as error:
        raise ImportError(f"the callback needs lightning: {how_to_install('lightning')} ({error})") from error

__all__ = ["SharpnessMonitor"]


class SharpnessMonitor(Callback):
    """Log sharpness every so many steps, or at each validation; the training is the same as without it, bit for bit.

    Values go to all loggers of the trainer under the names of :func:`sharpness.measured`, by the number of steps that
    were made; not by ``log``, which keeps only what falls on ``log_every_n_steps``. They are ``callback_metrics`` too,
    for callbacks that stand behind this one, such as ``EarlyStopping``.

    Parameters
    ----------
    batches : iterable
        Batches that ``loss_fn`` accepts; read once, now.
    loss_fn : callable, optional
        ``loss_fn(module, batch)`` → scalar, which logs nothing; by default ``module(**batch).loss`` or cross-entropy of
        ``module(x)`` and y.
    every : int, optional
        Number of steps of the optimiser between measurements, by default at each validation. For what is measured along
        the step, weights are copied before each step that is measured, which at validations is every step.
    quantities : iterable of str or Measure
        As :func:`sharpness.measured` takes them.
    other : iterable, optional
        Batches of other data, for ``"critical-relative"``.
    **options
        Of :func:`sharpness.measured`: symmetries, micro_batch, and those of :class:`sharpness.Search`.

    Raises
    ------
    ImportError
        Lightning is missing.
    ValueError
        An argument is wrong, the trainer has no logger, or the first measurement fails; a later one warns, and leaves
        its value out.

    Notes
    -----
    The module is in evaluation mode and without the trainer's mixed precision meanwhile. In several processes each
    measures the same, and the first one logs.

    Examples
    --------
    >>> import csv, pathlib, tempfile, warnings, torch
    >>> from lightning.pytorch import LightningModule, Trainer
    >>> from lightning.pytorch.loggers import CSVLogger
    >>> class Net(LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(2, 2)
    ...
    ...     def forward(self, x):
    ...         return self.layer(x)
    ...
    ...     def training_step(self, batch, index):
    ...         return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> batches = [(torch.eye(2), torch.arange(2))]
    >>> loader = torch.utils.data.DataLoader(batches, batch_size=None)
    >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # Lightning's advice
    ...     trainer = Trainer(
    ...         max_steps=2, logger=CSVLogger(folder), accelerator="cpu", enable_progress_bar=False,
    ...         enable_model_summary=False, enable_checkpointing=False,
    ...         callbacks=[SharpnessMonitor(batches, every=1, quantities=["adaptive"])],
    ...     )
    ...     trainer.fit(Net(), loader)
    ...     text = next(pathlib.Path(folder).rglob("metrics.csv")).read_text(encoding="utf-8")
    >>> list(csv.DictReader(text.splitlines()))[-1].keys()
    dict_keys(['sharpness/adaptive@0.5', 'step'])
    """

    def __init__(
        self, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, every: int | None = None,
        quantities: Iterable[str | Measure] = QUANTITIES, other: Iterable[Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.monitor = Monitor(batches, loss_fn, every=every, quantities=quantities, other=other, **options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        if not trainer.loggers:
            raise ValueError("the trainer has no logger for the sharpness; pass one, Trainer(logger=CSVLogger(folder))")
        self.monitor.start(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Copy the weights if the step will be measured."""
        self.monitor.before_step(pl_module, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure every so many steps."""
        if self.monitor.due(trainer.global_step):
            self._log(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure at a validation within a training."""
        if not trainer.sanity_checking and self.monitor.due_at_evaluation(trainer.global_step):
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End."""
        self.monitor.end(trainer.global_step)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The bar of rich would print a line for each state of another one.
        shown = isinstance(trainer.progress_bar_callback, TQDMProgressBar) and trainer.is_global_zero
        found = self.monitor.after_step(pl_module, trainer.global_step, progress=shown)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in found.items()})
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)
