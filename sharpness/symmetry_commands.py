"""The commands about the symmetries of one network, or of two: see :mod:`sharpness.commands`."""

from __future__ import annotations

import copy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .commands import at_commits, load_each
from .errors import about, say
from .files import check_apart, check_file, files_of
from .options import DataChoice


def same(one: str, other: str, *, model: str | None = None, out: Path | None = None) -> int:
    """Say whether two models are one function, fine-tunes of one another, or unrelated.

    Say whether two models of one architecture are one function, fine-tunes of one another,
    or unrelated, and print the evidence. Weights that a symmetry changes count as equal.
    The exit code is 1 if the models are not one function.

    in a shell:
      sharpness same path/to/bert path/to/converted
      sharpness same berts/one berts/two --out distances.csv

    Parameters
    ----------
    one, other
        A folder of a model, a name of the Hub, or a file of weights of --model.
    model
        The model of the weights: the name of an open_clip or timm model, or module:function.
    out
        Table (.csv) of the distances by kind of weight, before and after the alignment, relative to all weights.
    """
    if out is not None:
        check_file(out)
        check_apart(out, (one, other))
    names, remarks = at_commits(one, other)
    from .files import write_text
    from .sameness import judge

    two = load_each(names, model)
    with about(f"{one} and {other} cannot be compared"):
        found = judge(*two)
    if out is not None and not found.distances.empty:
        write_text(out, found.distances.to_csv(index_label="kind"))
    say([found.verdict.value], "1")
    print(*found.evidence, sep="\n")
    if out is not None and found.distances.empty:
        remarks.append(f"- there are no distances to write to {out}: the weights could not be aligned")
    say(remarks, "33")
    return 0 if found.verdict.same else 1


def symmetries(
    model: str,
    *,
    data: str | None = None,
    checkpoint: str | None = None,
    verify: bool = False,
    complete: bool = False,
    json: bool = False,
    **chosen: Any,
) -> int:
    """List the symmetries of a model's weights.

    List, layer by layer, which weights of a model can be changed without changing its
    function. The package examines attention of a class that it does not know, on examples
    of --data or else on trial inputs of the model's library.

    in a shell:
      sharpness symmetries path/to/bert --verify
      sharpness symmetries path/to/vit --complete
      sharpness symmetries path/to/vit --json

    Parameters
    ----------
    model
        A folder of transformers, timm or open_clip; owner/name or owner/name@revision on the Hugging Face Hub; the name
        of an open_clip or timm model; or module:function, a function of yours.
    data
        Examples to run the model on, given as for `sharpness run`; by default at most eight of them.
    checkpoint
        Local weights for a named model (.safetensors, or a state dict saved by torch).
    verify
        Move every pair along its symmetry. If outputs change, the exit code is 1.
    complete
        Count every continuous symmetry, by kind.
    json
        Print every continuous symmetry as JSON, for other programs.
    """
    if data is not None:
        from .hub_data import look_up_both

        look_up_both(model, data)
    (model,), remarks = at_commits(model)
    from quotient_manifolds.symmetries import ALL, check_coverage, default_forward, find, to_json
    from quotient_manifolds.symmetries import verify as certify
    from quotient_manifolds.symmetries.discovery import PAIRS

    from .models import load

    loaded = load(model, checkpoint, untrained=True)
    network, batch = loaded.model, loaded.example
    if data is not None:
        batch = DataChoice(**{"source": data, "batch_size": 8, "batches": 1, **chosen}).load(loaded)[0]
    with about(f"{model} cannot be examined; --data gives it other inputs"):
        found = find(network, batch, scope=ALL if complete or json else PAIRS)
        print(to_json(found) if json else found.table() if complete else found)
        say(remarks, "33", sys.stderr)
    if json and verify:
        raise ValueError("--json prints nothing but symmetries; leave out --verify")
    if not verify:
        return 0
    if batch is None:
        raise ValueError("--verify needs inputs, which are known for images and texts only; give --data")
    with about(f"{model} cannot be verified; --data gives it other inputs"):
        check_coverage(network, lambda: default_forward(network, batch), found)
        report = certify(network, batch, found if complete else None)
    print(f"\n{report}")
    return 0 if report.ok else 1


def canonicalize(model: str, *, out: Path, adapter: str | None = None) -> int:
    """Save a model in canonical form: norms folded, layers centred, heads balanced.

    Rewrite a model of transformers so that equivalent weights become equal: norms folded
    into the next layers, biases and embeddings centred, both factors of every head scaled
    alike. Outputs do not change. The order of heads and neurons and the basis of the
    residual stream stay as they are. transformers loads the
    new folder like the old one. LoRA adapters of the old weights do not fit the new ones:
    --adapter carries one, quotient-lora carry any others.

    in a shell:
      sharpness canonicalize path/to/vit --out canonical
      sharpness canonicalize path/to/bert --adapter adapter_a --out canonical

    Parameters
    ----------
    model
        A folder of transformers, or the name of one on the Hub.
    out
        New folder to write.
    adapter
        A LoRA adapter of the model, as PEFT saves it; OUT/adapter is the one that does the same to the new model.
    """
    if out.exists():
        raise ValueError(f"--out {out} exists already; give a new folder")
    from quotient_manifolds.hub import absence, refuse

    refuse([absence(model, "model", "transformers"), absence(adapter or "", "model", "lora")])
    (model,), remarks = at_commits(model)
    import torch

    from quotient_manifolds.adapters import balance
    from quotient_manifolds.adapters.storage import new_folder
    from quotient_manifolds.networks import quiet
    from quotient_manifolds.symmetries import canonicalize_

    from . import models
    from .losses import rounding_error
    from .watching import computed_in

    loaded = models.load(model)
    network: Any = loaded.model
    if loaded.folder is None or loaded.example is None:
        raise ValueError(f"{model}: only models of transformers, for images or texts, can be saved in canonical form")
    with torch.no_grad():
        before = network(**loaded.example)[0].double()
        carried = None if adapter is None else _carried(adapter, network, out)
        folded = canonicalize_(network)
        change = float((network(**loaded.example)[0].double() - before).abs().max() / before.abs().max())
        rounding = max(rounding_error(network), computed_in(lambda: network(**loaded.example)))
    if not folded.wired:
        raise ValueError(f"{type(network).__name__}: {folded.unwired}; describe it with register_wiring")
    # In half precision 10⁴ roundings would be any change at all.
    if not change <= min(0.1, 1e4 * rounding):
        raise ValueError(f"the canonical form of {model} changes the outputs by {change:.1e}; it is not saved")
    out.parent.mkdir(parents=True, exist_ok=True)
    with quiet(), new_folder(out) as folder:
        network.save_pretrained(folder)
        for path in files_of(loaded.folder, (*models.INPUTS, "*.jinja")):
            if not (folder / path.name).exists():
                shutil.copy(path, folder)
        if carried is not None:
            balance(carried, folder / "adapter")
    print(f"{folded.table()}\nlargest relative change of an output {change:.0e}")
    if carried is not None:
        print(f"adapter: {out / 'adapter'}")
    known = ", ".join(str(path.parent) for path in sorted(loaded.folder.glob("*/adapter_config.json")))
    remarks.append(
        f"- LoRA adapters of {model}{f', such as {known},' if known else ''} change other outputs on the new weights: "
        f"carry each by quotient-lora carry ADAPTER --from {model} --to {out} --out NEW"
    )
    say(remarks, "33")
    return 0


def _carried(adapter: str, network: Any, out: Path) -> Any:
    """Return an adapter for the canonical form of a network, in memory."""
    from quotient_manifolds.adapters import carry
    from quotient_manifolds.symmetries import canonicalize_

    canonical = copy.deepcopy(network).double()  # before it is rounded
    canonicalize_(canonical)
    found: Any = carry(adapter, network, canonical)
    return replace(found, place=Path(adapter), config={**found.config, "base_model_name_or_path": str(out)})
