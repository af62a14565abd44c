"""How far a long piece of work is: a bar on a terminal, a line a minute anywhere else."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm

__all__ = ["bar"]


class _Lines:
    """A stream on which every state of a bar is a line."""

    def write(self, text: str) -> None:
        """Write what is more than a carriage return."""
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: every line was flushed."""


def bar(total: int | None, what: str, unit: str, *, progress: bool = True) -> Any:
    """Give tqdm's bar on a terminal; in a file or pipe one that writes a line a minute, the first after a minute."""
    if not progress or (sys.stderr is not None and sys.stderr.isatty()):
        return tqdm(total=total, desc=what, unit=unit, disable=not progress)
    form = "{desc}: {n_fmt}" + ("" if total is None else " of {total_fmt}") + " {unit}s in {elapsed}{postfix}"
    return tqdm(
        total=total, desc=what, unit=unit, file=_Lines(), delay=60, mininterval=60, miniters=1, leave=False,
        bar_format=form, ascii=True, disable=sys.stderr is None,
    )  # fmt: skip
