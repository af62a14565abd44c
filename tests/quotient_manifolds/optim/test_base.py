"""What every optimiser does: equivalent starts train alike, decay, clipping, state, mixed precision."""

import contextlib
import copy
import io
import pickle
import time
from dataclasses import replace

import peft
import peft.optimizers
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientMuon,
    QuotientSGD,
    create_quotient_lora_optimizer,
)
from quotient_manifolds.symmetries import (
    GL,
    adapter_pairs,
    block,
    factor_pair,
    find_symmetric_pairs,
    pair,
)
from quotient_manifolds.symmetries.blocks import random_elements
from quotient_manifolds.symmetries.certificate import Certification

from ...training import (
    KINDS,
    X,
    Y,
    apart,
    lora,
    loss_of,
    moved,
    optimizer_of,
    train,
    trainable,
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
    optimizer = make([G, H], [factor_pair(G, H)])
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
    optimizer = make([G, H], [factor_pair(G, H, name="huge")], 1e-2)
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
            pairs = None if known else [replace(p, scale=1.0) for p in find_symmetric_pairs(model)]
            train(model, optimizer_of(model, kind, pairs=pairs, weight_decay=0.1, max_grad_norm=0.3), 30)
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
    first, second = nn.Linear(5, 3), nn.Linear(3, 4)
    p = pair([block(first, "weight", transpose=True), block(first, "bias")], [block(second, "weight")], GL(3))
    bias, product = first.bias.detach().clone(), second.weight.detach() @ first.weight.detach()
    optimizer = QuotientAdam([*first.parameters(), second.weight], [p], 0.1, weight_decay=0.5)
    for q in (*first.parameters(), second.weight):
        q.grad = torch.zeros_like(q)
    for _ in range(3):
        optimizer.step()
    assert torch.allclose(second.weight @ first.weight, product * 0.95**3)
    assert torch.equal(first.bias, bias)


def test_clipping_bounds_the_norm_in_the_metric():
    model = lora()
    steps = []
    for bound in (None, 1e-3):
        again = copy.deepcopy(model)
        optimizer = QuotientSGD(trainable(again), find_symmetric_pairs(again), 1.0, max_grad_norm=bound)
        before = [q.gather().detach() for q in find_symmetric_pairs(again)]
        loss_of(again).backward()
        optimizer.step()
        lengths = []
        for x, q in zip(before, find_symmetric_pairs(again), strict=True):
            (G, H), (dG, dH) = x.split([q.n, q.m]), (q.gather().detach() - x).split([q.n, q.m])
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
    other = lora(targets=("0",))
    with pytest.raises(ValueError, match="belongs to other pairs"):
        optimizer.load_state_dict(optimizer_of(other, "adam").state_dict())
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
        change(wrong["buckets"][0]["state"])
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
    assert {b["state"]["moment G"].dtype for b in optimizer.state_dict()["buckets"]} == {torch.float32}


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
    fused, up = nn.Linear(5, 6, bias=False), nn.Linear(3, 4, bias=False)
    p = pair([block(up, "weight")], [block(fused, "weight", rows=slice(0, 3), transpose=True)], GL(3))
    optimizer = QuotientAdam([fused.weight, up.weight], [p], 1e-2, weight_decay=0.1)
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
    optimizer = optimizer_of(model, kind)
    loss_of(model).backward()
    change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="have been replaced or deleted since this optimiser was created"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_every_parameter_group_is_checked():
    """Each of these stepped, some of them uphill."""
    model = lora()
    for name, wrong, words in (
        ("lr", -3, "lr must be a number of at least 0"),
        ("lr", "fast", "lr must be a number"), ("betas", (2, 3), r"betas must be two numbers in \[0, 1\)"),
        ("betas", 0.9, "betas must be two numbers"), ("eps", -1, "eps must be positive"),
        ("eps", 0, "eps must be positive"), ("weight_decay", float("nan"), "weight_decay must be a number"),
        ("maximize", 1, "maximize must be True or False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            QuotientAdam([{"params": trainable(model), name: wrong}], find_symmetric_pairs(model))
        with pytest.raises(ValueError, match=words):
            QuotientAdam(trainable(model), find_symmetric_pairs(model), **{name: wrong})
    with pytest.raises(ValueError, match="momentum must be a number in"):
        QuotientSGD([{"params": trainable(model), "momentum": 1.5}], find_symmetric_pairs(model))


@pytest.mark.parametrize("kind", ["adam", "muon", "sgd"])
def test_maximize_is_minimising_the_negative(kind):
    ends = []
    for sign, options in ((1, {"maximize": True}), (-1, {})):
        torch.manual_seed(0)
        model = lora()
        make = {"adam": QuotientAdam, "muon": QuotientMuon, "sgd": QuotientSGD}[kind]
        optimizer = make(trainable(model), find_symmetric_pairs(model), lr=1e-2, **options)
        torch.manual_seed(1)
        x = torch.randn(5, 12)
        for _ in range(3):
            optimizer.zero_grad()
            (sign * model(x).sin().sum()).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in trainable(model)])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other)


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
    optimizer = make(trainable(model), find_symmetric_pairs(model), 1e-2, max_grad_norm=1.0, **options)
    optimizer.certify = False  # which reads numbers, once, of the first gradient
    places = {p: n for n, p in model.named_parameters()}
    order = [places[p] for p in optimizer.param_groups[0]["params"]]
    covered = [places[p] for p in optimizer._covered]
    model.to("meta")
    named = dict(model.named_parameters())
    optimizer.param_groups[0]["params"] = [named[n] for n in order]
    optimizer._covered = {named[n]: None for n in covered}
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
    wrong = type(optimizer)._step_pairs

    def reading(self, group, s):
        float(s.squared_norm())
        wrong(self, group, s)

    monkeypatch.setattr(type(optimizer), "_step_pairs", reading)
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
    optimizer = QuotientAdam(trainable(model), adapter_pairs(model), 1e-2)
    seen = []
    real = Certification.see
    monkeypatch.setattr(Certification, "see", lambda *args: seen.append(0) or real(*args))
    train(model, optimizer, 4, schedule=False)
    assert len(seen) == 1
    assert len(optimizer._certification.open) == 2
    model.set_adapter("other")
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    train(model, optimizer, 1, schedule=False)
    assert len(seen) == 2
    assert not optimizer._certification.open


def test_a_loaded_state_clips_as_the_saved_one():
    def built(**options):
        torch.manual_seed(0)
        G, H = (nn.Parameter(torch.randn(5, 2)) for _ in range(2))
        return G, H, QuotientSGD([G, H], [factor_pair(G, H)], lr=0.1, **options)

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
    optimizer = QuotientAdam([G, H, other], [factor_pair(G, H)], lr=0.1, max_grad_norm=1.0)
    ((G @ H.mT).square().sum() + other.abs().square().sum()).backward()
    before = other.detach().clone()
    optimizer.step()
    assert not torch.equal(other, before)
