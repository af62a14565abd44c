import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds.symmetries import apply_random_symmetry_, find_symmetric_pairs, stacks
from tests import networks
from tests.snapshots import ALL, GEODESIC, assert_same, snapshot


@pytest.mark.parametrize("measure", ALL)
def test_direction_is_horizontal_of_length_rho_and_leads_to_the_worst_loss(trained_model, measure):
    model, batch = trained_model
    apply_random_symmetry_(model := copy.deepcopy(model), 50.0)
    rho = 0.05
    result = sharpness.evaluate(model, [batch], measure=measure, rho=rho)
    direction = result.direction(0)
    assert direction.norm == pytest.approx(rho, rel=1e-6)
    names = {id(p): n for n, p in model.named_parameters()}
    square, covered = 0.0, set()
    if measure in GEODESIC:
        for s in stacks(find_symmetric_pairs(model)):
            x = s.gather().detach()
            u = s.gather({p: direction.tensors[names[id(p)]] for p in s.parameters()})
            manifold = s.manifold(measure.removeprefix("geodesic-"))
            torch.testing.assert_close(manifold.proju(x, u), u, rtol=1e-6, atol=1e-9)
            square += float(manifold.inner(x, u).sum())
            covered |= {names[id(p)] for p in s.parameters()}
    for n, p in model.named_parameters():
        if n not in covered:
            weight = 1.0 if measure == "euclidean" else p.detach().abs()
            square += float(((direction.tensors[n] / weight) ** 2).nan_to_num().sum())
    assert math.sqrt(square) == pytest.approx(rho, rel=1e-6)

    before = snapshot(model)
    base = sharpness.evaluate(model, [batch], measure=measure, rho=rho, steps=1).batches[0].base_loss
    for t, expected in ((1.0, result.batches[0].worst_loss), (0.0, base)):
        with sharpness.perturbed(model, direction, t) as moved, torch.no_grad():
            output = moved(**batch).loss if isinstance(batch, dict) else moved(batch[0])
            if not isinstance(batch, dict):
                output = F.cross_entropy(getattr(output, "logits", output), batch[1])
        assert float(output) == pytest.approx(expected, rel=1e-9)
    assert_same(snapshot(model), before)
    with pytest.raises(RuntimeError, match="boom"), sharpness.perturbed(model, direction):
        raise RuntimeError("boom")
    assert_same(snapshot(model), before)
    with pytest.raises(ValueError, match="belongs to another model"), sharpness.perturbed(nn.Linear(2, 2), direction):
        pass


def test_perturbed_follows_the_geodesic_of_a_frozen_model_and_of_a_copy():
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=0.5, steps=5)
    first_order = sharpness.get_measure("geodesic-inv", geodesic="first-order")
    straight = sharpness.evaluate(model, [batch], measure=first_order, rho=0.5, steps=5)
    assert abs(float(straight) - float(result)) > 1e-4
    model.requires_grad_(False)
    for m in (model, copy.deepcopy(model)):
        with sharpness.perturbed(m, result.direction(0)), torch.no_grad():
            loss = float(F.cross_entropy(m(batch[0]).logits, batch[1]))
        assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_a_direction_of_a_model_with_adapters_moves_a_copy():
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["query", "value"], "init_lora_weights": False}
    model = peft.get_peft_model(networks.bert(), peft.LoraConfig(r=2, **options)).eval()
    batch = networks.text()
    result = sharpness.evaluate(model, [batch], rho=0.1, steps=3, keep_directions=True, progress=False)
    moved = copy.deepcopy(model)
    with sharpness.perturbed(moved, result.direction(0)), torch.no_grad():
        loss = float(moved(**batch).loss)
    assert loss == pytest.approx(result.batches[0].worst_loss, rel=1e-9)
    assert float(model(**batch).loss) == pytest.approx(result.batches[0].base_loss, rel=1e-12)
