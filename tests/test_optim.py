"""Optimisers on the quotient: invariance, an oracle in explicit frames, state, mixed precision, bad input."""

import copy
import io
import pickle
import time

import peft
import peft.optimizers
import pytest
import torch
from torch import nn

from quotient_manifolds import from_matrix
from quotient_manifolds.optim import (
    QuotientAdam,
    QuotientSGD,
    canonicalize_lora_,
    create_quotient_lora_optimizer,
    create_quotient_optimizer,
)
from quotient_manifolds.symmetries import (
    Group,
    adapter_pairs,
    apply_random_symmetry_,
    block,
    find_symmetric_pairs,
    pair,
)

from .networks import Encoder, bert, shake, vit

X = torch.randn(48, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.sin(2 * X[:, :9])


def lora(full_rank=True, targets=("0", "2"), r=4, dtype=torch.float64, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9)).to(dtype)
    config = peft.LoraConfig(r=r, target_modules=list(targets), init_lora_weights=not full_rank, **options)
    return peft.get_peft_model(net, config).to(dtype)


def loss_of(model, x=X, y=Y):
    p = next(model.parameters())
    return (model(x.to(p.dtype)) - y.to(p.dtype)).square().mean()


def products(model):
    found = [p for p in adapter_pairs(model) if p.group is not None]
    return [p.manifold().to_matrix(p.gather().detach()) for p in found]


def apart(one, two):
    return max(float((a - b).norm() / a.norm()) for a, b in zip(products(one), products(two), strict=True))


def moved(model, condition=100.0):
    """The same function with other factors."""
    model = copy.deepcopy(model)
    if all(bool(p.any()) for p in products(model)):
        apply_random_symmetry_(model, condition, seed=3)
        return model
    generator = torch.Generator().manual_seed(3)
    for p in adapter_pairs(model):  # the zero factor stays zero
        x = p.gather().detach()
        U, _, Vh = torch.linalg.svd(torch.randn(p.group.h, p.group.h, generator=generator, dtype=x.dtype))
        A = (U * torch.logspace(0, 2, p.group.h, dtype=x.dtype)) @ Vh
        G, H = x.split([p.n, p.m])
        p.scatter_(torch.cat([G @ torch.linalg.inv(A), H @ A.mH]))
    return model


def train(model, optimizer, steps=50, schedule=True):
    warm = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / 5, (steps - t) / steps) if schedule else 1.0
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        warm.step()
        losses.append(float(loss.detach()))
    return losses


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


ADAMS = [("adam", metric, second) for metric in ("mix", "inv") for second in ("matrix", "scalar")]
KINDS = [*ADAMS, ("sgd", "mix", None), ("sgd", "inv", None), ("nesterov", "mix", None)]


def optimizer_of(model, kind, metric="mix", second="matrix", lr=1e-2, **options):
    if kind == "adam":
        return QuotientAdam(
            trainable(model), find_symmetric_pairs(model), lr, metric=metric, second_moment=second, **options
        )
    return QuotientSGD(
        trainable(model),
        find_symmetric_pairs(model),
        10 * lr,
        0.9,
        metric=metric,
        nesterov=kind == "nesterov",
        **options,
    )


# -- invariance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full_rank", [True, False], ids=["full-rank", "B=0"])
@pytest.mark.parametrize(("kind", "metric", "second"), KINDS)
def test_equivalent_starts_train_alike(kind, metric, second, full_rank):
    one = lora(full_rank)
    two = moved(one)
    assert torch.allclose(one(X), two(X), atol=1e-10)
    for model in (one, two):
        losses = train(model, optimizer_of(model, kind, metric, second, weight_decay=0.1, max_grad_norm=0.3))
    assert apart(one, two) < 1e-8
    assert losses[-1] < 0.8 * losses[0]


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


@pytest.mark.parametrize(("kind", "metric"), [("adam", "mix"), ("adam", "inv"), ("sgd", "mix")])
@pytest.mark.parametrize("make", [vit, bert, Encoder])
def test_attention_trains_alike_from_equivalent_weights(make, kind, metric):
    torch.manual_seed(0)
    one = shake(make())
    two = copy.deepcopy(one)
    apply_random_symmetry_(two, 10.0, seed=2)
    if make is vit:
        batch = torch.randn(6, 1, 8, 8)
    elif make is bert:
        batch = torch.randint(20, (6, 7))
    else:
        batch = torch.randn(6, 5, 8)
    labels = torch.arange(6) % 3
    scores = []
    for model in (one, two):
        if kind == "adam":
            optimizer = create_quotient_optimizer(model, lr=3e-3, metric=metric, weight_decay=0.1, max_grad_norm=1.0)
        else:
            # The key bias has no gradient but rounding, which Adam's normalisation would lift out; SGD's does not.
            optimizer = QuotientSGD(model.parameters(), find_symmetric_pairs(model), 1e-2, 0.9, metric=metric)
        for _ in range(15):
            optimizer.zero_grad()
            found = model(batch)
            found = found if isinstance(found, torch.Tensor) else found.logits
            nn.functional.cross_entropy(found, labels).backward()
            optimizer.step()
        scores.append(found.detach())
    assert torch.allclose(*scores, atol=1e-6)


# -- an oracle -----------------------------------------------------------------------------------------------------


def inverse_root(V):
    """V^(-1/2) of a Hermitian matrix, eigenvalues below 1e-3 of the largest lifted to it."""
    values, vectors = torch.linalg.eigh(V)
    return vectors @ torch.diag(1 / (values.clamp_min(1e-3 * values[-1]).clamp_min(0).sqrt() + 1e-8)) @ vectors.mH


def frames_of(G, H):
    """(Q, R) of G above (H⁺)ᴴ, and of H."""
    return torch.linalg.qr(torch.cat([G, torch.linalg.pinv(H).mH])), torch.linalg.qr(H)


class ExplicitAdam:
    """Adam of one pair with moments in explicit orthonormal frames Q, carried by P = Q_newᴴ Q_old."""

    def __init__(self, metric, G, H, lr):
        self.metric, self.G, self.H, self.lr = metric, G, H, lr
        h = G.shape[1]
        self.moments = [(torch.zeros_like(X), torch.zeros(h, h), torch.zeros(len(X), 1)) for X in (G, H)]
        self.count = 0

    def pick(self, k, frames):
        """The frame of factor k: mix measures a factor by the other one, inv by itself."""
        return frames[k] if self.metric == "inv" else frames[1 - k]

    def step(self, grads):
        self.count += 1
        G, H, lr = self.G, self.H, self.lr
        before, ends, moments = frames_of(G, H), [], []
        first, second = 1 - 0.9**self.count, 1 - 0.999**self.count
        for k in (0, 1):
            R = self.pick(k, before)[1]
            T = R.mH if self.metric == "inv" else torch.linalg.inv(R)
            m, C, r = self.moments[k]
            g = grads[k] @ T
            m, C = 0.9 * m + 0.1 * g, 0.999 * C + 0.001 * g.mH @ g / len(g)
            root = inverse_root(C / second)
            r = 0.999 * r + 0.001 * (g @ root).square().mean(1, keepdim=True)
            d = (m / first) @ root / ((r / second).sqrt() + 1e-8)
            ends.append((G, H)[k] - lr * d @ T.mH)
            moments.append((m, C, r))
        after = frames_of(*ends)
        for k in (0, 1):
            P = self.pick(k, after)[0].mH @ self.pick(k, before)[0]
            m, C, r = moments[k]
            self.moments[k] = (m @ P.mH, P @ C @ P.mH, r)
        self.G, self.H = ends


@pytest.mark.parametrize("metric", ["mix", "inv"])
@pytest.mark.parametrize("start", ["zero", "full"])
def test_adam_against_explicit_frames(metric, start):
    torch.manual_seed(0)
    n, m, h = 9, 7, 3
    G, H = (torch.zeros if start == "zero" else torch.randn)(n, h), torch.randn(m, h)
    target = torch.randn(n, m)
    up, down = nn.Linear(h, n, bias=False), nn.Linear(m, h, bias=False)
    with torch.no_grad():
        up.weight.copy_(G)
        down.weight.copy_(H.T)
    p = pair([block(up, "weight")], [block(down, "weight", transpose=True)], Group(h))
    optimizer = QuotientAdam([up.weight, down.weight], [p], 0.02, metric=metric)
    oracle = ExplicitAdam(metric, G, H, 0.02)
    for _ in range(12):
        optimizer.zero_grad()
        torch.cosh(up.weight @ down.weight - target).sum().backward()
        optimizer.step()
        D = torch.sinh(oracle.G @ oracle.H.T - target)
        oracle.step((D @ oracle.H, D.T @ oracle.G))
    assert torch.allclose(up.weight.detach(), oracle.G, atol=1e-7)
    assert torch.allclose(down.weight.detach(), oracle.H.T, atol=1e-7)
    assert (up.weight.detach() - G).norm() > 0.1


def test_the_floor_bounds_the_term_of_second_order():
    """ξ_G ξ_Hᴴ is of order η² even where the product is nearly zero; without the floor it would be η²/σ."""
    torch.manual_seed(0)
    up, down = nn.Linear(3, 9, bias=False), nn.Linear(7, 3, bias=False)
    with torch.no_grad():
        up.weight.copy_(torch.randn(9, 3) @ torch.diag(torch.tensor([1.0, 1e-3, 1e-9])))
    p = pair([block(up, "weight")], [block(down, "weight", transpose=True)], Group(3))
    lr = 1e-2
    optimizer = QuotientAdam([up.weight, down.weight], [p], lr)
    before = p.gather().detach()
    (up.weight @ down.weight - torch.randn(9, 7)).square().sum().backward()
    optimizer.step()
    (dG, dH), H = (p.gather().detach() - before).split([9, 7]), before[9:]
    assert (dG @ dH.T).norm() <= 2 * lr**2 * (9 * 7) ** 0.5
    assert (dG @ H.T).norm() > lr


# -- from B = 0 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1e-4, 1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize(("kind", "metric", "second"), KINDS)
def test_the_loss_falls_from_step_one(kind, metric, second, lr):
    model = lora(full_rank=False)
    options = {"second": second} if second else {}
    losses = train(model, optimizer_of(model, kind, metric, lr=lr, **options), steps=12, schedule=False)
    assert losses[1] < losses[0]
    assert min(losses) == min(losses[2:])
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kind", "metric", "second"), KINDS)
def test_a_zero_learning_rate_does_nothing(kind, metric, second, dtype):
    """Warm-up starts with one."""
    model = lora(full_rank=False, dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    optimizer = optimizer_of(model, kind, metric, second, lr=0.0)
    train(model, optimizer, steps=3, schedule=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    optimizer.param_groups[0].update(lr=1e-2, initial_lr=1e-2)
    losses = train(model, optimizer, steps=5, schedule=False)
    assert losses[-1] < losses[0]


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


# -- decay, clipping -----------------------------------------------------------------------------------------------


def test_decay_shrinks_the_product_and_spares_biases():
    torch.manual_seed(0)
    first, second = nn.Linear(5, 3), nn.Linear(3, 4)
    p = pair([block(first, "weight", transpose=True), block(first, "bias")], [block(second, "weight")], Group(3))
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
            N, M = H.T @ H, G.T @ G + torch.linalg.inv(H.T @ H)
            lengths.append((torch.trace(N @ dG.T @ dG) + torch.trace(M @ dH.T @ dH)).sqrt())
        steps.append(float(torch.stack(lengths).norm()))
    assert steps[0] > 1e-2
    assert abs(steps[1] - 1e-3) < 1e-8


# -- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "metric", "second"), [*ADAMS[:2], ("sgd", "mix", None)])
def test_resuming_is_exact(kind, metric, second, dtype):
    straight = lora(full_rank=False, dtype=dtype)
    broken = copy.deepcopy(straight)
    train(straight, optimizer_of(straight, kind, metric, second), 12, schedule=False)
    optimizer = optimizer_of(broken, kind, metric, second)
    train(broken, optimizer, 5, schedule=False)
    file = io.BytesIO()
    torch.save({"model": broken.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = lora(full_rank=False, dtype=dtype)
    resumed.load_state_dict(saved["model"])
    again = optimizer_of(resumed, kind, metric, second)
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, 7, schedule=False)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_pickled_and_copied_optimisers_go_on():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    train(model, optimizer, 3, schedule=False)
    for clone in (pickle.loads(pickle.dumps((model, optimizer))), copy.deepcopy((model, optimizer))):
        train(*clone, 3, schedule=False)
        other = copy.deepcopy((model, optimizer))
        train(*other, 3, schedule=False)
        assert apart(clone[0], other[0]) == 0


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


def test_state_saved_under_compile_resumes_without():
    model = lora()
    compiled = torch.compile(model, backend="eager")
    saved = create_quotient_lora_optimizer(compiled, lr=1e-2).state_dict()
    create_quotient_lora_optimizer(model, lr=1e-2).load_state_dict(saved)


def numbers(state):
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size() if state.numel() > 1 else 0
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(numbers, values))


@pytest.mark.parametrize("second", ["matrix", "scalar"])
def test_the_state_is_no_larger_than_adamw(second):
    sizes = []
    for make in (lambda m: torch.optim.AdamW(trainable(m)), lambda m: optimizer_of(m, "adam", second=second)):
        model = lora(dtype=torch.float32)
        optimizer = make(model)
        train(model, optimizer, 2)
        found = optimizer.state_dict()
        sizes.append(numbers(found["state"]) + sum(numbers(b["small"]) for b in found.get("buckets", [])))
    assert sizes[1] <= sizes[0]


# -- mixed precision, wrappers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_train_in_float32_geometry(dtype):
    model = lora(full_rank=False, dtype=dtype)
    optimizer = optimizer_of(model, "adam")
    losses = train(model, optimizer, 30)
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in trainable(model)} == {dtype}
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}


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


def test_a_grad_scaler_skips_with_a_warning_and_unscales():
    one, two = lora(dtype=torch.float32), lora(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled, plain = optimizer_of(one, "adam", max_grad_norm=0.1), optimizer_of(two, "adam", max_grad_norm=0.1)
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


def test_nan_gradients_are_an_error_and_change_nothing():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    train(model, optimizer, 2)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    trainable(model)[1].grad[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite entries; no weight was changed"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for a, b in zip(state["buckets"], optimizer.state_dict()["buckets"], strict=True):
        assert all(torch.equal(a["small"][k], b["small"][k]) for k in a["small"])


def test_a_compiled_model_trains_alike():
    one, two = lora(), lora()
    train(one, optimizer_of(one, "adam"), 5)
    compiled = torch.compile(two, backend="eager")
    optimizer = create_quotient_lora_optimizer(compiled, lr=1e-2)
    train(compiled, optimizer, 5)
    assert apart(one, two) < 1e-12


def test_ddp(tmp_path):
    model, alone = lora(), lora()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        train(wrapped, create_quotient_lora_optimizer(wrapped, lr=1e-2), 5)
    finally:
        time.sleep(0.1)  # as in sharpness.distributed.torchrun
        torch.distributed.destroy_process_group()
    train(alone, optimizer_of(alone, "adam"), 5)
    assert apart(alone, model) < 1e-12


# -- adapters of every kind ----------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, a convolution and a linear layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 12)
        self.across = nn.Conv2d(1, 12, (1, 12))
        self.out = nn.Linear(12, 9)

    def forward(self, ids):
        return self.out(self.across(self.words(ids)[:, None]).mean(dim=(2, 3)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"out": 2}, "alpha_pattern": {"out": 3}},
        {"use_dora": True, "targets": ["across", "out"]},
        {"lora_bias": True, "targets": ["across", "out"]},
    ],
    ids=["plain", "rslora", "patterns", "dora", "bias"],
)
def test_embeddings_convolutions_and_variants(options):
    """peft starts embeddings with A = 0: the roles of the factors change there."""
    options = {"targets": ["words", "across", "out"], **options}
    targets = options.pop("targets")
    torch.manual_seed(0)
    net = shake(Words())
    one = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=targets, **options)).double()
    ids = torch.randint(11, (20, 5))
    labels = torch.arange(20) % 9
    two = moved(one)
    for model in (one, two):
        losses = []
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2, weight_decay=0.01, max_grad_norm=1.0)
        for _ in range(15):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[1] < losses[0]
    assert apart(one, two) < 1e-8


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_fused_and_conv1d_targets():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8)).double()
    one = peft.get_peft_model(
        net, peft.LoraConfig(r=3, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    ).double()
    one.eval()  # without dropout
    two = moved(one)
    ids = torch.randint(20, (4, 8))
    for model in (one, two):
        optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert apart(one, two) < 1e-6  # the library computes this loss in float32


def test_a_quantised_base_stays_as_it_is():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    net = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32), nn.Tanh(), nn.Linear(64, 9))
    net.is_loaded_in_4bit = True
    model = peft.get_peft_model(net.to("cpu"), peft.LoraConfig(r=4, target_modules=["0"]))
    base = model.base_model.model[0].get_base_layer().weight
    before = base.detach().clone()
    assert "bnb" in type(model.base_model.model[0]).__module__
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    x = torch.randn(48, 64)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - Y.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert base.dtype == torch.uint8
    assert torch.equal(base, before)


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
        QuotientAdam(trainable(model), find_symmetric_pairs(model))
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(input_ids=ids).logits, labels).backward()
            optimizer.step()
    assert apart(one, two) < 1e-8


@pytest.mark.filterwarnings("ignore")
def test_one_factor_for_several_experts_is_no_pair():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 6, 5))

        def forward(self, x):
            return torch.einsum("bi,eoi->bo", x, self.weight)

    net = nn.Sequential(Experts(), nn.Conv2d(4, 6, 1, groups=2))
    try:
        config = peft.LoraConfig(r=4, target_modules=["1"], target_parameters=["0.weight"], init_lora_weights=False)
        model = peft.get_peft_model(net, config)
    except TypeError:
        pytest.skip("this peft has no target_parameters")
    found = adapter_pairs(model)
    assert all(p.group is None for p in found)
    assert {p.reason for p in found} <= {"several experts share one factor", "a grouped convolution"}
    assert any("experts" in p.reason for p in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_complex_pairs(dtype):
    """Planes that RoPE rotates: one complex number each."""
    torch.manual_seed(0)
    q, k = nn.Linear(6, 4).to(dtype), nn.Linear(6, 4).to(dtype)
    sides = [[block(m, "weight", transpose=True, rotary="half"), block(m, "bias", rotary="half")] for m in (q, k)]
    p = pair(*sides, Group(2, "scalars", "complex"))
    C = torch.randn(7, 7, dtype=torch.complex128)

    def loss():
        z = pair(*sides, Group(2, "scalars", "complex")).gather().to(torch.complex128).squeeze(-1)
        return ((z[:, :7].mT @ z[:, 7:].conj() - C).abs() ** 2).sum()

    for make in (lambda: QuotientAdam([*q.parameters(), *k.parameters()], [p], 1e-2),
                 lambda: QuotientSGD([*q.parameters(), *k.parameters()], [p], 1e-3, 0.9)):  # fmt: skip
        optimizer = make()
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            found = loss()
            found.backward()
            optimizer.step()
            losses.append(float(found.detach()))
        assert losses[-1] < losses[0]
    assert q.weight.dtype == dtype


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


def test_weights_replaced_by_ones_of_lower_rank():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    with torch.no_grad():
        for p in adapter_pairs(model):
            p.H[0].tensor.zero_()
    before = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"second factor has lost its rank .*; no weight was changed"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_adapters_switched_and_added_later():
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
    model.double()
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.requires_grad_(True)
    optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    alone = lora()
    train(alone, optimizer_of(alone, "adam"), 4, schedule=False)
    still = [p.gather().detach() for p in adapter_pairs(model, ["second"])]
    train(model, optimizer, 4, schedule=False)
    for p, q in zip(adapter_pairs(model, ["default"]), adapter_pairs(alone), strict=True):
        assert torch.allclose(p.gather(), q.gather(), atol=1e-12)
    for p, before in zip(adapter_pairs(model, ["second"]), still, strict=True):
        assert torch.equal(p.gather(), before)
    model.set_adapter("second")
    optimizer.zero_grad()
    losses = train(model, optimizer, 4, schedule=False)
    assert losses[-1] < losses[0]
    model.add_adapter("third", peft.LoraConfig(r=2, target_modules=["0"]))
    model.set_adapter("third")
    model.double()
    optimizer.zero_grad()
    new = adapter_pairs(model, ["third"])
    optimizer.add_param_group({"params": [b.tensor for p in new for b in p.G + p.H], "pairs": new, "lr": 3e-2})
    losses = train(model, optimizer, 6, schedule=False)
    assert losses[-1] < losses[0]


def test_groups_of_the_lora_optimiser():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 9))
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1", "2"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["0"]))
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:  # a second adapter freezes these too before peft 0.21
            p.requires_grad_(True)
    optimizer = create_quotient_lora_optimizer(
        model, lr=1e-3, weight_decay=0.1, other_params_lr=1e-4, adapter_names=["default"]
    )
    pairs, decayed, plain = optimizer.param_groups
    assert [(g["lr"], g["weight_decay"]) for g in (pairs, decayed, plain)] == [(1e-3, 0.1), (1e-4, 0.1), (1e-4, 0.0)]
    assert len(pairs["params"]) == 2
    assert [p.dim() for p in decayed["params"]] == [2]
    assert [p.dim() for p in plain["params"]] == [1, 1, 1]


def test_a_parameter_that_belongs_to_a_pair_in_part():
    """The rest of it steps as AdamW would."""
    torch.manual_seed(0)
    fused, up = nn.Linear(5, 6, bias=False), nn.Linear(3, 4, bias=False)
    p = pair([block(up, "weight")], [block(fused, "weight", rows=slice(0, 3), transpose=True)], Group(3))
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


# -- bad input -----------------------------------------------------------------------------------------------------


def test_bad_input():
    model = lora()
    params = trainable(model)
    with pytest.raises(ValueError, match="there is no pair"):
        QuotientAdam(params, [])
    with pytest.raises(ValueError, match="no LoRA adapter of peft whose two factors are trainable"):
        create_quotient_lora_optimizer(nn.Linear(2, 2), lr=1e-3)
    with pytest.raises(ValueError, match="no layer has an adapter 'nobody'; there are default"):
        create_quotient_lora_optimizer(model, lr=1e-3, adapter_names=["nobody"])
    with pytest.raises(ValueError, match="split over the parameter groups"):
        QuotientAdam([{"params": params[:1]}, {"params": params[1:]}], find_symmetric_pairs(model))
    with pytest.raises(ValueError, match="is not among the optimiser's parameters"):
        QuotientAdam(params[1:], find_symmetric_pairs(model))
    with pytest.raises(ValueError, match='metric must be "mix" or "inv"'):
        QuotientAdam(params, find_symmetric_pairs(model), metric="flat")
    with pytest.raises(ValueError, match="second_moment must be"):
        QuotientAdam(params, find_symmetric_pairs(model), second_moment="rows")
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        QuotientSGD(params, find_symmetric_pairs(model), max_grad_norm=0)
    with torch.no_grad():
        params[0].zero_()
        params[1].zero_()
    with pytest.raises(ValueError, match="both factors lack full column rank"):
        QuotientAdam(params, find_symmetric_pairs(model))
    half = lora()
    trainable(half)[0].requires_grad_(False)
    with pytest.raises(ValueError, match="half frozen"):
        create_quotient_lora_optimizer(half, lr=1e-3)


def test_groups_and_pairs_given_twice():
    model = lora()
    pairs = find_symmetric_pairs(model)
    optimizer = QuotientAdam(trainable(model), [*pairs, *adapter_pairs(model)])
    assert len(optimizer.state_dict()["pairs"]) == len(pairs)
    extra = lora(targets=("0",))
    with pytest.raises(ValueError, match="max_grad_norm clips all groups together"):
        optimizer.add_param_group({"params": trainable(extra), "max_grad_norm": 1.0})
    for _ in range(2):  # a refused group leaves nothing behind
        with pytest.raises(ValueError, match="is not among the optimiser's parameters"):
            optimizer.add_param_group({"params": trainable(extra)[:1], "pairs": find_symmetric_pairs(extra)})
    optimizer.add_param_group({"params": trainable(extra), "pairs": find_symmetric_pairs(extra)})
    assert create_quotient_lora_optimizer(model, lr=1e-3, adapter_names="default") is not None
    wide = lora(r=11)  # more columns than the second layer has outputs
    assert canonicalize_lora_(wide) == [p.name for p in find_symmetric_pairs(wide) if p.n >= 11]


def test_half_a_gradient_is_an_error():
    model = lora()
    optimizer = optimizer_of(model, "adam")
    loss_of(model).backward()
    trainable(model)[0].grad = None
    with pytest.raises(ValueError, match="has no gradient but the rest of the pair has"):
        optimizer.step()


def test_sharded_parameters_are_refused():
    model = lora()
    trainable(model)[0]._is_flat_param = True
    with pytest.raises(ValueError, match="sharded parameter"):
        create_quotient_lora_optimizer(model, lr=1e-3)


# -- balancing -----------------------------------------------------------------------------------------------------


def test_balancing_keeps_the_function_and_evens_the_factors():
    model = moved(lora())
    before = model(X)
    names = canonicalize_lora_(model)
    assert len(names) == 2
    assert torch.allclose(model(X), before, atol=1e-10)
    for p in adapter_pairs(model):
        G, H = p.gather().detach().split([p.n, p.m])
        M, N = G.T @ G, H.T @ H
        assert torch.allclose(M, N, atol=1e-10)
        assert torch.allclose(M, torch.diag(torch.diag(M)), atol=1e-10)


def test_balancing_leaves_a_fresh_adapter_alone():
    model = lora(full_rank=False)
    before = copy.deepcopy(model.state_dict())
    assert canonicalize_lora_(model) == []
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_from_product(dtype):
    W = torch.randn(2, 6, 5, dtype=dtype)
    x = from_matrix(W, 3)
    G, H = x.split([6, 5], dim=-2)
    U, s, Vh = torch.linalg.svd(W, full_matrices=False)
    assert torch.allclose(G @ H.mH, (U[..., :3] * s[..., None, :3]) @ Vh[..., :3, :])
    assert torch.allclose(G.mH @ G, H.mH @ H)
    with pytest.raises(ValueError, match="no point of rank 6"):
        from_matrix(W, 6)
    with pytest.raises(ValueError, match="a rank below 2"):
        from_matrix(torch.ones(3, 3), 2)


def test_every_parameter_group_is_checked():
    """Each of these stepped, some of them uphill."""
    model = lora()
    for name, wrong, words in (
        ("metric", "zzz", 'metric must be "mix" or "inv"'), ("lr", -3, "lr must be a number that is not negative"),
        ("lr", "fast", "lr must be a number"), ("betas", (2, 3), r"betas must be two numbers in \[0, 1\)"),
        ("betas", 0.9, "betas must be two numbers"), ("eps", -1, "eps must be positive"),
        ("eps", 0, "eps must be positive"), ("weight_decay", float("nan"), "weight_decay must be a number"),
        ("second_moment", "cube", "second_moment must be"), ("maximize", 1, "maximize must be True or False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            QuotientAdam([{"params": trainable(model), name: wrong}], find_symmetric_pairs(model))
        with pytest.raises(ValueError, match=words):
            QuotientAdam(trainable(model), find_symmetric_pairs(model), **{name: wrong})
    with pytest.raises(ValueError, match="momentum must be a number in"):
        QuotientSGD([{"params": trainable(model), "momentum": 1.5}], find_symmetric_pairs(model))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_maximize_is_minimising_the_negative(kind):
    ends = []
    for sign, options in ((1, {"maximize": True, "foreach": False}), (-1, {"foreach": True})):
        torch.manual_seed(0)
        model = lora()
        make = QuotientAdam if kind == "adam" else QuotientSGD
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


def test_other_adapters_are_named():
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["0"], feedforward_modules=["0"])
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), config)
    with pytest.raises(ValueError, match="its adapters are of the kind IA3, whose weights form no such pair"):
        create_quotient_lora_optimizer(model, lr=1e-3)
