"""Whose an error is: the user's to mend, which one sentence tells, or a defect of ours, whose traceback is shown."""

from __future__ import annotations

import dis
import traceback
from types import FrameType

_OURS = {"quotient_manifolds", "sharpness", "reproduction"}
#: What our checks raise; any other class says that a function was called as none of ours should call it.
_SAID = (ValueError, ArithmeticError, RuntimeError)


def is_mendable(error: BaseException) -> bool:
    """Return whether users can mend an error; all else is a defect.

    They can if a ``raise`` of ours raised it; if the system, or a missing library, is its cause; and if their own model
    did in its forward pass. What Python or a library raises in the middle of our code is a defect, whatever its class.

    >>> import torch
    >>> from quotient_manifolds.symmetries import from_json
    >>> def fails(function, *arguments):
    ...     try:
    ...         function(*arguments)
    ...     except Exception as error:
    ...         return is_mendable(error)
    >>> fails(from_json, "nothing"), fails(open, "nowhere"), fails(torch.nn.Linear(2, 2), torch.ones(3))
    (True, True, True)
    >>> fails(int, "x")
    False
    """
    if isinstance(error, ImportError):
        return not _OURS & set((error.name or "").split(".")[:1])
    if isinstance(error, OSError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    if _is_ours(frames[-1]) and _raises(error):
        return isinstance(error, _SAID) and not isinstance(error, NotImplementedError)
    passes = [i for i, frame in enumerate(frames) if _is_pass(frame)]
    return bool(passes) and not any(map(_is_ours, frames[passes[-1] :]))


def _is_ours(frame: FrameType) -> bool:
    """Whether code of ours runs; what only hands an operation of torch on, as it watches a model, is the model's."""
    ours = frame.f_globals.get("__name__", "").partition(".")[0] in _OURS
    return ours and frame.f_code.co_name != "__torch_function__"


def _is_pass(frame: FrameType) -> bool:
    """Whether a module of torch is called."""
    return frame.f_globals.get("__name__") == "torch.nn.modules.module" and frame.f_code.co_name == "_call_impl"


def _raises(error: BaseException) -> bool:
    """Whether an error began at a statement ``raise``, and not in an operation or a function in C."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"
