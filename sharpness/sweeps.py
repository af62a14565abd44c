"""The commands for many models: each is a function, see :mod:`sharpness.commands`."""

from __future__ import annotations

import glob
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from .errors import aligned, blocks, painted, say
from .files import check_apart
from .options import DataChoice

Target = Literal["gap", "loss-gap", "test-error", "test-loss"]


def sweep(
    checkpoints: tuple[str, ...],
    *,
    out: Path,
    dry_run: bool = False,
    shard: str = "1/1",
    quiet: bool = False,
    **chosen: Any,
) -> int:
    """Measure many checkpoints; an interrupted sweep resumes when it is called again.

    Measure many checkpoints under several measures and radii: folders of models, or
    files of weights. A JSON file may take the place of the options (docs/howto/scale.md).
    All models and data are checked before the first measurement. If a sweep is
    interrupted, the same command resumes it from the folder OUT. The exit code is 1 if a
    checkpoint failed.

    in a shell:
      sharpness sweep berts/one berts/two --data dev.tsv --text sentence --measure adaptive --out results
      sharpness sweep sweep.json --out results --shard 1/4

    Parameters
    ----------
    checkpoints
        Folders of models, names of the Hub, files of weights, or patterns of them; or one JSON file.
    out
        Folder for the results: results.jsonl, failed.jsonl, and a file per job.
    dry_run
        Check everything, and say how many searches there are and how long they take.
    shard
        I/N: measure only the I-th of N parts of the checkpoints. All parts have the same OUT.
    quiet
        Show no progress.
    """
    from . import study
    from .study.plan import places
    from .study.rows import write_results

    config, results = checkpoints[0] if checkpoints[0].endswith(".json") else None, out / "results.jsonl"
    if config and (len(checkpoints) > 1 or chosen):
        raise ValueError(f"{config} says what is measured; leave out {', '.join([*chosen, *checkpoints[1:]])}")
    plan = study.read_config(config) if config else plan_of(checkpoints, **chosen)
    check_apart(results, [*checkpoints, plan.initial], [path for d in plan.sources() for path in places(d.source)])
    if results.exists() and not (out / "jobs").is_dir():
        raise ValueError(f"{results} is not from a sweep into this folder; choose another --out, or move it")
    failed = study.run_sweep(plan, out, shard=shard, progress=not quiet, dry_run=dry_run)
    if not dry_run:
        write_results(results, rows := study.read_rows(out, plan))
        write_results(out / "failed.jsonl", study.read_rows(out, plan, failed=True))
        if not quiet:
            print(f"{len(rows)} rows in {results}; show them with: sharpness table {out}")
    return 1 if failed else 0


def plan_of(
    paths: tuple[str, ...],
    *,
    data: str | None = None,
    test: str | None = None,
    measure: tuple[str, ...] = ("geodesic-inv",),
    rho: tuple[float, ...] | None = None,
    model: str | None = None,
    micro_batch: int | None = None,
    device: str = "cpu",
    **chosen: Any,
) -> Any:
    """Return the plan of a sweep over folders, or over files of weights.

    Parameters
    ----------
    paths
        Folders of models, names of the Hub, files of weights, or patterns of them.
    data
        Data for the measures, and for training loss and error, as for `sharpness run`.
    test
        Test data of the same kind, all of it, for the generalisation gap.
    measure
        One or several measures, as for `sharpness run`.
    rho
        Radii of all measures, by default each one's own.
    model
        The model of files of weights: the name of an open_clip or timm model, or module:function.
    micro_batch
        Pass so many examples at a time, to save memory.
    device
        cpu or cuda.
    """
    from .study.plan import planned

    if data is None:
        raise ValueError("give the data with --data, or a configuration that ends in .json in place of the checkpoints")
    own = {k: chosen.pop(k) for k in [*chosen] if k in DataChoice.__dataclass_fields__}
    patterns = (glob.escape(path) if Path(path).exists() else path for path in paths)
    whole = {**own, "source": test, "num_examples": None, "batches": None, "subset_seed": None}
    return planned(
        {
            "checkpoints": [{"path": pattern, "model": model} for pattern in patterns],
            "data": {**own, "source": data},
            "test": whole if test else None,
            "measures": measure,
            "rho": rho or {},
            "micro_batch": micro_batch,
            "device": device,
            **chosen,
        }
    )


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

    Print how well every measure, at every radius, ranks the models by the target:
    Kendall's tau, and tau given training loss and training error (partial), with 95 %
    intervals. The intervals of the partial tau are corrected for all rows. Fewer than ten
    models are listed one by one instead. In a terminal, blocks show sizes, and the largest
    correlations (of listed models, the smallest numbers) are bold.

    in a shell:
      sharpness table results --short
      sharpness table results --per-model --format latex

    Parameters
    ----------
    results
        The folder of a sweep, or its results.jsonl.
    target
        The quantity to predict. The gap is test error minus training error.
    per_model
        A row for each model: losses, errors, and sharpness with its standard error.
    format
        text, latex or csv. With latex and csv, notes go to standard error.
    short
        One radius for each measure: its default, or the middle.
    given
        Further controls of the partial tau, beside training loss and error; for example distance, which is that from
        the initial weights.
    """
    from . import study
    from .study.tables import CONTROLS, FEWEST_MODELS, one_radius

    say(failed := [f"failed: {said}" for said in study.read_failures(results)], "33", sys.stderr)
    rows = study.read_results(results)
    count, notes = len(study.targets(rows, target)), []
    if per_model or count < FEWEST_MODELS:
        shown = study.per_model(rows, short=short)
        errors = any("standard error" in name for name in shown)
        over = ", with the standard error over batches" * errors
        notes.append(f"Losses and sharpness are in nats{over}; errors are fractions.")
        if count < FEWEST_MODELS:
            fix = "" if count or failed else " Give the sweep test data, or choose another --target."
            notes.append(f"{count} models with a {target}: too few to correlate, which needs {FEWEST_MODELS}.{fix}")
    else:
        controls = tuple(dict.fromkeys([*CONTROLS, *given]))
        shown = study.compare(rows, target, given=controls)
        shown = one_radius(shown) if short else shown
        notes.append(f"tau is Kendall's, with the {target}; partial is tau given {', '.join(controls)}.")
    if format == "text" and any(name.endswith(", unconverged") for name in shown):
        notes.append("* did not converge: a lower bound")
    if format == "csv":
        print(shown.to_csv(index=False), end="")
    elif format == "latex":
        print(shown.to_latex(index=False, escape=True, na_rep="", float_format="{:.4g}".format), end="")
    else:
        print(_fitting(shown), end="\n\n")
    say((f"- {note}" for note in [*notes, *study.remarks(rows)]), "2", sys.stdout if format == "text" else sys.stderr)
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
        The quantity to predict. The gap is test error minus training error.
    out
        Figure: a .png, .pdf or .svg.
    """
    from . import study

    rows = study.read_results(results)
    study.plot_sweep(rows, target, out)
    print(out)
    say((f"- {remark}" for remark in study.remarks(rows)), "2")
    return 0


def _fitting(frame: Any) -> str:
    """Write a table for a terminal: with errors and intervals beside their numbers, and turned or cut if too wide.

    A terminal is also shown the size of every number by a block. Bold are the largest correlations, or what is smallest
    of all models.
    """
    shown = frame.apply(lambda column: column.map(lambda v: v if isinstance(v, str) else "" if v != v else f"{v:.3g}"))
    for name in frame.columns:
        if (error := f"{name}, standard error") in shown:
            shown.pop(error)
            shown[name] += frame[error].map(lambda v: "" if v != v else f" ± {v:.2g}")
        if (unconverged := f"{name}, unconverged") in shown:
            shown.pop(unconverged)
            shown[name] += frame[unconverged].map(lambda v: " *" if v > 0 else "")
    for name, low, high in (("tau", "low", "high"), ("partial", "partial_low", "partial_high")):
        if low in shown:
            shown[name] += (" [" + shown.pop(low) + ", " + shown.pop(high) + "]").where(frame[low].notna(), "")
    ranked = "tau" in shown
    size = frame[["tau", "partial"]].abs() if ranked else frame[shown.columns[1:]]
    bold = (size == (size.max() if ranked else size.min())) & (size.max() > size.min())
    for name in size if sys.stdout.isatty() and len(size) > 1 else ():
        shown[name] += [f" {block}" for block in blocks(size[name])]
    for name in bold:
        shown.loc[bold[name], name] = shown.loc[bold[name], name].map(lambda cell: painted(cell, "1", sys.stdout))
    width = shutil.get_terminal_size((10**4, 24)).columns  # a file takes any
    rows = [list(shown.columns), *shown.to_numpy().tolist()]
    plain, turned = aligned(rows, width), aligned(zip(*rows, strict=True), width)
    return turned if "\n\n" in plain and "\n\n" not in turned else plain
