"""The command ``sharpness spectrum``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from .errors import about, require_extra, say
from .files import check_apart, check_file, write_json
from .options import DataChoice


def spectrum(
    model: str,
    data: str,
    *,
    matrix: Literal["hessian", "ggn", "fisher"] = "hessian",
    measure: str = "geodesic-inv",
    k: int = 10,
    out: Path | None = None,
    plot: Path | None = None,
    checkpoint: str | None = None,
    micro_batch: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    quiet: bool = False,
    command: str = "",
    **chosen: Any,
) -> int:
    """Compute the largest eigenvalues of a curvature matrix, modulo symmetries.

    Compute the largest eigenvalues of the Hessian, the Gauss-Newton matrix or the empirical
    Fisher matrix of the mean loss over all data, in the coordinates of a measure's metric.

    in a shell:
      sharpness spectrum path/to/bert dev.tsv --text sentence --label label --num-examples 512
      sharpness spectrum path/to/bert dev.tsv --text sentence --num-examples 32 --matrix ggn --plot spectrum.png

    Parameters
    ----------
    model
        A folder of transformers, the name of an open_clip or timm model, or module:function, a function of yours.
    data
        Data as for `sharpness run`.
    matrix
        The Hessian; or of a cross-entropy or squared error the Gauss-Newton matrix or the empirical Fisher matrix.
    measure
        geodesic-inv, geodesic-mix, complete-inv, complete-mix, adaptive; or euclidean: the ordinary matrix.
    k
        Number of eigenvalues.
    out
        JSON file for the result, command, versions and digests.
    plot
        Picture of the spectral density and the eigenvalues, from 96 further products.
    checkpoint
        Local weights for a named model (.safetensors, or a state dict saved by torch).
    micro_batch
        Pass so many examples at a time, to save memory.
    device
        cpu or cuda.
    seed
        Seed of the random vectors.
    quiet
        Show no progress.
    """
    from .hub_data import check_source, look_up_both, pinned_data

    look_up_both(model, data)
    from . import devices, losses, models
    from .measures import get_measure
    from .plots import plot_spectrum
    from .spectra import spectrum
    from .study.plan import as_data, of_model, places
    from .study.run import versions

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("sharpness spectrum runs in one process; start it without torchrun")
    choice = DataChoice(data, **chosen)
    get_measure(measure)
    losses.Objective(micro_batch=micro_batch)
    for path in filter(None, (out, plot)):
        check_file(path)
        check_apart(path, [*places(model), checkpoint], places(data))
    if plot is not None:
        with require_extra("a picture needs matplotlib", "plot"):
            import matplotlib  # noqa: F401
    check_source(data)  # before gigabytes are fetched or loaded
    choice, model = replace(choice, source=pinned_data(data)), models.pinned(model, checkpoint)
    loaded, where = models.load(model, checkpoint), devices.checked_device(device)
    network, batches = devices.move(loaded.model, where), choice.load(loaded, where)
    remarks = [*loaded.remarks, *batches.remarks]
    say((f"- {remark}" for remark in remarks), "33")
    how: dict[str, Any] = {"matrix": matrix, "measure": measure, "k": k, "seed": seed, "micro_batch": micro_batch}
    with about(f"{model} on {data}"):
        found = spectrum(network, batches, **how, density=plot is not None, progress=not quiet)
    if out is not None:  # before it is printed, which may fail
        of = {"name": model, "checkpoint": checkpoint, "digest": of_model(model, checkpoint)}
        facts = {"command": command, "versions": versions(), "settings": how, "remarks": remarks}
        write_json(out, {**facts, "data": as_data(choice), "model": of, "result": found.to_dict()})
    print(found)
    if plot is not None:
        plot_spectrum(found, plot)
        print(f"picture: {plot}")
    return 0
