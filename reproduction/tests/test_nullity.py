import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries.whole import register_wiring, wiring_of
from reproduction.nullity import nullity
from tests.support.extent import EXHAUSTIVE
from tests.support.whole_networks import FAMILIES, build, count, forward, headed, inputs

#: CLIP has one direction more: of the d gains of the norm between embeddings and stream only d − 1 singular values are
#: seen, since both sides rotate.
EXTRA = {"clip": 1}

#: Families that another one resembles in everything that is counted.
ALIKE = ["deit", "electra", "gpt2", "qwen2", "torch-pre"]
LEFT_OUT = ["distilbert", "llama-tied", "mistral", "phi3", *([] if EXHAUSTIVE else ALIKE)]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in LEFT_OUT])
def test_the_list_is_complete(family):
    """Counted dimension = numerical null dimension of a whole network."""
    model = build(family)
    numbers = sum(p.numel() for p in model.parameters())
    repeated = family in ("gpt2", "gpt2-untied", "opt", "llama", "qwen2", "qwen3", "gemma")  # few first words
    found = nullity(model, list(inputs(family, int((2.2 if repeated else 1.3) * numbers))), forward=forward)
    assert found.dimension == sum(count(model).values()) + EXTRA.get(family, 0)
    assert found.gap > 1e4


def test_the_softmax_of_the_classes():
    model = build("vit")
    numbers = sum(p.numel() for p in model.parameters())
    found = nullity(model, list(inputs("vit", int(1.8 * numbers))), forward=forward, classes=True)
    assert found.dimension == sum(count(model, classes=True).values()) == 425


def test_an_incomplete_list_falls_short():
    """Without what embeddings share, the count is not the nullity."""

    class Forgetful(type(build("vit"))):
        pass

    @register_wiring(Forgetful)
    def forgetful(model):
        model.__class__ = Forgetful.__base__
        wiring = wiring_of(model)
        model.__class__ = Forgetful
        wiring.common.clear()
        return wiring

    model = build("vit")
    model.__class__ = Forgetful
    assert sum(count(model).values()) == 417 - 14


def test_a_tied_language_model_is_complete_but_for_one_direction():
    """c/γ in all words, less it in all types and c Σβ/γ in the decoder's biases: not in the list."""
    model, _ = headed("bert", "BertForMaskedLM")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-3
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(float(p.dim() == 1) + 0.4 * torch.randn(p.shape, dtype=p.dtype))
    numbers = sum(p.numel() for p in model.parameters())
    words = [torch.randint(0, 11, (6, 8)) for _ in range(int(2.2 * numbers / 528) + 1)]
    batches = [{"input_ids": w, "token_type_ids": torch.randint(0, 2, (6, 8))} for w in words]
    found = nullity(model, batches)
    assert found.dimension == sum(count(model).values()) + 1
    assert found.gap > 1e4


def test_too_few_outputs_are_refused():
    with pytest.raises(ValueError, match="pass more inputs"):
        nullity(nn.Linear(3, 2).double(), [torch.ones(2, 3, dtype=torch.float64)])


def test_what_would_be_counted_wrong_is_refused():
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Dropout(), nn.Linear(2, 3, bias=False))
    x = [torch.randn(9, 3, dtype=torch.float64)]
    for wrong in (net.float().eval(), net.double().train()):
        with pytest.raises(ValueError, match=r"pass model\.double\(\)\.eval\(\)"):
            nullity(wrong, x)
    with torch.no_grad():
        assert nullity(net.double().eval(), x).dimension == 4
