"""Every kind of batch: mappings of all kinds, named tuples, nested."""

from collections import UserDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.batches import default_forward, tensors, to_device, tree_map
from quotient_manifolds.symmetries import verify
from tests import networks

Pair = namedtuple("Pair", ["x", "y"])


def test_a_tree_keeps_its_form():
    batch = {"a": [torch.ones(1), (torch.zeros(2), "word")], "b": Pair(torch.ones(3), None)}
    found = tree_map(lambda t: t + 1, batch)
    assert isinstance(found["a"], list)
    assert isinstance(found["a"][1], tuple)
    assert isinstance(found["b"], Pair)
    assert found["b"].y is None
    assert [t.tolist() for t in tensors(found)] == [[2.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
    assert [len(t) for t in tensors(UserDict(batch))] == [1, 2, 3]


def test_an_empty_sequence_is_named():
    with pytest.raises(ValueError, match="of type list, holds no tensor"):
        default_forward(nn.Identity(), [])


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType])
def test_mappings_are_measured_verified_and_split_alike(kind):
    model, (pixels, labels) = networks.vit(), networks.images()
    plain = {"pixel_values": pixels, "labels": labels}
    expected = float(sharpness.evaluate(model, [plain], rho=0.1, steps=2))
    assert float(sharpness.evaluate(model, [kind(plain)], rho=0.1, steps=2)) == expected
    split = float(sharpness.evaluate(model, [kind(plain)], rho=0.1, steps=2, micro_batch=5))
    assert split == pytest.approx(expected, rel=1e-10)
    assert verify(model, kind(plain)).ok


def test_named_tuples_and_half_precision():
    model, batch = networks.vit(), networks.images()
    expected = float(sharpness.evaluate(model, [batch], rho=0.1, steps=2))
    assert float(sharpness.evaluate(model, [Pair(*batch)], rho=0.1, steps=2)) == expected
    low, few = model.to(torch.bfloat16), Pair(batch[0].to(torch.bfloat16), batch[1])
    assert float(sharpness.evaluate(low, [few], rho=0.1, steps=2)) > 0


def test_a_batch_goes_to_a_device():
    batch = {"x": torch.ones(2), "more": (torch.zeros(1), "word")}
    assert to_device(batch, torch.device("cpu")) is batch
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["more"][0].is_meta
    assert moved["more"][1] == "word"
