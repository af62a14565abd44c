"""A model that FSDP2 shards over processes of one machine: memory of the search per process, time beside bare passes.

Peak resident memory of each process, with the search and with bare passes alone; their difference is the search's part.
On a CPU the transport is gloo. Times of more processes than cores say nothing of a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import sharpness

from ._common import write

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8},
    "300M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22, "num_attention_heads": 16},
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
}


def shard_(model: nn.Module, device: torch.device) -> None:
    """Shard a model over all processes: each layer of its outermost lists of layers, and the rest."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    inside: set[nn.Module] = set()
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and layers not in inside:
            inside.update(layers.modules())
            for layer in layers:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def one(options: argparse.Namespace) -> None:
    """Be one of the processes: print its figures."""
    rank, device = int(os.environ["RANK"]), torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
        **SHAPES[options.shape],
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    shard_(model, device)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # whose buffers were not filled
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local()
            local.copy_(torch.ones_like(local) if p.dim() < 2 else 0.02 * torch.randn_like(local))
        model.eval()
    words = torch.randint(
        options.vocabulary, (options.batch, options.length), generator=torch.Generator().manual_seed(0)
    )
    batch = {"input_ids": words.to(device), "labels": words.to(device)}
    share = {k: v[rank :: dist.get_world_size()] for k, v in batch.items()}

    def bare() -> float:
        begin = time.perf_counter()
        model(**share).loss.backward()
        for p in model.parameters():
            p.grad = None
        return time.perf_counter() - begin

    seconds = min(bare() for _ in range(3))
    found = {"rank": rank, "parameters": count, "bare_pass": seconds, "bare_peak": peak(device)}
    if options.measure != "bare":
        begin = time.perf_counter()
        result = sharpness.evaluate(
            model, [batch], measure=options.measure, rho=0.05, steps=options.steps, relative_tol=0.0, progress=False,
        )  # fmt: skip
        found |= {"seconds": time.perf_counter() - begin, "passes": result.batches[0].passes, "value": float(result)}
        found |= {"job_seconds": result.batches[0].seconds}
    print(json.dumps(found | {"peak": peak(device)}), flush=True)
    time.sleep(0.1)  # as in sharpness.distributed.torchrun
    dist.destroy_process_group()


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def together(options: argparse.Namespace, size: int, measure: str) -> list[dict[str, float]]:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    # Large blocks go back to the system at once, so that the resident set is what is in use.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    settings |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", str(__spec__.name), *sys.argv[1:], "--one", "--measure", measure]
    started = [
        subprocess.Popen(
            command, env={**settings, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        for rank in range(size)
    ]
    outputs = [p.communicate()[0] for p in started]
    if any(p.returncode for p in started):
        raise SystemExit(f"{measure} on {size} processes failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="300M")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--measures", nargs="+", default=["geodesic-inv", "adaptive", "complete-inv"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", default="bare", help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options)
        return
    rows = []
    for size in options.sizes:
        bare = max(f["peak"] for f in together(options, size, "bare"))
        for measure in options.measures:
            found = together(options, size, measure)
            worst = max(f["peak"] for f in found)
            own = found[0]["parameters"] * 4 / size
            rows.append(
                {
                    "shape": options.shape, "parameters": found[0]["parameters"], "processes": size, "measure": measure,
                    "bare_peak_MiB": round(bare / 2**20), "peak_MiB": round(worst / 2**20),
                    "search_MiB": round((worst - bare) / 2**20), "search_in_shards": round((worst - bare) / own, 2),
                    "bare_pass_s": round(max(f["bare_pass"] for f in found), 2),
                    "pass_s": round(max(f["job_seconds"] / (f["passes"] - 1) for f in found), 2),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    write(Path(__file__).stem, rows)


if __name__ == "__main__":
    main()
