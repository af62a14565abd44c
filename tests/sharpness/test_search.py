import pytest
import torch
from torch import nn

import sharpness
from reproduction.additive import AdditiveMeasure
from sharpness import Measure


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": True}, "rho must be one or several positive numbers, got True"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1, got 2.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"relative_tol": "x"}, "relative_tol must be a number of at least 0, got 'x'"),
        ({"micro_batch": 2.5}, "micro_batch must be a whole number of at least 1, got 2.5"),
        ({"measure": 3}, "unknown measure 3"),
        ({"batches": torch.ones(3)}, "batches is a single Tensor; wrap it in a list"),
    ],
)
def test_arguments_are_named(options, words):
    arguments = {"batches": [(torch.ones(2, 3), torch.tensor([0, 1]))], "measure": "adaptive", **options}
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(nn.Linear(3, 2), **arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measure": AdditiveMeasure("additive", pair_metric="inv", geodesic="exact")}, "no geodesic equation"),
        ({"measure": AdditiveMeasure("additive", pair_metric="inv", relaxation=0.0)}, "must be positive"),
        ({"statistic": "average", "restarts": 1}, "restarts belong to statistic='worst'"),
        ({"ascent": "newton"}, "unknown ascent 'newton'; choose one of power, apgd"),
        ({"relative_tol": -1}, "relative_tol must be a number of at least 0"),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1"),
        ({"measure": Measure("own"), "rho": None}, "the measure 'own' has no default"),
    ],
)
def test_bad_arguments(trained, options, words):
    model, _, batch = trained
    with pytest.raises(ValueError, match=words):
        sharpness.evaluate(model, [batch], **{"rho": 0.1, **options})
