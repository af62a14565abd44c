"""The commands ``sweep``, ``table`` and ``plot``, for many checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import add_json, as_json, checked_device, examples, place, shard

__all__ = ["add_plot", "add_sweep", "add_table"]

#: Probability that all corrected intervals hold at once.
LEVEL = 0.95


def add_sweep(commands: Any) -> None:
    """Add ``sharpness sweep``."""
    sweep = commands.add_parser(
        "sweep",
        help="measure many checkpoints; an interrupted sweep resumes when it is called again",
        description="Measure many checkpoints under several measures, radii and ablations. A YAML or JSON file says "
        "which; its keys are checkpoints, data, train, test or accuracies, measures, rho, ablations, "
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
        "--out", type=place, required=True, help="folder for the results: results.jsonl, results.csv and a file per job"
    )
    sweep.add_argument("--shard", default="1/1", metavar="I/N", help="measure the I-th of N parts of the checkpoints")
    add_json(sweep)
    sweep.add_argument("--quiet", action="store_true", help="show no progress")
    sweep.set_defaults(run=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    import torch

    from ..distributed import World, torchrun
    from ..files import check_folder
    from ..rows import write_results
    from ..sweep import read_config, read_rows, run_sweep

    part = shard(options.shard)
    check_folder(options.out, create=False)
    sweep = read_config(options.config)
    _refuse_results(options.out, options.config, sweep)
    device = checked_device(sweep.device)
    with torchrun(device if sweep.sharded else torch.device("cpu")) as group:
        leader = group is None or int(os.environ["RANK"]) == 0
        failed = run_sweep(sweep, options.out, shard=part, progress=not options.quiet and leader)
        if not sweep.sharded:  # one exit code, and at one time: torchrun ends all processes when one has failed
            failed = World(group).gather(failed)
    before = _places(options.out / "results.jsonl")
    rows: list[dict[str, Any]] | None = None
    while rows != (
        now := read_rows(options.out, sweep)
    ):  # meanwhile other processes may finish and write the files too
        rows = now
        write_results(options.out / "results.jsonl", rows)
        write_results(options.out / "results.csv", rows)
    gone = before - _places(options.out / "results.jsonl")
    if gone and leader:
        print(
            f"sharpness: {options.out / 'results.jsonl'} has the rows of {options.config} alone now; {len(gone)} rows "
            f"of another configuration are in {options.out / 'jobs'} only; give each configuration a folder of its own",
            file=sys.stderr,
        )
    for job in failed if leader else ():
        what = job.get("measure", job["kind"])
        if isinstance(job.get("rho"), float):  # this radius is too large; the results at other radii are kept
            what = f"{what} at rho = {job['rho']:g}"
        print(f"sharpness: {job['checkpoint']}, {what}: {job['error']}", file=sys.stderr)
    if options.json and leader:
        found = {"rows": len(rows or ()), "results": str(options.out / "results.jsonl"), "failed": failed}
        print(as_json(found), end="")
    elif not options.quiet and leader:
        print(
            f"{len(rows or ())} rows in {options.out / 'results.jsonl'}; show them with: sharpness table {options.out}"
        )
    return 1 if failed else 0


def _places(path: Path) -> set[str]:
    """List what the rows of a file are of: checkpoint, measure and radius."""
    from ..rows import read_results

    try:
        rows = read_results(path) if path.is_file() else []
    except ValueError:  # empty, or broken; it is written anew
        rows = []
    return {str([row.get(k) for k in ("checkpoint", "kind", "measure", "ablation", "rho")]) for row in rows}


def _refuse_results(folder: Path, config: Path, sweep: Any) -> None:
    """Raise for a folder whose results a sweep would replace, though it reads them or no sweep wrote them."""
    from ..files import check_apart
    from ..sweep.digests import places

    data = [path for d in (sweep.data, sweep.train, sweep.test) if d is not None for path in places(d.source)]
    read = [path for c in (*sweep.checkpoints, sweep.initial) if c for path in (*places(c.model), c.weights)]
    table = [] if sweep.accuracies is None else [sweep.accuracies.file]
    files = [path for path in (config, *read, *table, *data) if path is not None and not Path(path).is_dir()]
    for name in ("results.jsonl", "results.csv"):
        check_apart(folder / name, files, [path for path in data if path.is_dir()])
        if (folder / name).exists() and not (folder / "jobs").is_dir():
            raise ValueError(f"{folder / name} is not from a sweep into this folder; choose another --out, or move it")


def _add_results(commands: Any, name: str, words: str, description: str, *shown_as: str) -> argparse.ArgumentParser:
    """Add a command that reads the results of a sweep."""
    shown: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=description, epilog=examples(*shown_as)
    )
    shown.add_argument(
        "results", type=place, metavar="RESULTS", help="the folder of a sweep, or its results.jsonl or results.csv"
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
        "Print Kendall's tau between the target and every measure: at every radius, at the paper's radius, at the best "
        "one and at matched increases of the loss, with bootstrap intervals. A partial tau controls for training loss "
        "and training error; its intervals are corrected for everything that is compared. Norms and other baselines "
        "stand beside the measures. Fewer than ten models are too few to correlate: they are listed one by one.",
        "sharpness table results --short",
        "sharpness table results --per-model --format latex --out models.tex",
    )
    shown.add_argument(
        "--per-model", action="store_true", help="a row for each model: losses, errors, and sharpness ± standard error"
    )
    shown.add_argument("--format", choices=["text", "markdown", "latex", "csv"], default="text", help="of the table")
    add_json(shown)
    shown.add_argument("--short", action="store_true", help="chosen radii only, not every radius of the sweep")
    shown.add_argument(
        "--level",
        type=float,
        default=LEVEL,
        help="probability that all corrected intervals hold at once; raise it if you look at several targets",
    )
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


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read results, and say on the error stream if the folder has finished jobs that are not among them."""
    from ..rows import read_results

    rows = read_results(path)
    jobs = (path if path.is_dir() else path.parent) / "jobs"
    known = {row["job"] for row in rows if "job" in row}  # not in a .csv
    others = [job for job in jobs.glob("*.json") if job.stem not in known] if known else []
    finished = sum(_has_rows(job) for job in others)
    if finished:
        print(
            f"sharpness: {jobs} has further finished jobs ({finished}) than the results: the sweep goes on, was "
            "interrupted, or its configuration, models or data were changed; `sharpness sweep` takes in what belongs "
            "to it",
            file=sys.stderr,
        )
    return rows


def _has_rows(job: Path) -> bool:
    try:
        return "rows" in json.loads(job.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _table(options: argparse.Namespace) -> int:
    from ..files import check_apart, check_file, write_text
    from ..rows import targets
    from ..tables import FEWEST_MODELS, remarks

    if options.out is not None:
        check_file(options.out)
        folder = options.results if options.results.is_dir() else options.results.parent
        files = [folder / "results.jsonl", folder / "results.csv", *({options.results} - {folder})]
        check_apart(options.out, files, [folder / "jobs"])
    if not 0 < options.level < 1:
        raise ValueError(f"--level must lie between 0 and 1, got {options.level}")
    rows = _rows(options.results)
    count = len(targets(rows, options.target))
    listed = options.per_model or count < FEWEST_MODELS
    if listed and (options.given or options.level != LEVEL):
        print("sharpness: --given and --level are for a ranking; here models are listed one by one", file=sys.stderr)
    text = _models(options, rows, count) if listed else _ranking(options, rows)
    if said := [] if options.json else remarks(rows):
        if options.format in ("text", "markdown"):
            text += "\nRemarks on the measurements:\n\n" + "".join(f"- {remark}\n" for remark in said)
        else:
            print(*(f"sharpness: {remark}" for remark in said), sep="\n", file=sys.stderr)
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
    return 0


def _models(options: argparse.Namespace, rows: list[dict[str, Any]], count: int) -> str:
    """Return a row for each model."""
    from ..rows import targets
    from ..tables import FEWEST_MODELS, model_records, per_model, remarks

    if options.json:
        records = model_records(rows, short=options.short)
        by_model = ([row for row in rows if row["checkpoint"] == r["model"]] for r in records)
        return as_json([{**r, "remarks": remarks(own)} for r, own in zip(records, by_model, strict=True)])
    text = per_model(rows, options.format, short=options.short)
    notes = ["Losses and sharpness are in nats; errors and the gap are fractions."]
    measured = [row["per_batch"] for row in rows if row.get("per_batch")]
    if measured and all(len(values) == 1 for values in measured):
        notes.append("Each sharpness is that of one batch: no spread.")
    elif measured:
        notes.append("± is the standard error over the batches.")
    if count < FEWEST_MODELS:
        what = f"{count} model{'s' * (count != 1)} with a {options.target}"
        losses = [] if count else targets(rows, "loss-gap")
        give = "choose --target loss-gap or test-loss" if losses else "give the sweep test data or accuracies"
        why = "" if count else f"; {give}"
        notes.append(f"{what}: too few to correlate. A ranking needs at least {FEWEST_MODELS}{why}.")
    if options.format in ("text", "markdown"):
        return text + "".join(f"\n{v}\n" for v in notes)
    for note in notes if count < FEWEST_MODELS else ():
        print(f"sharpness: {note}", file=sys.stderr)
    return text


def _ranking(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Return a row for each quantity that ranks the models."""
    from ..comparison import CONTROLS, compare
    from ..tables import controls_in_words, formatted, remarks, verdicts

    given = tuple(dict.fromkeys([*CONTROLS, *(name.replace("-", "_") for name in options.given)]))
    found, further = compare(rows, options.target, level=options.level, given=given), given[len(CONTROLS) :]
    said = verdicts(found)  # these look at every radius, whatever is printed
    if options.short:
        found = [r for r in found if r.choice != "ρ" or "," in r.quantity]  # all of ablations
    if options.json:
        return as_json({"rankings": found, "verdicts": said, "given": given, "remarks": remarks(rows)})
    text = formatted(found, options.format, further)
    if options.format in ("text", "markdown") and said:
        text += f"\nDoes it predict anything beyond {controls_in_words(given)}?\n\n"
        text += "".join(f"- {name.replace('_', ' ')}: {words}\n" for name, words in said.items())
    return text


def add_plot(commands: Any) -> None:
    """Add ``sharpness plot``."""
    shown = _add_results(
        commands,
        "plot",
        "draw the figures of a sweep",
        "Draw the target against every measure, at its best radius and at a matched increase of the loss, and "
        "sharpness and Kendall's tau against the radius.",
        "sharpness plot results --out figures",
    )
    shown.add_argument("--format", choices=["png", "pdf", "svg"], default="png", help="of the figures")
    shown.add_argument("--out", type=place, required=True, help="folder for the figures")
    add_json(shown)
    shown.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> int:
    from ..files import check_folder
    from ..plots import plot_sweep

    rows = _rows(options.results)
    check_folder(options.out)
    paths = [str(path) for path in plot_sweep(rows, options.target, options.out, suffix=options.format)]
    print(as_json({"figures": paths}) if options.json else "".join(f"{path}\n" for path in paths), end="")
    return 0
