import copy

import pytest
import torch

import sharpness
from quotient_manifolds.symmetries import find_symmetric_pairs
from sharpness.weights import named_weights
from tests import networks


def test_bad_models_are_named():
    model, batch = networks.vit(), networks.images()
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        sharpness.evaluate(frozen, [batch], rho=0.1)
    with pytest.raises(ValueError, match="lie on the meta device"):
        sharpness.evaluate(copy.deepcopy(model).to("meta"), [batch], rho=0.1)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter 'classifier\.bias' has NaN"):
        sharpness.evaluate(model, [batch], rho=0.1)


def test_weights_that_cannot_be_differentiated_are_named():
    with torch.inference_mode():
        model = torch.nn.Linear(4, 3)
    batch = (torch.randn(5, 4), torch.arange(5) % 3)
    with pytest.raises(
        ValueError, match=r"'weight' was made under torch.inference_mode, where .*; make the model outside"
    ):
        sharpness.evaluate(model, [batch], measure="adaptive")
    model = torch.nn.Linear(4, 3)
    model.weight = torch.nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"'weight' has dtype torch.float8_e4m3fn; only real"):
        sharpness.evaluate(model, [batch], measure="adaptive")


def test_shards_that_cannot_be_measured_are_refused():
    """ZeRO-3's and FSDP1's parameters have marks; FSDP2's are measured, see test_sharded."""
    model = networks.vit()
    model.classifier.weight.ds_id = 1
    with pytest.raises(ValueError, match=r"'classifier\.weight' is a shard of one \(FSDP, DTensor or ZeRO-3\)"):
        sharpness.evaluate(model, [networks.images()], rho=0.1)


def test_names_are_without_the_prefixes_of_wrappers_alone():
    """A layer called module had lost its name in pairs, but not in parameters."""
    net = torch.nn.ModuleDict({"module": networks.vit(), "head": torch.nn.Linear(2, 2)})
    names = set(named_weights(net))
    assert all(name.startswith(("module.", "head.")) for name in names)
    assert all(p.module.startswith("module.vit") for p in find_symmetric_pairs(net))
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": networks.vit()})})
    assert set(named_weights(wrapped)) == {name for name, _ in networks.vit().named_parameters()}
    assert all(p.module.startswith("vit") for p in find_symmetric_pairs(wrapped))
