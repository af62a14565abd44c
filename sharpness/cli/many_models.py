"""The commands ``sweep``, ``table`` and ``plot``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import torch

from ..distributed import World, torchrun
from ..files import check_apart, check_file, check_folder, write_text
from ..study.plan import Sweep, places, read_config
from ..study.ranking import CONTROLS, FEWEST_MODELS, compare, formatted, plot_sweep
from ..study.results import one_radius, read_results, remarks, targets, write_results
from ..study.results import per_model as table_of_models
from ..study.run import read_rows, run_sweep
from . import as_json, checked_device

Target = Literal["gap", "loss-gap", "test-error", "test-loss"]


def sweep(config: Path, *, out: Path, shard: str = "1/1", quiet: bool = False) -> int:
    """Measure many checkpoints; an interrupted sweep resumes when it is called again.

    Measure many checkpoints under several measures, radii and ablations. A YAML or
    JSON file says which; its keys are checkpoints, data, train, test, measures, rho,
    ablations, baselines, initial, steps, relative_tol, device and sharded
    (docs/guides/sweeps.md). A sweep may be interrupted; the same command resumes it
    from the folder OUT. Under torchrun, processes take checkpoints in turn;
    --shard splits them among independent processes that share OUT. The exit
    code is 1 if a checkpoint failed.

    in a shell:
      sharpness sweep sweep.json --out results
      sharpness sweep sweep.json --out results --shard 1/4

    Parameters
    ----------
    config
        YAML or JSON file.
    out
        Folder for the results: results.jsonl, and a file per job.
    shard
        I/N, to measure the I-th of N parts of the checkpoints.
    quiet
        Show no progress.
    """
    first, _, last = shard.partition("/")
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--shard takes i/n, such as 1/4, but {shard!r} does not have this form")
    check_folder(out, create=False)
    plan, results = read_config(config), out / "results.jsonl"
    _check_sweep(results, config, plan)
    results.unlink(missing_ok=True)  # of the sweep before: an interrupted one has none
    device = checked_device(plan.device)
    with torchrun(device if plan.sharded else torch.device("cpu")) as group:
        leader = World(group).rank == 0
        failed = run_sweep(plan, out, shard=(int(first), int(last)), progress=leader and not quiet)
        if not plan.sharded:  # one exit code, and at one time: torchrun ends all processes when one has failed
            failed = World(group).gather(failed)
    rows: list[dict[str, Any]] | None = None
    while rows != (now := read_rows(out, plan)):  # other processes may finish meanwhile and write it too
        rows = now
        write_results(results, rows)
    for job in failed if leader else ():
        what = job.get("measure", job["kind"])
        if isinstance(job.get("rho"), float):  # this radius is too large; the results at other radii are kept
            what = f"{what} at rho = {job['rho']:g}"
        print(f"sharpness: {job['checkpoint']}, {what}: {job['error']}", file=sys.stderr)
    if leader and not quiet:
        print(f"{len(rows or ())} rows in {results}; show them with: sharpness table {out}")
    return 1 if failed else 0


def _check_sweep(results: Path, config: Path, plan: Sweep) -> None:
    """Raise if a sweep would replace results though it reads them or no sweep wrote them."""
    data = [path for d in (plan.data, plan.train, plan.test) if d is not None for path in places(d.source)]
    read = [path for c in plan.checkpoints for path in (*places(c.model), c.weights)]
    files = [path for path in (config, plan.initial, *read, *data) if path is not None and not Path(path).is_dir()]
    check_apart(results, files, [path for path in data if path.is_dir()])
    if results.exists() and not (results.parent / "jobs").is_dir():
        raise ValueError(f"{results} is not from a sweep into this folder; choose another --out, or move it")


def table(
    results: Path,
    *,
    target: Target = "gap",
    per_model: bool = False,
    format: Literal["text", "markdown", "latex", "csv"] = "text",
    json: bool = False,
    short: bool = False,
    given: tuple[str, ...] = (),
    out: Path | None = None,
) -> int:
    """Print how every measure ranks the models of a sweep, or a row for each model.

    Print Kendall's tau between the target and every measure at every radius, with
    bootstrap intervals. A partial tau controls for training loss and training error;
    its intervals hold together. Fewer than ten models are too few to correlate: they
    are listed one by one.

    in a shell:
      sharpness table results --short
      sharpness table results --per-model --format latex --out models.tex

    Parameters
    ----------
    results
        The folder of a sweep, or its results.jsonl or a .csv of it.
    target
        What is to be predicted; the gap is test error minus training error.
    per_model
        A row for each model: losses, errors, and sharpness with its standard error.
    format
        Of the table.
    json
        Print JSON instead of the table.
    short
        One radius for each measure: its default, or the middle.
    given
        Where models are ranked, control for these quantities too, beside training loss and error; for example distance
        (from the initial weights), which sharpness may follow.
    out
        Write the table to this file (default: print it).
    """
    if out is not None:
        check_file(out)
        folder = results if results.is_dir() else results.parent
        check_apart(out, {folder / "results.jsonl", results} - {folder}, [folder / "jobs"])
    rows = read_results(results)
    count, notes = len(targets(rows, target)), []
    if per_model or count < FEWEST_MODELS:
        shown = table_of_models(rows, short=short)
        notes.append("Losses and sharpness are in nats, with the standard error over batches; errors are fractions.")
        if given:
            notes.append("--given is for a ranking; here models are listed one by one.")
        if count < FEWEST_MODELS:
            fix = "" if count else " Give the sweep test data, or choose another --target."
            notes.append(f"{count} models with a {target}: too few to correlate, which needs 10.{fix}")
    else:
        controls = tuple(dict.fromkeys([*CONTROLS, *(name.replace("-", "_") for name in given)]))
        shown = compare(rows, target, given=controls)
        shown = one_radius(shown) if short else shown
        notes.append(f"tau is Kendall's, with the {target}; partial is tau given {', '.join(controls)}.")
    notes += remarks(rows)
    if json:
        text = as_json({"rows": shown.to_dict("records"), "notes": notes})
    else:
        text = formatted(shown, format)
        if format in ("text", "markdown"):
            text += "\n" + "".join(f"- {note}\n" for note in notes)
        else:
            print(*(f"sharpness: {note}" for note in notes), sep="\n", file=sys.stderr)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
    return 0


def plot(results: Path, *, target: Target = "gap", format: Literal["png", "pdf", "svg"] = "png", out: Path) -> int:
    """Draw how every measure ranks the models of a sweep.

    Draw the target against every measure, at its default radius or the middle one,
    with Kendall's tau.

    in a shell:
      sharpness plot results --out figures

    Parameters
    ----------
    results
        The folder of a sweep, or its results.jsonl or a .csv of it.
    target
        What is to be predicted; the gap is test error minus training error.
    format
        Of the figure.
    out
        Folder for the figure.
    """
    rows = read_results(results)
    check_folder(out)
    path = out / f"scatter.{format}"
    plot_sweep(rows, target, path)
    print(path)
    return 0
