"""Gradients that are scaled, accumulated, of low rank, or not finite."""

import copy

import pytest
import torch

from quotient_manifolds.optim.gradients import _sums_are_finite

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
    """Off the CPU a gradient is known by its sum only."""
    large = torch.full((40,), 60000.0, dtype=torch.float16)
    assert not large.sum().isfinite()
    assert _sums_are_finite([large, torch.ones(3)])
    for bad in (float("nan"), float("inf")):
        large[3] = bad
        assert not _sums_are_finite([torch.ones(3), large])
