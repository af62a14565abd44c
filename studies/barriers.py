"""Barriers between networks trained apart: the loss between aligned weights, by the symmetries that align them.

``python -m studies.barriers --mnist M --ag-news A --out O`` trains five pairs each of vision transformers on MNIST and
of byte-level GPTs on the texts of AG News (two pre-norm layers, four heads) at widths 64, 128 and 256; the two networks
of a pair differ in their initial weights and in the order of the data. Checkpoints are kept in the folder O.

Then the second network of every pair is aligned with the first by more and more symmetries, and the test loss is
measured at eleven points of the straight line between the weights. Its barrier is the largest excess over the straight
line between the losses of the ends. "heads not moved inside" has the rotation and the permutations of all kinds, but no
group elements inside heads; "geodesic" leads attention's pairs along geodesics (metric inv).

What is there is neither trained nor measured again. ``--report`` prints the table and draws the figure; ``--random N``
aligns N pairs of small networks with random weights, and counts where all symmetries lead nearer than permutations.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import RESULTS, interval
from quotient_manifolds.symmetries import PairStack, find, stacks
from quotient_manifolds.symmetries.whole import align_models
from sharpness.plots import figure

from ._apart import PAIRS, TASKS, WIDTHS, Data, Trained, loaded, scores_of, train

#: What aligns the second network with the first; None leaves both as they are.
METHODS: dict[str, tuple[str, ...] | None] = {
    "nothing": None,
    "canonical form": (),
    "permutations": ("permutations",),
    "rotation and permutations": ("rotation", "permutations"),
    "all kinds": ("rotation", "permutations", "heads", "scales"),
}
ALL = "all kinds"
TIMES = tuple(i / 10 for i in range(11))


@torch.no_grad()
def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and error over the test data."""
    found = torch.cat([scores_of(model, part) for part in x.split(250)])
    error = (found.argmax(-1) != y).double().mean()
    return float(F.cross_entropy(found.flatten(0, -2).double(), y.flatten())), float(error)


def straight(one: nn.Module, other: nn.Module) -> Callable[[float], nn.Module]:
    """The networks on the straight line between the weights; the same module at every time."""
    between = copy.deepcopy(one)

    @torch.no_grad()
    def at(t: float) -> nn.Module:
        for p, a, b in zip(between.parameters(), one.parameters(), other.parameters(), strict=True):
            p.copy_(a.lerp(b, t))
        return between

    return at


def of_heads(model: nn.Module) -> list[PairStack]:
    """Attention's pairs, as stacks."""
    return stacks(find(model).of_full_rank().pairs, dict(model.named_parameters()))


def geodesic(one: nn.Module, other: nn.Module) -> Callable[[float], nn.Module]:
    """The same, with attention's pairs on geodesics; a pair without a geodesic goes straight on."""
    line = straight(one, other)
    ways, sides = [], [dict(m.named_parameters()) for m in (one, other)]
    for a, b in zip(of_heads(one), of_heads(other), strict=True):
        x, y = (s.gather(side).detach().double() for s, side in zip((a, b), sides, strict=True))
        ways.append((a.manifold("inv"), x, a.manifold("inv").logmap(x, y, on_error="nan")))

    @torch.no_grad()
    def at(t: float) -> nn.Module:
        between = line(t)
        weights = dict(between.named_parameters())
        for stack, (manifold, x, v) in zip(of_heads(between), ways, strict=True):
            known = v.isfinite().flatten(1).all(1)
            there = stack.gather(weights).detach()
            there[known] = manifold.expmap(x[known], t * v[known]).to(there)
            stack.scatter_(there, weights)
        return between

    return at


def compared(first: Trained, options: argparse.Namespace, data: Data, done: set[Any]) -> None:
    """Measure the paths between the two networks of a pair, by all methods; append a row for each."""
    one, other = (loaded(first._replace(seed=first.seed + i), options.out) for i in range(2))
    x, y = data.test(first.task)
    for method, by in METHODS.items():
        names = (method, f"{method}, heads not moved inside", f"{method}, geodesic") if method == ALL else (method,)
        if all((*first, name) in done for name in names):
            continue
        start = time.process_time()
        a, paths = one, {method: straight(one, other)}
        if by is not None:
            b, found = align_models(one, other, by=by)
            a, paths = found.reference, {method: straight(found.reference, b)}
        seconds = round(time.process_time() - start, 1)
        if method == ALL:
            cells = {name: replace(m, inner={}) for name, m in found.element.cells.items()}
            paths[names[1]] = straight(a, replace(found.element, cells=cells).of(other))
            paths[names[2]] = geodesic(a, b)
        for name, path in paths.items():
            losses, errors = zip(*(measured(path(t), x, y) for t in TIMES), strict=True)
            ends = [copy.deepcopy(path(t)) for t in (0.0, 1.0)]
            append(
                {
                    **first._asdict(),
                    "method": name,
                    "distance": apart(*ends),
                    "losses": rounded(losses),
                    "errors": rounded(errors),
                    "barrier": excess(losses),
                    "barrier_of_error": excess(errors),
                    "seconds": seconds,
                }
            )


def apart(one: nn.Module, other: nn.Module) -> float:
    """The distance of all weights, relative to the norm of the first's."""
    a, b = (nn.utils.parameters_to_vector(m.parameters()).detach().double() for m in (one, other))
    return round(float((a - b).norm() / a.norm()), 4)


def rounded(values: Any) -> list[float]:
    """Three decimals."""
    return [round(v, 3) for v in values]


def excess(values: Any) -> float:
    """The largest excess over the straight line between the ends, at least 0 by the ends themselves."""
    a, b = values[0], values[-1]
    return round(max(v - ((1 - t) * a + t * b) for t, v in zip(TIMES, values, strict=True)), 4)


def append(row: dict[str, Any]) -> None:
    """Write a row, and say so."""
    with (RESULTS / "barriers.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print({k: v for k, v in row.items() if k not in ("losses", "errors")}, flush=True)


def recorded() -> list[dict[str, Any]]:
    """The rows that are there."""
    path = RESULTS / "barriers.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def small(kind: str, seed: int) -> nn.Module:
    """A small network with random weights, of an architecture for texts."""
    import transformers

    torch.manual_seed(seed)
    name, activation = {"llama": ("Llama", "silu"), "bert": ("Bert", "gelu"), "opt": ("OPT", "relu")}[kind]
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = {"ffn_dim": 32, "word_embed_proj_dim": 16, "activation_function": activation} if kind == "opt" else {}
    wide |= {"num_key_value_heads": 2, "tie_word_embeddings": False} if kind == "llama" else {}
    config = getattr(transformers, f"{name}Config")(
        **sizes,
        **wide,
        **({} if kind == "opt" else {"intermediate_size": 32, "hidden_act": activation}),
        max_position_embeddings=16,
        pad_token_id=0,
    )
    model = getattr(transformers, {"bert": "BertModel"}.get(kind, f"{name}ForCausalLM"))(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


def random_pairs(number: int) -> None:
    """Align pairs of networks with random weights by permutations and by all kinds; append a row for each."""
    done = {(r["task"], r["seed"]) for r in recorded()}
    for seed in range(0, 2 * number, 2):
        kind = ("llama", "bert", "opt")[seed // 2 % 3]
        if (f"random {kind}", seed) in done:
            continue
        one, other = small(kind, seed), small(kind, seed + 1)
        for method in ("permutations", ALL):
            start = time.process_time()
            found = align_models(one, other, by=METHODS[method] or ())[1]
            append(
                {
                    "task": f"random {kind}",
                    "width": 16,
                    "seed": seed,
                    "method": method,
                    "distance": round(found.distance / found.size, 4),
                    "seconds": round(time.process_time() - start, 1),
                }
            )


def nearer(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """In how many pairs all kinds lead at least as near as permutations alone, and of how many."""
    by = {(r["task"], r["width"], r["seed"], r["method"]): r["distance"] for r in rows}
    pairs = [key[:3] for key in by if key[3] == ALL]
    return sum(by[(*pair, ALL)] <= by[(*pair, "permutations")] for pair in pairs), len(pairs)


def complete(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate the pairs of trained networks that were measured by all methods."""
    table = pd.DataFrame([r for r in rows if "losses" in r])
    number = table.method.nunique()
    pairs = table.groupby(["task", "width", "seed"], sort=False)
    return pairs.filter(lambda part: len(part) == number).sort_values(["task", "width"], ascending=[False, True])


def report(rows: list[dict[str, Any]]) -> None:
    """Print a table in Markdown: means over the pairs with t-intervals, and differences within pairs."""
    table = complete(rows)
    print(
        "| networks | width | pairs | aligned by | distance | barrier of the loss | of the error | against all kinds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (task, width), part in table.groupby(["task", "width"], sort=False):
        whole = part[part.method == ALL].set_index("seed").barrier
        for method, found in part.groupby("method", sort=False):
            cells = [spread(found[name], n) for name, n in (("distance", 2), ("barrier", 2), ("barrier_of_error", 2))]
            against = "" if method == ALL else spread(found.set_index("seed").barrier - whole, 2, "+")
            print(f"| {task} | {width} | {len(found)} | {method} | {' | '.join(cells)} | {against} |")
    print("\nAll kinds lead at least as near as permutations in {} of {} pairs.".format(*nearer(rows)))


def spread(values: Any, digits: int, sign: str = "") -> str:
    """Mean ± half-width of the 95 % t-interval."""
    mean, half = interval(values)
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean excess of the loss along the path, a row of panels for each task and a column for each width."""
    table = complete(rows)
    names = {"vit": "ViT, MNIST", "gpt": "GPT, bytes of AG News"}
    widths = sorted(set(table.width))
    shown = [m for m in (*METHODS, f"{ALL}, geodesic") if m != "canonical form"]
    colours = dict(zip(shown, ("#999999", "#D55E00", "#E69F00", "#0072B2", "#009E73"), strict=True))
    with figure(path, (4.6 * len(widths), 7.6), len(names), len(widths)) as (page, grid):
        for (task, width), axis in zip(product(names, widths), grid.flat, strict=True):
            part = table[(table.task == task) & (table.width == width)]
            axis.set_visible(len(part) > 0)
            for method, style in zip(shown, ("-", "-.", "--", "-", ":"), strict=True) if len(part) else ():
                losses = np.array(part[part.method == method].losses.tolist())
                line = losses[:, :1] + np.array(TIMES) * (losses[:, -1:] - losses[:, :1])
                axis.plot(TIMES, (losses - line).mean(0), style, color=colours[method], label=method)
            axis.set(title=f"{names[task]}, width {width}", xlabel="t", ylabel="excess of the test loss (nats)")
        page.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown))


def main() -> None:
    """Train, align, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--ag-news", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    random_pairs(options.random)
    if options.report:
        report(recorded())
        draw(recorded(), RESULTS.parent / "docs" / "images" / "barriers.png")
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    data = Data(options.mnist, options.ag_news)
    done = {(r["task"], r["width"], r["seed"], r["method"]) for r in recorded()}
    for width in options.widths:
        for task in options.tasks:
            for seed in range(2 * PAIRS):
                one = Trained(task, width, seed)
                path = options.out / f"{one}.safetensors"
                if not path.exists():
                    start = time.process_time()
                    train(one, data, path)
                    loss, error = measured(loaded(one, options.out), *data.test(task))
                    print(f"{one}: loss {loss:.4f}, error {error:.4f}, {time.process_time() - start:.0f} s", flush=True)
                if seed % 2:
                    compared(Trained(task, width, seed - 1), options, data, done)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
