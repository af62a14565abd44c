"""The commands ``sweep``, ``table`` and ``plot``, for many checkpoints."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from . import add_json, as_json, checked_device, examples, place, shard

__all__ = ["add_plot", "add_sweep", "add_table"]


def add_sweep(commands: Any) -> None:
    """Add ``sharpness sweep``."""
    sweep = commands.add_parser(
        "sweep",
        help="measure many checkpoints; an interrupted sweep resumes when it is called again",
        description="Measure many checkpoints under several measures, radii and ablations. A YAML or JSON file says "
        "which; its keys are checkpoints, data, train, test, measures, rho, ablations, "
        "baselines, initial, steps, relative_tol, device and sharded (docs/guides/sweeps.md). A sweep may be "
        "interrupted; the same command resumes it from the folder OUT. Under torchrun, processes draw "
        "checkpoints from a common counter; --shard splits them among independent processes that share OUT. "
        "The exit code is 1 if a checkpoint failed.",
        epilog=examples(
            "sharpness sweep sweep.json --out results", "sharpness sweep sweep.json --out results --shard 1/4"
        ),
    )
    sweep.add_argument("config", type=place, metavar="CONFIG", help="YAML or JSON file")
    sweep.add_argument(
        "--out", type=place, required=True, help="folder for the results: results.jsonl, and a file per job"
    )
    sweep.add_argument("--shard", default="1/1", metavar="I/N", help="measure the I-th of N parts of the checkpoints")
    add_json(sweep)
    sweep.add_argument("--quiet", action="store_true", help="show no progress")
    sweep.set_defaults(run=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    import torch

    from ..distributed import World, torchrun
    from ..files import check_folder
    from ..study.plan import read_config
    from ..study.results import write_results
    from ..study.run import read_rows, run_sweep

    part, results = shard(options.shard), options.out / "results.jsonl"
    check_folder(options.out, create=False)
    sweep = read_config(options.config)
    _refuse_results(results, options.config, sweep)
    results.unlink(missing_ok=True)  # of the sweep before: an interrupted one has none
    device = checked_device(sweep.device)
    with torchrun(device if sweep.sharded else torch.device("cpu")) as group:
        leader = group is None or int(os.environ["RANK"]) == 0
        failed = run_sweep(sweep, options.out, shard=part, progress=not options.quiet and leader)
        if not sweep.sharded:  # one exit code, and at one time: torchrun ends all processes when one has failed
            failed = World(group).gather(failed)
    rows: list[dict[str, Any]] | None = None
    while rows != (now := read_rows(options.out, sweep)):  # other processes may finish meanwhile and write it too
        rows = now
        write_results(results, rows)
    if not leader:
        return 1 if failed else 0
    for job in failed:
        what = job.get("measure", job["kind"])
        if isinstance(job.get("rho"), float):  # this radius is too large; the results at other radii are kept
            what = f"{what} at rho = {job['rho']:g}"
        print(f"sharpness: {job['checkpoint']}, {what}: {job['error']}", file=sys.stderr)
    if options.json:
        print(as_json({"rows": len(rows or ()), "results": str(results), "failed": failed}), end="")
    elif not options.quiet:
        print(f"{len(rows or ())} rows in {results}; show them with: sharpness table {options.out}")
    return 1 if failed else 0


def _refuse_results(results: Path, config: Path, sweep: Any) -> None:
    """Raise if a sweep would replace results though it reads them or no sweep wrote them."""
    from ..files import check_apart
    from ..study.plan import places

    data = [path for d in (sweep.data, sweep.train, sweep.test) if d is not None for path in places(d.source)]
    read = [path for c in sweep.checkpoints for path in (*places(c.model), c.weights)]
    files = [path for path in (config, *read, sweep.initial, *data) if path is not None and not Path(path).is_dir()]
    check_apart(results, files, [path for path in data if path.is_dir()])
    if results.exists() and not (results.parent / "jobs").is_dir():
        raise ValueError(f"{results} is not from a sweep into this folder; choose another --out, or move it")


def _add_results(commands: Any, name: str, words: str, description: str, *shown_as: str) -> argparse.ArgumentParser:
    """Add a command that reads the results of a sweep."""
    shown: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=description, epilog=examples(*shown_as)
    )
    shown.add_argument(
        "results", type=place, metavar="RESULTS", help="the folder of a sweep, or its results.jsonl or a .csv of it"
    )
    shown.add_argument(
        "--target",
        choices=["gap", "loss-gap", "test-error", "test-loss"],
        default="gap",
        help="what is to be predicted; the gap is test error minus training error",
    )
    return shown


def add_table(commands: Any) -> None:
    """Add ``sharpness table``."""
    shown = _add_results(
        commands,
        "table",
        "print how every measure ranks the models of a sweep, or a row for each model",
        "Print Kendall's tau between the target and every measure at every radius, with bootstrap intervals. A partial "
        "tau controls for training loss and training error; its intervals hold together. Fewer than ten models are too "
        "few to correlate: they are listed one by one.",
        "sharpness table results --short",
        "sharpness table results --per-model --format latex --out models.tex",
    )
    shown.add_argument(
        "--per-model",
        action="store_true",
        help="a row for each model: losses, errors, and sharpness with its standard error",
    )
    shown.add_argument("--format", choices=["text", "markdown", "latex", "csv"], default="text", help="of the table")
    add_json(shown)
    shown.add_argument("--short", action="store_true", help="one radius for each measure: its default, or the middle")
    shown.add_argument(
        "--given",
        action="append",
        default=[],
        metavar="NAME",
        help="where models are ranked, control for this quantity too, beside training loss and error; for example "
        "distance (from the initial weights), which sharpness may follow; may be repeated",
    )
    shown.add_argument("--out", type=place, help="write the table to this file (default: print it)")
    shown.set_defaults(run=_table)


def _table(options: argparse.Namespace) -> int:
    from ..files import check_apart, check_file, write_text
    from ..study.ranking import CONTROLS, FEWEST_MODELS, compare, formatted
    from ..study.results import one_radius, per_model, read_results, remarks, targets

    if options.out is not None:
        check_file(options.out)
        folder = options.results if options.results.is_dir() else options.results.parent
        check_apart(options.out, {folder / "results.jsonl", options.results} - {folder}, [folder / "jobs"])
    rows = read_results(options.results)
    count, notes = len(targets(rows, options.target)), []
    if options.per_model or count < FEWEST_MODELS:
        table = per_model(rows, short=options.short)
        notes.append("Losses and sharpness are in nats, with the standard error over batches; errors are fractions.")
        if options.given:
            notes.append("--given is for a ranking; here models are listed one by one.")
        if count < FEWEST_MODELS:
            fix = "" if count else " Give the sweep test data, or choose another --target."
            notes.append(f"{count} models with a {options.target}: too few to correlate, which needs 10.{fix}")
    else:
        given = tuple(dict.fromkeys([*CONTROLS, *(name.replace("-", "_") for name in options.given)]))
        table = compare(rows, options.target, given=given)
        table = one_radius(table) if options.short else table
        notes.append(f"tau is Kendall's, with the {options.target}; partial is tau given {', '.join(given)}.")
    notes += remarks(rows)
    text = "" if options.json else formatted(table, options.format)
    if options.json:
        text = as_json({"rows": table.to_dict("records"), "notes": notes})
    elif options.format in ("text", "markdown"):
        text += "\n" + "".join(f"- {note}\n" for note in notes)
    else:
        print(*(f"sharpness: {note}" for note in notes), sep="\n", file=sys.stderr)
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
        "Draw the target against every measure, at its default radius or the middle one, and sharpness and Kendall's "
        "tau against the radius.",
        "sharpness plot results --out figures",
    )
    shown.add_argument("--format", choices=["png", "pdf", "svg"], default="png", help="of the figures")
    shown.add_argument("--out", type=place, required=True, help="folder for the figures")
    shown.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> int:
    from ..files import check_folder
    from ..study.ranking import plot_sweep
    from ..study.results import read_results

    rows = read_results(options.results)
    check_folder(options.out)
    print(*plot_sweep(rows, options.target, options.out, suffix=options.format), sep="\n")
    return 0
