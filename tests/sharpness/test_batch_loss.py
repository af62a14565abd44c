import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from tests import networks


def with_dropout(model, batch):
    return F.cross_entropy(F.dropout(model(batch[0]).logits, 0.5, training=True), batch[1])


def test_loss_that_explodes_within_the_ball():
    model, batch = networks.vit(), networks.images()

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]).logits, batch[1])
        return value * (float("nan") if value > 2.5 else 1)

    with pytest.raises(ValueError, match=r"became NaN at a distance of .* use a smaller rho"):
        sharpness.evaluate(model, [batch], loss, measure="euclidean", rho=3.0)


def test_dropout_is_noticed_in_half_precision_too():
    model, (x, y) = networks.vit().bfloat16(), networks.images()
    with pytest.raises(ValueError, match="two identical passes"):
        sharpness.evaluate(model, [(x.bfloat16(), y)], with_dropout, rho=0.1)


def test_nan_data_and_infinite_losses_are_named():
    model, (x, y) = networks.vit(), networks.images()
    with pytest.raises(ValueError, match="the loss of batch 1 is nan; look for NaN in the data"):
        sharpness.evaluate(model, [(x, y), (x * float("nan"), y)], rho=0.1, steps=1)

    def loss(model, batch):
        value = F.cross_entropy(model(batch[0]).logits, batch[1])
        return value / (value < 2.5)

    with pytest.raises(ValueError, match=r"became infinite at a distance of .* use a smaller rho"):
        sharpness.evaluate(model, [(x, y)], loss, measure="euclidean", rho=3.0, steps=3)
    with pytest.raises(ValueError, match="one score per example"):
        sharpness.evaluate(nn.Linear(3, 1), [(torch.randn(4, 3), torch.randn(4, 1))], rho=0.1)
