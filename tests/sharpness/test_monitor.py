"""What is measured in a training: the numbers of ``evaluate``, and a training that does not notice."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import sharpness
from sharpness import MEASURES, get_measure, measured
from sharpness.monitor import Monitor
from tests.support.networks import Encoder, tokens

EVERY = ["geodesic-inv", "adaptive@0.2", "gradient-norm", "euclidean-hessian", "critical", "critical-relative"]


class Net(Encoder):
    """With all that a pass may change or draw: dropout, and statistics of batches."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(super().forward(x))


class Noisy(torch.utils.data.Dataset):
    """Data that draw from every generator when they are read."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x, y = tokens(8, seed=1)
        return x[i] + 0.1 * torch.randn(x[i].shape) + 0.1 * random.random() + 0.1 * np.random.random(), y[i]


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def trained(measure, steps=6, accumulate=2):
    """Train; all that may differ afterwards."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = Net().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
    batches = (next(iter(loader)) for _ in range(steps * accumulate))  # each is drawn when it is needed
    seen = []
    for step in range(steps):
        for i in range(accumulate):
            x, y = next(batches)
            nn.functional.cross_entropy(net(x), y).backward()
            if i == 0:  # between two passes that add to the same gradient
                measure(net, None, step)
        before = copy.deepcopy(net.state_dict())
        optimizer.step()
        measure(net, before, step)
        seen.append([p.grad.clone() for p in net.parameters()])
        optimizer.zero_grad()
    return [*net.state_dict().values(), *(g for grads in seen for g in grads)], [m.training for m in net.modules()]


def alike(one, two):
    (tensors, modes), (others, other_modes) = one, two
    return modes == other_modes and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def test_a_training_is_the_same_bit_for_bit():
    """Weights, gradients, buffers, modes and generators; and such a comparison notices a number that is drawn."""
    expected, after = trained(lambda net, before, step: None), generators()
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True)
    found = []

    def measure(net, before, step):
        if step in (1, 4):
            options = {"quantities": EVERY, "before": before, "other": loader, "steps": 2}
            found.append(measured(net, loader, **options))

    assert alike(trained(measure), expected)
    assert generators() == after
    assert [len(values) >= 4 for values in found] == [True] * 4
    for draw in (torch.rand, lambda n: random.random(), np.random.random):
        other = trained(lambda net, before, step, draw=draw: draw(1) if step == 1 else None)
        assert not alike(other, expected)


def test_values_are_those_of_the_functions():
    net, batches = Net().eval(), [tokens(8, seed=s) for s in (0, 1)]
    other = [tokens(8, seed=2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.cross_entropy(net(batches[0][0]), batches[0][1]).backward()
    before = copy.deepcopy(net.state_dict())
    optimizer.step()
    mine = get_measure("adaptive", name="mine", rho=0.3)
    names = ["geodesic-inv", "adaptive@0.2", mine, "gradient-norm", "euclidean-hessian", "critical"]
    found = measured(net, batches, quantities=[*names, "critical-relative"], before=before, other=other, steps=3)
    expected = {
        "sharpness/geodesic-inv@0.1": float(sharpness.evaluate(net, batches, steps=3)),
        "sharpness/adaptive@0.2": float(sharpness.evaluate(net, batches, measure="adaptive", rho=0.2, steps=3)),
        "sharpness/mine@0.3": float(sharpness.evaluate(net, batches, measure="adaptive", rho=0.3, steps=3)),
        "sharpness/gradient-norm": float(sharpness.gradient_norm(net, batches)),
        "sharpness/euclidean-hessian": float(sharpness.hessian(net, batches, measure="euclidean")),
        "sharpness/critical": sharpness.critical_sharpness(net, batches, before=before),
        "sharpness/critical-relative": sharpness.critical_sharpness(net, other, before=before),
    }
    assert expected["sharpness/critical"] != expected["sharpness/critical-relative"]
    # On other data the step may raise the loss, whatever its length: then there is no number.
    assert found == {name: value for name, value in expected.items() if value is not None}
    assert measured(net, batches, quantities=names[1:2] + names[-1:], steps=3) == {
        "sharpness/adaptive@0.2": found["sharpness/adaptive@0.2"]
    }


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantities": ["geodesic"]}, ValueError, "unknown quantity 'geodesic'; choose of geodesic-inv, .*critical"),
        ({"quantities": ["critical@2"]}, ValueError, "unknown quantity 'critical@2'"),
        ({"quantities": ["gradient-norm@1"]}, ValueError, "unknown quantity 'gradient-norm@1'"),
        ({"quantities": ["adaptive@"]}, ValueError, "rho must be"),
        ({"quantities": ["adaptive@x"]}, ValueError, "rho must be"),
        ({"quantities": [3]}, ValueError, "unknown quantity 3"),
        ({"quantities": "adaptive"}, ValueError, "quantities is the single 'adaptive'; wrap it in a list"),
        ({"quantities": []}, ValueError, "quantities is empty; name at least one"),
        ({"quantities": ["critical-relative"]}, ValueError, "'critical-relative' is measured on other data"),
        ({"other": [tokens()]}, ValueError, "'critical-relative' is measured on other data: pass both"),
        ({"batches": []}, ValueError, "batches is empty"),
        ({"batches": torch.ones(2)}, ValueError, "batches is a single Tensor; wrap it in a list"),
        ({"stepz": 3}, TypeError, "stepz"),
        ({"steps": 0}, ValueError, "steps"),
        ({"every": 0}, ValueError, "every"),
        ({"loss_fn": nn.MSELoss()}, ValueError, "loss_fn is called as"),
    ],
)
def test_errors_come_before_the_training(options, error, message):
    with pytest.raises(error, match=message):
        Monitor(**{"batches": [tokens()], **options})


# -- which steps -------------------------------------------------------------------------------------------------------


def measured_steps(monitor, net, steps, by=1, first=0):
    """Drive a monitor as a callback does."""
    monitor.start(first)
    found = {}
    for step in range(first, first + steps):
        if step % by == 0 or by == 1:
            monitor.before_step(net, step)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.99)
        if (step + 1) % by == 0 and monitor.due(step + 1):
            found[step + 1] = monitor.after_step(net, step + 1)
    return found


def test_which_steps_are_measured():
    """Also in a training that goes on, and where several optimisers' steps count in one batch."""
    net = Encoder()
    make = lambda n: Monitor([tokens()], every=n, quantities=["gradient-norm", "critical"])  # noqa: E731
    assert list(measured_steps(make(3), net, 10)) == [3, 6, 9]
    assert list(measured_steps(make(3), net, 7, first=5)) == [6, 9, 12]
    assert list(measured_steps(make(3), net, 12, by=2)) == [4, 6, 10, 12]
    monitor = make(2)
    monitor.start(0)
    monitor.before_step(net, 0)
    assert monitor._before is None  # nothing is held in vain
    monitor.before_step(net, 1)
    held = monitor._before
    assert {n: torch.equal(w, held[n]) for n, w in net.named_parameters()} == dict.fromkeys(held, True)
    monitor.after_step(net, 2)
    assert monitor._before is None


def test_a_measurement_that_fails_later_leaves_a_gap():
    """The first one raises, so that wrong data do not go unnoticed; others follow the one that fails."""
    net, monitor = Encoder(), Monitor([tokens()], every=1, quantities=["adaptive", "gradient-norm"])
    net.head.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match=r"'head\.weight' has NaN"):
        monitor.after_step(net, 1)
    net.head.weight.data[0] = 0.0
    assert len(monitor.after_step(net, 2)) == 2
    net.head.weight.data[0] = torch.nan
    monitor.before_step(net, 2)
    with pytest.warns(UserWarning, match="was not measured at step 3: parameter 'head.weight' has NaN") as warned:
        assert monitor.after_step(net, 3) == {}
    assert [str(w.message).partition(":")[0] for w in warned] == [
        f"{name} was not measured at step 3" for name in ("adaptive@0.5", "gradient-norm")
    ]
    net.head.weight.data[0] = 0.0
    assert len(monitor.after_step(net, 4)) == 2


def test_a_skipped_step_leaves_a_gap():
    """As a GradScaler's or that of a learning rate of 0."""
    net, monitor = Encoder(), Monitor([tokens()], every=1, quantities=["critical"])
    monitor.before_step(net, 0)
    assert monitor.after_step(net, 1) == {}


def test_every_measure_has_a_name_with_its_radius():
    names = [q.name for q in Monitor([tokens()], quantities=list(MEASURES)).quantities]
    assert names == [f"{name}@{measure.rho}" for name, measure in MEASURES.items()]
