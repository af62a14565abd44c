"""Trained models, once a file; and a folder with everything that a sweep needs."""

import copy
import json
import sys

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import move_
from tests.support import networks
from tests.support.snapshots import MODELS
from tests.support.sweeps import MODULE


@pytest.fixture(scope="module")
def trained():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    batch = networks.images()
    model = networks.train(networks.vit(layers=1), batch)
    twin = copy.deepcopy(model)
    move_(twin, condition=30.0, seed=1)
    return model, twin, batch


@pytest.fixture(scope="module", params=MODELS)
def trained_model(request):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    make, data = MODELS[request.param]
    batch = data()
    return networks.train(make(), batch), batch


@pytest.fixture(scope="module")
def trained_small():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    batch = networks.tokens(width=4)
    model = networks.train(networks.shake(networks.TinyAttention(), 0.5), batch, steps=10)
    twin = copy.deepcopy(model)
    move_(twin, condition=30.0, seed=1)
    return model, twin, batch


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Four checkpoints of a function's model, data, and a configuration."""
    torch.set_default_dtype(torch.float32)
    (tmp_path / "sweepmodel.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sweepmodel", raising=False)  # of another test's folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "collection").mkdir()
    for i in range(4):
        torch.manual_seed(i)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        torch.save(net.state_dict(), tmp_path / "collection" / f"net{i}.pt")
    for name, count, seed in (("train", 24, 0), ("test", 12, 1)):
        torch.manual_seed(seed)
        torch.save({"x": torch.randn(count, 6), "y": torch.randint(3, (count,))}, tmp_path / f"{name}.pt")
    config = {
        "checkpoints": [{"path": "collection/*.pt", "model": "sweepmodel:model"}],
        "data": {"source": "train.pt", "batch_size": 8, "num_examples": 16, "subset_seed": 3},
        "test": "test.pt",
        "measures": ["adaptive", "euclidean", "geodesic-inv", "geodesic-mix"],
        "rho": {"adaptive": [0.1, 0.3], "euclidean": 0.05, "geodesic-inv": [0.1, 0.3], "geodesic-mix": 0.05},
        "steps": 4,
    }
    (tmp_path / "sweep.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path
