import copy
import subprocess
import sys

import pytest
import torch

import sharpness
from tests import networks


def test_bad_models_are_named():
    model, batch = networks.vit(), networks.images()
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        sharpness.evaluate(frozen, [batch], rho=0.1)
    with pytest.raises(ValueError, match="lie on the meta device"):
        sharpness.evaluate(copy.deepcopy(model).to("meta"), [batch], rho=0.1)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter 'classifier\.bias' has NaN"):
        sharpness.evaluate(model, [batch], rho=0.1)


def test_sharded_models_are_refused(tmp_path):
    """FSDP2's parameters are DTensors, on which measuring ended in a segmentation fault."""
    script = tmp_path / "sharded.py"
    script.write_text("""
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import sharpness
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
try:
    sharpness.evaluate(model, [torch.ones(1, 3, 8)], lambda m, b: m(b).sum())
except ValueError as error:
    print(error)
""")
    found = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=120)
    assert "is a shard of one (FSDP, DTensor or ZeRO-3), but whole weights are measured" in found.stdout, found.stderr
