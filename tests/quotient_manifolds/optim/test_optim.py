"""What every optimiser does: pairs and parameter groups, gradients, state, equivalent starts, other devices."""

import contextlib
import copy
import io
import os
import pickle
import time
from dataclasses import replace
from itertools import accumulate

import geoopt
import numpy as np
import peft
import peft.optimizers
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quotient_manifolds import GLQuotientMix
from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientMuon,
    QuotientSGD,
    base,
    create_quotient_lora_optimizer,
    create_quotient_optimizer,
    metric,
)
from quotient_manifolds.optim.pairs import alone, orientation, reasons
from quotient_manifolds.optim.parameters import Store, check_options
from quotient_manifolds.optim.stack import Stack
from quotient_manifolds.symmetries import (
    GL,
    Cause,
    Refusal,
    adapter_pairs,
    canonicalize_,
    factor_pair,
    find,
    pair,
    slot,
)
from quotient_manifolds.symmetries.found import certify
from quotient_manifolds.symmetries.orbits import random_elements
from quotient_manifolds.symmetries.refusals import refused
from quotient_manifolds.weights import weights_of
from tests.support.networks import bert
from tests.support.training import (
    KINDS,
    X,
    Y,
    apart,
    lora,
    loss_of,
    moved,
    optimizer_of,
    point,
    train,
    trainable,
    trained,
)


@pytest.mark.parametrize("full_rank", [True, False], ids=["full-rank", "B=0"])
@pytest.mark.parametrize("kind", KINDS)
def test_equivalent_starts_train_alike(kind, full_rank):
    one = lora(full_rank)
    two = moved(one)
    assert torch.allclose(one(X), two(X), atol=1e-10)
    for model in (one, two):
        losses = train(model, optimizer_of(model, kind, weight_decay=0.1, max_grad_norm=0.3))
    assert apart(one, two) < 1e-8
    assert losses[-1] < 0.8 * losses[0]


def ends_of(make, G, H, T, dtype, gradients=None):
    """The product after five steps, and the gradients; ``gradients`` is the dtype in which they are computed."""
    G, H = (nn.Parameter(x.to(dtype, copy=True)) for x in (G, H))
    optimizer = make([("G", G), ("H", H)], [factor_pair(G, H)])
    for _ in range(5):
        seen = [p.detach().to(gradients or dtype).requires_grad_(True) for p in (G, H)]
        torch.cosh(0.1 * (seen[0] @ seen[1].mT - T.to(seen[0].dtype))).sum().backward()
        G.grad, H.grad = (p.grad.to(dtype) for p in seen)
        optimizer.step()
    return (G.double() @ H.double().mT).detach()


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
@pytest.mark.parametrize("make", [
    lambda *args: QuotientAdam(*args, 1e-2),
    lambda *args: QuotientMuon(*args, 1e-2),
    lambda *args: QuotientSGD(*args, 1e-3, 0.9),
], ids=["adam", "muon", "sgd"])  # fmt: skip
def test_ill_conditioned_factors_take_the_same_steps(make, rank):
    """Bounds: 1e-8 at condition 1e6 in float64, 1e-4 at 1e4 in float32, or what the gradient lost before the step.

    Both starts have the same product: the second is computed from the rounded factors of the first.
    """
    torch.manual_seed(0)
    G, H, T = torch.randn(40, rank) @ torch.randn(rank, 4), torch.randn(30, 4), torch.randn(40, 30)
    for dtype, condition, bound in ((torch.float64, 1e6, 1e-8), (torch.float32, 1e4, 1e-4)):
        A = random_elements(torch.empty(4, 4), condition, torch.Generator().manual_seed(0))
        skewed = [x.to(dtype).double() for x in (G @ torch.linalg.inv(A), H @ A.mT)]
        Q, R = torch.linalg.qr(skewed[1])
        straight = skewed[0] @ R.mT, Q
        found, wanted = ends_of(make, *skewed, T, dtype), ends_of(make, *straight, T, torch.float64)
        if dtype == torch.float32:  # the same in float64, with the gradients of float32
            lost = ends_of(make, *skewed, T, torch.float64, dtype)
            bound = max(bound, 2 * float((lost - wanted).norm() / wanted.norm()))
            assert bound < 2e-3
        assert float((found - wanted).norm() / wanted.norm()) <= bound


@pytest.mark.parametrize("make", [QuotientAdam, QuotientMuon, QuotientSGD])
def test_a_product_beyond_the_range_of_its_factors_is_left_alone(make):
    G, H = (nn.Parameter(torch.full((5, 1), 1e25, dtype=torch.float32)) for _ in range(2))
    optimizer = make([("G", G), ("H", H)], [factor_pair(G, H, name="huge")], 1e-2)
    optimizer.certify = False  # no loss has these gradients
    before = G.detach().clone(), H.detach().clone()
    for p in (G, H):
        p.grad = torch.ones_like(p)
    with pytest.warns(RuntimeWarning, match="pair 'huge': its product is too large for the dtype") as record:
        optimizer.step()
    optimizer.step()  # warnings are errors here: it says so once
    assert len(record) == 1
    assert torch.equal(G, before[0])
    assert torch.equal(H, before[1])
    optimizer.state_dict()


@pytest.mark.parametrize("full_rank", [True, False], ids=["full-rank", "B=0"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_an_adapter_makes_no_difference(kind, full_rank):
    """The same function with α/r = 1 and 10; an optimiser that does not know them trains it differently."""
    for known in (True, False):
        models = lora(full_rank, lora_alpha=4), lora(full_rank, lora_alpha=40)
        for name, w in models[1].named_parameters():
            if "lora_B" in name:
                w.data /= 10
        assert torch.allclose(models[0](X), models[1](X), atol=1e-12)
        for model in models:
            optimizer = optimizer_of(model, kind, weight_decay=0.1, max_grad_norm=0.3)
            for s in optimizer._stacks:
                s.scale = s.scale if known else 1.0
            train(model, optimizer, 15)
        far = float((models[0](X) - models[1](X)).detach().abs().max())
        assert far < 1e-8 if known else far > 1e-3


@pytest.mark.parametrize("name", ["AdamW", "peft"])
def test_other_optimisers_do_not(name):
    if name == "peft" and not hasattr(peft.optimizers, "create_riemannian_optimizer"):
        pytest.skip("this peft has no Riemannian optimiser")
    one = lora()
    two = moved(one)
    for model in (one, two):
        if name == "AdamW":
            optimizer = torch.optim.AdamW(trainable(model), 1e-2, weight_decay=0.1)
        else:
            optimizer = peft.optimizers.create_riemannian_optimizer(model, torch.optim.AdamW, lr=1e-2)
        train(model, optimizer)
    assert apart(one, two) > 1e-2


@pytest.mark.parametrize("lr", [1e-4, 1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_from_step_one(kind, lr):
    model = lora(full_rank=False)
    losses = train(model, optimizer_of(model, kind, lr=lr), steps=12, schedule=False)
    assert losses[1] < losses[0]
    assert min(losses) == min(losses[2:])
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_learning_rate_does_nothing(kind, dtype):
    """Warm-up starts with one."""
    model = lora(full_rank=False, dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    optimizer = optimizer_of(model, kind, lr=0.0)
    train(model, optimizer, steps=3, schedule=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    optimizer.param_groups[0].update(lr=1e-2, initial_lr=1e-2)
    losses = train(model, optimizer, steps=5, schedule=False)
    assert losses[-1] < losses[0]


def test_decay_shrinks_the_product_and_spares_biases():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4, bias=False))
    first, second = model
    G = [slot(model, "0.weight", transpose=True), slot(model, "0.bias")]
    bias, product = first.bias.detach().clone(), second.weight.detach() @ first.weight.detach()
    p = pair(G, [slot(model, "1.weight")], GL(3))
    optimizer = QuotientAdam(model.named_parameters(), [p], 0.1, weight_decay=0.5)
    for q in model.parameters():  # so small that nothing else moves, but not 0
        q.grad = torch.full_like(q, 1e-30)
    optimizer.certify = False  # no loss has these gradients
    for _ in range(3):
        optimizer.step()
    assert torch.allclose(second.weight @ first.weight, product * 0.95**3)
    assert torch.equal(first.bias, bias)


def test_clipping_bounds_the_norm_in_the_metric():
    model = lora()
    steps = []
    for bound in (None, 1e-3):
        again = copy.deepcopy(model)
        optimizer = QuotientSGD(trained(again), find(again), 1.0, max_grad_norm=bound)
        before = [point(q, again) for q in find(again).pairs]
        loss_of(again).backward()
        optimizer.step()
        lengths = []
        for x, q in zip(before, find(again).pairs, strict=True):
            (G, H), (dG, dH) = x.split([q.n, q.m]), (point(q, again) - x).split([q.n, q.m])
            N, M = q.scale**2 * H.T @ H, q.scale**2 * G.T @ G + torch.linalg.inv(H.T @ H)
            lengths.append((torch.trace(N @ dG.T @ dG) + torch.trace(M @ dH.T @ dH)).sqrt())
        steps.append(float(torch.stack(lengths).norm()))
    assert steps[0] > 1e-2
    assert abs(steps[1] - 1e-3) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_resuming_is_exact(kind, dtype):
    straight = lora(full_rank=False, dtype=dtype)
    broken = copy.deepcopy(straight)
    train(straight, optimizer_of(straight, kind), 12, schedule=False)
    optimizer = optimizer_of(broken, kind)
    train(broken, optimizer, 5, schedule=False)
    file = io.BytesIO()
    torch.save({"model": broken.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = lora(full_rank=False, dtype=dtype)
    resumed.load_state_dict(saved["model"])
    again = optimizer_of(resumed, kind)
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, 7, schedule=False)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def two_models(turn=1):
    """An optimiser of two models in one, whose pairs are given in one order or the other."""
    models = nn.ModuleList([lora(), lora()])
    return models, QuotientAdam(trained(models), adapter_pairs(models).pairs[::turn], 1e-2)


def test_pairs_of_two_models_resume_by_their_names():
    """They took the state in the order of the pairs: moments of one model went to the other."""
    models, optimizer = two_models()
    again, resumed = two_models(-1)
    for _ in range(3):
        optimizer.zero_grad()
        (loss_of(models[0]) + loss_of(models[1], y=Y.flip(0))).backward()
        optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    for there, here in zip(again, models, strict=True):
        there.load_state_dict(here.state_dict())
        for p, q in zip(trainable(there), trainable(here), strict=True):
            p.grad = q.grad.clone()
    optimizer.step()
    resumed.step()
    assert max(map(apart, models, again)) == 0
    saved = optimizer.state_dict()
    for entry in saved["stacks"]:
        entry["names"] = [name.replace("1.", "2.", 1) for name in entry["names"]]
    with pytest.raises(ValueError, match=r"belongs to other pairs: 2\.base_model"):
        resumed.load_state_dict(saved)


def test_names_are_told_apart():
    one, two = lora(), lora()
    with pytest.raises(
        ValueError, match=r"two parameters are called 'base_model\..*; put several models into one module"
    ):
        QuotientAdam(trained(one) + trained(two), adapter_pairs(one))
    both = nn.ModuleList([one, two])
    with pytest.raises(ValueError, match="two pairs are called 'mine'; give each of yours another name"):
        QuotientAdam(both.named_parameters(), [replace(p, module="mine", part="") for p in adapter_pairs(both).pairs])


@pytest.mark.parametrize("make", [
    lambda m, s: QuotientAdam(trainable(m), s),
    lambda m, s: QuotientAdam([{"params": trainable(m)}], s),
    lambda m, s: QuotientAdam(trained(m), s).add_param_group({"params": nn.Parameter(torch.ones(2))}),
], ids=["list", "group", "added"])  # fmt: skip
def test_parameters_without_names_are_refused(make):
    model = lora()
    with pytest.raises(ValueError, match=r"have no names, by which symmetries know them; pass model\.named_parameters"):
        make(model, adapter_pairs(model))
    found = QuotientAdam([{"params": trainable(model)}], adapter_pairs(model), within=model)  # which knows them
    assert found.param_groups[0]["param_names"] == [name for name, _ in trained(model)]


@pytest.mark.parametrize("named", ["module", "other"])
@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_of_wrappers_make_no_difference(prefix, named):
    """But a layer may be called as a wrapper's is."""
    model = nn.ModuleDict({named: lora(), "head": nn.Linear(2, 2).requires_grad_(False)})
    names = [(prefix + name, p) for name, p in trained(model)]
    optimizer = QuotientAdam(names[:2], adapter_pairs(model))
    for group in ({"params": names[2:]}, {"params": [("head", nn.Parameter(torch.ones(2)))]}):
        optimizer.add_param_group(group)
        optimizer.add_pairs(adapter_pairs(model))
    assert len(optimizer.state_dict()["pairs"]) == 2


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_pickled_and_copied_optimisers_go_on(kind):
    model = lora()
    optimizer = optimizer_of(model, kind)
    train(model, optimizer, 3, schedule=False)
    for clone in (pickle.loads(pickle.dumps((model, optimizer))), copy.deepcopy((model, optimizer))):
        train(*clone, 3, schedule=False)
        other = copy.deepcopy((model, optimizer))
        train(*other, 3, schedule=False)
        assert apart(clone[0], other[0]) == 0


def frozen_copy(state):
    return [(t, t.clone()) for t in tree_leaves(state) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_a_state_stays_as_it_was_given_and_taken(kind):
    """Its tensors were those of the optimiser: a kept state changed with the next step, a loaded one too."""
    torch.manual_seed(0)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9)),
        peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"]),
    )
    optimizer = optimizer_of(model, kind, lr=torch.tensor(1e-2))
    train(model, optimizer, 2, schedule=False)
    saved = optimizer.state_dict()
    before, rate = frozen_copy(saved), optimizer.param_groups[0]["lr"]
    assert len(before) >= 5
    train(model, optimizer, 2, schedule=False)
    rate.mul_(2)
    other = copy.deepcopy(model)
    again = optimizer_of(other, kind)
    again.load_state_dict(saved)
    train(other, again, 2, schedule=False)
    assert all(torch.equal(t, kept) for t, kept in before)


@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_steps_that_are_compiled(kind):
    """Dynamo failed on them; now it leaves them alone."""
    ends = []
    for compiled in (False, True):
        model = lora(full_rank=False)
        optimizer = optimizer_of(model, kind, max_grad_norm=1.0)

        def whole(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()

        run = torch.compile(whole, backend="eager") if compiled else whole
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(3):
            run()
            optimizer.zero_grad()
            loss_of(model).backward()
            step()
        ends.append(model)
    assert apart(*ends) == 0


def test_state_of_others_is_refused():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    with pytest.raises(ValueError, match=r"saved by an optimiser without pairs, such as AdamW.*; to switch, load"):
        optimizer.load_state_dict(torch.optim.AdamW(trainable(model)).state_dict())
    with pytest.raises(ValueError, match="saved by QuotientSGD, not by QuotientAdam"):
        optimizer.load_state_dict(optimizer_of(model, "sgd").state_dict())
    other = optimizer_of(lora(targets=("0",)), "adam")
    with pytest.raises(ValueError, match=r"belongs to other pairs: base_model\.model\.2 lora default"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(other.state_dict())
    wide = lora(r=5)
    wider = optimizer_of(wide, "adam")
    train(wide, wider, 1)
    with pytest.raises(ValueError, match="another rank, or another model"):
        optimizer.load_state_dict(wider.state_dict())


@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_state_of_another_version_is_refused(kind):
    """Each of these was taken; the next step failed with a KeyError, or did not."""
    model = lora()
    optimizer = optimizer_of(model, kind)
    train(model, optimizer, 2, schedule=False)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(saved))
    for change in (
        lambda state: state.update(moment=state.pop("moment G")),
        lambda state: state.update(more=torch.zeros(2)),
        lambda state: state.pop("moment H"),
    ):
        wrong = copy.deepcopy(saved)
        change(wrong["stacks"][0]["state"])
        with pytest.raises(
            ValueError, match=r"the state of pairs has .* where this optimiser has .*: it is of another version"
        ):
            optimizer.load_state_dict(wrong)


def test_state_saved_under_compile_resumes_without():
    model = lora()
    compiled = torch.compile(model, backend="eager")
    saved = create_quotient_lora_optimizer(compiled, lr=1e-2).state_dict()
    create_quotient_lora_optimizer(model, lr=1e-2).load_state_dict(saved)


@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_train_in_float32_geometry(dtype, kind):
    model = lora(full_rank=False, dtype=dtype)
    optimizer = optimizer_of(model, kind)
    losses = train(model, optimizer, 30)
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in trainable(model)} == {dtype}
    assert {b["state"]["moment G"].dtype for b in optimizer.state_dict()["stacks"]} == {torch.float32}


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_compiled_model_trains_alike(kind):
    one, two = lora(), lora()
    train(one, create_quotient_lora_optimizer(one, lr=1e-2, optimizer=kind), 5)
    compiled = torch.compile(two, backend="eager")
    optimizer = create_quotient_lora_optimizer(compiled, lr=1e-2, optimizer=kind)
    train(compiled, optimizer, 5)
    assert apart(one, two) < 1e-12


@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_accelerate_trains_alike(kind):
    """With accumulation over two halves of the batch, and a checkpoint of the wrapped optimiser in between."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    one, two = lora(), lora()
    train(one, create_quotient_lora_optimizer(one, lr=1e-2, optimizer=kind), 6, schedule=False)
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

        def prepared():
            return accelerator.prepare(two, create_quotient_lora_optimizer(two, lr=1e-2, optimizer=kind))

        model, optimizer = prepared()
        for step in range(12):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, X.chunk(2)[step % 2], Y.chunk(2)[step % 2]))
                optimizer.step()
                optimizer.zero_grad()
            if step == 5:
                saved = copy.deepcopy(optimizer.state_dict())
                model, optimizer = prepared()
                optimizer.load_state_dict(saved)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert apart(one, two) < 1e-12


def one_of_two(rank, folder):
    """Train on half of the batch under DDP, and keep the ends."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in ("adam", "muon"):
        model = nn.parallel.DistributedDataParallel(lora())
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2, optimizer=kind, max_grad_norm=0.3)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model, X.chunk(2)[rank], Y.chunk(2)[rank]).backward()
            optimizer.step()
        torch.save(model.module.state_dict(), f"{folder}/{kind}{rank}.pt")
    time.sleep(0.1)  # as in sharpness.distributed.torchrun
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ddp_of_two_processes(tmp_path):
    torch.multiprocessing.start_processes(one_of_two, (str(tmp_path),), nprocs=2, start_method="fork")
    for kind in ("adam", "muon"):
        first, second = (torch.load(tmp_path / f"{kind}{rank}.pt", weights_only=True) for rank in (0, 1))
        assert all(torch.equal(v, second[k]) for k, v in first.items())
        alone, together = lora(), lora()
        optimizer = create_quotient_lora_optimizer(alone, lr=1e-2, optimizer=kind, max_grad_norm=0.3)
        train(alone, optimizer, 5, schedule=False)
        together.load_state_dict(first)
        assert apart(alone, together) < 1e-10


def test_a_parameter_that_belongs_to_a_pair_in_part():
    """The rest of it steps as AdamW would."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"fused": nn.Linear(5, 6, bias=False), "up": nn.Linear(3, 4, bias=False)})
    fused, up = model.values()
    H = slot(model, "fused.weight", rows=slice(0, 3), transpose=True)
    optimizer = QuotientAdam(
        model.named_parameters(), [pair([slot(model, "up.weight")], [H], GL(3))], 1e-2, weight_decay=0.1
    )
    twin = fused.weight.detach()[3:].clone().requires_grad_(True)
    other = torch.optim.AdamW([twin], 1e-2, weight_decay=0.1)
    x = torch.randn(8, 5)
    for _ in range(4):
        optimizer.zero_grad()
        other.zero_grad()
        first, second = fused(x).split(3, dim=1)
        (up(first).square().sum() + torch.sin(second).sum()).backward()
        torch.sin(x @ twin.T).sum().backward()
        optimizer.step()
        other.step()
    assert torch.allclose(fused.weight.detach()[3:], twin, atol=1e-12)


def swapped(model, optimizer):
    """What accelerate does under FSDP2: it gives the groups other parameters."""
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    for p in group["params"]:
        p.grad = torch.ones_like(p)


def flattened(model, optimizer):
    """As DeepSpeed's ZeRO does; the step was AdamW's."""
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in optimizer.param_groups[0]["params"]]))
    optimizer.param_groups[0]["params"], flat.grad = [flat], torch.ones_like(flat)


def assigned(model, optimizer):
    """In one layer, others keep their parameters."""
    layer = model.base_model.model[0].lora_A
    layer.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [swapped, flattened, assigned])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_were_replaced_are_refused(kind, change):
    model = lora()
    optimizer = optimizer_of(model, kind, within=model)
    loss_of(model).backward()
    change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="have been replaced or deleted since this optimiser was created"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_model_is_a_module_and_a_rate_one_number():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    for wrong in (np.ones(2), list(layer.parameters()), None):
        with pytest.raises(TypeError, match=f"model must be a torch module, got {type(wrong).__name__}"):
            create_quotient_optimizer(wrong, lr=0.1)
    with pytest.raises(ValueError, match="lr must be a number of at least 0, got tensor"):
        create_quotient_optimizer(layer, lr=torch.ones(2))


def test_every_parameter_group_is_checked():
    """Each of these stepped, some of them uphill."""
    model = lora()
    for name, wrong, words in (
        ("lr", -3, "lr must be a number of at least 0"),
        ("lr", "fast", "lr must be a number"), ("betas", (2, 3), r"betas must be two numbers in \[0, 1\)"),
        ("betas", 0.9, "betas must be two numbers"), ("eps", -1, "eps must be positive"),
        ("eps", 0, "eps must be positive"), ("weight_decay", float("nan"), "weight_decay must be a number"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            QuotientAdam([{"params": trained(model), name: wrong}], find(model))
        with pytest.raises(ValueError, match=words):
            QuotientAdam(trained(model), find(model), **{name: wrong})
    with pytest.raises(TypeError, match="QuotientAdam has no option 'nesterov'"):
        QuotientAdam(trained(model), find(model), nesterov=True)
    with pytest.raises(ValueError, match="momentum must be a number in"):
        QuotientSGD([{"params": trained(model), "momentum": 1.5}], find(model))


class NothingCrosses(TorchDispatchMode):
    """Refuses what makes the host wait for a device: numbers read, and tensors copied from one to the other."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        sizes = [t for t in tree_leaves((args, kwargs, found)) if isinstance(t, torch.Tensor)]
        if "copy" in str(function):
            assert len({t.device for t in sizes}) <= 1, f"{function} from one device to another"
        return found


def on_meta(kind, others=False):
    """A model and its optimiser on a device that has no numbers to read, two steps on."""
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9)),
        peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"] if others else None),
    )
    options = {"momentum": 0.9} if kind == "sgd" else {}
    make = {"adam": QuotientAdam, "muon": QuotientMuon, "sgd": QuotientSGD}[kind]
    optimizer = make(trained(model), find(model), 1e-2, max_grad_norm=1.0, **options)
    optimizer.certify = False  # which reads numbers, once, of the first gradient
    model.to("meta")
    optimizer.param_groups[0]["params"], optimizer._homes = trainable(model), {}
    for s in optimizer._stacks:
        s.device = torch.device("meta")
    for p in trainable(model):
        p.grad = torch.empty_like(p)
    return optimizer


@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_no_step_reads_from_the_device(kind, monkeypatch):
    optimizer = on_meta(kind)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # there is none for it
    optimizer.step()
    with NothingCrosses():
        for _ in range(8):  # at every eighth step factors may move to another gauge
            optimizer.step()
    right = type(optimizer).rule

    def reading(metric, g, state, **options):
        float(g.sizes.sum())
        return right(metric, g, state, **options)

    monkeypatch.setattr(type(optimizer), "rule", staticmethod(reading))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"item|meta"):
        optimizer.step()


def test_with_other_weights_the_host_reads_whether_to_step(monkeypatch):
    """The only number; a step of pairs alone reads none."""
    optimizer = on_meta("adam", others=True)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    with pytest.raises((RuntimeError, NotImplementedError), match=r"item|meta"):
        optimizer.step()
    read = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda t: read.append(t.device.type) or True)
    optimizer.step()
    assert read.count("meta") == 1


def test_a_copy_from_the_host_is_seen():
    with NothingCrosses(), pytest.raises(AssertionError, match="from one device to another"):
        torch.ones(3).to("meta")


def test_adapters_that_are_switched_off_are_not_certified_at_every_step(monkeypatch):
    model = lora()
    model.add_adapter("other", model.peft_config["default"])
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    optimizer = QuotientAdam(trained(model), adapter_pairs(model), 1e-2)
    seen = []
    spy = lambda *args, **options: seen.append(0) or certify(*args, **options)  # noqa: E731
    monkeypatch.setattr("quotient_manifolds.optim.base.certify", spy)
    train(model, optimizer, 4, schedule=False)
    assert len(seen) == 1
    assert len(optimizer._uncertified) == 2
    model.set_adapter("other")
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    train(model, optimizer, 1, schedule=False)
    assert len(seen) == 2
    assert not optimizer._uncertified


def test_a_loaded_state_clips_as_the_saved_one():
    def built(**options):
        torch.manual_seed(0)
        G, H = (nn.Parameter(torch.randn(5, 2)) for _ in range(2))
        return G, H, QuotientSGD([("G", G), ("H", H)], [factor_pair(G, H)], lr=0.1, **options)

    G, H, first = built(max_grad_norm=0.1)
    other_G, other_H, second = built()
    second.load_state_dict(first.state_dict())
    for a, b, optimizer in ((G, H, first), (other_G, other_H, second)):
        (100 * a @ b.mT).square().sum().backward()
        optimizer.step()
    assert torch.equal(G, other_G)
    assert torch.equal(H, other_H)


def test_clipping_beside_complex_parameters():
    G, H = (nn.Parameter(torch.randn(5, 2)) for _ in range(2))
    other = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    optimizer = QuotientAdam([("G", G), ("H", H), ("other", other)], [factor_pair(G, H)], lr=0.1, max_grad_norm=1.0)
    ((G @ H.mT).square().sum() + other.abs().square().sum()).backward()
    before = other.detach().clone()
    optimizer.step()
    assert not torch.equal(other, before)


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
def test_a_grad_scaler_skips_and_unscales(kind):
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
    scaled.zero_grad()
    scaler.scale(loss_of(one)).backward()
    trainable(one)[0].grad[0, 0] = float("inf")
    scaler.step(scaled)
    scaler.update()
    assert all(torch.equal(v, before[k]) for k, v in one.state_dict().items())
    assert scaler.get_scale() == 2.0**9


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
    for a, b in zip(state["stacks"], optimizer.state_dict()["stacks"], strict=True):
        assert all(torch.equal(a["state"][k], b["state"][k]) for k in a["state"])


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e200)])
def test_large_gradients_outside_pairs_are_finite(dtype, size):
    """Their squares would not be."""
    G, H, other = (torch.nn.Parameter(torch.randn(n, 2).to(dtype)) for n in (4, 3, 40))
    optimizer = QuotientAdam([("G", G), ("H", H), ("other", other)], [factor_pair(G, H)], 1e-3, others="SGD")
    optimizer.certify, before = False, other.detach().clone()
    G.grad, H.grad, other.grad = torch.randn_like(G), torch.randn_like(H), torch.full_like(other, size)
    optimizer.step()
    torch.testing.assert_close(other.detach(), before - 1e-3 * size)
    other.grad[0, 0] = float("inf")
    with pytest.raises(ValueError, match="gradient of 'other' has NaN or infinite"):
        optimizer.step()


def test_the_norm_of_many_gradients_is_taken_in_double_precision():
    """In float32 that of 30 million numbers is off by a thousandth, and so would be what is clipped."""
    numbers = torch.randn(30_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(numbers.double().square().sum())
    assert abs(float(Store().total([], [numbers], squares=True)) / exact - 1) < 1e-12


def test_sums_in_half_precision_do_not_overflow():
    """Whether a gradient is finite is known by its sum."""
    for dtype in (torch.float16, torch.float32):
        G, H, other = (torch.nn.Parameter(torch.randn(n, 2).to(dtype)) for n in (4, 3, 40))
        optimizer = QuotientAdam([("G", G), ("H", H), ("other", other)], [factor_pair(G, H)], 1e-3)
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
    for module in (base, metric):
        monkeypatch.setattr(module, "HOST", "none")


def spoil(model, cause):
    """Make a step that must change nothing, by a gradient or by the second factor of a pair."""
    A = model.base_model.model[0].lora_A["default"].weight
    if cause == "anchor":
        A.data[0] = 0
    else:
        A.grad[0, 0] = float("nan")


def full_state(optimizer):
    saved = optimizer.state_dict()
    return copy.deepcopy([b["state"] for b in saved["stacks"]] + list(saved["state"].values()))


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
        optimizer = make(trained(model), find(model), 1e-2, weight_decay=0.1, max_grad_norm=clip, **options)
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


def test_no_copy_of_other_weights_off_the_cpu(monkeypatch):
    """A classifier, its gradient and AdamW's moments may be larger than all adapters."""
    off_the_cpu(monkeypatch)
    model = lora(modules_to_save=["2"], targets=("0",))
    optimizer = QuotientAdam(trained(model), find(model), 1e-2)
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


@pytest.mark.parametrize("make", [QuotientAdam, QuotientMuon, QuotientSGD])
def test_an_optimiser_without_pairs_says_who_finds_them(make):
    with pytest.raises(ValueError, match=r"no pair .*; create_quotient_lora_optimizer\(model, lr=…\) finds those of"):
        make(trained(lora()), lr=1e-3)


def test_bad_input():
    model = lora()
    params = trained(model)
    with pytest.raises(ValueError, match="no LoRA adapter of peft with two trainable factors"):
        create_quotient_lora_optimizer(nn.Linear(2, 2), lr=1e-3)
    with pytest.raises(ValueError, match="no layer has an adapter 'nobody'; there are default"):
        create_quotient_lora_optimizer(model, lr=1e-3, adapter_names=["nobody"])
    with pytest.raises(ValueError, match="split over the parameter groups"):
        QuotientAdam([{"params": params[:1]}, {"params": params[1:]}], find(model))
    with pytest.warns(UserWarning, match=r"1 of 2 adapters, which form no pair: frozen.*: base_model.*lora_A"):
        QuotientAdam(params[1:], find(model))
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        QuotientSGD(params, find(model), max_grad_norm=0)
    with torch.no_grad():
        params[0][1].zero_()
        params[1][1].zero_()
    with pytest.raises(ValueError, match="both factors lack full column rank"):
        QuotientAdam(params, find(model))


@pytest.mark.parametrize("name", ["pair", "other"])
def test_sparse_gradients_are_refused(name):
    """The check failed by itself."""
    words, (G, H) = nn.Embedding(7, 2, sparse=True), (nn.Parameter(torch.randn(n, 2)) for n in (5, 4))
    G = words.weight if name == "pair" else G
    names = {G: "G", H: "H", words.weight: "G" if name == "pair" else "words"}
    optimizer = QuotientAdam([(name, p) for p, name in names.items()], [factor_pair(G, H)])
    ((G @ H.mT).square().sum() + words(torch.tensor([1])).sum()).backward()
    words.weight.grad = words.weight.grad.to_sparse()
    with pytest.raises(ValueError, match="a gradient is sparse, which is not supported"):
        optimizer.step()


def test_groups_and_pairs_given_twice():
    model = lora()
    pairs = find(model).pairs
    optimizer = QuotientAdam(trained(model), [*pairs, *adapter_pairs(model).pairs])
    assert len(optimizer.state_dict()["pairs"]) == len(pairs)
    extra = nn.ModuleDict({"extra": lora(targets=("0",))})
    with pytest.raises(ValueError, match="max_grad_norm clips all groups together"):
        optimizer.add_param_group({"params": trained(extra), "max_grad_norm": 1.0})
    first, *rest = trained(extra)
    with pytest.raises(TypeError, match="add_pairs"):
        optimizer.add_param_group({"params": [first], "symmetries": find(extra)})
    optimizer.add_param_group({"params": [first]})
    for _ in range(2):  # a refused pair leaves nothing behind
        with pytest.warns(UserWarning, match="AdamW trains 1 of 1 adapters, which form no pair: frozen"):
            optimizer.add_pairs(find(extra))
    optimizer.param_groups[-1]["params"] += [p for _, p in rest]
    with pytest.raises(ValueError, match="not as many names as parameters: some have been replaced"):
        optimizer.add_pairs(find(extra))
    optimizer.param_groups[-1]["param_names"] += [name for name, _ in rest]
    optimizer.add_pairs(find(extra))
    assert len(optimizer.state_dict()["pairs"]) == len(pairs) + 1
    assert create_quotient_lora_optimizer(model, lr=1e-3, adapter_names="default") is not None
    wide = lora(r=11)  # more columns than the second layer has outputs
    assert canonicalize_(wide, found := adapter_pairs(wide)).pairs == tuple(p for p in found.pairs if p.n >= 11)


def test_half_a_gradient_is_an_error():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    loss_of(model).backward()
    trainable(model)[0].grad = None
    with pytest.raises(ValueError, match="has no gradient but the rest of the pair has"):
        optimizer.step()


def pairs_of(factors):
    """Every two of a list make a pair."""
    slots = [slot(factors, str(i)) for i in range(len(factors))]
    both = zip(slots[::2], slots[1::2], strict=True)
    return [pair([G], [H], GL(G.size[1]), name=f"pair {i}") for i, (G, H) in enumerate(both)]


@pytest.mark.parametrize("absent", ["None", "zero"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_without_gradient_stays_as_it_is(kind, absent):
    """Beside another of the same shape, which takes the steps that it would take alone, and joins it later.

    Muon moved an expert without tokens, whose gradient is 0, by full steps of its old moment.
    """

    def run(sizes, without):
        torch.manual_seed(0)
        factors = [nn.Parameter(torch.randn(n, 2)) for n in (5, 4, 5, 4)]
        factors[3].data[:, 1] = factors[3].data[:, 0] + 1e-3  # crooked, of which nothing is said
        model = nn.ParameterList(factors[:sizes])
        optimizer = optimizer_of(model, kind, symmetries=pairs_of(model), weight_decay=0.1, max_grad_norm=0.1)
        ends = []
        for step in range(6):
            optimizer.zero_grad()
            products = [G @ H.mT for G, H in zip(model[::2], model[1::2], strict=True)]
            sum(P.sin().sum() for P in (products[:1] if step in without else products)).backward()
            for p in model:
                p.grad = torch.zeros_like(p) if p.grad is None and absent == "zero" else p.grad
            optimizer.step()
            ends.append([p.detach().clone() for p in model])
        return optimizer, ends

    optimizer, found = run(4, (0, 1, 2, 4))
    (state,) = (s["state"] for s in optimizer.state_dict()["stacks"])
    assert "step" not in state or state["step"].tolist() == [6, 2]
    _, alone = run(2, ())
    for step in range(3):
        assert torch.equal(found[step][2], found[0][2])
        assert all(torch.allclose(p, q, atol=1e-12) for p, q in zip(found[step][:2], alone[step], strict=True))
    assert not torch.equal(found[3][2], found[0][2])
    assert all(torch.equal(p, q) for p, q in zip(found[3][2:], found[4][2:], strict=True))
    assert not torch.equal(found[5][2], found[4][2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_gradient_leaves_the_whole_state(kind):
    model = lora()
    optimizer = optimizer_of(model, kind, weight_decay=0.1)
    train(model, optimizer, 2, schedule=False)
    before = [p.detach().clone() for p in trainable(model)] + tree_leaves(full_state(optimizer))
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    after = trainable(model) + tree_leaves(full_state(optimizer))
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    trainable(model)[0].grad[0, 0] = 1e-20  # which is a gradient
    optimizer.certify = False
    optimizer.step()
    assert not torch.equal(trainable(model)[0], before[0])


def test_sharded_parameters_are_refused():
    model = lora()
    trainable(model)[0]._is_flat_param = True
    with pytest.raises(ValueError, match="sharded parameter"):
        create_quotient_lora_optimizer(model, lr=1e-3)


def test_engines_of_deepspeed_are_refused():
    engine = type("DeepSpeedEngine", (nn.Sequential,), {})(lora())
    for create in (create_quotient_lora_optimizer, create_quotient_optimizer):
        with pytest.raises(ValueError, match="DeepSpeedEngine, which gives optimisers flat copies"):
            create(engine, lr=1e-3)


def test_weights_replaced_by_ones_of_lower_rank():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    with torch.no_grad():
        for p in adapter_pairs(model).pairs:
            weights_of(model)[p.H[0].name].zero_()
    before = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"second factor has lost full rank .*; no weight was changed"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_lora_on_attention():
    """Its factors are rows of a frozen pair of the attention layer; that is no half of a pair."""
    torch.manual_seed(0)
    one = peft.get_peft_model(bert(), peft.LoraConfig(r=3, target_modules=["query", "value"])).double().eval()
    two = moved(one)
    ids, labels = torch.randint(20, (6, 7)), torch.arange(6) % 3
    for model in (one, two):
        optimizer = create_quotient_optimizer(model, lr=1e-2)
        assert len(optimizer.state_dict()["pairs"]) == 4
        QuotientAdam(trained(model), find(model))
        QuotientAdam(model.named_parameters(), find(model))
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(input_ids=ids).logits, labels).backward()
            optimizer.step()
    assert apart(one, two) < 1e-8


def spoilt(kind, model, optimizer):
    """Give the model gradients that are not those of a loss at its weights."""
    loss_of(model).backward()
    if kind == "delayed":
        for p in adapter_pairs(model).pairs:
            p.scatter_(point(p, model) + torch.randn(p.n + p.m, p.group.h), weights_of(model))
    for p in trainable(model):
        if kind == "noisy":
            p.grad += p.grad.std() * torch.randn_like(p)
        elif kind == "clipped":
            p.grad.clamp_(-p.grad.abs().median(), p.grad.abs().median())


@pytest.mark.parametrize("spoil", ["delayed", "noisy", "clipped"])
@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_gradients_of_other_weights_are_followed_with_one_warning(kind, spoil):
    """They were refused, by an error that blamed the pair."""
    torch.manual_seed(0)
    model = lora()
    optimizer = optimizer_of(model, kind, symmetries=adapter_pairs(model))
    spoilt(spoil, model, optimizer)
    with pytest.warns(RuntimeWarning, match=r"not taken at these weights.*the steps are taken all the same"):
        optimizer.step()
    optimizer.add_pairs(adapter_pairs(model))  # which are looked at anew
    optimizer.zero_grad()
    spoilt(spoil, model, optimizer)
    optimizer.step()  # warnings are errors here: it says so once
    losses = train(model, optimizer, 20, schedule=False)
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


def test_two_steps_on_one_gradient_are_followed():
    model = lora()
    first, second = (optimizer_of(model, "adam", symmetries=adapter_pairs(model), lr=lr) for lr in (0.3, 1e-2))
    loss_of(model).backward()
    first.step()
    first.step()
    with pytest.warns(RuntimeWarning, match="the steps are taken all the same"):
        second.step()


class Kernels(TorchDispatchMode):
    """Counts the calls that are no views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not (function.is_view or "unsafe_view" in str(function)) and str(function).startswith("aten")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("idle", [False, True], ids=["all", "some idle"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_kernels_does_not_grow_with_that_of_adapters(kind, dtype, idle):
    counts = []
    for number in (10, 100):
        factors = [nn.Parameter(torch.randn(n, 2, dtype=dtype)) for _ in range(number) for n in (5, 4)]
        model = nn.ParameterList(factors)
        optimizer = optimizer_of(model, kind, symmetries=pairs_of(model), weight_decay=0.1)
        optimizer.certify = False
        for _ in range(2):  # in the first step crooked pairs move to another gauge
            for i, p in enumerate(factors):
                p.grad = torch.randn_like(p) if i % 8 > 1 or not idle else torch.zeros_like(p)
            with Kernels() as kernels:
                optimizer.step()
        counts.append(kernels.count)
    assert counts[0] == counts[1] <= 150, counts


def most_in_use(optimizer):
    """Count the bytes that three steps have in use at once, beyond those before, as torch's allocator tells them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(3):
            optimizer.step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("waiting", [False, True], ids=["all", "one without gradient"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_the_memory_of_three_stacks_beside_its_state(kind, waiting, monkeypatch):
    """Small matrices, of which there are many, are .4 % of the weights each."""
    factors = nn.ParameterList(torch.randn(2048, 8) for _ in range(20))
    for p in factors[2 * waiting :]:
        p.grad = torch.randn_like(p)
    weights = sum(p.nbytes for p in factors)

    def beyond_state():
        optimizer = optimizer_of(factors, kind, symmetries=pairs_of(factors), weight_decay=0.1)
        optimizer.certify = False
        return most_in_use(optimizer) - sum(t.nbytes for s in optimizer._stacks for t in s.state.values())

    assert 2 * weights < beyond_state() <= 3 * weights
    advance_ = Stack.advance_
    wasteful = lambda s, u, *args, **more: advance_(s, u._replace(rows=[d.clone() for d in u.rows]), *args, **more)  # noqa: E731
    monkeypatch.setattr(Stack, "advance_", wasteful)
    assert beyond_state() > 3 * weights


@torch.no_grad()
def test_numbers_of_a_stack_lie_on_its_device():
    """Several may hold one model; the answer whether to step lies on the first."""
    model = lora(full_rank=True).to("meta")
    weights = weights_of(model)
    made = Stack(adapter_pairs(model).pairs[:1], False, 0, weights)
    assert made.begin(weights, {name: torch.empty_like(p) for name, p in weights.items()})
    made.g.restrict(torch.tensor(True, device="meta"))
    for t in (made.g.only(made.g.grams(), 0), *made.g.room, made.g.sizes):
        assert t.device.type == "meta"


def test_scales_that_have_become_different_are_refused():
    """Pairs of one scale share a bucket, whose metric depends on it."""

    def optimizer(**options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["0", "2"], init_lora_weights=False, **options)
        return create_quotient_lora_optimizer(peft.get_peft_model(net, config), lr=1e-3)

    saved = optimizer().state_dict()
    optimizer().load_state_dict(saved)
    with pytest.raises(ValueError, match="another model; set ranks, lora_alpha and rslora as they were"):
        optimizer(alpha_pattern={"2": 160}).load_state_dict(saved)


def test_steps_are_those_of_adamw():
    torch.manual_seed(0)
    G, H, *mine = (nn.Parameter(torch.randn(size)) for size in ((4, 2), (3, 2), (3, 2), (4,)))
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(theirs, **options)
    names = [("G", G), ("H", H), *((f"other {i}", p) for i, p in enumerate(mine))]
    ours = QuotientAdam(names, [factor_pair(G, H)], **options)
    for _ in range(3):
        for p, q in zip(theirs, mine, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        ours.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_hidden_matrices_outside_pairs_move_as_by_muon(kind):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 8), layer, nn.Linear(8, 11))
    options = {"lr": 0.02, "optimizer": kind, "other_params_lr": 1e-3, "weight_decay": 0.1}
    optimizer = create_quotient_optimizer(model, others="muon", **options)
    assert {g["lr"] for g in create_quotient_optimizer(model, lr=0.02, optimizer=kind, others="muon").param_groups} == {
        0.02
    }
    hidden = [layer.linear1.weight, layer.linear2.weight]
    assert [g["params"] for g in optimizer.param_groups if g["others"]["name"] == "Muon"] == [hidden]
    twins = [nn.Parameter(p.detach().clone()) for p in hidden]
    muon = torch.optim.Muon(twins, 1e-3, 0.1, adjust_lr_fn="match_rms_adamw")  # with its own momentum and eps
    ids = torch.randint(11, (4, 6))
    for step in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for p, twin in zip(hidden, twins, strict=True):
            twin.grad = p.grad.clone()
        optimizer.step()
        muon.step()
        if step == 3:
            saved = optimizer.state_dict()
            optimizer = create_quotient_optimizer(model, others="muon", **options)
            optimizer.load_state_dict(saved)
    for p, twin in zip(hidden, twins, strict=True):
        assert torch.equal(p, twin)
    with pytest.raises(ValueError, match='others must be "adamw", or "muon"'):
        create_quotient_optimizer(model, others="sgd", **options)


@pytest.mark.parametrize("options", [{}, {"betas": (0.8, 0.99), "eps": 1e-6}], ids=["default", "of AdamW"])
def test_schedules_of_momentum_cycle_that_of_muon(options):
    """They cycled the first beta of AdamW, which trains the other parameters, and keeps its own options."""
    torch.manual_seed(0)
    G, H, mine = (nn.Parameter(torch.randn(n, 2)) for n in (4, 3, 5))
    optimizer = QuotientMuon([("G", G), ("H", H), ("mine", mine)], [factor_pair(G, H)], lr=0.02, **options)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=9, base_momentum=0.6, max_momentum=0.7)
    (group,) = optimizer.param_groups
    assert (group["momentum"], group["others"].get("betas"), optimizer.defaults["momentum"]) == (
        0.7,
        options.get("betas"),
        0.9,
    )
    twin = nn.Parameter(mine.detach().clone())
    adamw = torch.optim.AdamW([twin], group["lr"] * (1 / 20), weight_decay=0.0, **options)
    for _ in range(3):
        for p in (G, H, mine):
            p.grad = torch.randn_like(p)
        twin.grad = mine.grad.clone()
        optimizer.certify = False
        optimizer.step()
        adamw.step()
    assert torch.equal(mine, twin)


@pytest.mark.parametrize(("name", "wrong"), [("lr", float("nan")), ("momentum", 1.0), ("max_grad_norm", 2.0)])
def test_options_are_checked_again_at_every_step(name, wrong):
    """Schedules and users change those of a group; a rate that was no number reached the weights."""
    model = lora(targets=("0",), modules_to_save=["2"])
    optimizer = create_quotient_lora_optimizer(model, lr=0.02, optimizer="muon")
    loss_of(model).backward()
    optimizer.param_groups[-1][name] = wrong
    with pytest.raises(ValueError, match=name):
        optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_adapters_without_a_pair_are_no_matrices_for_muon():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 9), nn.Linear(9, 2))
    model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0", "1"])).requires_grad_(True)
    model.base_model.model[0].lora_A["default"].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="AdamW or Muon trains 1 of 2 adapters, which form no pair: frozen"):
        optimizer = create_quotient_optimizer(model, lr=1e-2, others="muon", symmetries=adapter_pairs(model))
    layers = [model.base_model.model[i].base_layer.weight for i in range(2)]
    assert [g["params"] for g in optimizer.param_groups if g["others"]["name"] == "Muon"] == [layers]


def test_it_says_what_is_trained_how():
    model = lora(targets=("0",), modules_to_save=["2"])
    words = str(create_quotient_lora_optimizer(model, lr=1e-3)).splitlines()
    assert words[0] == f"1 adapter of rank 4 on the quotient; {20 * 9 + 9} other weights by AdamW"
    assert "lr: 0.001" in map(str.strip, words)
    layer = nn.TransformerEncoderLayer(12, 3, 7, batch_first=True)  # values lie in one parameter with queries and keys
    others = sum(p.numel() for p in layer.parameters()) - 2 * 12 * 12 - 12
    words = str(create_quotient_optimizer(layer, lr=1e-3, symmetries=find(layer).of_kind(["vo"])))
    assert words.startswith(f"3 pairs of rank 4 on the quotient; {others} other weights by AdamW\n")


def test_numbers():
    for value in (1, 0.5, torch.tensor(2.0)):
        check_options({"lr": value}, {})
    for value in (True, "1", torch.ones(2), [0.1], None, float("nan"), -1):
        with pytest.raises(ValueError, match="lr must be a number of at least 0, got"):
            check_options({"lr": value}, {})


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_complex_parameters_outside_pairs_move_as_by_adamw(lr):
    torch.manual_seed(0)
    G, H = (nn.Parameter(torch.randn(n, 2)) for n in (4, 3))
    c = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    other = nn.Parameter(c.detach().clone())
    target = torch.randn(5, dtype=torch.complex128)
    ours = QuotientAdam([("G", G), ("H", H), ("c", c)], [factor_pair(G, H)], lr=lr)
    theirs = torch.optim.AdamW([other], lr=lr, weight_decay=0.0)
    for _ in range(5):
        for optimizer, p in ((ours, c), (theirs, other)):
            optimizer.zero_grad()
            ((p - target).abs().square().sum() + (G @ H.T).square().sum()).backward()
            optimizer.step()
    torch.testing.assert_close(c, other, rtol=1e-12, atol=1e-12)


def test_what_is_trained_alone():
    """What is refused counts if the optimiser has a weight of it that belongs to no pair."""
    layer = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 1), "frozen": nn.MultiheadAttention(4, 1)})
    kinds = [Refusal(name, "attention", Cause.BROKEN, name) for name in layer]
    own = {name: p for name, p in layer.named_parameters() if "frozen" not in name or "bias" in name}
    assert alone(kinds, own) == kinds[:1]
    assert alone([replace(kinds[0], cause=Cause.FROZEN), replace(kinds[0], module="attend")], own) == []
    assert alone([replace(kinds[0], module="")], own) != []  # the model itself
    model = lora()
    weights = dict(trained(model))
    pairs = [refused(p, Cause.FROZEN, "no") for p in adapter_pairs(model).pairs]
    assert alone(pairs, weights) == pairs
    assert alone(pairs, {name: weights[name] for name in list(weights)[:1]}) == pairs[:1]
    layer.point = geoopt.ManifoldParameter(torch.randn(7, 2), manifold=GLQuotientMix(4, 3), requires_grad=False)
    points = [p for p in find(layer).restricted(own).refused if p.kind == "point"]  # whose path is that of no module
    assert len(points) == 1
    assert alone(points, own) == []
    assert reasons([*pairs, kinds[0]]) == (
        "frozen: no ('base_model.model.0 lora default' and 1 more); attention ('attention')"
    )


def test_the_orientation_of_a_pair():
    G, H = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.zeros(4, 2))
    assert orientation(factor_pair(H, G), {"G": H, "H": G}) is False
    weights = {"G": G, "H": H}
    assert orientation(factor_pair(G, H), weights) is True
    adapter = replace(factor_pair(G, H), kind="lora")
    G.data[:, 1] = 0
    assert orientation(adapter, weights) is None
    with pytest.raises(ValueError, match="both factors lack full column rank"):
        orientation(replace(adapter, kind="user"), weights)
    G.data.zero_()
    with pytest.raises(ValueError, match="both factors lack full column rank"):  # no gradient moves it
        orientation(adapter, weights)
    thin = {name: nn.Parameter(torch.randn(2, 3)) for name in "GH"}
    assert orientation(factor_pair(**thin), thin) is None


@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj.weight"])
def test_weights_in_another_order_of_memory_take_the_same_steps(name):
    """Several heads and both factors lie in one parameter, of which each is written by itself."""
    ends = []
    for strided in (False, True):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True)
        owner, attribute = (model, name) if "." not in name else (model.out_proj, "weight")
        w = getattr(owner, attribute).detach()
        setattr(owner, attribute, nn.Parameter(w.T.contiguous().T if strided else w.clone()))
        optimizer, x = create_quotient_optimizer(model, lr=0.05), torch.randn(4, 5, 8)
        for _ in range(3):
            optimizer.zero_grad()
            model(x, x, x, need_weights=False)[0].square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0])
