"""Tables for notebooks: what ``_repr_html_`` returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape


class Bar(float):
    """A number that a table shows with a bar of its size, relative to the largest one of its column."""


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> str:
    """Return a table as HTML, with numbers to the right, and notes below it.

    Examples
    --------
    >>> print(html_table(["layer", "share"], [["a < b", Bar(2.0)], ["c", Bar(1.0)]]).count("<tr>"))
    3
    """
    rows = [list(row) for row in rows]
    most = [max((abs(v) for v in column if _is_bar(v)), default=0.0) for column in zip(*rows, strict=True)]
    cells = (f"<tr>{''.join(_cell(v, m) for v, m in zip(row, most, strict=True))}</tr>" for row in rows)
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><thead><tr>{first}</tr></thead><tbody>{''.join(cells)}</tbody></table>{below}"


def _is_bar(value: object) -> bool:
    return isinstance(value, Bar) and math.isfinite(value)


def _cell(value: object, most: float) -> str:
    if isinstance(value, str):
        return f'<td style="text-align: left">{escape(value)}</td>'
    shown = "" if value is None else f"{value:.4g}" if isinstance(value, float) else escape(str(value))
    width = 100 * abs(value) / most if _is_bar(value) and most else 0.0  # type: ignore[arg-type]
    bar = f"; background: linear-gradient(90deg, #9ecae188 {width:.0f}%, transparent 0)" if width else ""
    return f'<td style="text-align: right{bar}">{shown}</td>'
