"""Small networks with attention, with weights and biases away from zero."""

import contextlib
import copy
import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F


def shake(model, size=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    return model.eval()


@contextlib.contextmanager
def training(model, pattern):
    """Freeze the parameters whose names do not match."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    for name, p in model.named_parameters():
        p.requires_grad_(bool(re.search(pattern, name)))
    yield model
    for p, trained in before:
        p.requires_grad_(trained)


def vit(layers=2, hidden=16, heads=2, **options):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=24, image_size=8,
        patch_size=4, num_channels=1, num_labels=3, **options,
    )  # fmt: skip
    return shake(ViTForImageClassification(config).to(torch.get_default_dtype()))


def vit_layers(model):
    """The layers of a ViT, whatever transformers calls them."""
    return model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer  # before 5.9


def projections(attention):
    """Queries', keys', values' and output projection of a ViT's attention layer."""
    if hasattr(attention, "q_proj"):
        return [getattr(attention, f"{c}_proj") for c in "qkvo"]
    inner = attention.attention  # before transformers 5.9
    return [inner.query, inner.key, inner.value, attention.output.dense]


def feed_forward(layer):
    """Both linear maps of a ViT's feed-forward part."""
    return [layer.mlp.fc1, layer.mlp.fc2] if hasattr(layer, "mlp") else [layer.intermediate.dense, layer.output.dense]


def bert(layers=2, hidden=16, heads=2, **options):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=24, vocab_size=20,
        max_position_embeddings=16, num_labels=3, **options,
    )  # fmt: skip
    return shake(BertForSequenceClassification(config).to(torch.get_default_dtype()))


class Encoder(nn.Module):
    """torch's own encoder with a linear head on the mean token."""

    def __init__(self, width=8, heads=2, classes=3, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 12, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class TinyAttention(nn.Module):
    """One attention layer and a head: fewer than 200 parameters."""

    def __init__(self, width=4, heads=2, classes=3, bias=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, bias=bias)
        self.head = nn.Linear(width, classes, bias=bias)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def images(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
    return x, torch.randint(3, (count,), generator=generator)


def tokens(count=12, width=8, length=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, length, width, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
    return x, torch.randint(3, (count,), generator=generator)


def text(count=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, (count, 6), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, (count,), generator=generator)}


def train(model, batch, steps=30, lr=1e-2):
    """Fit a batch roughly, so that the weights are near a minimum as those of trained networks are."""
    optimiser = torch.optim.Adam(model.parameters(), lr)
    for _ in range(steps):
        optimiser.zero_grad()
        if isinstance(batch, dict):
            loss = model(**batch).loss
        else:
            output = model(batch[0])
            loss = F.cross_entropy(getattr(output, "logits", output), batch[1])
        loss.backward()
        optimiser.step()
    model.zero_grad()
    return model


@functools.cache
def _trained(dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return train(vit(), images())


def trained_vit():
    """A transformer that has been trained on ``images()``, in the default dtype; the caller's own."""
    return copy.deepcopy(_trained(torch.get_default_dtype()))


def quantised_bert(bits):
    """A frozen BERT in single precision with the first attention layer as bitsandbytes stores it, and a batch."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.set_default_dtype(torch.float32)
    model = bert(hidden=64).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layer.0.attention" in name:
            options = {"has_fp16_weights": False} if bits == "8 bit" else {"quant_type": "nf4"}
            cls = bnb.nn.Linear8bitLt if bits == "8 bit" else bnb.nn.Linear4bit
            new = cls(module.in_features, module.out_features, **options)
            new.load_state_dict(module.state_dict())
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, new.requires_grad_(False).to("cpu"))
    assert not model.bert.encoder.layer[0].attention.self.query.weight.is_floating_point()
    return model, text()
