"""What the gradient's certificate finds of symmetries, and of a violation that changes the outputs by one percent.

Residuals of a trained BERT (a transformers folder), of an untrained ViT-B/32 and of a Llama of 300 million weights,
over random batches, in float32 and under bfloat16 autocast; the certificate's processor time as a share of a forward
and backward pass of 32 examples.

The certificate is one reading of the weights and gradients of the pairs, whatever the batch: its share falls with the
number of tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._common import write
from quotient_manifolds.symmetries import Certificate, PairStack, certify, find, stacks

#: A model, and what draws a random batch: of so many examples, of so many tokens.
Made = tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]
#: Batches whose residuals are looked at, and those of the passes that the certificate's time is held against.
SMALL = {"bert": (16, 24), "vit-b-32": (4, 50), "llama-300m": (1, 32)}
PASSES = {"bert": [(32, 24), (32, 128)], "vit-b-32": [(32, 50)], "llama-300m": [(32, 32), (32, 64)]}
#: What ``sharpness.evaluate`` takes for rounding of float32.
FLOAT32 = 1e-4


def bert(folder: str) -> Made:
    """A trained one, and random tokens."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder)
    return model, lambda count, length: {"input_ids": torch.randint(model.config.vocab_size, (count, length))}


def vit() -> Made:
    """ViT-B/32, random weights and images."""
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(patch_size=32)), lambda count, _: {"pixel_values": torch.randn(count, 3, 224, 224)}


def llama() -> Made:
    """300 million random weights, grouped queries, rotary positions."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=18, num_attention_heads=16,
        num_key_value_heads=8,
    )  # fmt: skip
    return LlamaModel(config), lambda count, length: {"input_ids": torch.randint(8000, (count, length))}


def gradients(model: nn.Module, batch: dict[str, Tensor], *, half: bool) -> dict[str, Tensor]:
    """Of a random cotangent of the outputs."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        output = model(**batch).last_hidden_state
        loss = (output.float() * torch.randn(output.shape)).mean()
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {name: g for name, g in zip(weights, found, strict=True) if g is not None}


def certified(
    model: nn.Module, found: list[PairStack], batch: dict[str, Tensor], *, half: bool = False, **options: float
) -> Certificate:
    """The certificate of a random cotangent."""
    return certify(found, dict(model.named_parameters()), gradients(model, batch, half=half), **options)


def violated(model: nn.Module, found: list[PairStack], batch: dict[str, Tensor]) -> tuple[str, float, Any]:
    """Bend one projection of a random pair so that the outputs change by about one percent."""
    stack = found[int(torch.randint(len(found), ()))]
    pair = stack.pairs[int(torch.randint(len(stack), ()))]
    linear = model.get_submodule(pair.G[0].name.rpartition(".")[0])
    with torch.no_grad():
        before = model(**batch).last_hidden_state
        amount, change = 0.5, 0.0
        for _ in range(12):
            hook = linear.register_forward_hook(lambda m, x, y, a=amount: y + a * y.tanh())
            change = float((model(**batch).last_hidden_state - before).norm() / before.norm())
            if 0.007 < change < 0.014:
                break
            hook.remove()
            amount *= min(4.0, max(0.25, 0.01 / max(change, 1e-6)))
    return pair.name, change, hook


def cost(
    model: nn.Module,
    found: list[PairStack],
    batch: Callable[[int, int], dict[str, Tensor]],
    size: tuple[int, int],
    *,
    half: bool,
) -> dict[str, Any]:
    """Processor seconds of a pass and of the certificate of its gradient, least of three."""
    passes, certificates = [], []
    for _ in range(3):
        start = time.process_time()
        g = gradients(model, batch(*size), half=half)
        middle = time.process_time()
        certify(found, dict(model.named_parameters()), g)
        certificates.append(time.process_time() - middle)
        passes.append(middle - start)
    share = min(certificates) / min(passes)
    return {"examples_and_tokens": size, "pass_seconds": min(passes), "certificate_seconds": min(certificates),
            "share_of_a_pass": share}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bert", help="a transformers folder of a trained BERT")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--violations", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(SMALL), choices=list(SMALL))
    parser.add_argument("--out", default="certificate", help="name of the recorded results")
    options = parser.parse_args()
    rows = []
    for name, make in (("bert", lambda: bert(options.bert)), ("vit-b-32", vit), ("llama-300m", llama)):
        if name not in options.models:
            continue
        torch.manual_seed(0)
        model, batch = make()
        model.eval()
        found = stacks(find(model).of_full_rank().pairs, dict(model.named_parameters()))
        for half in (False, True):
            worst = [
                max(certified(model, found, batch(*SMALL[name]), half=half).residuals.values())
                for _ in range(options.batches)
            ]
            row: dict[str, Any] = {
                "model": name, "half": half, "pairs": sum(map(len, found)), "batches": options.batches,
                "largest": max(worst), "median": sorted(worst)[len(worst) // 2],
                "costs": [cost(model, found, batch, size, half=half) for size in PASSES[name]],
            }  # fmt: skip
            if not half:
                hits = []
                for _ in range(options.violations):
                    one = batch(*SMALL[name])
                    pair, change, hook = violated(model, found, one)
                    certificate = certified(model, found, one, tolerance=FLOAT32)
                    hook.remove()
                    failed = [p.name for p in certificate.failures]
                    hits.append({"pair": pair, "change": change, "residual": max(certificate.residuals.values()),
                                 "found": pair in failed, "failures": len(failed)})  # fmt: skip
                row["violations"] = hits
            print(row, flush=True)
            rows.append(row)
    write(options.out, rows)


if __name__ == "__main__":
    main()
