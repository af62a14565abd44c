"""What of the world is spoilt, and the command that meets it."""

import argparse
import copy
import itertools
import json
import shutil

from quotient_manifolds import lora_command
from reproduction import cli as laboratory
from sharpness import cli, study
from sharpness.files import read_table
from tests.support.fuzzing.calls import load_batches
from tests.support.fuzzing.spoiling import (
    spoil_adapter,
    spoil_bytes,
    spoil_images,
    spoil_json,
    spoil_table,
    spoil_tensors,
    spoil_tree,
)
from tests.support.fuzzing.values import ADAPTERS, COMMANDS, FLOAT, KINDS, LABORATORY, ODD, PLACES, SWEEP, WORDS, Job
from tests.support.fuzzing.world import pick


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
