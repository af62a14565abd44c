"""Progress of long work and the time left: a bar on a terminal, elsewhere one line per minute."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm

__all__ = ["bar"]


class _Lines:
    """A stream on which every state of a bar becomes a line."""

    def write(self, text: str) -> None:
        """Write everything but bare carriage returns."""
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing, because every line was flushed when it was written."""


def bar(total: int | None, what: str, unit: str, *, progress: bool = True) -> Any:
    """Return tqdm's bar for a terminal, and for a file or pipe one that writes a line per minute, after the first."""
    if not progress or (sys.stderr is not None and sys.stderr.isatty()):
        return tqdm(total=total, desc=what, unit=unit, disable=not progress)
    form = "{desc}: {n_fmt}" + ("" if total is None else " of {total_fmt}") + " {unit}s in {elapsed}"
    form += ("" if total is None else ", {remaining} left") + "{postfix}"
    return tqdm(
        total=total, desc=what, unit=unit, file=_Lines(), delay=60, mininterval=60, miniters=1, leave=False,
        bar_format=form, ascii=True, disable=sys.stderr is None,
    )  # fmt: skip
