"""Critical sharpness: closed forms of quadratic losses, what has none, errors, and models that stay as they were."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quotient_manifolds.optim import QuotientSGD
from quotient_manifolds.symmetries import find, move_
from sharpness import critical_sharpness
from tests.support import networks

X, Y = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


class Quadratic(nn.Module):
    """½ wᵀ H w + bᵀ w + c, with (H, b, c) the batch."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, H, b, c):
        return SimpleNamespace(loss=self.w @ H @ self.w / 2 + b @ self.w + c)


def quadratic(seed, c=0.3):
    """A batch with positive definite H."""
    generator = torch.Generator().manual_seed(seed)
    A, b = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (6, 1))
    return {"H": A @ A.T + torch.eye(6), "b": b[0], "c": torch.tensor(c)}


def start(seed=7):
    return torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_closed_form(batch, w, d):
    """−dᵀHd/dᵀg = 2/η for L(w + ηd) = L(w)."""
    return float(-(d @ batch["H"] @ d) / (d @ (batch["H"] @ w + batch["b"])))


@pytest.mark.parametrize("c", [0.0, 1e3, -1e3])
def test_along_the_gradient_of_a_quadratic_it_is_the_rayleigh_quotient(c):
    net, batch = Quadratic(start()), quadratic(1, c)
    g = batch["H"] @ net.w.detach() + batch["b"]
    expected = float(g @ batch["H"] @ g / (g @ g))
    before = net.w.detach().clone()
    found = critical_sharpness(net, [batch], passes=45)
    assert found == pytest.approx(expected, rel=1e-8)
    assert torch.equal(net.w, before)
    # Within ten passes after a bad first guess, to some per cent.
    assert critical_sharpness(net, [batch]) == pytest.approx(expected, rel=0.3)
    assert found != pytest.approx(float(torch.linalg.eigvalsh(batch["H"])[-1]), rel=0.01)  # it is no largest eigenvalue


@pytest.mark.parametrize("rate", [1e-3, 0.1, 3.0])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_along_a_step_of_an_optimiser(kind, rate):
    """On the loss of the step's own data, and on that of other data."""
    net, batch = Quadratic(start()), quadratic(1)
    w = net.w.detach().clone()
    optimizer = kind(net.parameters(), lr=rate)
    net(**batch).loss.backward()
    before = copy.deepcopy(net.state_dict())
    optimizer.step()
    d = net.w.detach() - w
    found = critical_sharpness(net, [batch], before=before, passes=45)
    assert found == pytest.approx(in_closed_form(batch, w, d), rel=1e-8)
    assert found != pytest.approx(in_closed_form(batch, w + d, d), rel=1e-3)  # not from the weights after the step
    if kind is torch.optim.SGD:  # in the units of the paper
        assert found / rate == pytest.approx(critical_sharpness(Quadratic(w), [batch], passes=45), rel=1e-6)
    for slope in (-1.0, 1.0):  # of the loss of other data along the step, which every step raises if it is positive
        other = quadratic(2)
        other["b"] = slope * d / d.norm() - other["H"] @ w
        expected = pytest.approx(in_closed_form(other, w, d), rel=1e-8) if slope < 0 else None
        assert critical_sharpness(net, [other], before=before, passes=45) == expected


def test_above_two_the_step_raised_the_loss():
    for rate in (0.02, 0.05, 0.1, 0.2, 0.5):
        net, batch = Quadratic(start()), quadratic(1)
        before, first = copy.deepcopy(net.state_dict()), net(**batch).loss
        first.backward()
        first = first.detach()
        torch.optim.SGD(net.parameters(), lr=rate).step()
        found = critical_sharpness(net, [batch], before=before, passes=30)
        assert (found > 2) == (float(net(**batch).loss.detach()) > float(first)), rate


def test_of_several_batches_it_is_that_of_their_mean_loss():
    net, batches = Quadratic(start()), [quadratic(1), quadratic(2)]
    mean = {k: (batches[0][k] + batches[1][k]) / 2 for k in batches[0]}
    whole, parts = (critical_sharpness(net, b, passes=45) for b in ([mean], iter(batches)))
    assert parts == pytest.approx(whole, rel=1e-8)
    net = classifier()
    whole, pieces = (critical_sharpness(net, [(X.double(), Y)], passes=45, micro_batch=m) for m in (None, 7))
    assert pieces == pytest.approx(whole, rel=1e-8)


def test_what_has_none():
    net, flat = Quadratic(start()), {**quadratic(1), "H": torch.zeros(6, 6)}
    assert critical_sharpness(net, [flat]) is None  # it falls for ever
    assert critical_sharpness(net, [{**flat, "b": torch.zeros(6)}]) is None
    assert critical_sharpness(net, [quadratic(1)], before=copy.deepcopy(net.state_dict())) is None  # no step


def test_a_loss_that_overflows_has_risen():
    net, batch = Quadratic(start()), quadratic(1)
    before, g = copy.deepcopy(net.state_dict()), batch["H"] @ start() + batch["b"]
    net.w.data -= 1e160 * g
    assert not torch.isfinite(net(**batch).loss)
    found = critical_sharpness(net, [batch], before=before, passes=320)
    assert found / 1e160 == pytest.approx(in_closed_form(batch, before["w"], -g), rel=1e-6)


# -- networks ----------------------------------------------------------------------------------------------------------


def classifier(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), *layers, nn.Tanh(), nn.Linear(8, 3))


def step(net, batch, optimizer=None):
    """Take one step; return the weights before it."""
    before = copy.deepcopy(net.state_dict())
    output = net(batch[0])
    nn.functional.cross_entropy(getattr(output, "logits", output), batch[1]).backward()
    (optimizer or torch.optim.SGD(net.parameters(), lr=0.1)).step()
    return before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_float32(dtype):
    net, x = classifier().to(dtype), X.to(dtype)
    before = step(net, (x, Y))
    stored = copy.deepcopy(net.state_dict())
    found = [critical_sharpness(net, [(x, Y)], before=b) for b in (before, None)]
    assert all(torch.equal(v, stored[k]) and v.dtype == dtype for k, v in net.state_dict().items())
    wide = {k: v.float() for k, v in before.items()}
    assert found == [critical_sharpness(net.float(), [(x.float(), Y)], before=b) for b in (wide, None)]


def test_names_of_wrappers_are_stripped():
    net = classifier()
    before = step(net, (X.double(), Y))
    wrapped = {f"module._orig_mod.{name}": w for name, w in before.items()}
    found = [critical_sharpness(net, [(X.double(), Y)], before=b) for b in (before, wrapped)]
    assert found[0] == found[1] is not None


def test_frozen_weights_stay():
    net, batch = classifier(), (X.double(), Y)
    net[0].requires_grad_(False)
    before = step(net, batch)
    found = critical_sharpness(net, [batch], before=before)
    assert found == critical_sharpness(net, [batch], before={k: v for k, v in before.items() if k[0] == "2"})
    before["0.weight"] += 1.0
    assert found == critical_sharpness(net, [batch], before=before)


def test_the_model_stays_as_it_was():
    net, batch = classifier(nn.BatchNorm1d(8), nn.Dropout(0.5)).train(), (X.double(), Y)
    before = step(net, batch)
    expected = copy.deepcopy(net.state_dict()), torch.get_rng_state(), [p.grad.clone() for p in net.parameters()]
    for given in (before, None):
        critical_sharpness(net, [batch], before=given)
    assert all(torch.equal(v, expected[0][k]) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), expected[1])
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected[2], strict=True))
    assert all(m.training for m in net.modules())


def test_along_the_step_of_an_invariant_optimiser_it_is_invariant():
    """Every representative of one network has the same; along the gradient each has another."""
    values, gradients = [], []
    for moved in (False, True):
        torch.manual_seed(0)
        net, batch = networks.vit(layers=1), networks.images()
        if moved:
            move_(net, condition=10.0, seed=1)
        before = step(net, batch, QuotientSGD(net.named_parameters(), find(net), lr=0.05))
        values.append(critical_sharpness(net, [batch], before=before, passes=40))
        gradients.append(critical_sharpness(net, [batch], passes=40))
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    assert gradients[1] != pytest.approx(gradients[0], rel=1e-2)


# -- errors ------------------------------------------------------------------------------------------------------------


def spoilt(key, value):
    return {**quadratic(1), key: torch.full_like(quadratic(1)[key], value)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "batches is empty; pass at least one batch"),
        ({"batches": quadratic(1)}, "batches is a single dict; wrap it in a list"),
        ({"batches": [spoilt("c", torch.nan)]}, "the loss before the update is nan; look for NaN in the data"),
        ({"batches": [spoilt("c", torch.nan)], "before": {"w": torch.ones(6)}}, "the loss before the update is nan"),
        ({"batches": [spoilt("b", torch.inf)], "before": {"w": torch.ones(6)}}, "the loss before the update is inf"),
        ({"before": {"w": torch.full((6,), torch.nan)}}, "the update of the weights has NaN or infinite entries"),
        ({"before": {"v": torch.ones(6)}}, r"before has no weight 'w' of the shape \(6,\), which Quadratic has; copy"),
        ({"before": {"w": torch.ones(5)}}, r"before has no weight 'w' of the shape \(6,\)"),
        ({"before": {"w": [1.0] * 6}}, r"before has no weight 'w' of the shape \(6,\)"),
        ({"loss_fn": lambda net, batch: net(**batch).loss.detach()}, "the loss has no gradient: loss_fn must not det"),
        ({"passes": 0}, "passes"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"loss_fn": nn.CrossEntropyLoss()}, "loss_fn is called as"),
    ],
)  # fmt: skip
def test_errors_are_sentences(options, message):
    net = Quadratic(start())
    with pytest.raises(ValueError, match=message):
        critical_sharpness(net, **{"batches": [quadratic(1)], **options})
    assert torch.equal(net.w, start())


def test_weights_that_were_not_copied_and_frozen_ones():
    net = Quadratic(start())
    with pytest.raises(ValueError, match="before holds 'w' of Quadratic itself, which moves in the step; copy the wei"):
        critical_sharpness(net, [quadratic(1)], before=net.state_dict())
    with pytest.raises(TypeError, match="before must be a mapping of names to tensors, got list; copy the weights"):
        critical_sharpness(net, [quadratic(1)], before=[start()])
    with pytest.raises(TypeError, match="model must be a torch module, got NoneType"):
        critical_sharpness(None, [quadratic(1)])
    with pytest.raises(ValueError, match="Quadratic has no trainable parameter"):
        critical_sharpness(net.requires_grad_(False), [quadratic(1)])
