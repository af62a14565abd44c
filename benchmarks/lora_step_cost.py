"""Cost of the optimisers' step alone: 200 adapters of rank 16 on layers 4096 wide, float32, one thread.

Steps alternate in one process; times are those of the processor, which other processes do not lengthen (on a GPU those
of the clock), medians over repeats. Gradients are given; the certificate of the first step is left out. State is
counted in numbers a weight. With ``--memory``, the largest resident set of a process that takes three steps by itself,
above that with weights and gradients and after a step of a small model, which loads what torch loads late (on a GPU
the largest allocation), in bytes of the weights.

With ``--processes 1 2 4``, instead: time and state of a process where FSDP2 shards the factors over so many of them, by
gloo; 0 is one process without FSDP2. The largest median of all processes counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard

from quotient_manifolds.optim import QuotientAdam, QuotientMuon, QuotientSGD
from quotient_manifolds.symmetries import GL, SymmetricPair, pair, slot

from ._common import write


def adapters(
    count: int, rank: int, width: int, *, sharded: bool = False
) -> tuple[dict[str, nn.Parameter], list[SymmetricPair]]:
    """Factors with gradients, and their pairs."""
    model, found = nn.Sequential(), list[SymmetricPair]()
    for i in range(count):
        A, B = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        if sharded:
            fully_shard([A, B])
        model.extend([A, B])
        G, H = slot(model, f"{2 * i + 1}.weight"), slot(model, f"{2 * i}.weight", transpose=True)
        found.append(pair([G], [H], GL(rank), name=f"adapter {i}"))
    for p in model.parameters():
        p.grad = 1e-2 * torch.randn_like(p)
    return dict(model.named_parameters()), found


def numbers(optimizer: torch.optim.Optimizer) -> int:
    """Count what the state holds."""
    saved = optimizer.state_dict()
    of_params = [t for s in saved["state"].values() for t in s.values()]
    of_buckets = [t for b in saved.get("stacks", ()) for t in b["state"].values()]
    return sum(t.numel() for t in of_params + of_buckets if isinstance(t, torch.Tensor))


def optimizers(named: dict[str, nn.Parameter], pairs: list[SymmetricPair]) -> dict[str, Any]:
    """What makes them, by name."""
    params = list(named.items())
    return {
        "AdamW, fused": lambda: torch.optim.AdamW(params, 1e-5, fused=True),
        "AdamW, foreach": lambda: torch.optim.AdamW(params, 1e-5, foreach=True),
        "AdamW, torch's default": lambda: torch.optim.AdamW(params, 1e-5),
        "QuotientMuon": lambda: QuotientMuon(params, pairs, 1e-5),
        "QuotientAdam": lambda: QuotientAdam(params, pairs, 1e-5),
        "QuotientSGD": lambda: QuotientSGD(params, pairs, 1e-5, 0.9),
    }


def resident(device: str) -> int:
    """Return how many bytes are in use, or have been at most on a GPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def alone(name: str, params: dict[str, nn.Parameter], pairs: list[SymmetricPair], device: str) -> None:
    """Print the peak of three steps above what is in use before."""
    with torch.device(device):
        for which in (adapters(2, 2, 8), (params, pairs)):
            before = resident(device)
            optimizer = optimizers(*which)[name]()
            optimizer.certify = False
            for _ in range(3):
                optimizer.step()
    most = resident(device) if device.startswith("cuda") else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps((most - before) / sum(p.numel() * p.element_size() for p in params.values())))


def peak(name: str) -> float:
    """Return what :func:`alone` prints in a process of its own, in which large blocks go back to the system at once."""
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    command = [sys.executable, "-m", str(__spec__.name), *sys.argv[1:], "--one", name]
    found = subprocess.run(
        command, check=True, capture_output=True, text=True, env=settings, encoding="utf-8"
    ).stdout.splitlines()[-1]
    return round(float(json.loads(found)), 2)


def process(rank: int, size: int, port: int, options: argparse.Namespace, found: Any) -> None:
    """Be one of the processes: put the medians and the state of each optimiser into a queue."""
    os.environ |= {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{size or 1}",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}",
    }
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    params, pairs = adapters(options.adapters, options.rank, options.width, sharded=size > 0)
    weights, row = options.adapters * 2 * options.rank * options.width, {}
    for name in ("QuotientMuon", "QuotientAdam"):
        optimizer = optimizers(params, pairs)[name]()
        optimizer.certify, spent = False, []
        for _ in range(options.repeats + 1):
            dist.barrier()
            start = time.process_time()
            optimizer.step()
            spent.append(1e3 * (time.process_time() - start))
        numbers_here = sum(v.numel() for s in optimizer._stacks for v in s.state.values())
        row[name] = statistics.median(spent[1:]), numbers_here / weights  # the first one makes room
    found.put(row)
    dist.destroy_process_group()


def over_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size in options.processes:
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(process, (size, port, options, queue), nprocs=size or 1)
        found = [queue.get() for _ in range(size or 1)]
        rows += [
            {
                "optimiser": name, "processes": size, "adapters": options.adapters, "rank": options.rank,
                "width": options.width, "cpu_ms": round(max(f[name][0] for f in found), 1),
                "state_over_weights": round(max(f[name][1] for f in found), 3),
            }
            for name in found[0]
        ]  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="lora_step_cost")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--processes", type=int, nargs="+", default=[])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processes:
        write(options.name, over_processes(options))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = options.device.startswith("cuda")
    # First, for a process begins with the largest resident set of the one that starts it.
    peaks = {name: peak(name) for name in optimizers({}, [])} if options.memory and not options.one else {}
    with torch.device(options.device):
        params, pairs = adapters(options.adapters, options.rank, options.width)

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if on_gpu else time.process_time()

    if options.one:
        alone(options.one, params, pairs, options.device)
        return
    made: dict[str, torch.optim.Optimizer] = {name: make() for name, make in optimizers(params, pairs).items()}
    spent: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(options.repeats + 1):
        for name, optimizer in made.items():
            optimizer.certify = False  # type: ignore[attr-defined]
            start = clock()
            optimizer.step()
            if repeat:  # the first one makes room
                spent[name].append(clock() - start)
    medians = {name: statistics.median(times) for name, times in spent.items()}
    key_of_time = "gpu_ms" if on_gpu else "cpu_ms"
    weights = sum(p.numel() for p in params.values())
    rows: list[dict[str, Any]] = [
        {
            "optimiser": name, "adapters": options.adapters, "rank": options.rank, "width": options.width,
            key_of_time: round(1e3 * medians[name], 1), "least_ms": round(1e3 * min(spent[name]), 1),
            **{f"over_{key}": round(medians[name] / medians[f"AdamW, {label}"], 2)
               for key, label in (("fused", "fused"), ("foreach", "foreach"), ("default", "torch's default"))},
            "state_over_weights": round(numbers(optimizer) / weights, 2),
            **({"peak_over_weights": peaks[name]} if peaks else {}),
        }
        for name, optimizer in made.items()
    ]  # fmt: skip
    write(options.name, rows)


if __name__ == "__main__":
    main()
