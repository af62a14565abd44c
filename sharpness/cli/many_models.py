"""sweep, table, plot: what is asked of many checkpoints."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .options import Formatter, place, shard

__all__ = ["add_plot", "add_sweep", "add_table"]


def add_sweep(commands: Any) -> None:
    """Add ``sharpness sweep``."""
    sweep = commands.add_parser(
        "sweep",
        help="measure many checkpoints; resumes where it was stopped",
        description="Measure many checkpoints under many measures, radii and ablations, as a YAML or JSON file says: "
        "checkpoints, data, train, test or accuracies, measures, rho, ablations, baselines, initial, steps, "
        "relative_tol, device (docs/guides/sweeps.md). Interruptible; rerun to resume from the folder OUT. Under "
        "torchrun processes draw checkpoints from a common counter; --shard splits them among independent processes "
        "that share OUT. Exit code 1 if a checkpoint failed.",
        formatter_class=Formatter,
    )
    sweep.add_argument("config", type=place, metavar="CONFIG", help="YAML or JSON file")
    sweep.add_argument("--out", type=place, required=True, help="folder for the results")
    sweep.add_argument("--shard", default="1/1", help="take the i-th of n parts of the checkpoints")
    sweep.add_argument("--quiet", action="store_true", help="no progress bar")
    sweep.set_defaults(run=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    import torch

    from ..distributed import torchrun
    from ..files import check_folder
    from ..rows import write_results
    from ..sweep import read_config, read_rows, run_sweep

    part = shard(options.shard)
    check_folder(options.out, create=False)
    sweep = read_config(options.config)
    with torchrun(torch.device("cpu")) as group:
        leader = group is None or int(os.environ["RANK"]) == 0
        failed = run_sweep(sweep, options.out, shard=part, progress=not options.quiet and leader)
    rows: list[dict[str, Any]] | None = None
    while rows != (now := read_rows(options.out, sweep)):  # others may finish meanwhile, and write too
        rows = now
        write_results(options.out / "results.jsonl", rows)
        write_results(options.out / "results.csv", rows)
    for job in failed:
        what = job.get("measure", job["kind"])
        if isinstance(job.get("rho"), float):  # a radius that is too large; the others stand
            what = f"{what} at rho = {job['rho']:g}"
        print(f"sharpness: {job['checkpoint']}, {what}: {job['error']}", file=sys.stderr)
    if not options.quiet and leader:
        print(f"{len(rows or ())} rows in {options.out / 'results.jsonl'}")
    return 1 if failed else 0


def _add_results(commands: Any, name: str, words: str, description: str) -> argparse.ArgumentParser:
    """Add a command that reads the results of a sweep."""
    shown: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=description, formatter_class=Formatter
    )
    shown.add_argument("results", type=place, metavar="RESULTS", help="a sweep's folder, results.jsonl or .csv")
    shown.add_argument(
        "--target", choices=["gap", "loss-gap", "test-error", "test-loss"], default="gap", help="what is predicted"
    )
    return shown


def add_table(commands: Any) -> None:
    """Add ``sharpness table``."""
    shown = _add_results(
        commands,
        "table",
        "print how every measure ranks the models of a sweep",
        "Kendall's tau of the generalisation gap with every measure: at every radius, at the paper's, at its best and "
        "at matched increases of the loss; with bootstrap intervals, and given training loss and error (partial tau) "
        "with intervals corrected for all that is compared, beside norms and other baselines.",
    )
    shown.add_argument("--format", choices=["markdown", "latex", "csv"], default="markdown", help="of the table")
    shown.add_argument("--short", action="store_true", help="chosen radii only, not every radius of the sweep")
    shown.add_argument(
        "--level", type=float, default=0.95, help="that all corrected intervals hold; raise it for several targets"
    )
    shown.add_argument("--out", type=place, help="file (default: print)")
    shown.set_defaults(run=_table)


def _table(options: argparse.Namespace) -> int:
    from ..comparison import compare
    from ..files import check_file, write_text
    from ..rows import read_results
    from ..tables import formatted, verdicts

    if options.out is not None:
        check_file(options.out)

    rows = read_results(options.results)
    found = compare(rows, options.target, level=options.level)
    said = verdicts(found)  # which look at every radius, whatever is printed
    if options.short:
        found = [r for r in found if r.choice != "ρ" or ":" in r.quantity]
    text = formatted(found, options.format)
    if options.format == "markdown" and said:
        text += "\nDoes it say anything that training loss and error do not?\n\n"
        text += "".join(f"- {name.replace('_', ' ')}: {words}\n" for name, words in said.items())
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
    return 0


def add_plot(commands: Any) -> None:
    """Add ``sharpness plot``."""
    shown = _add_results(
        commands,
        "plot",
        "draw the figures of a sweep",
        "Scatter of the gap against every measure (at its best radius, and at a matched increase of the loss), and "
        "sharpness and tau along the radius.",
    )
    shown.add_argument("--format", choices=["png", "pdf", "svg"], default="png", help="of the figures")
    shown.add_argument("--out", type=place, required=True, help="folder for the figures")
    shown.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> int:
    from ..files import check_folder
    from ..plots import plot_sweep
    from ..rows import read_results

    rows = read_results(options.results)
    check_folder(options.out)
    for path in plot_sweep(rows, options.target, options.out, suffix=options.format):
        print(path)
    return 0
