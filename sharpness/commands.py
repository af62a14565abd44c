"""The commands: each is a function, whose parameters are its options and whose docstring is its help."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch

from quotient_manifolds.symmetries import check_coverage, default_forward, find_symmetric_pairs
from quotient_manifolds.symmetries import verify as verify_pairs
from quotient_manifolds.symmetries.whole import canonical_form, canonicalize_, verify_whole

from . import models, plots, study
from .ascent import Search
from .data import DataChoice
from .distributed import World, torchrun
from .errors import naming, require_extra
from .files import check_apart, check_file, check_folder, write_json
from .measures import LOCAL, checked_radii, measure_of
from .results import SharpnessResult
from .study.plan import as_data, of_model, places
from .study.run import measured, versions, write_results
from .study.tables import CONTROLS, FEWEST_MODELS, one_radius

Target = Literal["gap", "loss-gap", "test-error", "test-loss"]


def demo(*, seed: int = 0, out: Path = Path("sharpness-demo.png"), quiet: bool = False) -> int:
    """Train a small vision transformer on scanned digits and measure its sharpness.

    Train a small vision transformer on scikit-learn's scanned digits, measure its
    sharpness by four measures, and measure ten other networks that compute the same
    function, each moved along one kind of symmetry. Prints a table, and saves a
    picture with the numbers beside it. Takes less than two minutes.

    in a shell:
      sharpness demo --out sharpness-demo.png

    Parameters
    ----------
    seed
        Seed of the split of the data, the training and the moves.
    out
        Picture; the numbers go beside it.
    quiet
        Show no progress.
    """
    from .demo import run

    run(seed=seed, out=out, progress=not quiet)
    return 0


def symmetries(
    model: str,
    *,
    data: str | None = None,
    checkpoint: str | None = None,
    verify: bool = False,
    complete: bool = False,
    **chosen: Any,
) -> int:
    """List the symmetries of a model's attention and LoRA weights.

    List, layer by layer, which weights of a model can be changed without changing its
    function. An attention class that the package does not know is examined: on
    examples of --data, or else on inputs that its library has for a trial.

    in a shell:
      sharpness symmetries path/to/bert --verify
      sharpness symmetries path/to/vit --complete

    Parameters
    ----------
    model
        A folder of transformers, the name of an open_clip or timm model, or module:function, a function of yours.
    data
        Examples to run the model on, given as for `sharpness run`; by default at most eight of them.
    checkpoint
        Local weights for a named model (.safetensors, or a state dict saved by torch).
    verify
        Act on every pair; exit code 1 if outputs change.
    complete
        Count every continuous symmetry, by kind.
    """
    loaded = models.load(model, checkpoint)
    network, batch = loaded.model, loaded.example
    if data is not None:
        batch = DataChoice(**{"source": data, "batch_size": 8, "batches": 1, **chosen}).load(loaded)[0]
    with naming(f"{model} cannot be examined; --data gives it other inputs"):
        pairs = find_symmetric_pairs(network, batch=batch)
        print(canonical_form(network, pairs=pairs) if complete else pairs)
    if not verify:
        return 0
    if batch is None:
        raise ValueError("--verify needs inputs, which are known for images and texts only; give --data")
    with naming(f"{model} cannot be verified; --data gives it other inputs"):
        check_coverage(network, lambda: default_forward(network, batch), pairs)
        report: Any = (verify_whole if complete else verify_pairs)(network, batch)
    print(f"\n{report}")
    return 0 if report.ok else 1


def canonicalize(model: str, *, out: Path) -> int:
    """Save a model in canonical form: norms folded, layers centred.

    Save a model of transformers in canonical form. Its function stays the same, and
    all weights that differ only by a continuous symmetry outside the heads have the
    same canonical form. transformers loads the new folder like the old one.

    in a shell:
      sharpness canonicalize path/to/vit --out canonical

    Parameters
    ----------
    model
        A folder of transformers.
    out
        New folder to write.
    """
    loaded = models.load(model)
    network: Any = loaded.model
    if loaded.folder is None or loaded.example is None:
        raise ValueError(f"{model}: only models of transformers, for images or texts, can be saved in canonical form")
    if out.exists():
        raise ValueError(f"--out {out} exists already; give a new folder")
    with torch.no_grad():
        before = network(**loaded.example)[0].float()
        form = canonicalize_(network)
        change = float((network(**loaded.example)[0].float() - before).abs().max() / before.abs().max())
    if not form.wired:
        raise ValueError(f"the wiring of {type(network).__name__} is not known; describe it with register_wiring")
    # In half precision 10⁴ roundings would be any change at all.
    if not change <= min(0.1, 1e4 * max(torch.finfo(p.dtype).eps for p in network.parameters())):
        raise ValueError(f"the canonical form of {model} changes the outputs by {change:.1e}; it is not saved")
    print(f"{form}\nlargest relative change of an output {change:.0e}")
    with models.quiet():
        network.save_pretrained(out)
    for path in models.files_of(loaded.folder, (*models.INPUTS, "*.jinja")):
        if not (out / path.name).exists():
            shutil.copy(path, out)
    return 0


def run(
    model: str,
    data: str,
    *,
    checkpoint: str | None = None,
    measure: tuple[str, ...] = ("geodesic-inv",),
    rho: tuple[float, ...] | None = None,
    micro_batch: int | None = None,
    normalize_logits: bool = False,
    device: str = "cpu",
    out: Path | None = None,
    figures: Path | None = None,
    quiet: bool = False,
    command: str = "",
    **chosen: Any,
) -> int:
    """Measure the sharpness of a model on data.

    Measure by how much the loss of a model on data can rise within a ball around its weights. Under torchrun
    (torchrun --nproc-per-node N -m sharpness run ...) the work is spread over the processes, with the same result.

    in a shell:
      sharpness run path/to/bert dev.tsv --text sentence --label label --num-examples 512 --out result.json
      sharpness run path/to/vit images/train --num-examples 512 --measure geodesic-inv adaptive
      sharpness run mine:model mine:batches --measure adaptive --rho 0.2 0.5

    Parameters
    ----------
    model
        A folder of transformers, the name of an open_clip or timm model, or module:function, a function of yours.
    data
        Images: a folder of class folders; text: a .tsv, .csv, .jsonl or .parquet table; a folder saved by datasets
        (FOLDER/SPLIT); a .safetensors or .pt file with tensors x and y, or with inputs and labels of transformers; or
        module:function, a function of yours that returns batches.
    checkpoint
        Local weights for a named model (.safetensors, or a state dict saved by torch).
    measure
        One or several of geodesic-inv, geodesic-mix, complete-inv, complete-mix, adaptive, euclidean, gradient-norm,
        riemannian-hessian, euclidean-hessian.
    rho
        Radii of the ball, by default the measure's own (0.05 to 0.5); gradient norms and Hessians have none.
    micro_batch
        Pass so many examples at a time, to save memory.
    normalize_logits
        Divide every example's logits by their standard deviation over the classes.
    device
        cpu or cuda.
    out
        JSON file for results, command, versions and digests.
    figures
        Folder for figures of the worst direction and of the pairs.
    quiet
        Show no progress.
    """
    search = Search(**{f.name: chosen.pop(f.name) for f in fields(Search) if f.name in chosen})
    choice = DataChoice(data, **chosen)
    passes: dict[str, Any] = {"micro_batch": micro_batch, "normalize_logits": normalize_logits}
    settings = {**asdict(search), **passes, "ablation": {}, "rho": rho, "keep_directions": figures is not None}
    for name in measure:
        checked_radii(measure_of(name), rho)
    _check_targets(model, data, checkpoint, out, figures)
    with torchrun(where := models.checked_device(device)) as group:
        leader = World(group).rank == 0
        loaded = models.load(model, checkpoint)
        if checkpoint is None and loaded.folder is None and ":" not in model:
            raise ValueError(f"{model} names an architecture without weights; give them with --checkpoint")
        network, batches = loaded.model.to(where), choice.load(loaded, where)
        remarks = [*loaded.remarks, *batches.remarks]
        written: dict[str, Any] = {"remarks": remarks, "results": []}
        print(*(f"{remark}\n" for remark in remarks if leader), sep="", end="", flush=True)
        if leader and out is not None:
            written |= {"command": command, "versions": versions(), "data": as_data(choice)}
            written["model"] = {"name": model, "checkpoint": checkpoint, "digest": of_model(model, checkpoint)}
        for name in measure:
            with naming(f"{model} on {data}"):
                result = measured(name, network, batches, group=group, progress=leader and not quiet, **settings)
            written["results"].append({"quantity": name, **result.to_dict()})
            if leader:
                print(result, end="\n\n", flush=True)
                if out is not None:
                    write_json(out, written)
                if figures is not None and name not in LOCAL:
                    _draw(figures, network, batches, result, passes)
    return 0


def _check_targets(model: str, data: str, checkpoint: str | None, out: Path | None, figures: Path | None) -> None:
    """Check that results can be written, and that they replace nothing that is read."""
    if figures is not None:
        check_apart(figures, (), places(data))
        with require_extra("figures need matplotlib", "plot"):
            import matplotlib  # noqa: F401
        check_folder(figures)
    if out is not None:
        check_file(out)
        check_apart(out, [*places(model), checkpoint], places(data))


def _draw(figures: Path, model: Any, batches: Any, result: SharpnessResult, passes: dict[str, Any]) -> None:
    try:
        for path in plots.plot_model(model, batches[0], result, figures, **passes):
            print(f"drawn: {path}", file=sys.stderr)
    except (KeyError, ValueError) as error:  # the measurement is still valid
        print(f"sharpness: no figures of {result.measure.name}: {error}", file=sys.stderr)


def sweep(config: Path, *, out: Path, shard: str = "1/1", quiet: bool = False) -> int:
    """Measure many checkpoints; an interrupted sweep resumes when it is called again.

    Measure many checkpoints under several measures, radii and ablations. A JSON file
    says which; its keys are checkpoints, data, train, test, measures, rho, ablations,
    baselines, initial, steps, relative_tol and device (docs/howto/scale.md). A sweep
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
    plan, results = study.read_config(config), out / "results.jsonl"
    data = [path for d in (plan.data, plan.train, plan.test) if d is not None for path in places(d.source)]
    check_apart(results, [config, plan.initial], data)
    if results.exists() and not (out / "jobs").is_dir():
        raise ValueError(f"{results} is not from a sweep into this folder; choose another --out, or move it")
    failed = study.run_sweep(plan, out, shard=shard, progress=not quiet)
    rows = study.read_rows(out, plan)
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
    rows = study.read_results(results)
    count, notes = len(study.targets(rows, target)), []
    if per_model or count < FEWEST_MODELS:
        shown = study.per_model(rows, short=short)
        notes.append("Losses and sharpness are in nats, with the standard error over batches; errors are fractions.")
        if count < FEWEST_MODELS:
            fix = "" if count else " Give the sweep test data, or choose another --target."
            notes.append(f"{count} models with a {target}: too few to correlate, which needs 10.{fix}")
    else:
        controls = tuple(dict.fromkeys([*CONTROLS, *given]))
        shown = study.compare(rows, target, given=controls)
        shown = one_radius(shown) if short else shown
        notes.append(f"tau is Kendall's, with the {target}; partial is tau given {', '.join(controls)}.")
    if format == "csv":
        print(shown.to_csv(index=False), end="")
    elif format == "latex":
        print(shown.to_latex(index=False, escape=True, na_rep="", float_format="{:.4g}".format), end="")
    else:
        print(shown.to_string(index=False, na_rep="", float_format="{:.4g}".format), end="\n\n")
    notes += study.remarks(rows)
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
    study.plot_sweep(study.read_results(results), target, out)
    print(out)
    return 0
