"""Cost of a step of the search, and of optimisers, in the checkout, as a ratio to that of another commit.

Both versions run in one process, in two threads that take turns at every forward pass, so that whatever else the
machine does meets both. What counts is the processor time of the thread. Imports within functions find the modules of
the version whose turn it is.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ._common import write

PACKAGES = ("quotient_manifolds", "sharpness")
RADII = {"geodesic-inv": 0.05, "geodesic-mix": 0.01, "complete-inv": 0.05, "adaptive": 0.2, "euclidean": 0.02}


class Classifier(nn.Module):
    """open_clip's image tower with a linear head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import open_clip

        self.visual = open_clip.create_model(name, pretrained=None).visual
        self.head = nn.Linear(self.visual.output_dim, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.visual(x))


class Version:
    """The packages of one folder, whose modules are those of the process while :meth:`install` holds."""

    def __init__(self, folder: Path) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.times: list[float] = []
        sys.path.insert(0, str(folder))
        self.install()
        self.sharpness = importlib.import_module("sharpness")
        whole = importlib.import_module("quotient_manifolds.symmetries.whole")
        named = "at" in inspect.signature(whole.wiring_of).parameters  # older versions take the part itself
        of_part = (lambda m: whole.wiring_of(m, "visual")) if named else (lambda m: whole.wiring_of(m.visual))
        whole.register_wiring(Classifier)(of_part)
        assert Path(str(self.sharpness.__file__)).is_relative_to(folder)
        self.uninstall()
        sys.path.remove(str(folder))

    def install(self) -> None:
        sys.modules.update(self.modules)

    def uninstall(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            self.modules[name] = sys.modules.pop(name)


class Turns:
    """Which of two versions runs."""

    def __init__(self, versions: list[Version]) -> None:
        self.versions, self.running, self.now = versions, {0, 1}, 0
        self._changed = threading.Condition()

    def wait(self, me: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.now == me)
            self.versions[me].install()

    def pass_on(self, me: int, *, ended: bool = False) -> None:
        with self._changed:
            self.versions[me].uninstall()
            self.running -= {me} if ended else set()
            self.now = 1 - me if 1 - me in self.running else me
            self._changed.notify_all()


def measure(version: Version, me: int, turns: Turns, model: nn.Module, batch: Any, options: dict[str, Any]) -> None:
    """Search once, and keep the times between forward passes."""
    began = 0.0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal began
        version.times.append(time.thread_time() - began)
        turns.pass_on(me)
        turns.wait(me)
        began = time.thread_time()
        return F.cross_entropy(model(batch[0]), batch[1])

    turns.wait(me)
    began = time.thread_time()
    version.sharpness.evaluate(model, [batch], loss, relative_tol=0, progress=False, keep_directions=False, **options)
    turns.pass_on(me, ended=True)


def adapters(count: int, width: int = 768, rank: int = 8) -> nn.Module:
    """Linear layers with LoRA, each with a gradient."""
    import peft

    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    config = peft.LoraConfig(r=rank, target_modules=[str(i) for i in range(count)], init_lora_weights=False)
    model = peft.get_peft_model(layers, config)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    return model


def optimizer_steps(versions: list[Version], rounds: int = 40) -> list[dict[str, Any]]:
    """Take steps by both versions in turn; the first are not counted."""
    rows = []
    for name in ("adam", "muon"):
        optimizers = []
        for version in versions:
            version.install()
            optim = importlib.import_module("quotient_manifolds.optim")
            optimizers.append(optim.create_quotient_lora_optimizer(adapters(48), lr=1e-4, optimizer=name))
            version.times = []
            version.uninstall()
        for _ in range(rounds):
            for version, optimizer in zip(versions, optimizers, strict=True):
                version.install()
                began = time.thread_time()
                optimizer.step()
                version.times.append(time.thread_time() - began)
                version.uninstall()
        ratios = [b / a for a, b in zip(*(v.times[3:] for v in versions), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({"optimizer": name, "step": round(middle, 3), "step_quartiles": [round(low, 3), round(high, 3)],
                     "seconds": [round(statistics.median(v.times[3:]), 4) for v in versions]})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", help="commit to compare with")
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--measures", nargs="*", default=list(RADII))
    parser.add_argument("--optimizers", action="store_true", help="measure steps of optimisers instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root, rows = Path(__file__).resolve().parents[1], []
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", options.old, *PACKAGES], cwd=root, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
        versions = [Version(Path(place)), Version(root)]
        if options.optimizers:
            write("commits_optimizers", [{"old": options.old, **row} for row in optimizer_steps(versions)])
            return
        torch.manual_seed(0)
        model = Classifier(options.model).eval()
        batch = torch.randn(options.batch, 3, 224, 224), torch.randint(1000, (options.batch,))
        for name in options.measures:
            turns, search = Turns(versions), {"measure": name, "rho": RADII[name], "steps": options.steps}
            copies = [Classifier(options.model).eval() for _ in versions]
            threads = []
            for i, (version, copy) in enumerate(zip(versions, copies, strict=True)):
                copy.load_state_dict(model.state_dict())
                version.times = []
                threads.append(threading.Thread(target=measure, args=(version, i, turns, copy, batch, search)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            steps = options.steps - 1
            ratios = [b / a for a, b in zip(*(v.times[-steps:] for v in versions), strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            before = [sum(v.times[:-steps]) for v in versions]
            rows.append(
                {
                    "measure": name, "model": options.model, "batch": options.batch, "old": options.old,
                    "step": round(middle, 3), "step_quartiles": [round(low, 3), round(high, 3)],
                    "seconds": [round(statistics.median(v.times[-steps:]), 2) for v in versions],
                    "before_the_steps": round(before[1] / before[0], 3),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    write(f"commits_{options.batch}", rows)


if __name__ == "__main__":
    main()
