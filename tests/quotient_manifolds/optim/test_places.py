"""Adapters that are replaced after the optimiser was made, and would stay untrained."""

import contextlib
import copy

import peft
import pytest
import torch
from torch import nn

from quotient_manifolds.optim import QuotientAdam, create_quotient_lora_optimizer
from quotient_manifolds.symmetries import adapter_pairs

from ...training import X, apart, lora, loss_of, optimizer_of, train, trainable

CONFIG = peft.LoraConfig(r=4, target_modules=["0", "2"])


def added_again(model):
    model.add_adapter("other", CONFIG)
    model.set_adapter("other")
    model.delete_adapter("default")
    model.add_adapter("default", CONFIG)
    model.set_adapter("default")
    return model


def redistributed(model):
    """As EVA does with ranks, in one of two layers."""
    layer = model.base_model.model[2]
    layer.update_layer("default", 2, lora_alpha=8, config=model.peft_config["default"])
    return model


def deleted(model):
    model.delete_adapter("default")
    return model


def head_replaced(model):
    """A module that PEFT trains as a whole."""
    model.base_model.model[4].modules_to_save["default"] = nn.Linear(9, 9)
    return model


CHANGES = {
    "delete_adapter, add_adapter": added_again,
    "ranks": redistributed,
    "delete_adapter": deleted,
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "merge_and_unload, get_peft_model": lambda model: peft.get_peft_model(model.merge_and_unload(), CONFIG),
    "unload, get_peft_model": lambda model: peft.get_peft_model(model.unload(), CONFIG),
    "unload, another name": lambda model: peft.get_peft_model(model.unload(), CONFIG, adapter_name="new"),
    "modules_to_save": head_replaced,
}


def with_head(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 9))
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], modules_to_save=["4"], **options)
    return peft.get_peft_model(net, config).double()


def by_hand(model):
    return QuotientAdam(trainable(model), adapter_pairs(model), 1e-2)


@pytest.mark.parametrize("steps", [0, 2])  # old gradients stay where a new model's zero_grad does not reach
@pytest.mark.parametrize("make", [lambda m: create_quotient_lora_optimizer(m, lr=1e-2), by_hand], ids=["made", "hand"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_have_left_the_model_are_named(change, make, steps):
    """In each of these the step did nothing, or moved what no output depends on."""
    model = with_head()
    optimizer = make(model)
    train(model, optimizer, steps, schedule=False)
    if not steps:
        optimizer.zero_grad()
    model = CHANGES[change](model).double()
    if any(p.requires_grad for p in model.parameters()):
        loss_of(model).backward()
    before = [p.detach().clone() for p in model.parameters()]
    place = "modules_to_save" if change == "modules_to_save" else "lora_[AB]"
    with pytest.raises(ValueError, match=rf"'base_model\.model\..*{place}.* have been replaced or deleted since this"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.skipif(not hasattr(peft, "KasaConfig"), reason="this peft has no KaSA")
def test_adapters_without_a_pair_are_looked_for_too():
    model = with_head(kasa_config=peft.KasaConfig())
    with pytest.warns(UserWarning, match="AdamW trains 2 of 2 adapters"):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    model = peft.get_peft_model(model.unload(), CONFIG).double()
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"lora_A.* have been replaced or deleted"):
        optimizer.step()


class Around(nn.Module):
    """What a library may put around a layer, after the optimiser was made."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_parameters_that_stay_may_move_within_the_model():
    one, two = lora(), lora()
    optimizers = [create_quotient_lora_optimizer(m, lr=1e-2) for m in (one, two)]
    inner = two.base_model.model
    inner[0] = Around(inner[0])
    for model, optimizer in zip((one, two), optimizers, strict=True):
        train(model, optimizer, 3, schedule=False)
    assert apart(one, two) == 0
    inner[0] = nn.Linear(12, 20).double()
    with pytest.raises(
        ValueError, match=r"'base_model\.model\.0\.inner\.lora_A.* 1 other parameters of the model have"
    ):
        optimizers[1].step()


def test_an_optimiser_without_its_model_says_nothing_of_it():
    """A copy of the optimiser alone belongs to a copy of the model, and steps as before."""
    model = lora()
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    train(model, optimizer, 2, schedule=False)
    again = copy.deepcopy(optimizer)
    again.step()


def test_a_step_of_merged_adapters_is_refused():
    """It would not reach the outputs, and unmerging would then take away another product than was added."""
    model = lora()
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    loss_of(model).backward()
    outputs = model(X)
    model.merge_adapter()
    with pytest.raises(ValueError, match="adapter 'default' is merged into the base weights"):
        optimizer.step()
    model.unmerge_adapter()
    assert torch.allclose(model(X), outputs)
    optimizer.step()
    assert not torch.allclose(model(X), outputs)


def test_a_scale_that_has_changed_is_named_once():
    model = lora()
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    model.base_model.model[0].set_scale("default", 3.0)
    with pytest.warns(UserWarning, match="scale of adapter 'default' was 2 .* is 6 now") as warned:
        train(model, optimizer, 3, schedule=False)
    assert len(warned) == 1
    model.base_model.model[0].set_scale("default", 1.0)
    with pytest.warns(UserWarning, match="was 6 .* is 2 now"):  # also where groups are added in between
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_an_adapter_that_did_not_join_is_named():
    model = lora()
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    model.add_adapter("new", CONFIG)
    model.set_adapter("new")
    model.double()
    optimizer.zero_grad()
    optimizer.step()  # there is no gradient at all, as before the first batch
    loss_of(model).backward()
    with pytest.warns(UserWarning, match=r"no parameter of this optimiser has a gradient, but '.*new.*add_param_group"):
        optimizer.step()
    new = adapter_pairs(model, ["new"])
    optimizer.add_param_group({"params": [p for q in new for p in q.parameters()], "pairs": new})
    losses = train(model, optimizer, 5, schedule=False)
    assert losses[-1] < losses[0]


def compiled(model):
    return torch.compile(model, backend="eager")  # importing the default one warns with some versions of torch


@pytest.mark.parametrize("wrap", [lambda m: m, compiled, nn.DataParallel], ids=["plain", "compiled", "wrapped"])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_wrapped_models_are_walked_too(wrap, kind):
    model = lora()
    optimizer = optimizer_of(model, kind, pairs=adapter_pairs(wrap(model)))
    train(model, optimizer, 2, schedule=False)
    added_again(model)
    with contextlib.suppress(RuntimeError):
        loss_of(model.double()).backward()
    with pytest.raises(ValueError, match="have been replaced"):
        optimizer.step()
