"""One adapter of every kind that peft writes, merged with itself by peft and by us: how wrong the model's change is.

The oracle knows nothing of factors: it compares outputs of the model without, with the one, with the merged adapter.
"""

import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quotient_manifolds.adapters import Adapter, merge
from tests.support import networks

ROWS, TOKENS = torch.linspace(-1, 9, 60).sin().view(5, 12), torch.arange(9).view(1, 9)
IMAGES = torch.linspace(-3, 40, 300).sin().view(2, 6, 5, 5)
#: peft's ways of merging, and ours, in files and in memory.
TOOLS = ("linear", "cat", "svd", "folders", "memory")
#: One adapter, or two copies of it.
WEIGHTS = ((1.0,), (0.5, 0.5))


class Experts(nn.Module):
    """Three linear maps in one parameter."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 12, 7))

    def forward(self, x):
        return torch.einsum("bi,eio->beo", x, self.up)


def layers(**named):
    return nn.Sequential(OrderedDict(named))


def linear():
    return layers(layer=nn.Linear(12, 7))


def two():
    return layers(layer=nn.Linear(12, 8), head=nn.Linear(8, 7))


def of_gpt2():
    from transformers.pytorch_utils import Conv1D

    return layers(layer=Conv1D(7, 12))


def tied():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=9, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return networks.shake(LlamaForCausalLM(config))


@dataclass
class Variant:
    """A network, its inputs, and the options and dtype of its adapter."""

    network: Callable[[], nn.Module] = linear
    inputs: torch.Tensor = field(default_factory=lambda: ROWS)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def model(self, folder=None, name="one"):
        torch.manual_seed(0)
        network = self.network()
        return network if folder is None else peft.PeftModel.from_pretrained(network, str(folder), name)

    def save(self, folder):
        options = {"r": 4, "lora_alpha": 6, "target_modules": ["layer"], "init_lora_weights": False, **self.options}
        model = peft.get_peft_model(self.model(), peft.LoraConfig(**options))
        torch.manual_seed(1)
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.data = 1.3 * p.data.abs() if "magnitude" in name else p.data + 0.3 * torch.randn_like(p)
        model.save_pretrained(folder)
        file = Path(folder, "adapter_model.safetensors")
        save_file({key: t.to(self.dtype) for key, t in load_file(file).items()}, file, {"format": "pt"})

    def outputs(self, model):
        """In double precision."""
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        with torch.no_grad():
            found = model.double().eval()(inputs)
        return getattr(found, "logits", found)


LAYERS = {"target_modules": ["layer", "head"], "rank_pattern": {"head": 2}, "alpha_pattern": {"layer": 3}}
EXPERTS = {"target_modules": [], "target_parameters": ["layer.up"]}
SAVED = {"modules_to_save": ["head"]}
TRAINED = {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 4]}}
VARIANTS = {
    "LoRA": Variant(),
    "rsLoRA": Variant(options={"use_rslora": True}),
    "lora_bias": Variant(options={"lora_bias": True}),
    "DoRA": Variant(options={"use_dora": True}),
    "rank_pattern, alpha_pattern": Variant(two, options=LAYERS),
    "embedding": Variant(lambda: layers(layer=nn.Embedding(9, 7)), TOKENS),
    "convolution": Variant(lambda: layers(layer=nn.Conv2d(6, 4, 3)), IMAGES),
    "convolution, 2 groups": Variant(lambda: layers(layer=nn.Conv2d(6, 4, 3, groups=2)), IMAGES),
    "Conv1D of GPT-2": Variant(of_gpt2, options={"fan_in_fan_out": True}),
    "experts (target_parameters)": Variant(lambda: layers(layer=Experts()), options=EXPERTS),
    "modules_to_save": Variant(two, options=SAVED),
    "trained tokens, tied head": Variant(tied, TOKENS, TRAINED),
    "bfloat16": Variant(dtype=torch.bfloat16),
    "float8": Variant(dtype=torch.float8_e4m3fn),
}
#: All that the table has: weights other than a mean are for what is a product alone.
CASES = [(name, weights) for name in VARIANTS for weights in WEIGHTS] + [("LoRA", (-1.0,)), ("LoRA", (1.0, -1.0))]


def merged(variant, folder, weights, tool):
    """Return a model with copies of the adapter in a folder merged."""
    if tool == "folders":
        merge([folder] * len(weights), folder / f"{weights}", weights=weights)
        return variant.model(folder / f"{weights}", "new")
    model = variant.model(folder)
    if tool == "memory":
        merge([Adapter.from_model(model, "one")] * len(weights), weights=weights).add_to(model, "new")
    else:
        names = ["one", *(f"copy{i}" for i in range(1, len(weights)))]
        for name in names[1:]:
            model.load_adapter(str(folder), name)
        model.add_weighted_adapter(names, list(weights), "new", combination_type=tool)
    model.set_adapter("new")
    return model


def error(name, weights, tool):
    """Return how far the change is from the adapter's own times the sum of the weights, relative to the adapter's own.

    Or the error that the tool raises, without places.
    """
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as place:
        variant.save(place)
        base, one = variant.outputs(variant.model()), variant.outputs(variant.model(place))
        try:
            found = variant.outputs(merged(variant, Path(place), weights, tool))
        except (ValueError, RuntimeError, NotImplementedError) as raised:
            return type(raised)(str(raised).replace(f"{place}: ", "").replace("one: ", ""))
    return float((found - base - sum(weights) * (one - base)).norm() / (one - base).norm())
