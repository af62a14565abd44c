"""Rankings as tables, and in words."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np

from .comparison import Ranking
from .statistics import Correlation

__all__ = ["formatted", "verdicts"]


def verdicts(found: Sequence[Ranking], bound: float = 0.3) -> dict[str, str]:
    """Say of every quantity whether it says anything of the target that training loss and error do not say.

    Parameters
    ----------
    found : sequence of Ranking
        Of :func:`compare`; those with a corrected interval count, a measure's at all its radii together.
    bound : float
        A partial τ below it is nothing of size.

    Returns
    -------
    dict of str to str
        By quantity: ``"yes, +"`` or ``"yes, −"`` if the corrected intervals at all radii leave out 0 on one side;
        ``"nothing of size"`` if all of them lie within ±bound; ``"unresolved"`` otherwise.

    Examples
    --------
    A quantity that is the gap itself, and one that is noise, given a training loss of no consequence:

    >>> from sharpness.comparison import compare
    >>> rng = np.random.default_rng(0)
    >>> gap, loss, noise = rng.uniform(size=(3, 60))
    >>> of = [{"checkpoint": i, "kind": "fit", "train_loss": loss[i], "test_loss": gap[i] + loss[i]} for i in range(60)]
    >>> of += [{"checkpoint": i, "kind": "baselines", "margin": gap[i], "distance": noise[i]} for i in range(60)]
    >>> verdicts(compare(of, "loss-gap"))
    {'distance': 'unresolved', 'margin': 'yes, +'}
    """
    intervals: dict[str, list[Correlation]] = {}
    for r in found:
        if r.corrected is not None and r.choice in ("ρ", "–"):
            intervals.setdefault(r.quantity, []).append(r.corrected)
    return {name: _verdict(taus, bound) for name, taus in intervals.items()}


def _verdict(taus: Sequence[Correlation], bound: float) -> str:
    if all(t.low > 0 for t in taus) or all(t.high < 0 for t in taus):
        return "yes, +" if taus[0].value > 0 else "yes, −"
    return "nothing of size" if all(-bound < t.low and t.high < bound for t in taus) else "unresolved"


_HEAD = (
    "quantity", "radius", "ρ", "median loss increase", "models", "τ", "95 % interval", "p",
    "τ given train loss and error", "p", "corrected interval", "τ − adaptive",
)  # fmt: skip


def _cells(row: Ranking) -> list[str]:
    def number(value: float | None, digits: str) -> str:
        return "" if value is None else "–" if np.isnan(value) else format(value, digits)

    def interval(tau: Correlation) -> str:
        return f"[{tau.low:+.2f}, {tau.high:+.2f}]"

    partial, difference = row.partial, row.difference
    return [
        row.quantity if ":" in row.quantity else row.quantity.replace("_", " "),
        row.choice.replace("_", " "),
        number(row.rho, ".3g"),
        number(row.loss_increase, ".3g"),
        str(row.tau.models),
        number(row.tau.value, "+.2f"),
        interval(row.tau),
        number(row.tau.p, ".2g"),
        number(None if partial is None else partial.value, "+.2f"),
        number(None if partial is None else partial.p, ".2g"),
        "" if row.corrected is None else interval(row.corrected),
        "" if difference is None else f"{difference.value:+.2f} {interval(difference)}",
    ]


def formatted(found: Sequence[Ranking], style: str = "markdown") -> str:
    """Format rankings as a table.

    Parameters
    ----------
    found : sequence of Ranking
        Of :func:`sharpness.comparison.compare`.
    style : {"markdown", "latex", "csv"}
        The rules of a table in LaTeX are those of booktabs.

    Returns
    -------
    str

    Examples
    --------
    >>> from sharpness.comparison import compare
    >>> rows = [{"checkpoint": i, "kind": "fit", "train_error": 0.1 * i, "test_error": 0.3 * i} for i in range(3)]
    >>> print(formatted(compare(rows), "csv").splitlines()[1])
    train error,–,,,3,+1.00,"[..., ...]",...
    """
    lines = [list(_HEAD), *(_cells(row) for row in found)]
    if style == "csv":
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(lines)
        return stream.getvalue()
    if style == "markdown":
        rows = ["| " + " | ".join(cells) + " |" for cells in lines]
        return "\n".join([rows[0], "|" + "---|" * len(_HEAD), *rows[1:]]) + "\n"
    if style == "latex":
        words = str.maketrans({"%": r"\%", "_": r"\_", "τ": r"$\tau$", "ρ": r"$\rho$", "−": "$-$", "–": "--"})
        rows = [" & ".join(cell.translate(words) for cell in cells) + r" \\" for cells in lines]
        begin = f"\\begin{{tabular}}{{ll{'r' * (len(_HEAD) - 2)}}}"
        return "\n".join([begin, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}", ""])
    raise ValueError(f"a table is markdown, latex or csv, not {style!r}")
