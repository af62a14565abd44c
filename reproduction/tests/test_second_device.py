"""A study's zoo is the same on a device that is not the CPU."""

import contextlib
import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from reproduction import radii, zoo
from reproduction.collection import train_collection
from reproduction.zoo_data import LABELS
from sharpness.data import DataChoice
from sharpness.study import read_config, read_rows, run_sweep
from tests.support.extent import EXHAUSTIVE
from tests.support.processes import together
from tests.support.second_device import NAME, POSSIBLE, second_device
from tests.support.texts import bert_folder
from tests.test_second_device import ended_well

from .test_zoo import write_pictures

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="this torch has no devices that are written in Python")
WORDS = ("red", "green", "blue", "old", "new", "large", "small", "warm", "cold", "near", "far", "late")


def same_rows(kind):
    """Make a tiny zoo on the CPU and on the device, from its training to its table."""
    found = {}
    for name, within in ((NAME, second_device()), ("cpu", contextlib.nullcontext())):
        with within:
            found[name] = _rows(kind, name)
    assert len(found[NAME]) == len(found["cpu"]) > 4
    for one, other in zip(found[NAME], found["cpu"], strict=True):
        assert_alike(one, other)


def assert_alike(one, other, name="row"):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"seconds", "job", "model", "weights", "source"}:
            assert_alike(one[key], other[key], f"{name}, {key}")
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b, name)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-3), name
    else:
        assert one == other, name


def _rows(kind, device):
    assert zoo.build(kind, Path("data"), Path(device), device=device, progress=False) == []
    config = radii.choose_radii(Path(device), measures=("euclidean",), device=device, progress=False)
    sweep = read_config(config)
    assert sweep.device == device
    assert json.loads(Path(f"{device}/models/model_00.json").read_text(encoding="utf-8"))["device"] == device
    assert run_sweep(sweep, f"{device}/results", progress=False) == []
    return read_rows(f"{device}/results", sweep)


def tiny(kind):
    """Make the study's zoos small in this process."""
    torch.manual_seed(0)
    Path("data").mkdir()
    radii.guess_error = lambda sweep: 1.1  # these models have learned little
    radii.LEVELS = (0.1,)
    zoo._IMAGES, zoo._POINTS = {"scratch": 12}, {"scratch": 4, "minilm": 4}
    zoo.KINDS[kind] = (3, {**zoo.KINDS[kind][1], "epochs": (1, 1), "batch": (6,), "frozen": 0})
    if kind == "scratch":
        write_pictures(Path("data/cifar10"))
        return
    pairs = [{"premise": f"Is it {w}?", "hypothesis": w, "label": x} for w, x in zip(WORDS, itertools.cycle(LABELS))]
    Path("pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs), encoding="utf-8")
    bert_folder([p["premise"] for p in pairs], "bert")
    data = DataChoice("pairs.jsonl", text="premise", pair="hypothesis", label_map=LABELS, max_length=12)
    zoo.train_collection = lambda *a, autocast, **kw: train_collection(*a, **kw)  # it would round on the CPU alone
    zoo._parts = lambda *_: ("bert", None, data, data, "pairs.jsonl")


def zoo_alike(kind, folder):
    os.chdir(folder)
    torch.set_default_dtype(torch.float32)
    tiny(kind)
    same_rows(kind)


@pytest.mark.parametrize("kind", ["scratch", *(["minilm"] if EXHAUSTIVE else [])])
def test_zoos_have_the_same_rows(kind, tmp_path):
    ended_well(together(1, zoo_alike, kind, tmp_path, folder=tmp_path))
