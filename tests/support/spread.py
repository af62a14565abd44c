"""A model and batches by name, for runs in processes of their own, and what processes of one group say."""

import copy
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sharpness
from tests.support import networks


def model():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    return networks.Encoder()


def batches():
    return [networks.tokens(6, seed=i) for i in range(3)]


class Failing(networks.Encoder):
    """Ends in rank 1, at the eighth pass, as FAILURE says: by an error, or by a signal that no program survives."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        if os.environ.get("RANK") == "1" and self.passes == 8:
            if os.environ["FAILURE"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the eighth pass failed")
        return super().forward(x)


def failing():
    model()
    return Failing()


def network(*norms):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *norms, nn.Tanh(), nn.Linear(8, 3))


def examples():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 6, generator=generator, dtype=torch.float64), torch.randint(3, (24,), generator=generator)
    return list(zip(x.split(4), y.split(4), strict=True))


def said(model, batches, **options):
    """A value, or the words of the refusal."""
    try:
        return float(sharpness.evaluate(model, batches, measure="adaptive", steps=2, progress=False, **options))
    except ValueError as error:
        return str(error)


def in_a_group(folder):
    """What one of two processes says of DDP's model, and of batches and weights that are not those of the other."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, batches = dist.get_rank(), examples()
    group = {"group": dist.group.WORLD}
    net, other, buffers = network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8))
    wrapped = (
        DistributedDataParallel(copy.deepcopy(net)),
        DistributedDataParallel(copy.deepcopy(net), static_graph=True),
    )
    other[0].weight.data[0, 0] += rank
    buffers[1].running_mean += rank
    found = {"DDP": [said(model, batches, **group) for model in wrapped]}
    if rank == 0:
        found["alone"] = said(wrapped[0], batches)
    given = {
        "same": batches, "shares": batches[rank::2], "order": batches[:: 1 - 2 * rank], "counts": batches[: 6 - rank],
        "labels": [(x, y.clone()) for x, y in batches],
    }  # fmt: skip
    given["labels"][2][1][0] = rank  # of a batch that falls to the first process
    found |= {name: said(net, own, **group) for name, own in given.items()}
    found |= {"weights": said(other, batches, **group), "buffers": said(buffers, batches, **group)}
    found |= {f"sharded, {name}": said(fully_shard(network()), own) for name, own in given.items()}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def trained(rank, *, measure):
    """Train in DDP; the weights, and what is measured on each process."""
    model, (x, y), values = DistributedDataParallel(network(nn.BatchNorm1d(8))), examples()[rank], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        nn.functional.cross_entropy(model(x), y).backward()
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        if measure:
            values.append(sharpness.measured(model, examples()[:2], before=before, steps=2))
    return {"weights": [p.tolist() for p in model.state_dict().values()], "values": values}


def training(folder):
    """What one of two processes trains with and without measurements."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    found = [trained(rank, measure=measure) for measure in (False, True)]
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
