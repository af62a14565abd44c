"""Cost of a step of the ascent, as a ratio to a bare forward and backward pass.

Bare passes and ascents alternate in one process; a step's cost is the time of an ascent divided by its steps, without
the set-up of the geometry, which is reported apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quotient_manifolds.symmetries.whole import Wiring, register_wiring, wiring_of
from quotient_manifolds.weights import preserve_model_state
from sharpness.ascent import ASCENTS
from sharpness.losses import BatchLoss, Objective
from sharpness.measures import MEASURES
from sharpness.space import WeightSpace

from ._common import write

RADII = {"geodesic-inv": 0.05, "complete-inv": 0.05, "geodesic-mix": 0.01, "adaptive": 0.2, "euclidean": 0.02}

_LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
#: Shapes of text models, with random weights: those of BERT-base, of TinyLlama, and two to try things with.
TEXT_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "bert-base": ("Bert", {}), "llama-1b": ("Llama", _LLAMA_1B), "bert-tiny": ("Bert", _TINY),
    "llama-tiny": ("Llama", _TINY),
}  # fmt: skip


class Classifier(nn.Module):
    """open_clip's image tower with a linear head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import open_clip

        self.visual = open_clip.create_model(name, pretrained=None).visual
        self.head = nn.Linear(self.visual.output_dim, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.visual(x))


@register_wiring(Classifier)
def tower(model: Classifier) -> Wiring:
    """Wire the tower; the head reads its projection."""
    found = wiring_of(model, "visual")
    assert found is not None
    return found


def build(options: argparse.Namespace) -> tuple[nn.Module, Callable[[int], Any]]:
    """Give a model and what makes a batch of a size for it."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    if options.model in TEXT_MODELS:
        import transformers

        kind, config = TEXT_MODELS[options.model]
        model = getattr(transformers, f"{kind}Config")(**config)
        name = "ForCausalLM" if kind == "Llama" else "ForSequenceClassification"
        with device:
            built = getattr(transformers, kind + name)(model)

        def words(size: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(1000, (size, options.length), device=device)
            return {"input_ids": ids, "labels": ids if kind == "Llama" else ids[:, 0] % 2}

        return built.eval(), words
    built = Classifier(options.model).to(device)
    return built.eval(), lambda size: (
        torch.randn(size, 3, 224, 224, device=device), torch.randint(1000, (size,), device=device)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ViT-B-32", help=f"of open_clip, or {', '.join(TEXT_MODELS)}")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--length", type=int, default=128, help="words of a text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--measures", nargs="+", default=list(RADII))
    parser.add_argument("--ascent", default="power", choices=list(ASCENTS))
    parser.add_argument("--name", default="iteration_cost")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    device = torch.device(options.device)
    with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Time everything, in the precision that is set."""
    model, make_batch = build(options)
    sync = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    rows, objective = [], Objective()
    for size in options.batch:
        batch = make_batch(size)
        parameters = list(model.parameters())

        def bare(batch=batch, parameters=parameters) -> float:
            start = time.perf_counter()
            loss = objective(model, batch).loss
            torch.autograd.grad(loss, parameters, allow_unused=True)
            sync()
            return time.perf_counter() - start

        bare()
        for name in options.measures:

            def measured(name=name, batch=batch, bare=bare) -> tuple[float, list[tuple[float, float, float]]]:
                start = time.perf_counter()
                space = WeightSpace(model, MEASURES[name])
                sync()
                setup = time.perf_counter() - start
                with space.attached():
                    task = BatchLoss(space, objective, batch, 0)

                    def ascend(task=task, space=space, name=name) -> float:
                        start, known, last = time.perf_counter(), [task.base], space.empty()

                        def f(x: torch.Tensor, out: torch.Tensor | None) -> float:
                            if known and out is not None:  # the first point
                                out.copy_(task.base_gradient)
                                return known.pop()
                            return task(x, last if out is None else out)  # the last step is given a backward pass

                        ASCENTS[options.ascent](f, space.empty().zero_(), RADII[name], options.steps)
                        sync()
                        return (time.perf_counter() - start) / options.steps

                    ascend()
                    return setup, [(bare(), ascend(), bare()) for _ in range(options.repeats)]

            state = preserve_model_state(model)
            with state, state:
                setup, pairs = measured()
            ratios = [step / ((before + after) / 2) for before, step, after in pairs]
            rows.append(
                {
                    "model": options.model, "batch": size, "measure": name, "ascent": options.ascent,
                    "device": options.device, "precision": options.precision,
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(r, 3) for r in ratios],
                    "bare_seconds": round(statistics.median(b for b, _, _ in pairs), 4),
                    "setup_seconds": round(setup, 3),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    write(options.name, rows)


if __name__ == "__main__":
    main()
