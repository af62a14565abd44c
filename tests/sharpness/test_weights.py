import copy

import pytest
import torch

import sharpness
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


def test_shards_that_cannot_be_measured_are_refused():
    """ZeRO-3's and FSDP1's parameters have marks; FSDP2's are measured, see test_sharded."""
    model = networks.vit()
    model.classifier.weight.ds_id = 1
    with pytest.raises(ValueError, match=r"'classifier\.weight' is a shard of one \(FSDP, DTensor or ZeRO-3\)"):
        sharpness.evaluate(model, [networks.images()], rho=0.1)
