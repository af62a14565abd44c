"""Worst directions: their length, the model moved along them, and the loss on the way."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds.symmetries import find, move_, stacks
from reproduction.rk4 import RungeKuttaMeasure
from sharpness import plots
from tests.support import networks
from tests.support.snapshots import ALL, GEODESIC, assert_same, snapshot


@pytest.mark.parametrize("measure", ALL)
def test_direction_is_horizontal_of_length_rho_and_leads_to_the_worst_loss(trained_model, measure):
    model, batch = trained_model
    move_(model := copy.deepcopy(model), condition=50.0)
    rho = 0.05
    result = sharpness.evaluate(model, [batch], measure=measure, rho=rho)
    direction = result.direction(0)
    assert direction.norm == pytest.approx(rho, rel=1e-6)
    weights = dict(model.named_parameters())
    square, covered = 0.0, set()
    if measure in GEODESIC:
        for s in stacks(find(model).pairs, weights):
            x = s.gather(weights).detach()
            u = s.gather(direction.tensors)
            manifold = s.manifold(measure.removeprefix("geodesic-"))
            torch.testing.assert_close(manifold.proju(x, u), u, rtol=1e-6, atol=1e-9)
            square += float(manifold.inner(x, u).sum())
            covered |= set(s.names)
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


@pytest.fixture
def measured():
    model, batch = networks.trained_vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=0.3, progress=False)
    return model, batch, result


def profile(*arguments, **options):
    """The line that is drawn of the loss along a direction."""
    line = plots.plot_profile(*arguments, **options).axes[0].lines[-1]
    return tuple(line.get_xdata()), tuple(line.get_ydata())


def test_geodesic_ends_at_the_worst_loss_and_the_line_is_straight(measured):
    model, batch, result = measured
    direction = result.direction(0)
    before = {n: p.clone() for n, p in model.named_parameters()}
    lengths, curved = profile(model, batch, direction, points=9)
    assert lengths == pytest.approx([0.15 * k for k in range(-4, 5)])
    line = replace(direction, measure=replace(direction.measure, geodesic="first-order"))
    _, straight = profile(model, batch, line, points=9)
    assert curved[6] == pytest.approx(result.batches[0].worst_loss, rel=1e-9)
    assert curved[4] == straight[4] == pytest.approx(result.batches[0].base_loss, rel=1e-9)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(direction.tensors[name], alpha=-1.5)
        by_hand = float(F.cross_entropy(model(batch[0]).logits, batch[1]))
    assert straight[1] == pytest.approx(by_hand, rel=1e-9)
    assert abs(curved[1] / by_hand - 1) > 1e-5  # a geodesic that is straight, to 1e-9, would be seen


def test_other_ways_losses_and_pieces(measured):
    model, batch, result = measured
    direction = result.direction(0)
    along = replace(direction, measure=replace(direction.measure, geodesic="exact"))
    _, exact = profile(model, batch, along, points=5)
    stepped = RungeKuttaMeasure(**vars(direction.measure))
    _, steps = profile(model, batch, replace(direction, measure=stepped), points=5)
    near = slice(1, 4)  # t from -1 to 1: the steps of the oracle have a fixed number
    assert exact[near] == pytest.approx(steps[near], rel=1e-6)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]).logits, batch[1])

    _, plain = profile(model, batch, direction, points=3)
    for options in ({"loss_fn": loss_fn}, {"micro_batch": 5}):
        assert profile(model, batch, direction, points=3, **options)[1] == pytest.approx(plain, rel=1e-9)


def test_pieces_and_gradients_within_a_loss(measured):
    model, batch, result = measured
    sizes = []

    def loss_fn(model, batch):
        sizes.append(len(batch[1]))
        loss = F.cross_entropy(model(batch[0]).logits, batch[1])
        (slope,) = torch.autograd.grad(loss, model.classifier.bias, create_graph=True)
        return loss + slope.square().sum()

    profile(model, batch, result.direction(0), points=2, loss_fn=loss_fn, micro_batch=5)
    assert set(sizes) == {5, 2}


def test_modes_stay(measured):
    model, batch, result = measured
    model.train()
    seen = []
    handle = model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    profile(model, batch, result.direction(0), points=3)
    handle.remove()
    assert model.training
    assert not any(seen)


def test_a_frozen_half_precision_base():
    torch.set_default_dtype(torch.float32)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = torch.nn.Linear(4, 6, dtype=torch.bfloat16), torch.nn.Linear(6, 3)
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.head(self.base(x).float())

    model, batch = Model(), (torch.randn(8, 4, dtype=torch.bfloat16), torch.arange(8) % 3)
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, progress=False)
    _, found = profile(model, batch, result.direction(0), points=5)
    assert found[3] == pytest.approx(result.batches[0].worst_loss, rel=1e-4)


def test_a_measure_without_pairs():
    model, batch = networks.bert(), networks.text()
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, progress=False)
    _, found = profile(model, batch, result.direction(0), points=5)
    assert found[3] == pytest.approx(result.batches[0].worst_loss, rel=1e-9)


def test_half_precision():
    torch.set_default_dtype(torch.float32)
    model, batch = networks.vit().to(torch.bfloat16), networks.images()
    batch = batch[0].to(torch.bfloat16), batch[1]
    result = sharpness.evaluate(model, [batch], rho=0.1, progress=False)
    _, found = profile(model, batch, result.direction(0), points=5)
    assert found[3] == pytest.approx(result.batches[0].worst_loss, rel=1e-4)


def test_bad_input(measured):
    model, batch, result = measured
    with pytest.raises(ValueError, match="points must be a whole number"):
        profile(model, batch, result.direction(0), points=1)
    other = replace(result.direction(0), tensors={"nowhere": torch.zeros(2)})
    with pytest.raises(ValueError, match="belongs to another model"):
        profile(model, batch, other)
