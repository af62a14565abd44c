import pytest
import torch

import sharpness
from quotient_manifolds.symmetries import apply_random_symmetry_
from quotient_manifolds.symmetries.whole import apply_random_moves_
from sharpness.parts import PARTS, Parts
from tests.whole_networks import build, inputs, loss


def test_every_entry_belongs_to_one_part():
    """Squares of ones count entries: by hand for a ViT of two layers."""
    model = build("vit")
    space = sharpness.WeightSpace(model, sharpness.MEASURES["adaptive"])
    found = {}
    places = Parts(model, dict(model.named_parameters()))
    for block, part in space._blocks:
        places.add_squares(found, block, torch.ones(space.dim)[part])
    assert found == {
        "Q–K": 2 * 2 * (64 + 8),
        "V–O": 2 * (2 * 64 + 8),
        "MLP": 2 * 2 * 96,
        "embeddings": 8 + 40 + 128,
        "norms and biases": 8 + 5 * 16 + 2 * (8 + 12 + 8),
        "head": 27,
    }
    assert set(found) <= set(PARTS)


@pytest.mark.parametrize("measure", ["complete-inv", "geodesic-mix", "adaptive", "euclidean"])
def test_shares_add_up(measure):
    model = build("bert")
    result = sharpness.evaluate(model, inputs("bert"), loss, measure=measure, steps=3, progress=False)
    shares = result.by_part()
    assert sum(shares.values()) == pytest.approx(1)
    assert {"Q–K", "V–O", "MLP", "embeddings"} <= set(shares)
    assert f"MLP {shares['MLP']:.0%}" in str(result)


def test_shares_of_the_complete_measure_do_not_move():
    shares = []
    for move in (False, True):
        model = build("gpt2-untied")
        if move:
            apply_random_moves_(model)
            apply_random_symmetry_(model)
        options = {"measure": "complete-inv", "steps": 3, "progress": False}
        shares.append(sharpness.evaluate(model, inputs("gpt2-untied"), loss, **options).by_part())
    assert shares[0] == pytest.approx(shares[1], rel=1e-6)
