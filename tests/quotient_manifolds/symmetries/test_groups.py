"""Groups, and what every kind of them leaves as it is."""

import copy

import pytest
import torch

import sharpness
from quotient_manifolds.symmetries import (
    GL,
    apply_random_symmetry_,
)

from ... import architectures
from ...architectures import adapted, bert_and_batch


def measured(name):
    if name == "lora":
        base, batch = bert_and_batch()
        return adapted(base, ["query", "value"]), batch, lambda m, b: m(**b).last_hidden_state.square().mean()
    model, batch = architectures.transformers_model(name, "eager")
    return model, batch, lambda m, b: m(**b).last_hidden_state.sin().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox", "qwen3", "lora"])
@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix"])
def test_sharpness_is_invariant_for_every_kind_of_group(name, measure):

    model, batch, loss = measured(name)
    for parameter, p in model.named_parameters():  # LoRA's base is frozen, and the pooler takes no part
        if "pooler" in parameter:
            p.requires_grad_(False)
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 10.0) > 0
    options = {"measure": measure, "rho": 0.02, "steps": 4}
    one, two = (float(sharpness.evaluate(m, [batch], loss, **options)) for m in (model, twin))
    # Models that cast to float32 inside are staircases at 1e-7 of the loss.
    tolerance = 1e-8 if name in ("bert", "lora") else 1e-3
    assert abs(one - two) < tolerance * one
    assert one > 0


def test_groups_and_their_points():
    real, plane = GL(3), GL(2, diagonal=True, field="complex")
    assert [str(g) for g in (real, plane, GL(2, field="complex"), GL(3, diagonal=True))] == [
        "GL(3)", "(ℂ*)^2", "GL(2, ℂ)", "(ℝ*)^3"
    ]  # fmt: skip
    assert [g.dimension for g in (real, plane, GL(2, field="complex"), GL(3, diagonal=True))] == [9, 4, 8, 3]
    for group, shape in ((real, (4, 5, 3)), (plane, (4, 2, 5, 1))):
        rows = torch.randn(4, 5, *group.columns)
        assert group.to_point(rows).shape == shape
        assert torch.equal(group.from_point(group.to_point(rows)), rows)
    for wrong in (
        {"h": 0},
        {"h": True},
        {"h": 2.0},
        {"h": 2, "diagonal": "scalars"},
        {"h": 2, "field": "rational"},
    ):
        with pytest.raises(ValueError, match="no such group"):
            GL(**wrong)


@pytest.mark.parametrize("wrong", [{"positive": True}, {"diagonal": True, "positive": "no"}, {"field": "quaternion"}])
def test_groups_that_do_not_exist(wrong):
    with pytest.raises(ValueError, match="no such group"):
        GL(3, **wrong)
    assert GL(3, diagonal=True, positive=True).dimension == 3
