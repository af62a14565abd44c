"""Pre-training: attention on the quotient against AdamW, Muon and Muon head by head.

``python -m studies.pretraining --ag-news A`` trains a byte-level language model (three layers, width 128, four heads)
on the texts of AG News, with rotary (Llama) or learned positions (OPT); A is a folder as in ``lora_text.py``. A method
says what trains the matrices of attention, and what the other hidden matrices; AdamW trains embeddings, head and
vectors. It has two rates, that of attention and that of all the rest; those of AdamW and Muon are one.

1. *Tuning*: from a start on the grid 1, 2, 5, 10 … up to a rate, or two, whose neighbours on the grid are all worse by
   the mean of two seeds. Methods with two rates start with the best of AdamW or Muon for the rest.
2. *Final*: five other seeds at the best rates.
3. *Why*: the same with variants of one method, whose rate of attention alone is tuned.

A run is one line of JSON, appended when it has ended; those that are there are not done again. Rates warm up linearly
for a twelfth of the steps and then fall linearly to 0. ``--report`` prints the tables. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import RESULTS, interval
from quotient_manifolds.optim import create_quotient_optimizer
from quotient_manifolds.optim.metric import StepMetric, trace
from quotient_manifolds.optim.stack import Stack
from quotient_manifolds.symmetries import GL, SymmetricPair, find, pair, slot

from .lora_text import ag_news

RATES = tuple(round(m * 10.0**e, 9) for e in range(-5, 2) for m in (1, 2, 5))
TUNING, SEEDS = (100, 101), (0, 1, 2, 3, 4)
BATCH, CONTEXT, TEST = 8, 64, 512
WIDTH, LAYERS, HEADS = 128, 3, 4
MOMENTUM = 0.95
Point = tuple[float, float]


class Method(NamedTuple):
    """What trains attention and the other hidden matrices, the rates where tuning starts, and what it moves.

    The rate of the rest starts at the best of a method (``base``) if there is one. Tuning moves both rates at once
    ("together"), that of "attention" alone, "each" of the two, or none.
    """

    attention: str
    hidden: str
    start: float
    other: float
    tune: str = "together"
    base: str = ""


METHODS = {
    "AdamW": Method("adamw", "adamw", 5e-3, 5e-3),
    "Muon": Method("muon", "muon", 1e-2, 1e-2),
    "Muon per head": Method("heads", "muon", 1e-2, 1e-2),
    "QuotientAdam, AdamW": Method("quotient adam", "adamw", 2e-3, 2e-3),
    "QuotientMuon, AdamW": Method("quotient muon", "adamw", 1e-2, 2e-3, "attention", "AdamW"),
    "QuotientMuon, Muon": Method("quotient muon", "muon", 5e-2, 1e-2, "each", "Muon"),
}
WHY = {
    "QuotientMuon, Muon at a twentieth": Method("quotient muon", "muon", 2e-2, 1e-3, "none"),
    "QuotientMuon without planes, Muon": Method("quotient whole", "muon", 1e-2, 1e-2, "attention", "Muon"),
    "QuotientMuon on vo, Muon": Method("quotient vo", "muon", 1e-2, 1e-2, "attention", "Muon"),
    "QuotientMuon on qk, Muon": Method("quotient qk", "muon", 1e-2, 1e-2, "attention", "Muon"),
    "QuotientMuon without ridge, Muon": Method("quotient bare", "muon", 1e-2, 1e-2, "attention", "Muon"),
    "AdamW on attention, Muon": Method("adamw", "muon", 2e-3, 1e-2, "attention", "Muon"),
    "Muon, attention at its own rate": Method("muon", "muon", 1e-2, 1e-2, "attention", "Muon"),
}
ALL = {**METHODS, **WHY}
POSITIONS = ("rotary", "learned")


class Unit(NamedTuple):
    """A run."""

    positions: str
    steps: int
    decay: float
    method: str
    lr: float
    other_lr: float
    seed: int


def network(positions: str) -> nn.Module:
    """A language model over bytes, with random weights."""
    import transformers

    sizes = {"vocab_size": 256, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    more = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "use_cache": False}
    if positions == "rotary":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, **more, intermediate_size=8 * WIDTH // 3)
        )
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(**sizes, **more, ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH, dropout=0.0)
    )


class MuonByHead(torch.optim.Muon):
    """Muon whose matrices are the rows (or, of outputs, the columns) of single heads."""

    def __init__(self, matrices: dict[str, nn.Parameter], lr: float, **options: Any) -> None:
        self.parts = []
        for name, w in matrices.items():
            dim = 1 if "o_proj" in name or "out_proj" in name else 0
            views = w.detach().chunk(HEADS, dim)
            self.parts.append((w, dim, [nn.Parameter(v) for v in views]))  # which share the memory of w
        super().__init__([p for _, _, parts in self.parts for p in parts], lr, **options)

    def step(self, closure: Any = None) -> None:
        for w, dim, parts in self.parts:
            for p, g in zip(parts, w.grad.chunk(HEADS, dim), strict=True):
                p.grad = g
        super().step(closure)


def unrotated(p: SymmetricPair, model: nn.Module) -> SymmetricPair:
    """The pair that queries and keys of a head would be without RoPE."""
    if p.part != "rotary" or p.head is None:
        return p
    size = WIDTH // HEADS
    rows = slice(size * p.head, size * (p.head + 1))
    G, H = (slot(model, side[0].name, rows, transpose=True) for side in (p.G, p.H))
    return pair([G], [H], GL(size), name=p.name)


def bare_metric(s: Stack, grams: Tensor) -> StepMetric:
    """The metric of QuotientMuon with 1e-3 of a product's norm as the least singular value, and no more."""
    M, N = grams.unbind(-3)
    return StepMetric(M, N, s.scale, 1e-6 * s.scale**2 * trace(M @ N)[..., None, None])


def optimizers(model: nn.Module, method: Method, unit: Unit) -> list[torch.optim.Optimizer]:
    """The optimisers of a method, which together train all parameters."""
    muon = {"adjust_lr_fn": "match_rms_adamw", "momentum": MOMENTUM, "weight_decay": unit.decay}
    attention, hidden = method.attention, method.hidden
    if attention.startswith("quotient"):
        kind = attention.split()[1]
        found = find(model).without_null()
        if kind in ("qk", "vo"):
            found = found.of_kind([kind])
        if kind == "whole":
            found = replace(found, pairs=tuple(unrotated(p, model) for p in found.pairs))
        own = {} if kind == "adam" else {"momentum": MOMENTUM}
        made = create_quotient_optimizer(
            model, lr=unit.lr, optimizer="adam" if kind == "adam" else "muon", symmetries=found, others=hidden,
            other_params_lr=unit.other_lr, weight_decay=unit.decay, **own,
        )  # fmt: skip
        made.certify = kind != "whole"
        if kind == "bare":
            made._metric = bare_metric  # type: ignore[method-assign]
        return [made]
    named = dict(model.named_parameters())
    matrices = {n: w for n, w in named.items() if w.dim() == 2 and "embed" not in n and "lm_head" not in n}
    parts = {
        "attention": {n: w for n, w in matrices.items() if "attn" in n},
        "hidden": {n: w for n, w in matrices.items() if "attn" not in n},
        "tables": {n: w for n, w in named.items() if w.dim() == 2 and n not in matrices},
        "vectors": {n: w for n, w in named.items() if w.dim() < 2},
    }
    groups, made = [], list[torch.optim.Optimizer]()
    for name, kind, lr in (("attention", attention, unit.lr), ("hidden", hidden, unit.other_lr)):
        if kind == "adamw":
            groups.append({"params": list(parts[name].values()), "lr": lr})
        elif kind == "heads":
            made.append(MuonByHead(parts[name], lr, **muon))
        else:
            made.append(torch.optim.Muon(list(parts[name].values()), lr, **muon))
    groups.append({"params": list(parts["tables"].values())})
    groups.append({"params": list(parts["vectors"].values()), "weight_decay": 0.0})
    return [*made, torch.optim.AdamW(groups, unit.other_lr, weight_decay=unit.decay)]


@cache
def data(folder: Path) -> tuple[Tensor, Tensor]:
    """Bytes of the training texts, and windows of the test texts."""
    train, test = (
        torch.frombuffer(bytearray("\n".join(text for text, _ in rows).encode()), dtype=torch.uint8).long()
        for rows in ag_news(folder)
    )
    starts = torch.arange(TEST) * ((len(test) - CONTEXT - 1) // TEST)
    return train, windows(test, starts)


def windows(text: Tensor, starts: Tensor) -> Tensor:
    """Windows of a text, of one byte more than the context."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean loss of the next byte, in nats."""
    return F.cross_entropy(model(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())


def run(unit: Unit, folder: Path) -> dict[str, Any]:
    """Train once."""
    train, test = data(folder)
    torch.manual_seed(unit.seed)
    model = network(unit.positions).train()
    made = optimizers(model, ALL[unit.method], unit)
    warm = max(unit.steps // 12, 1)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: min((t + 1) / warm, (unit.steps - t) / (unit.steps - warm)))
        for o in made
    ]
    generator = torch.Generator().manual_seed(unit.seed)
    losses, spent, start = [], 0.0, time.process_time()
    for _ in range(unit.steps):
        batch = windows(train, torch.randint(len(train) - CONTEXT, (BATCH,), generator=generator))
        loss = loss_of(model, batch)
        losses.append(float(loss.detach()))
        if not loss.isfinite():
            break
        model.zero_grad()
        loss.backward()
        before = time.process_time()
        for o in made:
            o.step()
        spent += time.process_time() - before
        for s in schedules:
            s.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        final = statistics.fmean(float(loss_of(model.eval(), part)) for part in test.split(64))
    return {
        **unit._asdict(), "loss": round(final, 5) if final < 100 else None,
        "train_losses": [round(v, 3) for v in losses[:: max(unit.steps // 30, 1)]],
        "seconds": round(seconds, 1), "optimizer_ms": round(1e3 * spent / len(losses), 2),
    }  # fmt: skip


Rows = list[dict[str, Any]]


def tuned(rows: Rows, positions: str, steps: int, method: str, decay: float) -> dict[Point, float]:
    """The mean loss over the seeds of the tuning at each point that has both."""
    found: dict[Point, list[float]] = {}
    for r in rows:
        if (r["positions"], r["steps"], r["method"], r["decay"]) == (positions, steps, method, decay) and (
            r["seed"] in TUNING
        ):
            loss = float("inf") if r["loss"] is None else r["loss"]
            found.setdefault((r["lr"], r["other_lr"]), []).append(loss)
    return {point: statistics.fmean(v) for point, v in found.items() if len(v) == len(TUNING)}


def beside(name: str, point: Point) -> Iterator[Point]:
    """The neighbours of a point on the grid."""
    (lr, other), method = point, ALL[name]

    def moved(rate: float, by: int) -> float:
        return RATES[RATES.index(rate) + by]

    for by in (1, -1):
        if method.tune == "together":
            yield moved(lr, by), moved(other, by)
        elif method.tune != "none":
            yield moved(lr, by), other
    if method.tune == "each":
        yield from ((lr, moved(other, by)) for by in (1, -1))


def tuning(rows: Rows, positions: str, steps: int, name: str, decay: float) -> Iterator[Unit]:
    """Go from the start to a point whose neighbours are all worse; later units are chosen when earlier rows exist."""
    method, fixed = ALL[name], (positions, steps, decay)
    first = (method.start, method.other)
    if method.base:
        first = method.start, best(rows, positions, steps, method.base, decay)[1]
    if positions != POSITIONS[0] and tuned(rows, POSITIONS[0], steps, name, decay):
        first = best(rows, POSITIONS[0], steps, name, decay)
    yield from (Unit(*fixed, name, *first, seed) for seed in TUNING)
    while True:
        done = tuned(rows, positions, steps, name, decay)
        new = next((p for p in beside(name, min(done, key=done.__getitem__)) if p not in done), None)
        if new is None:
            return
        yield from (Unit(*fixed, name, *new, seed) for seed in TUNING)


def best(rows: Rows, positions: str, steps: int, name: str, decay: float) -> Point:
    """The rates of the least loss in the tuning; where there was none, those of rotary positions, or the start."""
    done = tuned(rows, positions, steps, name, decay) or tuned(rows, POSITIONS[0], steps, name, decay)
    return min(done, key=done.__getitem__) if done else (ALL[name].start, ALL[name].other)


def units(rows: Rows, options: argparse.Namespace) -> Iterator[Unit]:
    """What is to be run, in order."""
    steps, decay = options.steps, options.decay
    for where in options.positions:
        for name in () if options.untuned else options.methods:
            yield from tuning(rows, where, steps, name, decay)
        for length in (steps, options.long):
            for seed in SEEDS[: options.seeds] if length else ():
                for name in options.methods:
                    yield Unit(where, length, decay, name, *best(rows, where, steps, name, decay), seed)


def finals(rows: Rows, steps: int, decay: float) -> dict[tuple[str, str], dict[int, float]]:
    """Losses at the best rates, by positions and method and then by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for r in rows:
        at = (r["lr"], r["other_lr"]) == best(rows, r["positions"], steps, r["method"], decay)
        if at and (r["steps"], r["decay"]) == (steps, decay) and r["seed"] in SEEDS:
            found.setdefault((r["positions"], r["method"]), {})[r["seed"]] = r["loss"]
    return found


def report(rows: Rows, steps: int, decay: float) -> Iterator[str]:
    """Tables of the losses at the best rates and of differences, with 95 % t-intervals, and of the tuning."""
    final = finals(rows, steps, decay)
    yield "| positions | method | learning rate, attention | the rest | seeds | loss | against AdamW | against Muon |"
    yield "|---|---|---|---|---|---|---|---|"
    for where, name in ((where, name) for where in POSITIONS for name in ALL if len(final.get((where, name), ())) > 1):
        own, (lr, other) = final[where, name], best(rows, where, steps, name, decay)
        mark = "" if tuned(rows, where, steps, name, decay) else "*"
        cells = [where, name, f"{lr:g}{mark}", f"{other:g}{mark}", str(len(own)), plus_minus([*own.values()])]
        for rival in ("AdamW", "Muon"):
            known = final.get((where, rival), {})
            differences = [loss - known[seed] for seed, loss in own.items() if seed in known]
            cells.append("" if name == rival else plus_minus(differences, "+"))
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| positions | method | loss in tuning, by learning rate of attention and of the rest |"
    yield "|---|---|---|"
    for where, name in ((where, name) for where in POSITIONS for name in ALL):
        if found := sorted(tuned(rows, where, steps, name, decay).items()):
            yield f"| {where} | {name} | {'; '.join(f'{lr:g}, {other:g}: {loss:.3f}' for (lr, other), loss in found)} |"


def plus_minus(values: list[float], sign: str = "") -> str:
    """The mean and half its 95 % t-interval."""
    mean, half = interval(values) if len(values) > 1 else (float("nan"), float("nan"))
    return f"{mean:{sign}.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ag-news", type=Path, help="folder with alps/dev.tsv and official/test.csv")
    parser.add_argument("--out", type=Path, default=RESULTS / "pretraining.jsonl")
    parser.add_argument("--positions", nargs="+", default=list(POSITIONS))
    parser.add_argument("--methods", nargs="+", default=list(ALL))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="runs at the best rates")
    parser.add_argument("--untuned", action="store_true", help="no tuning but that which is there")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--long", type=int, default=0, help="steps of further runs at the same rates")
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
        if options.out.exists()
        else []
    )
    if options.report:
        print("\n".join(report(rows, options.steps, options.decay)))
        return
    done = {tuple(r[k] for k in Unit._fields) for r in rows}
    for unit in units(rows, options):
        if unit in done:
            continue
        row = run(unit, options.ag_news)
        rows.append(row)
        done.add(unit)
        with options.out.open("a", encoding="utf-8") as file:  # one write, at the end of the file
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print({k: v for k, v in row.items() if k != "train_losses"}, flush=True)


if __name__ == "__main__":
    main()
