"""What benchmarks and studies share: where they ran, and how a result is written."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch

RESULTS = Path(__file__).parents[1] / "results"


def environment() -> dict[str, Any]:
    """Machine, versions and command of a run."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    module = ".".join(Path(sys.argv[0]).with_suffix("").parts[-2:])
    return {
        # Of a path outside the working directory only the last part means anything elsewhere.
        "command": " ".join(["python -m", module, *(Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:])]),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "geoopt", "scipy", "numpy")},
    }


def write(name: str, rows: Any, **more: Any) -> None:
    """Write rows, and what else is given, with their environment to ``results/NAME.json``; print the rows."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"environment": environment(), "rows": rows, **more}, indent=1) + "\n",
        encoding="utf-8",
    )
    for row in rows:
        print(row)


def interval(values: Any) -> tuple[float, float]:
    """Mean and half-width of its 95 % t-interval."""
    v = np.asarray(values, dtype=float)
    return float(v.mean()), float(scipy.stats.t.ppf(0.975, len(v) - 1) * v.std(ddof=1) / len(v) ** 0.5)
