"""A folder with everything that a sweep needs."""

import json
import sys

import pytest
import torch
from torch import nn

from tests.sweeps import MODULE


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Four checkpoints of a function's model, data, and a configuration."""
    torch.set_default_dtype(torch.float32)
    (tmp_path / "sweepmodel.py").write_text(MODULE)
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
        "measures": ["adaptive", "euclidean"],
        "rho": {"adaptive": [0.1, 0.3], "euclidean": 0.05},
        "ablations": [{}, {"statistic": "average"}],
        "steps": 4,
    }
    (tmp_path / "sweep.json").write_text(json.dumps(config))
    return tmp_path
