"""Looking at a model changes nothing of it; float64 all the way."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quotient_manifolds.passes import Wide, record, widened
from quotient_manifolds.symmetries import find, verify
from quotient_manifolds.weights import first_names, plain_names, pointing_to, preserve_model_state, trained, weights_of


class Own(nn.MultiheadAttention):
    """Of a class that no handler knows."""


class Busy(nn.Module):
    """Normalises, drops out, draws, and fills and adds buffers."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.attention = nn.BatchNorm1d(5), nn.Dropout(0.5), Own(8, 2, batch_first=True)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", None)
        self.drop.training = False

    def forward(self, x):
        self.calls += 1
        self.late = torch.randn(3)
        self.register_buffer("more", torch.ones(1))
        x = self.drop(self.norm(x))
        return self.attention(x, x, x)[0]


def test_modes_buffers_and_random_numbers_are_as_they_were():
    model, x = Busy(), torch.randn(2, 5, 8)
    before, modes, random = (
        copy.deepcopy(model.state_dict()),
        [m.training for m in model.modules()],
        torch.get_rng_state(),
    )
    found = find(model, x)
    assert [str(p.group) for p in found.pairs] == ["GL(4)"] * 4
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    assert model.late is None
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in after.items())
    model(x)  # the comparison sees what a plain forward pass does
    assert not torch.equal(torch.get_rng_state(), random)
    assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])


def test_inner_modules_are_reached_where_torch_has_a_fast_path():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 3, 8)
    fast = torch.backends.mha.get_fastpath_enabled()
    with preserve_model_state(layer):
        calls = record(lambda: layer(x), {"a": layer.self_attn})
        assert not layer.self_attn.training
    assert torch.equal(calls["a"][0][0], x)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert all(m.training for m in layer.modules())


class Cached(nn.MultiheadAttention):
    """Adds to its inputs what it has gathered once in evaluation mode."""

    def __init__(self):
        super().__init__(8, 2, batch_first=True)
        self.table, self.cache = nn.Parameter(torch.ones(3, 8)), {}

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)

    def forward(self, x):
        if "table" not in self.cache:
            self.cache["table"] = self.table[[0, 1, 2, 1, 0]]
        x = x + self.cache["table"]
        return super().forward(x, x, x, need_weights=False)[0]


class Keeping(Cached):
    """As the other, but nothing drops its cache."""

    def train(self, mode=True):
        return nn.Module.train(self, mode)


@pytest.mark.parametrize("kind", [Cached, Keeping])
def test_caches_with_a_graph_hinder_no_examination(kind):
    model, x = nn.Sequential(kind()).eval(), torch.randn(2, 5, 8)
    model(x)
    for _ in range(2):
        found = find(model, x)
        assert (len(found.pairs), found.refused) == (4, ())
        assert verify(model, x).ok
    assert not model[0]._forward_pre_hooks
    with torch.no_grad():
        before = model(x)
        assert torch.equal(model(x), before)


def test_casts_to_single_precision_are_left_out():
    x = torch.randn(3, 4)

    def narrow(x):
        y = F.softmax(x.float(), -1, dtype=torch.float32).to(torch.bfloat16).type(torch.float16)
        return (y + torch.arange(4, dtype=torch.float32) + torch.zeros(4).half()).to(x.dtype)

    assert (narrow(x) - x.softmax(-1) - torch.arange(4)).abs().max() > 1e-5
    torch.set_default_dtype(torch.float32)
    with Wide():
        assert torch.equal(narrow(x), x.softmax(-1) + torch.arange(4))
    assert torch.get_default_dtype() is torch.float32


def test_what_is_made_meanwhile_is_wide_in_this_thread_alone():
    """The default dtype is that of all threads: as float64 it stopped training, and changed seeded draws, elsewhere."""
    torch.set_default_dtype(torch.float32)
    made = {
        "zeros": lambda: torch.zeros(2), "tensor": lambda: torch.tensor(0.5), "quotient": lambda: torch.arange(3) / 2,
        "drawn": lambda: torch.rand(2), "read": lambda: torch.from_numpy(torch.ones(2).numpy()),
        "given": lambda: torch.ones(2, dtype=torch.get_default_dtype()), "full": lambda: torch.full((2,), 0.5),
    }  # fmt: skip
    beside = []
    with Wide():
        assert {name: make().dtype for name, make in made.items()} == dict.fromkeys(made, torch.float64)
        assert torch.equal(made["quotient"](), torch.tensor([0, 0.5, 1], dtype=torch.float64))
        least = torch.finfo(torch.float64).min  # with which masks are filled
        assert torch.full((), fill_value=least).item() == least
        assert [t.item() for t in (torch.full((), least), torch.tensor(0.1), torch.arange(0.1, 1)[0])] == [
            least,
            0.1,
            0.1,
        ]
        assert {t.dtype for t in (torch.arange(3), torch.tensor([1, 2]), torch.full((2,), 1))} == {torch.int64}
        thread = threading.Thread(target=lambda: beside.extend(make().dtype for make in made.values()))
        thread.start()
        thread.join()
    assert beside == [torch.float32] * len(made)


def in_another_thread(call):
    """The error that a call ends with in another thread, if any."""
    errors = []

    def run():
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_weights_that_one_thread_moves_are_kept_from_the_others():
    """Else the second to begin took the first one's copies for the weights, and left them in the model."""
    model, other, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2), torch.ones(1, 2)

    def shifted(model):
        return {name: p.detach() + 1 for name, p in weights_of(model).items()}

    def measured(model):
        with preserve_model_state(model), pointing_to(model, shifted(model)):
            pass

    uses = [
        lambda: measured(model), lambda: measured(model[1]), lambda: measured(nn.Sequential(other, model)),
        lambda: find(model, x), lambda: verify(model, x),
    ]  # fmt: skip
    ways = [preserve_model_state(model), pointing_to(model, shifted(model))]
    for way in ways:
        with way:
            for use in uses:
                error = in_another_thread(use)
                assert isinstance(error, RuntimeError)
                assert "use a model in one thread at a time" in str(error)
            assert in_another_thread(lambda: measured(other)) is None
            measured(model)  # within the same thread
            assert isinstance(in_another_thread(uses[0]), RuntimeError)
        before = [p.detach().clone() for p in model.parameters()]
        assert [in_another_thread(use) for use in uses] == [None] * len(uses)
        assert all(map(torch.equal, model.parameters(), before))


def test_a_batch_is_widened():
    found = widened({"x": torch.ones(2, dtype=torch.float32, requires_grad=True), "ids": torch.arange(2)})
    assert found["x"].dtype is torch.float64
    assert not found["x"].requires_grad
    assert found["ids"].dtype is torch.int64


def wrapped(model):
    """A module that only holds another one under the name that DDP and DataParallel have for it."""
    outer = nn.Module()
    outer.module = model
    return outer


def test_names_are_those_of_the_plain_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    names = [name for name, _ in model.named_parameters()]
    for outer in (model, torch.compile(model), wrapped(model), wrapped(torch.compile(wrapped(model)))):
        assert list(weights_of(outer)) == names
        assert all(p is q for p, q in zip(weights_of(outer).values(), model.parameters(), strict=True))
    model[0] = torch.compile(model[0])
    assert list(weights_of(model)) == names
    both = nn.ModuleDict({"module": nn.Linear(2, 3), "head": nn.Linear(3, 2)})  # a layer that is called so
    assert list(weights_of(both)) == [name for name, _ in both.named_parameters()]
    assert plain_names(both)("module.weight") == "module.weight"


def test_what_is_trained_is_what_autograd_differentiates():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).requires_grad_(False), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    for outer in (model, wrapped(model)):
        moving = trained(weights_of(outer))
        assert list(moving) == ["0.weight", "2.weight", "2.bias"]
        model(torch.randn(4, 2)).square().sum().backward()
        assert set(moving.values()) == {p for p in model.parameters() if p.grad is not None}


def test_tied_weights_have_the_first_name():
    model = nn.ModuleDict({"words": nn.Embedding(5, 3), "layer": nn.Linear(3, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["words"].weight
    model["again"] = model["layer"]
    further = {"head.weight": "words.weight", "again.weight": "layer.weight", "again.bias": "layer.bias"}
    for outer in (model, wrapped(model)):
        assert first_names(outer) == further
        assert weights_of(outer).keys() == dict(model.named_parameters(remove_duplicate=False)).keys() - further.keys()
