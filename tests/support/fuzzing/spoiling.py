"""Mutations of what lies on disk."""

import json
import math
import shutil

import torch

from tests.support.fuzzing.values import CONFIG, LORA_CONFIG, ODD, SIZES
from tests.support.fuzzing.world import pick, read_tensors, write_tensors


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
        into = path / ("extra" if how == "class" else "")
        if image.is_file() and image.parent != into:
            shutil.copy(image, into)
    elif how in ("one", "none"):
        for inner in sorted(path.iterdir())[how == "one" :]:
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    elif how == "nest":
        shutil.copytree(path, path.parent / "inner")
        shutil.move(path.parent / "inner", path / "inner")
    else:
        (image.parent / pick(rng, ["notes.txt", ".hidden", "notes.png"])).write_text("a note", encoding="utf-8")
    return f"{path.name}: {how} {image.name}"
