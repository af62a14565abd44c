"""How many vectors of the weights' size a step of the ascent reads and writes, beside the model's own passes.

Operations on floating-point tensors of more than 10,000 entries are counted by a dispatch mode, with what they read and
what they write; views move nothing. From this a bare forward and backward pass is subtracted. ``of_memory`` leaves out
what the last operations have left in a cache of 8 MiB, which vectors that are processed piece by piece are. ViT-B/32.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sharpness

from ._common import write
from .iteration_cost import RADII, Classifier

LEAST = 10_000
#: What writes its first argument without reading it.
OVERWRITING = ("copy_", "fill_", "zero_", "normal_")
#: What makes memory without content or reads nothing of its argument, and what only looks at it.
IDLE = ("empty", "new_empty", "_unsafe_view", "detach")
CACHE = 2**23


def large(found: Any) -> dict[tuple[int, int], int]:
    """Bytes of the large floating-point tensors among the leaves, by where they lie; of an expanded one its storage."""
    tensors = [t for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_floating_point() and t.numel() > LEAST]
    sizes = {(t.data_ptr(), t.numel()): (t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors}
    return {key: min(size) for key, size in sizes.items()}


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, and those of them that are not in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.of_memory = 0
        #: What was touched last, with its bytes, and which of it will have to be written to memory.
        self.cached, self.dirty = OrderedDict[tuple[int, int], int](), set[tuple[int, int]]()

    def touch(self, tensors: dict[tuple[int, int], int], known: Container[tuple[int, int]]) -> None:
        """Count tensors, of which those that are known cost no memory's time, and keep them in the cache."""
        self.bytes += sum(tensors.values())
        self.of_memory += sum(size for key, size in tensors.items() if key not in known)
        self.cached.update(tensors)
        for key in tensors:
            self.cached.move_to_end(key)
        while sum(self.cached.values()) > CACHE:
            self.dirty.discard(self.cached.popitem(last=False)[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), func._schema.name.removeprefix("aten::")
        returned = [r.alias_info for r in func._schema.returns]
        if any(a is not None and not a.is_write for a in returned) or name in IDLE:
            return out
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        changed = large([given[a.name] for a in func._schema.arguments if a.alias_info is not None and a.name in given])
        blind = changed if "out" in kwargs or name.endswith(OVERWRITING) else {}
        read = {key: size for key, size in large(given).items() if key not in blind} if name != "new_zeros" else {}
        written = changed or large(out)
        self.touch(read, self.cached)
        self.touch(written, self.dirty)
        self.dirty |= written.keys() & self.cached.keys()
        return out


def moved(model: Classifier, batch: tuple[Tensor, Tensor], measure: str | None, steps: int = 0) -> Traffic:
    """Count a measurement of so many steps, or one bare pass."""
    with Traffic() as traffic:
        if measure is None:
            torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), list(model.parameters()))
        else:
            sharpness.evaluate(
                model, [batch], measure=measure, rho=RADII[measure], steps=steps, relative_tol=0, progress=False,
                keep_directions=False,
            )  # fmt: skip
    return traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=2, help="which does not matter")
    parser.add_argument("--measures", nargs="+", default=list(RADII))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier(options.model).eval()
    batch = torch.randn(options.batch, 3, 224, 224), torch.randint(1000, (options.batch,))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    bare, rows = moved(model, batch, None), []
    for measure in options.measures:
        few, more = (moved(model, batch, measure, steps) for steps in (2, 4))
        row = {
            k: ((getattr(more, k) - getattr(few, k)) / 2 - getattr(bare, k)) / weights for k in ("bytes", "of_memory")
        }
        rows.append({"measure": measure, **{k: round(v, 2) for k, v in row.items()}})
        print(rows[-1], flush=True)
    write("traffic", rows, model=options.model, batch=options.batch)


if __name__ == "__main__":
    main()
