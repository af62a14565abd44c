"""What importing the packages costs over importing torch and geoopt; fresh processes that take turns."""

from __future__ import annotations

import statistics
import subprocess
import sys

from ._common import write

CODES = {
    "torch, geoopt": "import torch, geoopt",
    "quotient_manifolds": "import torch, geoopt, quotient_manifolds",
    "quotient_manifolds.symmetries": "import torch, geoopt, quotient_manifolds.symmetries",
    "quotient_manifolds.optim": "import torch, geoopt, quotient_manifolds.optim",
    "sharpness": "import torch, geoopt, sharpness",
}


def seconds(code: str) -> float:
    """Time the imports alone, in a new process."""
    timed = f"import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-W", "ignore", "-c", timed], capture_output=True, check=True).stdout)


def main(repeats: int = 15) -> None:
    """Measure in turns; the first turn fills the caches and does not count."""
    turns = [{name: seconds(code) for name, code in CODES.items()} for _ in range(repeats + 1)][1:]
    base = "torch, geoopt"
    rows = [
        {
            "import": name,
            "median seconds": round(statistics.median(t[name] for t in turns), 3),
            "over torch and geoopt, median": round(statistics.median(t[name] - t[base] for t in turns), 3),
        }
        for name in CODES
    ]
    write("import_time", rows)


if __name__ == "__main__":
    main()
