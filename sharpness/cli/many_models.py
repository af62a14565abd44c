"""The commands ``sweep``, ``table`` and ``plot``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from ..files import check_apart
from ..study.plan import places, read_config
from ..study.ranking import CONTROLS, FEWEST_MODELS, compare, plot_sweep
from ..study.results import one_radius, read_results, remarks, targets, write_results
from ..study.results import per_model as table_of_models
from ..study.run import read_rows, run_sweep

Target = Literal["gap", "loss-gap", "test-error", "test-loss"]


def sweep(config: Path, *, out: Path, shard: str = "1/1", quiet: bool = False) -> int:
    """Measure many checkpoints; an interrupted sweep resumes when it is called again.

    Measure many checkpoints under several measures, radii and ablations. A JSON file
    says which; its keys are checkpoints, data, train, test, measures, rho, ablations,
    baselines, initial, steps, relative_tol and device (docs/guides/sweeps.md). A sweep
    may be interrupted; the same command resumes it from the folder OUT. --shard splits
    the checkpoints among processes that share OUT. The exit code is 1 if a checkpoint
    failed.

    in a shell:
      sharpness sweep sweep.json --out results
      sharpness sweep sweep.json --out results --shard 1/4

    Parameters
    ----------
    config
        JSON file.
    out
        Folder for the results: results.jsonl, and a file per job.
    shard
        I/N, to measure the I-th of N parts of the checkpoints.
    quiet
        Show no progress.
    """
    plan, results = read_config(config), out / "results.jsonl"
    data = [path for d in (plan.data, plan.train, plan.test) if d is not None for path in places(d.source)]
    check_apart(results, [config, plan.initial, *data], [path for path in data if path.is_dir()])
    if results.exists() and not (out / "jobs").is_dir():
        raise ValueError(f"{results} is not from a sweep into this folder; choose another --out, or move it")
    failed = run_sweep(plan, out, shard=shard, progress=not quiet)
    rows = read_rows(out, plan)
    write_results(results, rows)
    for job in failed:
        at = f" at rho = {job['rho']:g}" if isinstance(job.get("rho"), float) else ""  # the others' results are kept
        print(f"sharpness: {job['checkpoint']}, {job.get('measure', job['kind'])}{at}: {job['error']}", file=sys.stderr)
    if not quiet:
        print(f"{len(rows)} rows in {results}; show them with: sharpness table {out}")
    return 1 if failed else 0


def table(
    results: Path,
    *,
    target: Target = "gap",
    per_model: bool = False,
    format: Literal["text", "latex", "csv"] = "text",
    short: bool = False,
    given: tuple[str, ...] = (),
) -> int:
    """Print how every measure ranks the models of a sweep, or a row for each model.

    Print Kendall's tau between the target and every measure at every radius, with
    bootstrap intervals. A partial tau controls for training loss and training error;
    its intervals hold together. Fewer than ten models are too few to correlate: they
    are listed one by one. Notes go to standard error if the format is not text.

    in a shell:
      sharpness table results --short
      sharpness table results --per-model --format latex

    Parameters
    ----------
    results
        The folder of a sweep, or its results.jsonl.
    target
        What is to be predicted; the gap is test error minus training error.
    per_model
        A row for each model: losses, errors, and sharpness with its standard error.
    format
        Of the table.
    short
        One radius for each measure: its default, or the middle.
    given
        Where models are ranked, control for these quantities too, beside training loss and error; for example distance
        (from the initial weights), which sharpness may follow.
    """
    rows = read_results(results)
    count, notes = len(targets(rows, target)), []
    if per_model or count < FEWEST_MODELS:
        shown = table_of_models(rows, short=short)
        notes.append("Losses and sharpness are in nats, with the standard error over batches; errors are fractions.")
        if count < FEWEST_MODELS:
            fix = "" if count else " Give the sweep test data, or choose another --target."
            notes.append(f"{count} models with a {target}: too few to correlate, which needs 10.{fix}")
    else:
        controls = tuple(dict.fromkeys([*CONTROLS, *given]))
        shown = compare(rows, target, given=controls)
        shown = one_radius(shown) if short else shown
        notes.append(f"tau is Kendall's, with the {target}; partial is tau given {', '.join(controls)}.")
    if format == "csv":
        print(shown.to_csv(index=False), end="")
    elif format == "latex":
        print(shown.to_latex(index=False, escape=True, na_rep="", float_format="{:.4g}".format), end="")
    else:
        print(shown.to_string(index=False, na_rep="", float_format="{:.4g}".format), end="\n\n")
    notes += remarks(rows)
    print(*(f"- {note}" for note in notes), sep="\n", file=sys.stdout if format == "text" else sys.stderr)
    return 0


def plot(results: Path, *, target: Target = "gap", out: Path) -> int:
    """Draw how every measure ranks the models of a sweep.

    Draw the target against every measure, at its default radius or the middle one,
    with Kendall's tau.

    in a shell:
      sharpness plot results --out scatter.png

    Parameters
    ----------
    results
        The folder of a sweep, or its results.jsonl.
    target
        What is to be predicted; the gap is test error minus training error.
    out
        Figure: a .png, .pdf or .svg.
    """
    plot_sweep(read_results(results), target, out)
    print(out)
    return 0
