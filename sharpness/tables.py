"""Tables of rankings and of single models, and verdicts in words."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from statistics import stdev
from textwrap import wrap
from typing import Any

import numpy as np

from .comparison import CONTROLS, Ranking, label
from .measures import MEASURES
from .rows import Row, targets
from .statistics import Correlation

__all__ = ["FEWEST_MODELS", "STYLES", "formatted", "per_model", "remarks", "verdicts"]

#: With fewer models a rank correlation says next to nothing: for nine models, one in thirteen unrelated quantities has
#: a τ of at least 0.5 or at most -0.5.
FEWEST_MODELS = 10
#: Styles of a table; "text" has aligned columns, for terminals.
STYLES = ("text", "markdown", "latex", "csv")


def verdicts(found: Sequence[Ranking], bound: float = 0.3) -> dict[str, str]:
    """Tell for every quantity whether it predicts anything of the target beyond training loss and error.

    Parameters
    ----------
    found : sequence of Ranking
        Result of :func:`compare`. Rankings with a corrected interval are used, those of a measure at all its radii
        together.
    bound : float
        A partial τ within ±bound counts as negligible.

    Returns
    -------
    dict of str to str
        By quantity: ``"yes, +"`` or ``"yes, −"`` if the corrected intervals at all radii exclude 0 on the same side;
        ``"nothing of size"`` if all of them lie within ±bound; ``"unresolved"`` otherwise, and for fewer than ten
        models.

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
    if min(t.models for t in taus) < FEWEST_MODELS:
        return "unresolved"
    if all(t.low > 0 for t in taus) or all(t.high < 0 for t in taus):
        return "yes, +" if taus[0].value > 0 else "yes, −"
    return "nothing of size" if all(-bound < t.low and t.high < bound for t in taus) else "unresolved"


def controls_in_words(given: Sequence[str]) -> str:
    """Name what was controlled for: training loss and error, and what else."""
    return ", ".join(["training loss and error", *(name.replace("_", " ") for name in given if name not in CONTROLS)])


def _head(further: Sequence[str]) -> list[str]:
    given = ", ".join(["τ given train loss and error", *(name.replace("_", " ") for name in further)])
    return [
        "quantity", "radius", "ρ", "median loss increase", "models", "τ", "95 % interval", "p",
        given, "p", "corrected interval", "τ − adaptive",
    ]  # fmt: skip


def _cells(row: Ranking) -> list[str]:
    def number(value: float | None, digits: str) -> str:
        return "" if value is None else "–" if np.isnan(value) else format(value, digits)

    def interval(tau: Correlation) -> str:
        return "" if np.isnan(tau.value) else f"[{tau.low:+.2f}, {tau.high:+.2f}]"

    def judged(tau: Correlation) -> str:
        fewer = tau.models != row.tau.models  # the models that its whole family has
        return f"{tau.value:+.2f} {interval(tau)}, {tau.models} models" if fewer else interval(tau)

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
        "" if row.corrected is None else judged(row.corrected),
        "" if difference is None else f"{difference.value:+.2f} {interval(difference)}",
    ]


def formatted(found: Sequence[Ranking], style: str = "text", further: Sequence[str] = ()) -> str:
    """Format rankings as a table.

    Parameters
    ----------
    found : sequence of Ranking
        Result of :func:`sharpness.comparison.compare`.
    style : {"text", "markdown", "latex", "csv"}
        ``"text"`` has aligned columns, for a terminal; LaTeX tables use the rules of booktabs.
    further : sequence of str
        What was controlled for beside training loss and error.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        Another style.

    Examples
    --------
    >>> from sharpness.comparison import compare
    >>> rows = [{"checkpoint": i, "kind": "fit", "train_error": 0.1 * i, "test_error": 0.3 * i} for i in range(3)]
    >>> print(formatted(compare(rows), "csv").splitlines()[1])
    train error,–,,,3,+1.00,"[..., ...]",...
    """
    return _laid_out([_head(further), *(_cells(row) for row in found)], style)


#: Columns of a fit and of quantities that follow from it.
_FITS = ("train_loss", "train_error", "test_loss", "test_error")
#: What the name of a standard error ends in.
_SPREAD = ", standard error"


def model_records(rows: Sequence[Row], *, short: bool = False) -> list[dict[str, Any]]:
    """Collect a sweep's numbers, with one record per checkpoint.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`sharpness.rows.read_results`.
    short : bool
        Take one radius for each measure: its default if the sweep has it, else the middle one.

    Returns
    -------
    list of dict
        Losses and errors on training and test data, the gap (test error minus training error), and every measure with
        its radius, as the mean over its batches; its standard error has a key of its own. What is missing is None, as
        is the standard error of a measurement on one batch.

    Examples
    --------
    >>> fit = {"checkpoint": "run 7", "kind": "fit", "train_error": 0.25, "test_error": 0.375}
    >>> model_records([fit])
    [{'model': 'run 7', 'train error': 0.25, 'test error': 0.375, 'gap': 0.125}]
    """
    gaps = targets(rows, "gap")
    measured: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["kind"] == "sharpness":
            place = (row["measure"], json.dumps(row["ablation"], sort_keys=True), row["rho"])
            measured.setdefault(place, {})[row["checkpoint"]] = row
    shown = sorted(_one_radius(measured) if short else measured)
    fits = {row["checkpoint"]: row for row in rows if row["kind"] == "fit"}
    known = [name for name in _FITS if any(fit.get(name) is not None for fit in fits.values())]
    records = []
    for model in dict.fromkeys(row["checkpoint"] for row in rows):
        found = {"model": model} | {name.replace("_", " "): fits.get(model, {}).get(name) for name in known}
        found |= {"gap": gaps.get(model)} if gaps else {}
        for measure, switches, rho in shown:
            row = measured[measure, switches, rho].get(model, {})
            batches = row.get("per_batch") or ()
            name = label(measure, json.loads(switches)) + (f", ρ = {rho:g}" if rho else "")
            spread = stdev(batches) / len(batches) ** 0.5 if len(batches) > 1 else None
            found |= {name: row.get("sharpness"), name + _SPREAD: spread}
        records.append(found)
    return records


def per_model(rows: Sequence[Row], style: str = "text", *, short: bool = False) -> str:
    """Tabulate a sweep with one row per checkpoint.

    Parameters
    ----------
    rows, short
        As for :func:`model_records`.
    style : {"text", "markdown", "latex", "csv"}
        As for :func:`formatted`. In CSV the standard errors have separate columns.

    Returns
    -------
    str
        The numbers of :func:`model_records`, every measure as mean ± standard error over its batches.

    Raises
    ------
    ValueError
        Another style.

    Examples
    --------
    >>> of = {"checkpoint": "run 7", "kind": "sharpness", "measure": "adaptive", "ablation": {}, "rho": 0.5}
    >>> fit = {"checkpoint": "run 7", "kind": "fit", "train_error": 0.25, "test_error": 0.375}
    >>> print(per_model([fit, {**of, "sharpness": 0.2, "per_batch": [0.1, 0.3]}], "markdown"))
    | model | train error | test error | gap | adaptive, ρ = 0.5 |
    |---|---|---|---|---|
    | run 7 | 0.25 | 0.375 | 0.125 | 0.2 ± 0.1 |
    """
    records = model_records(rows, short=short)
    columns = [c for c in (records or [{"model": None}])[0] if style == "csv" or not c.endswith(_SPREAD)]
    lines = [columns]
    for record in records:
        spreads = {c: "" if style == "csv" else _number(record.get(c + _SPREAD), 2, " ± ") for c in columns}
        lines.append([str(record["model"]), *(_number(record[c]) + spreads[c] for c in columns[1:])])
    return _laid_out(lines, style)


def remarks(rows: Sequence[Row]) -> list[str]:
    """List what was remarked on the measurements of a sweep, each once, with the models that it is about.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`sharpness.rows.read_results`.

    Returns
    -------
    list of str

    Examples
    --------
    >>> row = {"checkpoint": "run 7", "kind": "sharpness", "measure": "adaptive", "ablation": {}, "remarks": ["so"]}
    >>> remarks([row, row])
    ['so (adaptive; run 7)']
    """
    about: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        for remark in row.get("remarks") or ():
            measures, models = about.setdefault(remark, ({}, {}))
            measures[label(row["measure"], row["ablation"])] = models[row["checkpoint"]] = None
    few = 3
    return [
        f"{remark} ({', '.join(measures)}; {', '.join(models) if len(models) <= few else f'{len(models)} models'})"
        for remark, (measures, models) in about.items()
    ]


def _one_radius(places: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Choose one radius for each measure: its default, or else the middle one."""
    radii: dict[tuple[Any, ...], list[float]] = {}
    for place in places:
        radii.setdefault(place[:-1], []).append(place[-1])
    for measure, several in radii.items():
        default = MEASURES[measure[0]].rho if measure[0] in MEASURES else None
        yield (*measure, default if default in several else sorted(several)[len(several) // 2])


def _number(value: float | None, digits: int = 4, before: str = "") -> str:
    return "" if value is None else f"{before}{value:.{digits}g}"


def _laid_out(lines: Sequence[Sequence[str]], style: str) -> str:
    """Write cells as a table, whose first line is the head."""
    head, *body = lines
    if style == "csv":
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(lines)
        return stream.getvalue()
    if style == "markdown":
        rows = ["| " + " | ".join(cells) + " |" for cells in lines]
        return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]]) + "\n"
    if style == "latex":
        words = str.maketrans({**{c: "\\" + c for c in "%_&$#{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
                               "^": r"\textasciicircum{}", "τ": r"$\tau$", "ρ": r"$\rho$", "−": "$-$",
                               "–": "--", "±": r"$\pm$"})  # fmt: skip
        rows = [" & ".join(cell.translate(words) for cell in cells) + r" \\" for cells in lines]
        begin = f"\\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}"
        return "\n".join([begin, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}", ""])
    if style == "text":
        return _aligned(head, body)
    raise ValueError(f"a table is {', '.join(STYLES[:-1])} or {STYLES[-1]}, not {style!r}")


def _aligned(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Align columns, the first one to the left; wrap a head that is wider than its column."""
    columns = list(zip(*body, strict=True)) if body else [()] * len(head)
    wide = [max(9, *map(len, [*column, *title.split()])) for title, column in zip(head, columns, strict=True)]
    titles = [wrap(title, width) for title, width in zip(head, wide, strict=True)]
    deep = max(map(len, titles))
    tops = [[([""] * (deep - len(t)) + t)[i] for t in titles] for i in range(deep)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, wide, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    rule = "  ".join("─" * w for w in wide)
    return "\n".join([*map(line, tops), rule, *map(line, body)]) + "\n"
