"""Sharpness in the logs of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import how_to_install
from .losses import LossFunction
from .measures import Measure
from .monitor import QUANTITIES, Monitor

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f"the callback needs transformers: {how_to_install('transformers')} ({error})") from error

__all__ = ["SharpnessCallback"]


class SharpnessCallback(TrainerCallback):
    """Log sharpness every so many steps, or at each evaluation; the training is the same as without it, bit for bit.

    Values stand under the names of :func:`sharpness.measured` in ``trainer.state.log_history``, ``trainer_state.json``
    and whatever ``report_to`` names. TensorBoard has them below ``train/``. Those of an evaluation are among its
    metrics, with ``eval_`` before the name, for ``metric_for_best_model`` and callbacks that were added later.

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer to which the callback is added, and by which it logs: reporters run before a user's callbacks.
    batches : iterable
        Dicts with labels, or any batches that ``loss_fn`` accepts; read once, now.
    loss_fn : callable, optional
        ``loss_fn(model, batch)`` → scalar; by default ``model(**batch).loss``.
    every : int, optional
        Number of steps of the optimiser between measurements, by default at each evaluation. For what is measured along
        the step, weights are copied before each step that is measured, which at evaluations is every step.
    quantities : iterable of str or Measure
        As :func:`sharpness.measured` takes them.
    other : iterable, optional
        Batches of other data, for ``"critical-relative"``.
    **options
        Of :func:`sharpness.measured`: symmetries, micro_batch, and those of :class:`sharpness.Search`.

    Raises
    ------
    ImportError
        transformers is missing.
    TypeError
        ``trainer`` is no Trainer.
    ValueError
        An argument is wrong, the callback is in another Trainer, or the first measurement fails; a later one warns, and
        leaves its value out.

    Notes
    -----
    The model is in evaluation mode meanwhile. In several processes each measures the same.

    Examples
    --------
    >>> import contextlib, io, tempfile, transformers
    >>> config = transformers.BertConfig(
    ...     vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    ... )
    >>> model = transformers.BertForSequenceClassification(config)
    >>> data = [{"input_ids": [1, 2, i], "labels": i % 2} for i in range(8)]
    >>> with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    ...     args = transformers.TrainingArguments(folder, max_steps=2, report_to=[], use_cpu=True)
    ...     trainer = transformers.Trainer(model, args, train_dataset=data)
    ...     batches = [trainer.data_collator(data)]
    ...     trainer.add_callback(SharpnessCallback(trainer, batches, every=1, quantities=["adaptive"]))
    ...     _ = trainer.train()
    >>> [entry["step"] for entry in trainer.state.log_history if "sharpness/adaptive@0.5" in entry]
    [1, 2]
    """

    def __init__(
        self, trainer: Trainer, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
        every: int | None = None, quantities: Iterable[str | Measure] = QUANTITIES, other: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be the transformers.Trainer that logs, got {type(trainer).__name__}")
        self.trainer = trainer
        self.monitor = Monitor(batches, loss_fn, every=every, quantities=quantities, other=other, **options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin, in the trainer that was given."""
        if state is not self.trainer.state:
            raise ValueError(
                "this SharpnessCallback logs to another Trainer than the one that runs; make one for each: "
                "trainer.add_callback(SharpnessCallback(trainer, batches))"
            )
        self.monitor.start(state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Copy the weights if the step will be measured."""
        self.monitor.before_step(kwargs["model"], state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure every so many steps."""
        if self.monitor.due(state.global_step):
            self._log(args, state, control, kwargs["model"])

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure at an evaluation."""
        if self.monitor.due_at_evaluation(state.global_step):
            found = self._log(args, state, control, kwargs["model"])
            # By this name the trainer and EarlyStoppingCallback look for metric_for_best_model.
            kwargs["metrics"].update({f"eval_{name}": value for name, value in found.items()})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End."""
        self.monitor.end(state.global_step)

    def _log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any
    ) -> dict[str, float]:
        wanted = control.should_log  # what is logged here is not what the trainer was about to log
        shown = not args.disable_tqdm and state.is_world_process_zero
        found = self.monitor.after_step(model, state.global_step, progress=shown)
        self.trainer.log({**found})  # to which the trainer adds entries
        control.should_log = wanted
        return found
