"""A measurement leaves no trace, wherever an interrupt falls and whatever other threads do."""

import contextlib
import sys
import threading

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import sharpness
from quotient_manifolds.symmetries import modules as module

OURS = (
    "symmetries/modules.py",
    "sharpness/model_state.py",
    "sharpness/weights.py",
    "contextlib.py",
    "sharpness/space.py",
)


class Filling(nn.Module):
    """A model whose forward pass fills a buffer that was None, and makes another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", None)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.seen = x.detach().mean()
        self.count += 1
        self.register_buffer("made", x.detach()[:1])
        return self.linear(x)


def small():
    torch.manual_seed(0)
    return Filling(), [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))]


def state(model):
    weights = [p.detach().clone() for p in model.parameters()]
    pointers = [p.data_ptr() for p in model.parameters()]
    buffers = {name: None if b is None else b.clone() for m in model.modules() for name, b in m._buffers.items()}
    switches = (
        torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled(),
        parametrize._cache_enabled, torch.is_inference_mode_enabled(),
    )  # fmt: skip
    return weights, pointers, [m.training for m in model.modules()], buffers, switches, torch.get_rng_state()


def same(one, two):
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    return len(one) == len(two) and all(map(same, one, two)) if isinstance(one, (list, tuple)) else one == two


def interrupted(run, moment):
    """Raise KeyboardInterrupt at the given bytecode, counted from the first clean-up on; whether it was reached."""
    count, begun = 0, False

    def trace(frame, event, _):
        nonlocal count, begun
        name = frame.f_code.co_filename
        if not name.endswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        begun = begun or (event == "call" and frame.f_code.co_name in ("put_back", "restore"))
        if event == "opcode" and begun:
            count += 1
            if count == moment:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()  # that of coverage
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 delivers none
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_every_bytecode_of_the_clean_up():
    model, batches = small()
    before = state(model)

    def run():
        sharpness.evaluate(model, batches, measure="adaptive", rho=0.1, steps=1, progress=False)

    moment = 1
    while interrupted(run, moment):
        assert same(state(model), before), f"bytecode {moment} of the clean-up"
        moment += 1
    assert moment > 300


def test_one_clean_up_alone_would_not_do(monkeypatch):
    """What the test above is for: without the second pass some interrupts leave the model changed."""
    once = set()
    full = module.preserve_model_state.restore

    def restore(self):
        if id(self) not in once:
            once.add(id(self))
            full(self)

    monkeypatch.setattr(module.preserve_model_state, "restore", restore)
    model, batches = small()
    before = state(model)
    moment, harmed = 1, 0

    def run():
        sharpness.evaluate(model, batches, measure="adaptive", rho=0.1, steps=1, progress=False)

    while moment < 400 and interrupted(run, moment):
        harmed += not same(state(model), before)
        model, batches = small()
        torch.set_rng_state(before[-1])
        torch.backends.mha.set_fastpath_enabled(True)
        torch.set_autocast_cache_enabled(True)
        moment += 7
    module._fast_path._users.clear()
    torch.backends.mha.set_fastpath_enabled(True)
    assert harmed


def test_buffers_that_a_pass_fills_are_as_before():
    model, batches = small()
    before = state(model)
    sharpness.evaluate(model, batches, measure="adaptive", rho=0.1, steps=2)
    assert same(state(model), before)
    assert model.seen is None
    assert set(model._buffers) == {"seen", "count"}


def test_cached_parametrizations_do_not_change_the_value():
    model = parametrizations.weight_norm(nn.Linear(3, 2))
    batches = [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))]
    expected = float(sharpness.evaluate(model, batches, measure="adaptive", rho=0.2, steps=3))
    with parametrize.cached():
        model(batches[0][0])
        assert float(sharpness.evaluate(model, batches, measure="adaptive", rho=0.2, steps=3)) == expected
        assert parametrize._cache_enabled
    assert expected > 0


def test_threads_put_the_fast_path_back():
    torch.backends.mha.set_fastpath_enabled(True)
    inside, out = threading.Barrier(2), threading.Barrier(2)
    seen = []

    def measure(first):
        def work():
            inside.wait(30)
            if first:  # leaves while the other is still at work
                return
            out.wait(30)
            seen.append(torch.backends.mha.get_fastpath_enabled())

        with module.preserve_model_state(nn.Linear(1, 1)):
            work()
        if first:
            out.wait(30)

    threads = [threading.Thread(target=measure, args=(first,)) for first in (True, False)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [False]
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_interrupt_of_perturbed_weights():
    model, batches = small()
    result = sharpness.evaluate(model, batches, measure="adaptive", rho=0.1, steps=1)
    before = state(model)
    with contextlib.suppress(KeyboardInterrupt), sharpness.perturbed(model, result.direction(0)):
        assert not same(state(model), before)
        raise KeyboardInterrupt
    assert same(state(model), before)
    with contextlib.suppress(KeyboardInterrupt):
        sharpness.profile(model, batches[0], result.direction(0), interrupt, points=3)
    assert same(state(model), before)


def interrupt(*_):
    raise KeyboardInterrupt
