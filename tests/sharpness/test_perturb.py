"""A measurement leaves no trace, wherever an interrupt falls and whatever other threads do."""

import contextlib
import copy
import sys
import threading

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import sharpness
from quotient_manifolds import passes
from quotient_manifolds import weights as module
from quotient_manifolds.networks import quiet
from sharpness import curvature, evaluation, plots
from tests.support import networks
from tests.support.extent import EXHAUSTIVE
from tests.support.snapshots import ALL, assert_same, snapshot


class Interrupt:
    """A loss that fails at its n-th call."""

    def __init__(self, at, error):
        self.calls, self.at, self.error = 0, at, error

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return F.cross_entropy(model(batch[0]).logits, batch[1])


@pytest.mark.parametrize("measure", ALL)
@pytest.mark.parametrize(
    ("at", "error"),
    [(None, None), (1, RuntimeError("boom")), (3, RuntimeError("boom")), (7, KeyboardInterrupt()), (9, MemoryError())],
    ids=str,
)
def test_the_model_is_as_before_on_every_way_out(measure, at, error):
    model, batch = networks.vit(hidden_dropout_prob=0.3), networks.images()
    F.cross_entropy(model(batch[0]).logits, batch[1]).backward()
    model.train()
    networks.vit_layers(model)[0].eval()
    model.classifier.bias.requires_grad_(False)
    model.register_buffer("counter", torch.zeros(1))
    before = snapshot(model)
    if error is None:
        sharpness.evaluate(model, [batch] * 2, Interrupt(None, None), measure=measure, rho=0.1, steps=4, relative_tol=0)
    else:
        with pytest.raises(type(error)):
            sharpness.evaluate(
                model, [batch] * 2, Interrupt(at, error), measure=measure, rho=0.1, steps=4, relative_tol=0
            )
    assert_same(snapshot(model), before)


def test_the_measured_weights_are_really_moved():
    """The test above would hold for a measurement that moves nothing."""
    model, batch = networks.vit(), networks.images()
    seen = set()

    def loss(model, batch):
        seen.add(networks.projections(networks.vit_layers(model)[0].attention)[0].weight.detach().sum().item())
        return F.cross_entropy(model(batch[0]).logits, batch[1])

    sharpness.evaluate(model, [batch], loss, measure="geodesic-inv", rho=0.1, steps=4)
    assert len(seen) >= 5


def test_buffers_that_the_forward_pass_changes_are_restored():
    class Counting(networks.Encoder):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = networks.shake(Counting())
    before = snapshot(model)
    sharpness.evaluate(model, [networks.tokens()], measure="adaptive", rho=0.1, steps=2)
    assert_same(snapshot(model), before)


def test_mixed_and_half_precision_weights():
    torch.set_default_dtype(torch.float32)
    batch = networks.images()
    model = networks.trained_vit()
    expected = float(sharpness.evaluate(model, [batch], rho=0.1))
    half = copy.deepcopy(model).bfloat16()
    before = snapshot(half)
    rough = sharpness.evaluate(half, [(batch[0].bfloat16(), batch[1])], rho=0.1)
    assert float(rough) == pytest.approx(expected, rel=0.3)
    assert_same(snapshot(half), before)


def test_inside_autocast():
    """Autocast keeps casts of weights; they must not survive a move of the weights."""
    torch.set_default_dtype(torch.float32)
    batch = networks.images()
    model = networks.trained_vit()
    expected = float(sharpness.evaluate(model, [batch], rho=0.3))
    cached = torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = float(sharpness.evaluate(model, [batch], rho=0.3))
        assert torch.is_autocast_cache_enabled() == cached
    assert found == pytest.approx(expected, rel=0.15)


class Merging(nn.Linear):
    """Merges something into its weight whenever it is told to evaluate."""

    def train(self, mode=True):
        if not mode:
            self.weight.data += 1
        return super().train(mode)


def test_layers_that_merge_weights_in_eval_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), Merging(8, 3))
    batch = (torch.randn(4, 8), torch.randint(3, (4,)))
    before = snapshot(model)
    sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1)
    assert_same(snapshot(model), before)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 3), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_() if self.reentrant == "seen" else x
        h = torch.utils.checkpoint.checkpoint(lambda t: self.first(t).relu(), x, use_reentrant=bool(self.reentrant))
        return self.second(h)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("hidden", ["seen", "not in the graph"])
def test_gradient_checkpointing(hidden):
    torch.manual_seed(1)
    model = Checkpointed(reentrant=False)
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    plain = nn.Sequential(model.first, nn.ReLU(), model.second)
    expected = float(sharpness.evaluate(plain, [(x, y)], measure="adaptive", rho=0.5))
    F.cross_entropy(model(x), y).backward()
    before = snapshot(model)
    found = float(sharpness.evaluate(model, [(x, y)], measure="adaptive", rho=0.5))
    assert found == pytest.approx(expected, rel=1e-10)
    assert_same(snapshot(model), before)
    model.reentrant = hidden  # the old kind, behind which autograd.grad sees no weights
    with pytest.raises(ValueError, match="pass use_reentrant=False"):
        sharpness.evaluate(model, [(x, y)], measure="adaptive", rho=0.5)
    assert_same(snapshot(model), before)
    with networks.training(model, "second"):  # what is hidden is frozen
        with networks.training(plain, "2"):
            expected = float(sharpness.evaluate(plain, [(x, y)], measure="adaptive", rho=0.5))
        assert float(sharpness.evaluate(model, [(x, y)], measure="adaptive", rho=0.5)) == pytest.approx(expected)


def test_sparse_gradients_and_gradient_penalties():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    batch = (torch.randint(5, (6, 2)), torch.randint(3, (6,)))
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    for found in (
        lambda m: float(sharpness.evaluate(m, [batch], measure="adaptive", rho=0.3)),
        lambda m: float(sharpness.hessian(m, [batch], measure="adaptive")),
    ):
        assert found(model) == pytest.approx(found(dense), rel=1e-5)
    assert model[0].sparse

    def penalty(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().mean()

    smooth = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    assert float(sharpness.evaluate(smooth, [(torch.randn(5, 4),)], penalty, measure="adaptive", rho=0.3)) > 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
class TestAdaptersOnABfloat16Base:
    """Below float32 adapters, which peft makes, what is frozen stays as it is, in storage and precision."""

    @staticmethod
    def model(base, adapters):
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=13, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        plain = LlamaForCausalLM(config).bfloat16().to(base)  # the same numbers in both
        found = get_peft_model(plain, LoraConfig(r=2, target_modules="all-linear"))
        for i, (name, p) in enumerate(found.named_parameters()):
            if "lora" in name:
                p.data = (
                    (0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))).bfloat16().to(adapters)
                )
        return found.eval()

    @pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("measure", ["geodesic-inv", "adaptive", "complete-inv"])
    def test_base_is_untouched_and_the_value_is_right(self, adapters, measure):
        torch.set_default_dtype(torch.float32)
        words = torch.randint(13, (6, 9), generator=torch.Generator().manual_seed(0))
        batch, model = {"input_ids": words, "labels": words}, self.model(torch.bfloat16, adapters)
        base = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters() if not p.requires_grad}
        before, seen, stays = snapshot(model), set(), []

        def loss(model, batch):
            found = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters() if not p.requires_grad}
            stays.append(found == base)
            seen.update(p.dtype for p in model.parameters() if p.requires_grad)
            return model(**batch).loss

        options = {"measure": measure, "rho": 0.5, "steps": 4, "progress": False}
        result = sharpness.evaluate(model, [batch], loss, **options)
        assert torch.float32 in seen
        assert all(stays) == (adapters == torch.float32)  # what moves in half precision, moves in a float32 model
        assert_same(snapshot(model), before)
        # Two searches may end in two maxima, so that the same direction is taken. bfloat16 has steps of .008.
        wide = self.model(torch.float32, torch.float32)
        with torch.no_grad():
            start = float(loss_of(wide, batch))
            with sharpness.perturbed(wide, result.direction(0)):
                rise = float(loss_of(wide, batch)) - start
        assert float(result) == pytest.approx(rise, rel=0.02 if adapters == torch.float32 else 1e-4)
        assert float(result) != rise or adapters != torch.float32


def loss_of(model, batch):
    return model(**batch).loss


class Caching(nn.Module):
    """Gathers a bias once in evaluation mode, as timm's LeViT, TinyViT and EfficientFormer."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias, self.cache = nn.Linear(3, 2), nn.Parameter(torch.ones(2)), {}
        self.register_buffer("index", torch.tensor([1, 0]))

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.cache = {}
        return self

    def gathered(self):
        if self.training:
            return self.bias[self.index]
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.bias[self.index]
        return self.cache["cpu"]

    def forward(self, x):
        return self.linear(x) + self.gathered()


@pytest.mark.parametrize("loss", [None, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("filled", [True, False])
def test_caches_of_evaluation_mode_are_no_part_of_a_measurement(loss, training, filled):
    torch.manual_seed(0)
    model, batches = nn.Sequential(Caching()), [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 2
    options = {"measure": "adaptive", "rho": 0.2, "steps": 3}
    plain = copy.deepcopy(model)
    plain[0].gathered = lambda: plain[0].bias[plain[0].index]
    expected = sharpness.evaluate(plain, batches, loss, **options)
    if filled:  # with its graph
        model.eval()(batches[0][0])
    model.train(training)
    found = sharpness.evaluate(model, batches, loss, **options)
    assert float(found) == float(expected)
    assert found.remarks == ()
    assert found.direction(0).tensors["0.bias"].any()
    assert model[0].training == training
    assert not model[0]._forward_pre_hooks
    with torch.no_grad():
        model[0].bias.mul_(3) if training else None
        plain[0].bias.mul_(3) if training else None
        assert torch.equal(model.eval()(batches[0][0]), plain(batches[0][0]))  # it holds no weights that were moved


def test_a_cache_that_is_made_at_moved_weights_does_not_outlive_them():
    torch.manual_seed(0)
    model, x = Caching().eval(), torch.randn(4, 3)
    direction = sharpness.evaluate(
        model, [(x, torch.tensor([0, 1, 1, 0]))], measure="adaptive", rho=0.2, steps=3
    ).direction(0)
    with torch.no_grad():
        for filled in (True, False):
            model.cache = dict(model.cache) if filled else {}
            before = model.linear(x) + model.bias[model.index]
            with sharpness.perturbed(model, direction) as moved:
                inside = moved(x)
                assert torch.equal(inside, moved.linear(x) + moved.bias[moved.index])
                assert not torch.equal(inside, before)
            assert torch.equal(model(x), before)


class Frozen(nn.Module):
    """Keeps its weights in a tensor of its own, which nothing clears."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.kept = self.linear.weight.data.t().clone()

    def forward(self, x):
        return x @ self.kept + self.linear.bias


def test_weights_behind_a_cache_that_stays_are_named():
    model, batches = Frozen(), [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))]
    (remark,) = sharpness.evaluate(model, batches, measure="adaptive", rho=0.1, steps=2).remarks
    assert (
        remark == "6 of 8 weights got no gradient from any batch, so the result says nothing about them: linear.weight"
    )


OURS = (
    "quotient_manifolds/weights.py",
    "quotient_manifolds/passes.py",
    "sharpness/measuring.py",
    "sharpness/losses.py",
    "sharpness/evaluation.py",
    "sharpness/space.py",
    "contextlib.py",
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


def interrupted(run, moment, seen=None, end=False):
    """Raise KeyboardInterrupt at the given bytecode; whether it was reached.

    Bytecodes are counted from the first gradient at the weights on, or from where all batches are done. ``seen`` lists
    the names of the functions to which they belong.
    """
    seen, begun = [] if seen is None else seen, False

    def begin(caller):
        nonlocal begun
        begun = True
        while caller := caller.f_back:  # what is left of those that wait for it belongs to the clean-up
            if caller.f_code.co_filename.endswith(OURS):
                caller.f_trace, caller.f_trace_opcodes, caller.f_trace_lines = trace, True, False

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(OURS):
            return None
        if not begun:
            if frame.f_code.co_name not in ("put_back", "restore", "see"):
                return None
            begin(frame)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            seen.append(frame.f_code.co_name)
            if len(seen) == moment:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()  # that of coverage
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 delivers none
    original = evaluation._Share

    def share(*found):
        sys.settrace(trace)
        begin(sys._getframe())
        return original(*found)

    try:
        if end:
            evaluation._Share = share
        else:
            sys.settrace(trace)
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        evaluation._Share = original
    return False


def test_an_interrupt_at_every_bytecode_of_the_clean_up():
    """And, by the way, at some between that of the first copy of the weights and the last one.

    Every run of the tests takes each third one, and all of them if exhaustive.
    """
    model, batches = small()
    before, seen, end = state(model), [], []

    def run():
        sharpness.evaluate(model, batches, measure="adaptive", rho=0.1, steps=1, progress=False)

    run()  # what the first one alone does is no part of the clean-up
    interrupted(run, 0, seen)
    interrupted(run, 0, end, end=True)  # the same bytecodes, without watching those that come before
    last = len(seen) - len(end)
    assert end == seen[last:]
    assert seen[last:].count("put_back") > 50
    assert seen[last:].count("__exit__") > 200  # of one whole clean-up; after it the second has nothing left to do
    for moment in range(1, last, 7 if EXHAUSTIVE else 97):
        assert interrupted(run, moment)
        assert same(state(model), before), f"bytecode {moment}"
    moment = 1
    while interrupted(run, moment, end=True):
        assert same(state(model), before), f"bytecode {moment} of the end"
        moment += 1 if EXHAUSTIVE else 3
    assert moment >= len(end)


def test_one_clean_up_alone_would_not_do(monkeypatch):
    """What the test above is for: without the second pass some interrupts leave the model changed."""
    once = set()
    full = module.preserve_model_state.__exit__

    def restore(self, *error):
        if id(self) not in once:
            once.add(id(self))
            full(self, *error)

    monkeypatch.setattr(module.preserve_model_state, "__exit__", restore)
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
    module._shortcuts._users.clear()
    module._shortcuts._undo.clear()
    module._movers.clear()
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


SHARED = {
    "fast path": (module._shortcuts, torch.backends.mha.get_fastpath_enabled, True),
    "compiled code": (passes.eager, lambda: torch._dynamo.eval_frame._stance.stance, "default"),
    "kernels": (curvature.plain_attention, torch.backends.cuda.flash_sdp_enabled, True),
    "words": (quiet, transformers.logging.get_verbosity, transformers.logging.WARNING),
}


@pytest.mark.parametrize("name", SHARED)
def test_the_last_user_puts_back_what_all_threads_share(name):
    """Else the second of two users that overlap puts back what the first one has set, for ever."""
    shared, now, usual = SHARED[name]
    assert now() == usual
    with shared():
        switched = now()
        assert switched != usual
        shared.use(0, on=True)
    assert now() == switched
    shared.use(0, on=False)
    assert now() == usual
    shared.use(0, on=False)
    assert now() == usual


class Beside(nn.Module):
    """Attention of a known class and of an unknown one; ``during`` runs while the first is computed."""

    def __init__(self, during=lambda: None):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        self.own, self.head = networks.TinyAttention(classes=4), nn.Linear(4, 3)
        self.layer.self_attn.register_forward_pre_hook(lambda *_: during())

    def forward(self, x):
        h = self.layer(x)
        return self.head(h.mean(1) + self.own(h))


class Waiting(nn.Module):
    """A module within which a thread stays."""

    def __init__(self):
        super().__init__()
        self.inside, self.leave = threading.Event(), threading.Event()

    def forward(self, x):
        self.inside.set()
        self.leave.wait(30)
        return x


def test_what_runs_in_another_thread_is_no_part_of_the_model():
    """Hooks on all modules of the process took it for one that holds the attention, which then was unknown."""
    model, batch = Beside(), (torch.randn(3, 2, 4), torch.tensor([0, 1, 2]))
    alone = sharpness.evaluate(model, [batch], steps=2, progress=False)
    threads = []

    def during():
        waiting = Waiting()
        threads.append((threading.Thread(target=waiting, args=(torch.ones(1),)), waiting))
        threads[-1][0].start()
        assert waiting.inside.wait(30)

    model.layer.self_attn.register_forward_pre_hook(lambda *_: during())
    found = sharpness.evaluate(model, [batch], steps=2, progress=False)
    for thread, waiting in threads:
        waiting.leave.set()
        thread.join()
    assert threads
    assert (float(found), found.remarks) == (float(alone), alone.remarks)


def test_two_models_in_two_threads():
    """Each pass of one waits for one of the other, as long as both are measured; attention of both is examined."""
    torch.set_default_dtype(torch.float32)
    turns, batch = threading.Barrier(2), (torch.randn(3, 2, 4), torch.tensor([0, 1, 2]))

    def wait():
        with contextlib.suppress(threading.BrokenBarrierError):
            turns.wait(30)

    models = [Beside(), Beside()]
    measures = [lambda m=m: sharpness.evaluate(m, [batch], steps=2, progress=False).batches[0].history for m in models]
    alone, found = [measure() for measure in measures], [None, None]
    state = torch.get_rng_state()

    def measure(i):
        models[i].layer.self_attn.register_forward_pre_hook(lambda *_: wait())
        found[i] = measures[i]()
        turns.abort()

    threads = [threading.Thread(target=measure, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone
    assert torch.equal(torch.get_rng_state(), state)


def test_a_second_measurement_of_one_model_is_refused_and_harms_neither():
    model, batch = networks.TinyAttention(), networks.tokens(width=4)
    before, errors, calls = state(model), [], 0
    alone = sharpness.evaluate(model, [batch], steps=3, progress=False).batches[0].history

    def second():
        try:
            sharpness.evaluate(model, [batch], steps=3, progress=False)
        except RuntimeError as error:
            errors.append(str(error))

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == 4:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        return F.cross_entropy(model(batch[0]), batch[1])

    assert sharpness.evaluate(model, [batch], loss, steps=3, progress=False).batches[0].history == alone
    assert len(errors) == 1
    assert "use a model in one thread at a time" in errors[0]
    assert same(state(model), before)


@pytest.mark.parametrize("meta", ["weight", "frozen", "buffer"])
def test_what_has_no_numbers_is_named(meta):
    """The message was another error's, that of the clean-up, which left torch's fast path off."""
    model, batch = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), (torch.ones(2, 3), torch.tensor([0, 1]))
    if meta == "weight":
        model.to("meta")
    elif meta == "frozen":
        model[0].requires_grad_(False).to("meta")
    else:
        model[1].running_mean = model[1].running_mean.to("meta")
    with pytest.raises(ValueError, match=r"meta.*load the whole model"):
        sharpness.evaluate(model, [batch], progress=False)
    assert torch.backends.mha.get_fastpath_enabled()


def test_batches_made_under_inference_mode():
    model = networks.vit()
    with torch.inference_mode():
        x, y = networks.images()
    for measure in ("geodesic-inv", "complete-inv"):
        plain = sharpness.evaluate(model, [networks.images()], measure=measure, steps=2, progress=False)
        assert float(sharpness.evaluate(model, [(x, y)] * 2, measure=measure, steps=2, progress=False)) == float(plain)


def test_an_interrupt_of_perturbed_weights():
    model, batches = small()
    result = sharpness.evaluate(model, batches, measure="adaptive", rho=0.1, steps=1)
    before = state(model)
    with contextlib.suppress(KeyboardInterrupt), sharpness.perturbed(model, result.direction(0)):
        assert not same(state(model), before)
        raise KeyboardInterrupt
    assert same(state(model), before)
    with contextlib.suppress(KeyboardInterrupt):
        plots.plot_profile(model, batches[0], result.direction(0), points=3, loss_fn=interrupt)
    assert same(state(model), before)


def interrupt(*_):
    raise KeyboardInterrupt
