"""Seeded cases of what a user can get wrong: a small world on disk, a few mutations, one command or call.

``python -m tests.support.fuzzing [CASES [SURFACE [NUMBER]]]`` runs cases and counts what failed.
"""

import argparse
import collections
import contextlib
import copy
import gc
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

import quotient_manifolds as qm
import sharpness
from quotient_manifolds import adapters as lora
from quotient_manifolds import lora_command, optim, symmetries, testing
from quotient_manifolds.errors import is_mendable
from reproduction import cli as laboratory
from sharpness import checkpoints, cli, data, measures, models, plots, study
from sharpness.files import read_table
from tests.support import adapter_variants, docs_world, networks

PACKAGES = {"quotient_manifolds", "sharpness"}
# fmt: off
LIMIT = 60.0
#: Wrong in most places; nothing that asks for work without end.
ODD = [None, True, False, -1, 0, 1, 2.5, math.inf, math.nan, -1e300, "", "x", "1", [], {}, [[]], [None], {"a": 1}]
ODD_PYTHON = [*ODD, 1j, b"x", object(), np.float64(0.5), np.arange(2), torch.tensor(math.nan), torch.ones(2), len, ()]
INT = ["-1", "0", "x", "1e3", "2.5", "", "1"]
FLOAT = ["nan", "inf", "-1", "0", "x", "", "1e300", "1e-300", "1e-40"]
PLACES = ["", ".", "nope", "bert", "vit", "file", "folder", "nope:model", "mine:nope", "mine:", ":", "mine:batches",
          "a b",
          "a\nb", "nul\0byte", "näh", "x" * 300, "missing/deep/out", "file/out", "/proc/none/out", "..", "../beside",
          "done", "bert/model.safetensors", "bert/config.json", "pics/cat/0.png", "done/results.jsonl",
          "collection/net0.pt", "dev.tsv", "pics:x", "/proc/self/mem", "label", "0", "-1"]
WORDS = {"device": ["cuda", "nope", "meta", "", "cpu:9"], "shard": ["0/0", "2/1", "x", "1/0", "-1/2", "/", "1/2"],
         "label_map": ["junk", "a=1", "a=x", "=", "0=0,0=1", "0=0,1=1", "0=5,1=-1"],
         "measure": ["junk", "", *measures.MEASURES]}
#: Small enough to be quick; a command that stands here twice comes twice as often.
COMMANDS = [line.split() for line in (7 * """
run bert dev.tsv --text sentence --measure adaptive --rho 0.1 --steps 2 --batch-size 8 --quiet
run vit pics --measure gradient-norm --quiet --out out.json
""" + 2 * """
sweep sweep.json --quiet --out out
spectrum bert dev.tsv --text sentence --num-examples 8 --measure adaptive --k 1 --quiet --out out.json
run bert dev.tsv --text sentence --measure gradient-norm --quiet --out bert/model.safetensors
symmetries bert
compare bert bert
same bert vit --out same.csv
same bert bert --out same.csv
same collection/net0.pt collection/net0.pt --model mine:model --out same.csv
sweep collection/net0.pt collection/net1.pt --model mine:model --data xy.pt --steps 2 --quiet --out out
table done
demo --quiet --out missing/out.png
finetune bert dev.tsv --text sentence --models 1 --epochs 1 --batch 8 --points 4 --num-examples 8 --out out
""" + """
plot done --out out.png
toy --quiet --out out
diagonal --n 4 --d 6 --models 3 --seeds 1 --rho 0.1 --workers 1 --quiet --out out
""").split("\n") if line]
#: Of quotient-lora, in the folder lora of the world.
ADAPTERS = [line.split() for line in """\
merge one two --weights 0.7 0.3 --rank 3 --out out
merge one two --method ties --out out
merge one two --method dare --space knots --out out
merge one three --method mix --out out
merge kohya.safetensors diffusers.safetensors --out out
merge old one --weights 2 -1 --out out
merge dora dora --out out
resize one --rank 2 --out out
resize diffusers.safetensors --energy 0.9 --out out
resize experts --rank 5 --out out
balance dora --out out
balance old --out out
balance experts --out out
balance saved --out out
carry berted --from ../bert --to moved --out out
convert one --to kohya --model unet --out out
convert dora --to diffusers --model unet --one-rank --out out
convert kohya.safetensors --to peft --base base.safetensors --out out
convert diffusers.safetensors --to diffsynth --out out
extract base.safetensors tuned.safetensors --rank 2 --out out
extract ../bert moved --energy 0.9 --modules-to-save classifier --out out
extract sharded tuned.safetensors --rank 2 --target-modules layer --out out
compare one two --json
compare dora experts
compare saved old
compare kohya.safetensors diffusers.safetensors
""".splitlines()]
#: Of adapter_config.json.
LORA_CONFIG = {"r": [0, -1, 2.0, "4", None, 10**30, True, [4]],
               "lora_alpha": [0, -2, math.nan, math.inf, "x", 1e300, None],
               "rank_pattern": [{"layer": 2}, {"layer": 0}, {"": 4}, {"(": 1}, {"layer": "x"}, [], {"head": 2.5}],
               "alpha_pattern": [{"layer": 2}, {"layer": None}, {"head": math.nan}, {"[": 1}, 3],
               "peft_type": ["LOHA", "", None, 3, "lora", ["LORA"]], "use_rslora": [True, "x", 1],
               "use_dora": [True], "lora_bias": [True, "x"],
               "bias": ["all", "lora_only", "x", 3, None], "fan_in_fan_out": [True, 3],
               "target_modules": [["layer"], "layer", "(", "*", [], None, [3], {"layer": 1}, "layer|head", [None]],
               "target_parameters": [["layer.up"], ["layer"], [3], "x", [""], [None]],
               "modules_to_save": [["head"], "head", [3], [[]], {}, [None]],
               "trainable_token_indices": [[1], {"x": [1]}, 3, {}, {"layer": "x"}],
               "layers_to_transform": [[0], 3], "init_lora_weights": ["pissa", True, 3, "eva"],
               "base_model_name_or_path": [None, 3, "näh", "\ud800", ["x"]], "revision": [3, "main"],
               "peft_version": [None, 3, "", "0.19.0", "9" * 5000, "x", "0.18.0.dev0"],
               "layer_replication": [[[0, 1]]], "alora_invocation_tokens": [[1]], "exclude_modules": ["(", ["head"]]}
SWEEP = {"checkpoints": [{"path": "collection/*.pt", "model": "mine:model"}],
         "data": {"source": "xy.pt", "batch_size": 4, "subset_seed": 3},
         "test": {"source": "xy.safetensors"}, "measures": ["adaptive", "gradient-norm"],
         "rho": {"adaptive": [0.1, 0.3]},
         "baselines": "mine:norms",
         "initial": "collection/net0.pt",
         "steps": 2, "relative_tol": 1e-3, "ascent": "power", "restarts": 0, "seed": 0, "micro_batch": 4,
         "device": "cpu"}
#: Of config.json; sizes may become 10¹³, which is refused at once, but the number of layers not.
CONFIG = {"architectures": [["BertModel"], ["ViTModel"], ["Nope"], [], ["PreTrainedModel"], "BertModel", [3],
                            ["pipeline"]],
          "num_hidden_layers": [0, 2, 40, -1], "num_labels": [0, 1, 3, -1], "dtype": ["float16", "int8", "x"],
          "model_type": ["vit", "bert", "gpt2", "nope", 3], "id2label": [{}, {"0": "a"}, {"x": "y"}, None],
          "label2id": [{"a": "b"}, {}, {"a": -1}, None, [1]], "auto_map": [{"AutoConfig": "mine.Config"}],
          "quantization_config": [{"bits": 4}], "problem_type": ["regression", "multi_label_classification", "x"]}
SIZES = ["hidden_size", "vocab_size", "intermediate_size", "max_position_embeddings", "image_size", "patch_size",
         "num_channels", "num_attention_heads", "type_vocab_size", "height", "width"]
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
KINDS = {"int": INT, "count": INT, "seed": INT, "float": FLOAT}
LABORATORY = ("finetune", "toy", "diagonal")
# fmt: on


def main_of(argv):
    """Give the command line that a command belongs to."""
    return (laboratory if argv[:1] and argv[0] in LABORATORY else cli).main


class HangError(BaseException):
    """The watchdog's: no handler of the package's catches it."""


@dataclass
class Job:
    """A command or a call; ``outs`` may be written, ``names`` are the arguments that were spoilt."""

    what: object
    argv: list | None = None
    call: object = None
    outs: tuple = ()
    names: tuple = ()
    allowed: tuple = ()
    main: object = None


@dataclass(frozen=True)
class Failure:
    surface: str
    number: int
    kind: str
    place: str
    words: str
    what: str

    def __str__(self):
        return f"{self.surface} {self.number}: {self.kind} at {self.place}: {self.words}\n    {self.what[:300]}"


# -- the world ---------------------------------------------------------------------------------------------------------


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


# -- mutations ---------------------------------------------------------------------------------------------------------


def spoil_bytes(rng, path):
    """Damage any file."""
    raw = path.read_bytes()
    at, noise = int(rng.integers(max(1, min(len(raw), pick(rng, [20, len(raw) + 1]))))), rng.bytes(9)
    ways = {
        "cut": raw[:at], "empty": b"", "flip": raw[:at] + noise[:1] + raw[at + 1 :], "noise": rng.bytes(200),
        "insert": raw[:at] + noise + raw[at:], "bom": b"\xef\xbb\xbf" + raw, "nul": raw[:at] + b"\0" + raw[at:],
        "twice": raw + raw, "latin": raw[:at] + b"\xe9" + raw[at:], "gone": None, "folder": None,
    }  # fmt: skip
    how = pick(rng, ways)
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes(ways[how])
    return f"{path.name}: {how} at byte {at}"


def spoil_tree(rng, tree, odd=ODD):
    """Change one entry, at any depth, of what JSON holds."""
    spots = [(tree, k) for k in (tree if isinstance(tree, dict) else range(len(tree)))]
    for box, key in spots:  # grows meanwhile
        inner = box[key]
        spots += (
            [(inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))]
            if isinstance(inner, (dict, list))
            else []
        )
    if not spots:
        return "nothing left"
    box, key = pick(rng, spots)
    old, how = box[key], pick(rng, ["drop", "odd", "odd", "odd", "near", "near", "wrap", "rename"])
    new = pick(rng, odd)
    if how == "near" and isinstance(old, (int, float)) and not isinstance(old, bool):
        new = pick(rng, [old + 1, old - 1, -old, 2 * old, float(old), *([10**13] if key in SIZES else [])])
    elif how == "wrap":
        new = pick(rng, [[old], {"a": old}, [old, old], str(old)])
    if how == "drop":
        del box[key]
    elif how == "rename" and isinstance(box, dict):
        box[pick(rng, ["unknown", str(key) + "s", ""])] = box.pop(key)
    else:
        box[key] = new
    return f"{key}: {how if how in ('drop', 'rename') else repr(new)[:60]}"


def spoil_json(rng, path):
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if rng.random() < 0.2:
            return spoil_bytes(rng, path)
        if path.name == "config.json" and rng.random() < 0.35:
            key = pick(rng, CONFIG)
            tree[key] = pick(rng, CONFIG[key])
            what = f"{key}: {tree[key]}"
        else:
            what = spoil_tree(rng, tree)
        path.write_text(json.dumps(tree if rng.random() < 0.95 else pick(rng, ODD)), encoding="utf-8")
        return f"{path.name}: {what}"
    except (OSError, ValueError, TypeError):
        return f"{path.name}: broken already"


def spoil_adapter(rng, path):
    """Change the config of an adapter, one of its tensors, or what the header of a file says."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    if path.suffix == ".json":
        if rng.random() < 0.3 or not path.is_file():
            return spoil_json(rng, path)
        try:
            tree, key = json.loads(path.read_text(encoding="utf-8")), pick(rng, LORA_CONFIG)
            tree[key] = pick(rng, LORA_CONFIG[key])
        except (ValueError, TypeError):
            return f"{path.name}: broken already"
        path.write_text(json.dumps(tree), encoding="utf-8")
        return f"{path.parent.name}/{path.name}: {key}: {tree[key]!r:.60}"
    if not path.is_file():
        return f"{path.name}: gone already"
    if path.suffix == ".bin" or rng.random() < 0.2:
        return spoil_bytes(rng, path)
    try:
        with safe_open(path, "pt") as file:
            metadata, found = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception:
        return f"{path.name}: broken already"
    said = spoil_tensors(rng, path)
    if rng.random() < 0.5 and "lora_adapter_metadata" in metadata:
        tree = json.loads(metadata["lora_adapter_metadata"])
        said = f"{path.name}: {spoil_tree(rng, tree)}"
        metadata["lora_adapter_metadata"] = pick(rng, [*[json.dumps(tree)] * 4, "", "x", "[]", "null"])
        save_file(found, path, metadata)
    elif rng.random() < 0.8:  # those that spoil_tensors leaves out
        save_file({key: t.clone() for key, t in read_tensors(path).items()}, path, metadata)
    return f"{path.parent.name}/{said}"


def spoil_tensors(rng, path):
    """Change what a file of tensors holds."""
    try:
        found = read_tensors(path)
        name = pick(rng, sorted(found))
    except Exception:
        return f"{path.name}: broken already"
    t = found.pop(name)
    t = t.long() if t.dtype == torch.bool else t
    ways = {
        "drop": None, "rename": t, "turn": t.mT if t.dim() > 1 else t[None], "flat": t.flatten(),
            "nan": t.float() * math.nan,
        "inf": t.float() + math.inf, "half": t.half(), "long": t.long(), "bool": t.bool(),
            "complex": t.to(torch.complex64),
        "short": t[:-1], "none": t[:0], "number": t.flatten()[:1].sum(), "deep": t[..., None], "zero": 0 * t,
            "far": t + 99,
        "minus": t - 100, "double": t.double(), "other": torch.rand_like(t.float()),
    } if t.dim() else {"drop": None}  # fmt: skip
    how = pick(rng, ways)
    if how != "drop":
        other = pick(rng, [name + "_", "module." + name, "z", name.replace("0", "7"), name.split(".", 1)[-1]])
        found[other if how == "rename" else name] = ways[how]
    write_tensors(path, found)
    return f"{path.name}: {name} {how}"


def spoil_table(rng, path):
    """Change a table of text, line by line."""
    if not path.is_file():
        return f"{path.name}: gone already"
    mark = {".tsv": "\t", ".csv": ","}.get(path.suffix, ": ")
    lines = path.read_bytes().decode("utf-8", "replace").splitlines() or [""]
    at = int(rng.integers(len(lines)))
    label = pick(rng, ["7", "-1", "", "x", "1.0", "nan", "0 ", '"', "1e3", "null", "[]", "9" * 30, "١"])
    head, (line, *rest) = lines[:at], lines[at:]
    first, last = line.split(mark)[0], mark.join([*line.split(mark)[:-1], label])
    ways = {
        "column": [v.rpartition(mark)[0] for v in lines], "header": lines[:1], "none": [],
            "short": [*head, first, *rest],
        "mark": [v.replace(mark, pick(rng, ["; ", "|", " ", mark * 2])) for v in lines], "label": [*head, last, *rest],
        "ragged": [*head, line + mark + "more", *rest], "blank": [*head, "", line, *rest],
            "double": [v + mark + v for v in lines],
        "huge": [*head, "word " * 40000 + line, *rest], "quote": [*head, '"' + line, *rest],
        "labels": [lines[0], *(mark.join([*v.split(mark)[:-1], label]) for v in lines[1:])],
        "junk": [*head, pick(rng, ["[1]", "null", "{", "{}", "3", "\\"]), *rest],
    }  # fmt: skip
    how = pick(rng, ways)
    path.write_text(pick(rng, ["\n", "\n", "\r\n", "\r"]).join(ways[how]) + "\n", newline="", encoding="utf-8")
    return f"{path.name}: {how} in line {at}, {label!r}"


def spoil_images(rng, path):
    """Change a folder of class folders."""
    from PIL import Image

    how, found = (
        pick(rng, ["bytes", "mode", "extra", "class", "one", "none", "nest", "note"]),
        sorted(path.rglob("*.png")),
    )
    image = pick(rng, [p for p in found if p.is_file()] or [path / "none.png"])
    if how == "bytes" and image.is_file():
        return spoil_bytes(rng, image)
    if how == "mode":
        mode, size = pick(rng, ["L", "RGBA", "P", "1", "I", "I;16", "F", "CMYK", "LA"]), pick(rng, [(8, 8), (1, 900)])
        Image.new(mode, size).save(image, "tiff")
    elif how in ("extra", "class"):
        (path / "extra").mkdir(exist_ok=True)
        shutil.copy(image, path / ("extra" if how == "class" else "")) if image.is_file() else None
    elif how in ("one", "none"):
        for inner in sorted(path.iterdir())[how == "one" :]:
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    elif how == "nest":
        shutil.copytree(path, path.parent / "inner")
        shutil.move(path.parent / "inner", path / "inner")
    else:
        (image.parent / pick(rng, ["notes.txt", ".hidden", "notes.png"])).write_text("a note", encoding="utf-8")
    return f"{path.name}: {how} {image.name}"


# -- surfaces: what is spoilt, and the command or call that meets it ---------------------------------------------------


def folders(rng, world):
    kind, what = pick(rng, ["bert", "bert", "vit"]), []
    other = {"bert": ["tokenizer.json", "tokenizer_config.json"], "vit": ["preprocessor_config.json"]}[kind]
    for _ in range(int(rng.integers(1, 4))):
        path = (
            world / kind / pick(rng, ["config.json", "model.safetensors", "config.json", "model.safetensors", *other])
        )
        if path.suffix == ".json":
            what.append(spoil_json(rng, path))
        elif rng.random() < 0.15:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            shutil.copy(world / {"bert": "vit", "vit": "bert"}[kind] / path.name, path)
            what.append("the other model's weights")
        elif path.is_file():
            what.append(pick(rng, [spoil_tensors, spoil_tensors, spoil_tensors, spoil_bytes])(rng, path))
    if rng.random() < 0.2:
        return Job(what, ["symmetries", kind, *pick(rng, [[], ["--verify"], ["--key-bias", "drop"]])])
    source = pick(rng, [["dev.tsv", "--text", "sentence"], ["ids.safetensors"]]) if kind == "bert" else ["pics"]
    how = pick(rng, [["adaptive", "--rho", "0.1"], ["geodesic-inv", "--rho", "0.1"], ["gradient-norm"]])
    return Job(
        what,
        ["run", kind, *source, "--measure", *how, "--steps", "2", "--quiet", "--out", "out.json"],
        outs=["out.json"],
    )


def datasets(rng, world):
    kind, more = pick(rng, ["table", "table", "images", "images", "tensors", "tensors", "checkpoint"]), []
    model, source, spoilers = "mine:model", "xy.pt", [spoil_tensors, spoil_tensors, spoil_bytes]
    if kind == "table":
        model, source, spoilers = (
            "bert",
            pick(rng, ["dev.tsv", "dev.csv", "dev.jsonl"]),
            [*[spoil_table] * 4, spoil_bytes],
        )
        more = ["--text", "sentence", *pick(rng, [[], [], ["--no-header"], ["--label", "1", "--text", "0",
                                                                            "--no-header"],
                ["--label-map", "0=0,1=1"], ["--pair", "sentence"], ["--label", "nope"],
                ["--max-length", "4"]])]  # fmt: skip
    elif kind == "images":
        model, source, spoilers = "vit", "pics", [spoil_images]
    elif kind == "tensors":
        source = pick(rng, ["xy.pt", "xy.safetensors", "ids.safetensors"])
        model = "bert" if source.startswith("ids") else model
    else:
        more = ["--checkpoint", "collection/net1.pt"]
    path = world / ("collection/net1.pt" if kind == "checkpoint" else source)
    what = [
        pick(rng, spoilers)(rng, path) for _ in range(int(rng.integers(1, 3))) if path.is_file() or kind == "images"
    ]
    if rng.random() < 0.2 and kind in ("tensors", "table"):
        read = read_table if kind == "table" else load_batches
        return Job(what, call=lambda: read(source))
    how = pick(rng, [["adaptive", "--rho", "0.1"], ["gradient-norm"]])
    return Job(what, ["run", model, source, *more, "--measure", *how, "--steps", "2", "--quiet"])


def sweeps(rng, world):
    tree, what = copy.deepcopy(SWEEP), []
    if rng.random() < 0.3:
        tree["train"] = tree.pop("test")
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.5:
            key = pick(rng, tree)
            tree[key] = pick(rng, ODD)
            what.append(f"{key}: {tree[key]!r}")
        else:
            what.append(spoil_tree(rng, tree))
    name = "new.json"
    (world / name).write_text(json.dumps(tree), encoding="utf-8")
    what += [spoil_bytes(rng, world / name)] if rng.random() < 0.1 else []
    if rng.random() < 0.3:
        return Job(what, call=lambda: study.read_config(name))
    return Job(what, ["sweep", name, "--out", "out", "--quiet"], outs=["out"])


def results(rng, world):
    path, what = world / "done" / "results.jsonl", []
    for _ in range(int(rng.integers(1, 4))):
        if not path.is_file() or rng.random() < 0.15:
            what += [spoil_bytes(rng, path)] if path.is_file() else []
            continue
        try:
            found = [json.loads(v) for v in path.read_text(encoding="utf-8").splitlines()]
            some = [r for r in found if rng.random() < 0.3] if rng.random() < 0.5 else found
            key, how, odd = (
                pick(rng, sorted({k for r in some for k in r})),
                pick(rng, ["drop", "odd", "odd", "same", "twice", "few"]),
                pick(rng, ODD),
            )
        except (ValueError, TypeError):
            what.append(spoil_table(rng, path))
            continue
        for row in (r for r in some if key in r):
            row.update({key: odd} if how == "odd" else {key: found[0].get(key, 0.5)} if how == "same" else {})
            row.pop(key if how == "drop" else None, None)
        found = [*found, *some] if how == "twice" else found[:3] if how == "few" else found
        path.write_text("".join(json.dumps(r) + "\n" for r in found), encoding="utf-8")
        what.append(f"{key} {how} {odd!r} in {len(some)} rows")
    target, command = pick(rng, study.TARGETS), pick(rng, ["table"] * 8 + ["plot", "call", "sweep"])
    if command == "call":
        return Job(what, call=lambda: study.compare(study.read_results(path), target))
    if command == "sweep":  # goes on from jobs that are spoilt
        what = [spoil_json(rng, pick(rng, sorted((world / "done/jobs").iterdir()))) for _ in range(2)]
        return Job(what, ["sweep", "sweep.json", "--out", "done", "--quiet"], outs=["done"])
    more = (
        ["--out", "out.png"]
        if command == "plot"
        else pick(rng, [[], ["--short"], ["--format", "latex"], ["--format", "csv"]])
    )
    places = ["done/results.jsonl", "done"]
    return Job(what, [command, pick(rng, places), "--target", target, *more], outs=["out.png"])


def commands(rng, world):
    argv = list(pick(rng, COMMANDS))
    command = (laboratory if argv[0] in LABORATORY else cli).parser()
    spoil_options(rng, argv, command)
    if rng.random() < 0.06:
        argv.insert(
            int(rng.integers(len(argv) + 1)), pick(rng, ["--nope", "extra", "--", "-h", "", "--quiet", "--out"])
        )
    outs = [b for a, b in itertools.pairwise(argv) if a in ("--out", "--report")]
    return Job("", argv, outs=[*outs, *(o.replace(".png", ".json") for o in outs if argv[0] == "demo")])


def spoil_options(rng, argv, command):
    """Change an argument or two of a command line."""
    while subs := [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]:
        command = subs[0].choices[argv[command.prog.count(" ")]]
    depth = command.prog.count(" ")
    places = [a for a in command._actions if not a.option_strings]
    usual = [a for a in command._actions if a.dest != "help" for _ in range(3 if a.dest in ("out", "report") else 1)]
    for action in (pick(rng, usual) for _ in range(int(rng.integers(1, 3)))):
        pool = WORDS.get(action.dest) or action.choices or KINDS.get(getattr(action.type, "__name__", ""), PLACES)
        pool = (
            ["9" * 30, *pool]
            if "seed" in action.dest
            else FLOAT[:6]
            if action.dest.startswith("alpha")
            else [*pool, "junk"]
        )
        values = (
            []
            if action.nargs == 0
            else [pick(rng, pool) for _ in range(1 + (action.nargs == "+" and rng.random() < 0.5))]
        )
        if action in places:
            argv[depth + places.index(action)] = values[0]
            continue
        option = action.option_strings[0]
        if option in argv:
            at = argv.index(option)
            del argv[at : at + 1 + (action.nargs != 0)]
        argv += [option, *values]


def adapters(rng, world):
    """Meet quotient-lora with spoilt files, or spoilt arguments."""
    argv, what = list(pick(rng, ADAPTERS)), []
    argv = [f"lora/{v}" if (world / "lora" / v).exists() else v for v in argv]
    if rng.random() < 0.3:
        spoil_options(rng, argv, lora_command._parser())
    places = [world / v for v in argv if v.startswith("lora/") and (world / v).exists()]
    for _ in range(int(rng.integers(0 if argv[-2:] != ["--out", "out"] else 1, 4)) if places else 0):
        place = pick(rng, places)
        read = [p for p in place.rglob("*.*") if p.suffix in (".json", ".safetensors", ".bin") and p.is_file()]
        what.append(spoil_adapter(rng, pick(rng, sorted(read) if place.is_dir() and read else [place])))
    outs = [b for a, b in itertools.pairwise(argv) if a == "--out"]
    return Job(what, argv, outs=outs, main=lora_command.main)


def in_memory(rng, world):
    """Meet the functions of adapters with spoilt arguments, which they must not change."""
    import peft

    options = {"r": 2, "target_modules": ["layer", "head"], "init_lora_weights": False}
    model = peft.get_peft_model(adapter_variants.two(), peft.LoraConfig(**options))
    model.add_adapter("two", peft.LoraConfig(**{**options, "r": 3, "use_rslora": True}))
    one, two = (lora.Adapter.from_model(model, name) for name in ("default", "two"))
    base, ema = adapter_variants.two(), lora.QuotientEMA(model)
    ema.update()
    state, config = {key: t.clone() for key, t in one.state.items()}, dict(one.config)
    # fmt: off
    targets = [(lora.merge, {"adapters": [one, two], "out": None, "weights": [0.5, 0.5], "rank": 2, "energy": 1.0,
                             "method": "sum", "space": "core", "density": 0.5, "seed": 0})] * 4 + [
        (lora.Adapter.from_state, {"state": state, "config": config, "name": "x"})] * 4 + [
        (lora.resize, {"adapter": one, "out": None, "rank": 2, "energy": 0.9}),
        (lora.balance, {"adapter": one, "out": "out"}), (lora.compare, {"one": one, "other": two}),
        (lora.carry, {"adapter": one, "base": base, "other": copy.deepcopy(base), "out": None}),
        (lora.convert, {"adapter": one, "out": "out", "to": "kohya", "base": None, "model": "unet", "one_rank": False}),
        (lora.extract, {"base": "lora/base.safetensors", "tuned": "lora/tuned.safetensors", "out": "out", "rank": 2,
                        "energy": None, "target_modules": ["layer"], "modules_to_save": []}),
        (lora.Adapter.from_model, {"model": model, "name": "two"}), (one.add_to, {"model": model, "name": "new"}),
        (lora.QuotientEMA, {"model": model, "decay": 0.9, "rank": 2, "symmetries": None}),
        (ema.load_state_dict, {"state": ema.state_dict()}),
    ]
    special = {
        "adapters": [[], [one], [one, "lora/one"], ["lora/one", "lora/kohya.safetensors"], one, "lora/one", [one] * 3],
        "weights": [[1.0], [1, -1], [0, 0], [math.nan, 1], (1e308, 1e308), torch.ones(2), [1e-320, 0], ["a", "b"]],
        "method": ["ties", "dare", "inv", "mix", "SUM"], "space": ["knots"], "rank": [10**30, 2**70, np.int64(2), 1000],
        "seed": [2**70, -(2**70), np.int64(3)], "to": ["peft", "diffusers", "diffsynth"],
        "adapter": [two, "lora/one", Path("lora/dora"), "lora/kohya.safetensors", b"lora/one", model, state],
        "base": [nn.Linear(2, 2), model, base.half(), adapter_variants.linear(), "bert", "lora/base.safetensors"],
        "model": [nn.Linear(2, 2), base, "text_encoder", "x.y", "a b", adapter_variants.two().to("meta")],
        "name": ["default", "two", "new.one", ""], "symmetries": [symmetries.Symmetries(), symmetries.find(tiny())],
        "target_modules": [["nope"], ["head", "layer"], "layer", [""]], "modules_to_save": [["head"], "head", [""]],
    }
    # fmt: on
    special |= {"one": special["adapter"], "other": [*special["adapter"], *special["base"]]}
    function, given = pick(rng, targets)
    name = pick(rng, given)
    pool = special.get(name) or (PLACES if isinstance(given[name], str) else ODD_PYTHON)
    odd = pick(rng, pool if rng.random() < 0.6 else [*ODD_PYTHON, *(PLACES if name == "out" else [])])
    if name == "state":
        odd = copy.deepcopy(given[name]) if rng.random() < 0.8 else odd
        key = pick(rng, odd) if isinstance(odd, dict) and odd else None
        if torch.is_tensor(odd.get(key) if isinstance(odd, dict) else None) and rng.random() < 0.8:
            odd[pick(rng, [key, key, key + "x", 3])] = odd_tensor(rng, odd[key])
        elif isinstance(odd, dict):
            spoil_tree(rng, odd, ODD_PYTHON)
    elif name == "config" and rng.random() < 0.8:
        key = pick(rng, LORA_CONFIG)
        odd = {**config, key: pick(rng, [*LORA_CONFIG[key], *ODD_PYTHON])}
    given = {**given, name: odd}
    if rng.random() < 0.15:  # weights that no training gives
        pick(rng, [p for p in model.parameters() if p.requires_grad]).data.fill_(
            pick(rng, [0.0, math.nan, math.inf, 1e-45, 3e38])
        )
    words = f"{name}={odd!r:.150}" if not isinstance(odd, dict) else f"{name}: {shortened(given[name])}"

    def call():
        held = [model, base, *(v for v in given.values() if isinstance(v, nn.Module))]
        before = [copy.deepcopy(m.state_dict()) for m in held]
        said = copy.deepcopy((config, one.config, two.config))
        found = function(**given)
        if isinstance(found, lora.Adapter) and function == lora.Adapter.from_state:
            found = lora.merge([found])
        if isinstance(found, lora.Adapter) and function != lora.Adapter.from_model:
            keys = [key for parts in found.layers.values() for key in parts.values()]
            bad = [key for key in [*keys, *found.others] if not bool(found.tensor(key).isfinite().all())]
            assert not bad, f"{bad[0]} has NaN"
            json.dumps(dict(found.lost), allow_nan=False)
        elif isinstance(found, dict):
            json.dumps(found, allow_nan=False)
        mean = found if isinstance(found, lora.QuotientEMA) else ema if function == ema.load_state_dict else None
        if mean is not None:
            mean.update()
            mean.values()
            assert all(math.isfinite(v) for v in mean.lost().values()), "lost is NaN"
        if function != one.add_to:
            assert all(
                torch.equal(t.nan_to_num(7), m.state_dict()[key].nan_to_num(7))
                for m, old in zip(held, before, strict=True)
                for key, t in old.items()
                if not t.is_meta
            ), "the model's weights changed"
        assert repr(said) == repr((config, one.config, two.config)), "a config changed"

    outs = [v for v in [given.get("out")] if isinstance(v, str)]
    return Job([getattr(function, "__name__", function), words], call=call, outs=outs, names=[name])


def shortened(tree):
    """Show what a dict holds, without the numbers of tensors."""
    return {k: f"{v.dtype} {tuple(v.shape)}" if torch.is_tensor(v) else repr(v)[:40] for k, v in tree.items()}


def odd_tensor(rng, t):
    # fmt: off
    if t.dim() < 2 or not t.numel():
        return t
    return pick(rng, [t, t[..., :-1, :], t[..., :1], t.mT, t[0], t[0, 0], t * math.nan, 0 * t, t.half(), t.long(),
                      t.double(), t.bool(),
                      t.to(torch.complex64), t[None].expand(2, *t.shape), t[None][:0], t[..., :0], t.numpy(),
                      t.tolist(), None, "x",
                      t * 1e30, t * 1e-30, t * math.inf, t[..., :1].expand(t.shape), t.requires_grad_(True),
                      torch.cat([t, t], -1), 3])
    # fmt: on


def manifolds(rng, world):
    make, shape = pick(rng, [(qm.GLQuotientInv, (7, 2)), (qm.GLQuotientMix, (7, 2)), (qm.RescaleQuotient, (2, 1))])
    if rng.random() < 0.1:
        given = {"n": 4, "m": 3} if shape[1] > 1 else {"metric": "inv"}
        given[key := pick(rng, given)] = pick(rng, ODD_PYTHON)
        return Job([make.__name__, given], call=lambda: repr(make(**given)), names=[key])
    manifold = make(4, 3) if shape[1] > 1 else make()
    x, u, v, A = torch.randn(shape), torch.randn(shape), torch.randn(shape), torch.randn(shape[1], shape[1])
    known = {"x": x, "u": u, "v": v, "y": x + 0.1 * u, "A": A, "L": A, "t": 0.5,
             "points": torch.stack([x, x + 0.1 * v]), "size": shape,
             "tensors": (x[: len(x) // 2 + 1], x[len(x) // 2 + 1 :]), "tensor": x, "G": torch.randn(4, 2),
             "H": torch.randn(3, 2),
             "X": torch.randn(4, 3), "h": 2,
             "manifold": manifold}  # fmt: skip
    own = [
        getattr(manifold, m)
        for m in dir(manifold)
        if m[0] != "_" and m not in dir(nn.Module) and callable(getattr(manifold, m))
    ]
    method = pick(rng, [*own, qm.canonical_gauge, qm.from_matrix, testing.check_manifold])
    wanted = inspect.signature(method).parameters.values()
    names = [p.name for p in wanted if (p.name in known and p.default is p.empty) or p.name == "v"]
    if not names:
        return Job("nothing to give", call=int)
    parts = [(n, v) for n in names for v in (known[n] if n in ("size", "tensors") else [known[n]])]
    at = int(rng.integers(len(parts)))
    name, old = parts[at]
    odd = odd_tensor(rng, old.clone()) if torch.is_tensor(old) and rng.random() < 0.85 else pick(rng, ODD_PYTHON)
    arguments = [odd if i == at else v for i, (_, v) in enumerate(parts)]
    words = (
        f"{odd.dtype} {tuple(odd.shape)} of norm {odd.to(torch.complex64).norm():.2g}"
        if torch.is_tensor(odd)
        else repr(odd)
    )
    return Job(
        [manifold, method.__name__, name, words], call=lambda: method(*arguments), names=["factor", "point", *names]
    )


def tiny():
    torch.manual_seed(0)
    return networks.TinyAttention().float().eval()


def calls(rng, world):
    # fmt: off
    model, (x, y), one, two = tiny(), networks.tokens(6, 4, 3), nn.Linear(4, 2), nn.Linear(2, 4)
    found, batch, weights = symmetries.find(model), (x, y), dict(model.named_parameters())
    how = {"lr": 1e-2, "weight_decay": 0.0, "metric": "mix", "max_grad_norm": None}
    both = nn.Sequential(one, two)
    down, up = symmetries.slot(both, "0.weight", transpose=True), symmetries.slot(both, "1.weight")
    own = symmetries.pair([down], [up], symmetries.GL(2), name="a")
    net, inputs = (lambda m, b: m(b[0]).sum()), {"model": model, "batches": [batch, batch]}
    adam = {"params": list(model.named_parameters()), "symmetries": found, **how}
    measured = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, steps=2, progress=False)
    measuring = {**inputs, "loss_fn": None, "measure": "geodesic-inv", "rho": 0.1, "steps": 2, "relative_tol": 1e-3,
                 "ascent": "power", "restarts": 0,
                 "seed": 0,
                 "micro_batch": None, "symmetries": None,
                 "keep_directions": None, "group": None}
    targets = [(sharpness.evaluate, measuring)] * 12 + [(optim.QuotientAdam, {**adam, "betas": (0.9, 0.99),
                                                                              "eps": 1e-8})] * 3 + [
        (plots.plot_profile, {"model": model, "batch": batch, "direction": measured.direction(0), "loss_fn": None,
                              "points": 3, "micro_batch": None}),
        (measured.__getitem__, {"rho": 0.1}), (measured.direction, {"batch_index": 0}),
        (sharpness.hessian, {**inputs, "loss_fn": None, "measure": "adaptive", "num_matvecs": 3, "seed": 0,
                             "micro_batch": None, "group": None}),
        (sharpness.average, {**inputs, "loss_fn": None, "measure": "adaptive", "rho": 0.1, "num_samples": 2,
                             "seed": 0}),
        (sharpness.spectrum, {**inputs, "loss_fn": None, "measure": "adaptive", "matrix": "hessian", "k": 1, "seed": 0,
                              "micro_batch": None, "progress": False}),
        (sharpness.measured, {**inputs, "quantities": ("gradient-norm", "geodesic-inv"), "loss_fn": None, "steps": 1,
                              "before": None, "other": None}),
        (sharpness.critical_sharpness, {**inputs, "loss_fn": None, "before": None, "passes": 4, "micro_batch": None}),
        (sharpness.gradient_norm, {**inputs, "loss_fn": None, "measure": "geodesic-inv", "symmetries": None}),
        (measured.to_json, {"path": "out"}),
        (optim.QuotientSGD, {**adam, "momentum": 0.9}), (optim.create_quotient_optimizer,
                                                                            {"model": model, **how}),
        (sharpness.GeodesicSAM, {"model": model, "base_optimizer": torch.optim.SGD(model.parameters(), 0.1),
                                 "rho": 0.05,
                                 "measure": "geodesic-inv", "refresh": 2, "symmetries": found}),
        (symmetries.find, {"model": model, "batch": batch}),
        (symmetries.verify, {"model": model, "batch": batch, "seed": 0, "symmetries": found}),
        (symmetries.move_, {"model": model, "symmetries": found, "condition": 10.0, "seed": 0, "kinds": None}),
        (symmetries.slot, {"module": one, "name": "weight", "rows": slice(None), "columns": slice(None),
                           "transpose": False}),
        (symmetries.GL, {"h": 2, "diagonal": False}),
        (symmetries.stacks, {"pairs": found.pairs, "weights": weights}), (found.restricted, {"names": [*weights]}),
        (lambda added: found.adding(added), {"added": own}),
        (symmetries.pair, {"G": [down], "H": [up], "group": symmetries.GL(2), "name": "a"}),
        (symmetries.PairStack, {"pairs": found.pairs[:1]}),
        (models.load, {"name": "mine:model", "checkpoint": "collection/net0.pt"}),
        (checkpoints.load_state_dict, {"path": "xy.pt"}),
        (load_batches, {"source": "xy.pt", "batch_size": 4, "batches": 1, "num_examples": 8, "subset_seed": 0,
                        "device": "cpu"}),
        (read_table, {"path": "dev.tsv", "header": True}),
        (study.read_config, {"path": "sweep.json"}),
        (study.read_results, {"path": "done"}), (symmetries.canonicalize_, {"model": model, "symmetries": found}),
        (study.compare, {"rows": study.read_results("done"), "target": "gap", "given": ("train_loss",)}),
        (sharpness.WeightSpace, {"model": model, "measure": sharpness.MEASURES["geodesic-inv"],
                                 "symmetries": None}),
        (measures.get_measure, {"measure": "geodesic-inv", "geodesic": "exact", "symmetry": "qk"}),
    ]
    special = {
        "batches": [[], [[]], [()], [(x,)], [(x, y, y)], [(x, y.float())], [(x, y + 99)], [(x, y - 9)],
                    [(x[:0], y[:0])], [{}], x, iter([]),
                    [batch, {"x": x}], [(x, y[:2])], [x.numpy()], batch, [(x.double(), y)], [(x.half(), y)],
                    [batch, (x, y + 99)],
                    [batch, None], [(x * math.nan, y)], [(x[..., :2], y)], [(x.long(), y)], [(x[0], y[0])],
                    [batch, (x * math.nan, y)]],
        "loss_fn": [lambda m, b: 3.0, lambda m, b: None, lambda m, b: torch.tensor(1.0), lambda m, b: m(b[0]), net,
                    lambda m, b: net(m, b).long(),
                    lambda m, b: net(m, b).detach(), lambda m, b: net(m, b) * math.nan, lambda m, b: (net(m, b), 1),
                    lambda m: 0,
                    lambda m, b: net(m, b) * 1j, lambda m, b: net(m, b)[None], lambda m, b: {"loss": net(m, b)}],
        "model": [nn.Identity(), tiny().requires_grad_(False), tiny().half(), tiny().to("meta"), tiny().double(),
                  nn.Linear, nn.Sequential(),
                  nn.Linear(4, 3), nn.TransformerEncoderLayer(4, 2, 8), nn.LazyLinear(3)],
        "pairs": [[], symmetries.find(tiny()).pairs, [*found.pairs, *found.pairs], [None], found.pairs[0], found],
        "symmetries": [symmetries.Symmetries(), symmetries.find(tiny()), found.pairs, found.adding(own)],
        "added": [found.pairs[0]],
        "weights": [{}, {name: t[:1] for name, t in weights.items()}, {name: t.half() for name, t in weights.items()}],
        "measure": [*sharpness.MEASURES],
               "G": [[down, down], [up]],
        "before": [{}, {name: t.detach()[:1] for name, t in weights.items()}, weights, {"x": x}],
        "quantities": [["critical"], ["critical-relative"], ["geodesic-inv@0.2"], ["adaptive@x"], ["nope"], []],
        "rho": [[0.1, 0.2], (0.1, 0.1), "0.1", 1e300], "seed": [2**70, -(2**70)],
        "geodesic": ["first-order", "exact", "rk4"],
               "symmetry": ["none"],
        "betas": [(0.9, 1.0), (0.9,), ("a", "b"), (math.nan, 0.9)], "lr": [1e300], "rows": [slice(0, 99), slice(5, 2),
                                                                                            [{}], [{"kind": "fit"}]],
    }
    # fmt: on
    function, given = pick(rng, targets)
    names = [pick(rng, given) for _ in range(int(rng.integers(1, 3)))]
    for name in names:
        pool = special.get(name) or (PLACES if isinstance(given[name], str) else ODD_PYTHON)
        given = {**given, name: pick(rng, pool if rng.random() < 0.5 else ODD_PYTHON)}
    if rng.random() < 0.1:  # weights that no training gives
        pick(rng, list(model.parameters())).data.fill_(pick(rng, [0.0, math.nan, math.inf, 1e-45, 1e38]))
    where, odd = pick(rng, ["group", "state", "setting", "gradient", "plain", "plain"]), pick(rng, ODD_PYTHON)

    def call():
        before = copy.deepcopy(model.state_dict())
        found = function(**given, **({"progress": False} if function is sharpness.evaluate else {}))
        after = model.state_dict()
        assert function in (symmetries.move_, symmetries.canonicalize_) or all(
            before[k].isnan().any() or torch.equal(v, before[k]) for k, v in after.items()
        ), "the model's weights changed"
        if isinstance(found, torch.optim.Optimizer):
            train(rng, model, found, where, names[0], odd)
        elif function is sharpness.evaluate:
            assert str(found), found.to_dict()

    lookup = (KeyError,) if where == "state" or function in (measured.__getitem__, measured.direction) else ()
    what = [getattr(function, "__name__", function), *(f"{k}={given[k]!r:.80}" for k in names), where, f"{odd!r:.60}"]
    return Job(
        what, call=call, outs=[v for v in [given.get("path")] if isinstance(v, str)], names=names, allowed=lookup
    )


def train(rng, model, optimizer, where, name, odd):
    """Take two steps with an optimiser whose settings or state are spoilt on the way."""
    if where == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: odd})
    elif where == "setting":
        optimizer.param_groups[0][name] = odd
    elif where == "state":
        state = copy.deepcopy(optimizer.state_dict())
        spoil_tree(rng, state, ODD_PYTHON)
        optimizer.load_state_dict(state)
    for step in range(2):
        x, y = networks.tokens(4, 4, 3, seed=step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if where == "gradient":
                model.head.weight.grad = None
                model.attention.in_proj_weight.grad *= pick(rng, [0.0, math.nan, math.inf, 1e30])
            return loss

        optimizer.step(closure)


#: With their shares of a thousand cases.
SURFACES = {
    folders: 180,
    datasets: 180,
    sweeps: 150,
    results: 110,
    commands: 170,
    manifolds: 70,
    calls: 140,
    adapters: 120,
    in_memory: 80,
}
BY_NAME = {f.__name__: f for f in SURFACES}

# -- a case ------------------------------------------------------------------------------------------------------------


def snapshot(root):
    """Hash every file below a folder; folders count too."""
    found = {}
    for place, inner, files in os.walk(root):
        found |= {os.path.join(place, name): "folder" for name in inner}
        found |= {p: hashlib.blake2b(Path(p).read_bytes()).digest() for f in files if (p := os.path.join(place, f))}
    return found


def disturbed(before, after, world, job):
    """Tell what a case changed without leave: all but the file it was told to write and new files in such a folder."""
    outs = [os.path.normpath(os.path.join(world, p)) for p in job.outs if p]
    goes_on = job.argv is not None and job.argv[0] == "sweep" and "done" in job.argv  # and rewrites its own results
    read = [os.path.normpath(os.path.join(world, p)) for p in (job.argv or ())[1:3]]  # with all that lies in it
    mine = [p for p in outs if not any(p == r or p.startswith(r + os.sep) for r in read)]
    bad = [
        p
        for p, d in before.items()
        if after.get(p) != d and (d == "folder" or p not in mine) and not (goes_on and "/done/" in p)
    ]
    for path in after.keys() - before.keys():
        inside = any(path == o or path.startswith(o + os.sep) for o in outs)
        on_the_way = after[path] == "folder" and any(o.startswith(path + os.sep) for o in outs)
        bad += [] if inside or on_the_way else [path]
    return [os.path.relpath(p, world)[:60] for p in sorted(bad)]


def not_the_users(loaded, folder):
    """Name a parameter of a measured model that is no tensor of the folder's file."""
    if not (folder / "model.safetensors").is_file():
        return "there is no file of weights"
    found = [(t.shape, t) for t in read_tensors(folder / "model.safetensors").values()]
    for name, p in loaded.model.named_parameters():
        if not any(
            s == p.shape and torch.equal(t.to(p.dtype).nan_to_num(7), p.detach().nan_to_num(7)) for s, t in found
        ):
            return f"{name} is not in the file"
    return ""


def place_of(error):
    """Give the last line inside the packages, else the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}tests{os.sep}" not in f.filename and "site-packages" not in f.filename]
    own = [f for f in own if PACKAGES & set(Path(f.filename).parts)] or frames
    parts = Path(own[-1].filename).parts
    first = max((i for i, part in enumerate(parts) if part in PACKAGES), default=len(parts) - 3)
    return "/".join(parts[first:]) + f":{own[-1].lineno}"


def proper(error, job, surface):
    """Tell whether a function may raise this."""
    if surface == "in_memory":
        return isinstance(error, TypeError) or is_mendable(error)
    if isinstance(error, TypeError):  # Python's own word for a value of another type than the function says
        return True
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    if "geoopt" in frames[-1] or any("torch/nn/modules" in f for f in frames):  # its methods; the user's own model
        return True
    own = isinstance(error, ArithmeticError) and type(error).__module__.startswith(("quotient_manifolds", "sharpness"))
    return own or isinstance(error, (ValueError, OSError, ImportError, *job.allowed))


def ring(*_):
    raise HangError(f"more than {LIMIT:g} s")


def never(*_, **__):
    raise ValueError("the demo came as far as its training")


def run_case(surface, number, base):
    """Run one case; gives its failures, and a word on how it ended."""
    rng, loads, code, error = np.random.default_rng([zlib.crc32(surface.encode()), number]), [], None, None
    out, err = io.StringIO(), io.StringIO()

    def load(*arguments, _load=models.load, **options):
        loads.append(_load(*arguments, **options))
        return loads[-1]

    with tempfile.TemporaryDirectory() as above, contextlib.ExitStack() as stack:
        above = Path(above).resolve()
        world = above / "world"
        shutil.copytree(base, world)
        (above / "beside").mkdir()
        for place in (above, above / "beside"):
            (place / "keep.txt").write_text("a neighbour's", encoding="utf-8")
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(number)
        for patch in (
            warnings.catch_warnings(), within(world), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
            mock.patch("sharpness.models.load", load), mock.patch("sharpness.demo.train", never),
            mock.patch("sharpness.study.correlation._RESAMPLES", 30),  # these take the time of a table
            mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"),
        ):  # fmt: skip
            stack.enter_context(patch)
        warnings.simplefilter("ignore")
        job = BY_NAME[surface](rng, world)
        before, ringing = snapshot(above), signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            code = (job.main or main_of(job.argv))(job.argv) if job.argv is not None else (job.call(), 0)[1]
        except SystemExit as left:
            code = left.code
        except (Exception, HangError) as caught:
            error = caught
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, ringing)
        if surface in ("adapters", "in_memory") and (code or error):
            job = replace(job, outs=())  # a folder appears when it is complete
        found = list(judge(surface, job, code, error, out.getvalue(), err.getvalue(), loads, world))
        found += [
            ("world", "-", f"{len(bad)} changed or left: {bad[0]}")
            for bad in [disturbed(before, snapshot(above), world, job)]
            if bad
        ]
    what = f"{job.what} {job.argv or ''}"
    return [Failure(surface, number, k, p, w.replace(str(above), "…"), what) for k, p, w in found], type(
        error
    ).__name__ if error else code


def judge(surface, job, code, error, out, err, loads, world):
    """Hold the end of a case against what was promised."""
    if isinstance(error, HangError):
        yield "hang", place_of(error), str(error)
    elif error is not None and (job.argv is not None or not proper(error, job, surface)):
        yield "traceback", place_of(error), f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if job.argv is None or error is not None:
        return
    lines = err.rstrip("\n").split("\n")
    if code not in (0, 1, 2) or (
        code == 2 and not lines[-1].startswith(("sharpness", "reproduction", "quotient-lora"))
    ):
        yield "refusal", "-", f"exit code {code}, stderr ends in {lines[-1][:100]!r}"
    if "Traceback" in err or (code == 2 and len(err) > 4000):
        yield "refusal", "-", f"{len(err)} characters, a traceback among them: {'Traceback' in err}"
    if surface == "adapters":
        yield from holes(job, code, out, lines, world)
        return
    if "as far as its training" in err:
        given = dict(itertools.pairwise(job.argv))
        if not (world / given.get("--out", "")).parent.is_dir():
            yield "late", "-", "the demo trains before it refuses"
    if code == 0 and job.argv[0] == "run":
        if "nan" in out.split():
            yield "nan", "-", next(v for v in out.splitlines() if "nan" in v)[:100]
        for words in [not_the_users(m, world / job.argv[1]) for m in loads if m.folder]:
            if words:
                yield "not the user's", "-", words


def holes(job, code, out, lines, world):
    """Find more than one line of a refusal, NaN in what quotient-lora printed or wrote, or what it does not read."""
    if code == 2 and len(lines) > 1 and not lines[0].startswith("usage"):
        yield "refusal", "-", f"{len(lines)} lines, the last {lines[-1][:200]!r}"
    if code != 0:
        return
    if {"nan", "NaN", "inf", "Infinity", "nan,", "NaN,", "Infinity,"} & set(out.split()):
        yield "nan", "-", next(v for v in out.splitlines() if "nan" in v.lower() or "inf" in v.lower())[:100]
    for place in (world / o for o in job.outs):
        for file in place.rglob("*.safetensors"):
            bad = [key for key, t in read_tensors(file).items() if not bool(t.isfinite().all())]
            if bad:
                yield "nan", "-", f"{bad[0]} in {file.name}"
            try:
                lora.compare(file, file)
            except Exception as error:
                yield "not read", "-", f"{type(error).__name__}: {error}"[:200]
        for file in place.rglob("*.json"):
            if {"NaN", "Infinity", "-Infinity"} & set(file.read_text(encoding="utf-8").replace(",", " ").split()):
                yield "nan", "-", file.name


def load_batches(source, device="cpu", **choice):
    return data.DataChoice(source, **choice).load(models.LoadedModel(tiny()), device)


def chunks(cases, count=20):
    """Divide the cases by surface into about so many parts of equal size."""
    total = sum(SURFACES.values())
    for surface, share in SURFACES.items():
        parts = max(1, round(count * share / total))
        for part in range(parts):
            yield surface.__name__, range(max(1, round(cases * share / total)))[part::parts]


def run(surface, numbers, base):
    """Run cases; gives their failures and ends."""
    failures, ends = [], []
    for number in numbers:
        found, end = run_case(surface, number, base)
        failures += found
        ends.append((surface, number, str(end), [(f.kind, f.place) for f in found]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what was left open says so here, not in a later test
    return failures, ends


def main(cases=1000, only=None, number=None):
    """Print what failed, counted."""
    failures, ends, seconds, groups = [], [], collections.Counter(), collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        build(base := Path(place).resolve() / "base")
        for surface, numbers in chunks(int(cases)):
            if only in (None, surface) and (number is None or numbers.start == 0):
                start = time.process_time()
                found, ended = run(surface, numbers if number is None else [int(number)], base)
                failures, ends = failures + found, ends + ended
                seconds[surface] += round(time.process_time() - start, 1)
    for f in failures:
        groups[f.kind, f.surface, f.place, f.words.split(":")[0] if f.kind == "traceback" else f.words[:30]].append(f)
    for (kind, surface, where, _), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        first = found[0]
        print(f"{len(found):4d} {kind:14} {where:45} {surface} {first.number}: {first.words}\n{'':9}{first.what[:300]}")
    print(
        f"{len(ends)} cases, {len(failures)} failures of {len(groups)} sorts:",
        dict(collections.Counter(f.kind for f in failures)),
    )
    print("ends:", dict(collections.Counter(e[2] for e in ends)), "\nseconds of the processor:", dict(seconds))
    print("digest:", hashlib.blake2b(repr(ends).encode(), digest_size=8).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
