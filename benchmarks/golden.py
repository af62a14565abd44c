"""Compare this checkout with another commit in some hundred numbers, all in float64.

``python -m benchmarks.golden COMMIT`` prints each number's relative difference, largest last, and ends with 1 if one is
above 1e-8. Every commit runs its own copy of this file, so a number survives a renamed function: keep its name.
Without COMMIT it prints the numbers of the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-8
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
#: A radius at which the loss rises by a few per cent, and the ascent.
SEARCHES = {
    "euclidean": (0.05, "power"), "adaptive": (0.2, "power"), "geodesic-inv": (0.05, "power"),
    "geodesic-mix": (0.02, "power"), "complete-inv": (0.05, "power"), "complete-mix": (0.02, "power"),
}  # fmt: skip
Numbers = Iterator[tuple[str, float]]


def _texts(**more: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 11, (6, 5))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def networks() -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Networks with heads, RoPE, tied embeddings, and LoRA; no RMSNorm, which computes in single precision."""
    import peft
    import transformers as tf

    words = {"vocab_size": 11, "max_position_embeddings": 8}
    yield (
        "vit",
        tf.ViTForImageClassification(
            tf.ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1, num_labels=3, hidden_act="relu")
        ),
        {"pixel_values": torch.randn(6, 1, 8, 8), "labels": torch.randint(3, (6,))},
    )
    causal = _texts()
    causal["labels"] = causal["input_ids"]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    gpt2 = tf.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, n_inner=12, **special)
    yield "gpt2", tf.GPT2LMHeadModel(gpt2), causal
    neox = tf.GPTNeoXConfig(**SMALL, **words, **special, rotary_pct=0.5)
    yield "gpt_neox", tf.GPTNeoXForCausalLM(neox), causal
    bert = tf.BertForSequenceClassification(tf.BertConfig(**SMALL, **words, num_labels=2))
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=3, target_modules=["query", "value", "dense"])
    yield "lora", peft.get_peft_model(bert, config), _texts(labels=torch.randint(2, (6,)))


def made() -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """The networks in double precision, without dropout; no weight is zero, as LoRA's B would be."""
    torch.manual_seed(0)
    for name, model, batch in networks():
        model = model.double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        yield name, model, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy in double precision; that of transformers' language models is in single."""
    labels = batch["labels"]
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    if labels.dim() > 1:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def measures(model: nn.Module, batch: dict[str, torch.Tensor]) -> Numbers:
    """What ``evaluate`` and its relatives find."""
    import sharpness

    for measure, (rho, ascent) in SEARCHES.items():
        options: dict[str, Any] = {"measure": measure, "progress": False}
        found = sharpness.evaluate(model, [batch], loss, rho=rho, steps=6, relative_tol=0, ascent=ascent, **options)
        yield f"{measure}, worst", float(found)
        # By older commits the average is a statistic of evaluate.
        mean = getattr(sharpness, "average", partial(sharpness.evaluate, statistic="average"))
        average = mean(model, [batch], loss, rho=rho, num_samples=3, **options)
        yield f"{measure}, average", float(average)
        yield f"{measure}, gradient norm", float(sharpness.gradient_norm(model, [batch], loss, **options))
    for measure in ("geodesic-inv", "complete-inv"):
        options = {"measure": measure, "progress": False}
        found = sharpness.evaluate(model, [batch], loss, rho=0.05, steps=6, relative_tol=0, ascent="apgd", **options)
        yield f"{measure}, Auto-PGD", float(found)
    yield (
        "Hessian",
        float(sharpness.hessian(model, [batch], loss, progress=False, measure="geodesic-inv")),
    )


def comparisons(model: nn.Module) -> Numbers:
    """Distances, canonical form, aligning."""
    from quotient_manifolds.symmetries import ALL, canonicalize_, find, model_distance
    from quotient_manifolds.symmetries.whole import align_models

    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.02 * torch.randn_like(p))
    found = find(model)
    yield "number of pairs", float(len(found.pairs) + len(found.refused))
    for metric in ("inv", "mix"):
        yield f"distance, {metric}", model_distance(model, other, metric=metric).total
    if any("lora" in name for name, _ in model.named_parameters()):
        return
    yield "distance of aligned networks", align_models(model, other)[1].distance
    canonical = copy.deepcopy(model)
    found = find(canonical, scope=ALL)
    yield "dimension of the symmetries", float(found.dimension)
    canonicalize_(canonical, dataclasses.replace(found, pairs=()))
    yield "size of the canonical form", math.sqrt(sum(float(p.detach().square().sum()) for p in canonical.parameters()))


def steps(model: nn.Module, batch: dict[str, torch.Tensor]) -> Numbers:
    """Losses after five steps of each optimiser, and of GeodesicSAM."""
    import sharpness
    from quotient_manifolds.optim import QuotientSGD, create_quotient_optimizer
    from quotient_manifolds.symmetries import find

    def sgd(m: nn.Module) -> Any:
        weights = {name: p for name, p in m.named_parameters() if p.requires_grad}
        found = find(m).without_null().restricted(weights)
        held = {name for pair in found.pairs for name in pair.names}
        return QuotientSGD([(n, p) for n, p in weights.items() if n in held], found.pairs, lr=1e-2, momentum=0.5)

    def sam(m: nn.Module) -> Any:
        base = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05)
        return sharpness.GeodesicSAM(m, base, rho=0.05)

    makes: dict[str, Callable[[nn.Module], Any]] = {
        "QuotientAdam": lambda m: create_quotient_optimizer(m, lr=1e-2),
        "QuotientMuon": lambda m: create_quotient_optimizer(m, lr=1e-2, optimizer="muon"),
        "QuotientSGD": sgd,
        "GeodesicSAM": sam,
    }
    for name, make in makes.items():
        trained = copy.deepcopy(model)
        optimizer = make(trained)

        def closure(trained: nn.Module = trained, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(trained, batch)
            found.backward()
            return found

        for _ in range(5):
            optimizer.step(closure)
        yield name, float(closure())


def geometry() -> Numbers:
    """Maps of the manifolds, at random points."""
    from quotient_manifolds import GLQuotientInv, GLQuotientMix

    torch.manual_seed(2)
    for manifold in (GLQuotientInv(6, 5), GLQuotientMix(6, 5)):
        name = type(manifold).__name__
        x = torch.randn(3, 11, 2, dtype=torch.float64)
        u, v = (manifold.proju(x, 0.1 * torch.randn_like(x)) for _ in range(2))
        end = manifold.expmap(x, u)
        yield f"{name}, inner product", float(manifold.inner(x, u, v).sum())
        yield f"{name}, geodesic", float(manifold.to_matrix(end).norm())
        yield f"{name}, retraction", float(manifold.to_matrix(manifold.retr(x, u)).norm())
        yield f"{name}, transport", float(manifold.norm(end, manifold.transp(x, end, v)).sum())
        yield f"{name}, distance", float(manifold.dist(x, end).sum())
        yield f"{name}, mean", float(manifold.to_matrix(manifold.mean(torch.stack([x, end]))).norm())


def numbers() -> dict[str, float]:
    """Compute all of them; what raises is NaN, and said."""
    found: dict[str, float] = {}

    def keep(name: str, rows: Numbers) -> None:
        try:
            for row, value in rows:
                found[f"{name}: {row}"] = value
        except Exception as error:
            found[f"{name}: {type(error).__name__}"] = math.nan
            print(f"{name}: {error!r}", file=sys.stderr)

    keep("manifolds", geometry())
    for name, model, batch in made():
        keep(name, measures(model, batch))
        keep(f"{name}, another", comparisons(model))
        keep(f"{name}, training", steps(model, batch))
    return found


def run(folder: Path, script: Path) -> dict[str, float]:
    """Run a script with the packages of a folder."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, **threads, "PYTHONPATH": str(folder)}, check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout)


def compare(old: dict[str, float], new: dict[str, float]) -> list[tuple[float, str]]:
    """Relative differences; infinite where one has no such number."""
    rows = []
    for name in {**old, **new}:
        a, b = old.get(name, math.nan), new.get(name, math.nan)
        apart = abs(a - b) / max(abs(a), abs(b), 1e-300)
        rows.append((apart if math.isfinite(apart) else math.inf, name))
    return sorted(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="commit to compare with")
    options = parser.parse_args()
    if options.old is None:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = numbers()
        print(json.dumps(found, indent=1))
        return 0
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", options.old], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
        old = run(Path(place), Path(place) / "benchmarks" / Path(__file__).name)
    rows = compare(old, run(ROOT, Path(__file__)))
    for apart, name in rows:
        print(f"{apart:8.1e}  {name}")
    return int(rows[-1][0] > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
