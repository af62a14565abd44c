"""The world on disk in which a case runs: models, data, results and adapters."""

import contextlib
import json
import os
import shutil
import sys
import warnings
from unittest import mock

import torch
from torch import nn

from quotient_manifolds import adapters as lora
from quotient_manifolds import symmetries
from sharpness import cli
from tests.support import adapter_variants, docs_world
from tests.support.fuzzing.values import SWEEP

MINE = """import torch
from torch import nn
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
def batches():
    return [(torch.ones(4, 4), torch.arange(4) % 3)]
def norms(model, batches, start):
    return {"norm": sum(float(p.detach().square().sum()) for p in model.parameters())}
"""


def build(base):
    """Make the valid world that every case gets a copy of."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    base.mkdir(parents=True)
    docs_world.small_bert(base / "bert")
    docs_world._vit(base / "vit")
    (base / "mine.py").write_text(MINE, encoding="utf-8")
    texts = docs_world._rows(12)
    for name, mark in (("dev.tsv", "\t"), ("dev.csv", ",")):
        (base / name).write_text(
            "\n".join(mark.join(map(str, r)) for r in [("sentence", "label"), *texts]) + "\n", encoding="utf-8"
        )
    (base / "dev.jsonl").write_text(
        "".join(json.dumps({"sentence": t, "label": k}) + "\n" for t, k in texts), encoding="utf-8"
    )
    docs_world._images(base / "pics", 3)
    write_tensors(base / "xy.pt", {"x": torch.randn(12, 4), "y": torch.arange(12) % 3})
    write_tensors(base / "xy.safetensors", read_tensors(base / "xy.pt"))
    write_tensors(base / "ids.safetensors", {"input_ids": torch.randint(5, 30, (8, 6)), "labels": torch.arange(8) % 2})
    for i in range(4):
        (base / "collection").mkdir(exist_ok=True)
        write_tensors(
            base / "collection" / f"net{i}.pt", nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).state_dict()
        )
    (base / "sweep.json").write_text(json.dumps(SWEEP), encoding="utf-8")
    (base / "folder").mkdir()
    (base / "folder" / "keep.txt").write_text("a user's own", encoding="utf-8")
    (base / "file").write_text("a user's own", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that is deprecated
        build_adapters(base / "lora", base / "bert")
    with within(base):
        assert cli.main(["sweep", "sweep.json", "--out", "done", "--quiet"]) == 0


def build_adapters(place, bert):
    """Make adapters in the names of all tools, and models of which some are."""
    import peft
    import transformers

    place.mkdir()
    for name, known in {"one": "LoRA", "two": "rank_pattern, alpha_pattern", "three": "LoRA", "dora": "DoRA",
                        "experts": "experts (target_parameters)", "saved": "modules_to_save"}.items():  # fmt: skip
        adapter_variants.VARIANTS[known].save(place / name)
    shutil.copytree(place / "one", place / "old")
    weights = read_tensors(file := place / "old" / "adapter_model.safetensors")
    torch.save(weights, file.with_suffix(".bin"))
    file.unlink()
    write_tensors(place / "three" / "adapter_model.safetensors", {k: 1.1 * t for k, t in weights.items()})
    for to in ("kohya", "diffusers"):
        lora.convert(place / "one", place / "new", to=to, model="unet")
        shutil.move(place / "new" / "pytorch_lora_weights.safetensors", place / f"{to}.safetensors")
        shutil.rmtree(place / "new")
    (place / "sharded").mkdir()
    for i, file in enumerate((place / "base.safetensors", place / "tuned.safetensors")):
        weights = {"layer.weight": torch.randn(7, 12), "layer.bias": torch.randn(7), "head.weight": torch.randn(7, 7)}
        write_tensors(file, weights)
        write_tensors(place / "sharded" / f"part{i}.safetensors", dict([*weights.items()][i::2]))
    index = {"weight_map": {name: f"part{i % 2}.safetensors" for i, name in enumerate(weights)}}
    (place / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    model = transformers.BertForSequenceClassification.from_pretrained(bert)
    symmetries.move_(model, symmetries.find(model), seed=0)
    model.save_pretrained(place / "moved")
    config = peft.LoraConfig(r=2, target_modules=["query", "value", "dense"], init_lora_weights=False)
    model = transformers.BertForSequenceClassification.from_pretrained(bert)
    peft.get_peft_model(model, config).save_pretrained(place / "berted", save_embedding_layers=False)


@contextlib.contextmanager
def within(world):
    """Stand in a folder as a fresh process would: what it imports from there is forgotten afterwards."""
    path, here = list(sys.path), os.getcwd()
    os.chdir(world)
    sys.modules.pop("mine", None)  # other tests have a module of that name
    try:
        with mock.patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        os.chdir(here)
        sys.path[:] = path
        sys.modules.pop("mine", None)


def write_tensors(path, tensors):
    from safetensors.torch import save_file

    if path.suffix == ".pt":
        torch.save(dict(tensors), path)
    else:
        save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path, {"format": "pt"})


def read_tensors(path):
    from safetensors.torch import load_file

    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def pick(rng, options):
    options = list(options)
    return options[int(rng.integers(len(options)))]
