"""Time and memory of merging adapters as files: eight of a small model, and two of a large one.

Each case runs in a process of its own, whose peak memory is compared with that after a small adapter was merged there,
for which the linear algebra is loaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from quotient_manifolds.adapters import folders, merge
from quotient_manifolds.adapters.storage import TensorFile

from ._common import write

#: Adapters, layers of the model, width, rank of each adapter and of the merge.
CASES = {"12 layers, 768 wide": (8, 12, 768, 16, 16), "32 layers, 4096 wide": (2, 32, 4096, 64, 64)}


def adapter(folder: Path, layers: int, width: int, rank: int, seed: int) -> None:
    """Write an adapter of queries, keys, values, outputs (width × width) and two layers of four times the width."""
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (4 * width, width), "down": (width, 4 * width)}
    generator, start = torch.Generator().manual_seed(seed), "base_model.model.layers"

    folder.mkdir()
    with TensorFile(folder / folders.WEIGHTS) as file:
        for i, (name, (n, m)) in product(range(layers), shapes.items()):
            A, B = (torch.randn(size, generator=generator) for size in ((rank, m), (n, rank)))
            file.update({f"{start}.{i}.{name}.lora_{factor}.weight": t for factor, t in (("A", A), ("B", B))})
        file.finish({})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*shapes]}
    folders.write_config(folder, config)


def peak() -> float:
    """Return the largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def merged(parents: list[str], out: str, rank: int) -> dict[str, float]:
    """Merge, and return seconds and MiB."""
    small = Path(out).with_name("small")
    adapter(small, 1, 8, 2, 0)
    merge([small], small.with_name("first"), rank=1)
    before, start, cpu = peak(), time.perf_counter(), time.process_time()
    merge(parents, out, rank=rank)
    times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return {**times, "mib_before": before, "mib": peak()}


def main() -> None:
    """Run the cases, each in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        rank, out, *parents = options.case
        print(json.dumps(merged(parents, out, int(rank))))
        return
    rows = []
    for name, (count, layers, width, rank, new_rank) in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            parents = [Path(place) / str(i) for i in range(count)]
            for i, folder in enumerate(parents):
                adapter(folder, layers, width, rank, i)
            case = [str(new_rank), str(Path(place) / "out"), *map(str, parents)]
            done = subprocess.run(
                [sys.executable, "-m", str(__spec__.name), "--case", *case],
                check=True,
                capture_output=True,
                text=True,
                encoding="utf-8",
            )
            size = (parents[0] / folders.WEIGHTS).stat().st_size / 2**20
            rows.append({"model": name, "adapters": count, "rank": rank, "mib_of_one": size, **json.loads(done.stdout)})
    write("adapters_cost", rows)


if __name__ == "__main__":
    main()
