"""Gradients that are scaled, accumulated, of low rank, or not finite."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quotient_manifolds.optim import QuotientAdam, QuotientMuon, QuotientSGD, base, stacked
from quotient_manifolds.symmetries import factor_pair, find_symmetric_pairs

from ...training import (
    X,
    Y,
    apart,
    lora,
    loss_of,
    moved,
    optimizer_of,
    products,
    train,
    trainable,
)


def test_gradients_of_low_rank_do_no_harm():
    one = lora(full_rank=False)
    two = moved(one)
    for model in (one, two):
        optimizer = optimizer_of(model, "adam")
        for _ in range(20):
            optimizer.zero_grad()
            loss_of(model, X[:1], Y[:1]).backward()  # one example: rank one
            optimizer.step()
    assert apart(one, two) < 1e-6  # rounding in the directions without a gradient grows, but slowly
    assert torch.isfinite(one(X)).all()


def test_accumulated_gradients_are_those_of_the_whole_batch():
    one, two = lora(), lora()
    for model, parts in ((one, 1), (two, 4)):
        optimizer = optimizer_of(model, "adam")
        for _ in range(5):
            optimizer.zero_grad()
            for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
                (loss_of(model, x, y) / parts).backward()
            optimizer.step()
    assert apart(one, two) < 1e-10


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_grad_scaler_skips_with_a_warning_and_unscales(kind):
    one, two = lora(dtype=torch.float32), lora(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled, plain = optimizer_of(one, kind, max_grad_norm=0.1), optimizer_of(two, kind, max_grad_norm=0.1)
    for _ in range(3):
        for model, optimizer in ((one, scaled), (two, plain)):
            optimizer.zero_grad()
            loss = loss_of(model)
            (scaler.scale(loss) if optimizer is scaled else loss).backward()
        scaler.step(scaled)
        scaler.update()
        plain.step()
    assert apart(one, two) < 1e-5
    before = copy.deepcopy(one.state_dict())
    trainable(one)[0].grad[0, 0] = float("inf")
    with pytest.warns(RuntimeWarning, match="this step is skipped"):
        scaler.step(scaled)
    scaler.update()
    assert all(torch.equal(v, before[k]) for k, v in one.state_dict().items())
    assert scaler.get_scale() == 2.0**9


def test_the_scale_is_taken_out_in_float32():
    torch.manual_seed(0)
    model = lora(dtype=torch.float16)
    optimizer = optimizer_of(model, "adam")
    scaler = torch.amp.GradScaler("cpu")  # 65536: beyond float16
    before = products(model)
    scaler.scale(loss_of(model).float() * 1e-3).backward()
    scaler.step(optimizer)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in zip(before, products(model), strict=True))


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_nan_gradients_are_an_error_and_change_nothing(kind):
    model = lora()
    optimizer = optimizer_of(model, kind)
    train(model, optimizer, 2)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    trainable(model)[1].grad[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite entries; no weight was changed"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for a, b in zip(state["buckets"], optimizer.state_dict()["buckets"], strict=True):
        assert all(torch.equal(a["state"][k], b["state"][k]) for k in a["state"])


def test_sums_in_half_precision_do_not_overflow():
    """Whether a gradient is finite is known by its sum."""
    for dtype in (torch.float16, torch.float32):
        G, H, other = (torch.nn.Parameter(torch.randn(n, 2).to(dtype)) for n in (4, 3, 40))
        optimizer = QuotientAdam([G, H, other], [factor_pair(G, H)], 1e-3)
        optimizer.certify = False
        G.grad, H.grad, other.grad = (torch.full_like(p, 60000.0) for p in (G, H, other))
        optimizer.step()
        for bad in (float("nan"), float("inf")):
            for p in (G, other):
                p.grad[3, 0] = bad
                with pytest.raises(ValueError, match="NaN or infinite entries"):
                    optimizer.step()
                p.grad[3, 0] = 1.0


def off_the_cpu(monkeypatch):
    """Let the optimiser do on the CPU what it does where the host is not to read."""
    monkeypatch.setattr(base, "on_cpu", lambda x: False)
    monkeypatch.setattr(stacked, "_IN_CACHE", 10**9)


def spoil(model, cause):
    """Make a step that must change nothing, by a gradient or by the second factor of a pair."""
    A = model.base_model.model[0].lora_A["default"].weight
    if cause == "anchor":
        A.data[0] = 0
    else:
        A.grad[0, 0] = float("nan")


def full_state(optimizer):
    saved = optimizer.state_dict()
    return copy.deepcopy([b["state"] for b in saved["buckets"]] + list(saved["state"].values()))


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("cause", ["gradient", "anchor"])
@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_bad_steps_off_the_cpu_change_nothing(kind, cause, others, monkeypatch):
    """There the host does not know: the step is one of zero length, and is counted."""
    runs = []
    for off in (False, True):
        if off:
            off_the_cpu(monkeypatch)
        model = lora(modules_to_save=["2"] if others else None, targets=("0",))
        make = {"adam": QuotientAdam, "muon": QuotientMuon, "sgd": QuotientSGD}[kind]
        options = {"momentum": 0.9} if kind == "sgd" else {}
        clip = 0.3 if others else None
        optimizer = make(
            trainable(model), find_symmetric_pairs(model), 1e-2, weight_decay=0.1, max_grad_norm=clip, **options
        )
        train(model, optimizer, 4, schedule=False)
        runs.append(copy.deepcopy(model))
        if off:
            state = full_state(optimizer)
            spoil(model, cause)
            before = copy.deepcopy(model.state_dict())
            optimizer.step()
            for name, v in model.state_dict().items():
                assert torch.equal(v, before[name]), name
            with pytest.warns(RuntimeWarning, match="1 steps were skipped"):
                after = full_state(optimizer)
            for a, b in zip(state, after, strict=True):
                assert all(torch.allclose(a[k], b[k], rtol=1e-12, atol=0) for k in a)
    assert apart(*runs) < 1e-10


def test_what_a_grad_scaler_knows_is_not_counted(monkeypatch, recwarn):
    off_the_cpu(monkeypatch)
    model = lora(targets=("0",))
    optimizer = QuotientMuon(trainable(model), find_symmetric_pairs(model), 1e-2)
    train(model, optimizer, 1, schedule=False)
    before = products(model)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    optimizer.state_dict()
    assert not recwarn.list
    assert all(torch.equal(a, b) for a, b in zip(before, products(model), strict=True))
    optimizer.found_inf = torch.zeros(())
    spoil(model, "anchor")
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="1 steps were skipped"):
        optimizer.state_dict()


def test_no_copy_of_other_weights_off_the_cpu(monkeypatch):
    """A classifier, its gradient and AdamW's moments may be larger than all adapters."""
    off_the_cpu(monkeypatch)
    model = lora(modules_to_save=["2"], targets=("0",))
    optimizer = QuotientAdam(trainable(model), find_symmetric_pairs(model), 1e-2)
    train(model, optimizer, 2, schedule=False)
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.clone.default, torch.ops.aten.where.self, torch.ops.aten.where.ScalarOther):
                copies.append(tuple(found.shape))
            return found

    with Copies():
        optimizer.step()
        assert (9, 20) not in copies
        next(p for p in trainable(model) if p.shape == (9, 20)).clone()
    assert (9, 20) in copies
