"""Errors that users can cause, in one sentence."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries.modules import plain_class, tensors


def words_of(error: BaseException) -> str:
    """Describe an error in one line, with its type where the message alone may not be clear."""
    said = " ".join(str(error).split())[:500]
    return said if isinstance(error, (ValueError, OSError)) and said else f"{type(error).__name__}: {said}".rstrip(": ")


class RemoteError(RuntimeError):
    """Another process of the group failed."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn an exception from a user's file, model or function into a one-sentence error that begins with ``what``.

    A missing library or a lack of memory is raised unchanged.

    >>> with naming("the settings cannot be read"):
    ...     {}["steps"]
    Traceback (most recent call last):
    ValueError: the settings cannot be read: KeyError: 'steps'
    """
    try:
        yield
    except (ImportError, MemoryError, RemoteError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {words_of(error)}") from error


def why_it_failed(error: Exception, model: nn.Module, batch: Any) -> str | None:
    """Say what was wrong with the batch, or with casts of the model, when a pass failed; None for other errors."""
    reason = _wrong_ids(error, model, batch) or _wrong_labels(error, model, batch)
    present = {t.dtype for t in (*model.parameters(), *model.buffers(), *tensors(batch)) if t.is_floating_point()}
    for dtype, word in ((torch.bfloat16, "BFloat16"), (torch.float16, "Half")):
        if reason is None and word in str(error) and present and dtype not in present:
            others = " and ".join(sorted(map(str, present)))
            reason = f"the model casts to {dtype} by itself, while it is measured in {others}; let it cast to that"
    return reason


def _failed_call(error: BaseException, *functions: Any) -> dict[str, Any]:
    """Return the arguments of the innermost call of one of some functions that an error passed; empty if of none."""
    codes, arguments, trace = [f.__code__ for f in functions], dict[str, Any](), error.__traceback__
    while trace is not None:
        arguments = trace.tb_frame.f_locals if trace.tb_frame.f_code in codes else arguments
        trace = trace.tb_next
    return arguments


def _wrong_ids(error: Exception, model: nn.Module, batch: Any) -> str | None:
    """Say which rows an embedding lacks, or that a text has more tokens than the model has positions."""
    name, call = plain_class(model).__name__, _failed_call(error, F.embedding)
    if call and call["input"].numel():
        rows, asked = len(call["weight"]), [int(call["input"].min()), int(call["input"].max())]
        if asked[0] < 0 or asked[1] >= rows:
            path = next((n for n, p in model.named_parameters() if p is call["weight"]), "an embedding")
            return (
                f"rows {asked[0]} to {asked[1]} of {path} are asked for, but {name} has {rows} of them; use its own "
                "tokenizer, and inputs that are no longer than it has positions"
            )
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    size = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 0
    if most and size > most and {str(size), str(most)} <= set(re.findall(r"\d+", str(error))):
        return f"the inputs have {size} tokens, but {name} has {most} positions; use shorter inputs"
    return None


def _wrong_labels(error: Exception, model: nn.Module, batch: Any) -> str | None:
    """Say how the labels do not fit the scores that a loss was given with them."""
    by_name, name, shown = isinstance(batch, Mapping), plain_class(model).__name__, None
    if by_name or (isinstance(batch, (list, tuple)) and len(batch) == 2):
        shown = batch.get("labels") if by_name else batch[1]
    kind = type(shown).__name__
    if isinstance(shown, (list, tuple)) and kind in str(error) and all(isinstance(v, (int, float)) for v in shown):
        return f"the labels are a {kind} of numbers; give a tensor, torch.tensor(labels)"
    call = _failed_call(error, F.cross_entropy, F.binary_cross_entropy_with_logits)
    scores, labels = call.get("input"), call.get("target")
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor) and isinstance(shown, Tensor)):
        return None
    if not scores.dim() or not shown.dim():
        return None
    ignored = call.get("ignore_index")  # None in the loss of several classes of an example
    if ignored is not None and labels.dtype == torch.int64 and labels.shape == scores.shape[:1] + scores.shape[2:]:
        classes, counted = scores.shape[1:2].numel(), labels[labels != ignored]
        if not counted.numel() or 0 <= int(counted.min()) <= int(counted.max()) < classes:
            return None
        return (
            f"the labels go from {int(counted.min())} to {int(counted.max())}, but {name} has {classes} classes; check "
            "that model and data belong together"
        )
    if labels.is_floating_point() and labels.shape == scores.shape:
        return None
    if by_name and len(scores) > len(labels) == len(shown):
        return (
            f"{name} scores every token ({len(scores)}), but there are {len(labels)} labels, one for each example; "
            "load a class such as …ForSequenceClassification, or label every token"
        )
    one = "" if ignored is not None else ' (with config.problem_type = "single_label_classification")'
    return (
        f"the labels are {shown.dtype} of shape {tuple(shown.shape)}, but the loss of {name} takes floats of the "
        f"scores' shape {tuple(scores.shape)} for several classes of an example, labels.float(), or one int64 for each "
        f"example{one}, labels.long().flatten()"
    )


def called(name: str, *arguments: Any) -> Any:
    """Call the function named ``module:function``, also from the current folder; turn its errors into ValueErrors."""
    what = f"{name!r} is not an importable module:function"
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        with naming(what):
            function = pkgutil.resolve_name(name)
    except ImportError as error:
        raise ValueError(f"{what}: {error}") from error
    if not callable(function):
        raise ValueError(f"{name!r} is not a function")
    with naming(f"{name} failed"):
        return function(*arguments)


@contextmanager
def require_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failing import in the block into one line: the feature, the extra that installs its library, and why.

    For example ``figures need matplotlib: pip install 'quotient-manifolds[plot]' (No module named 'matplotlib')``.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'quotient-manifolds[{extra}]' ({error})") from error
