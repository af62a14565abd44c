"""Trained models, once a file."""

import copy

import pytest
import torch

from quotient_manifolds.symmetries import apply_random_symmetry_
from tests import networks
from tests.snapshots import MODELS


@pytest.fixture(scope="module")
def trained():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    batch = networks.images()
    model = networks.train(networks.vit(), batch)
    twin = copy.deepcopy(model)
    apply_random_symmetry_(twin, 30.0, seed=1)
    return model, twin, batch


@pytest.fixture(scope="module", params=MODELS)
def trained_model(request):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    make, data = MODELS[request.param]
    batch = data()
    return networks.train(make(), batch), batch


@pytest.fixture(scope="module")
def trained_small():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    batch = networks.images()
    model = networks.train(networks.vit(layers=1, hidden=8), batch, steps=10)
    twin = copy.deepcopy(model)
    apply_random_symmetry_(twin, 30.0, seed=1)
    return model, twin, batch
