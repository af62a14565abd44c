"""What a network does not see of its weights, as a value: compared, restricted, added to, carried elsewhere."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from quotient_manifolds.symmetries import (
    GL,
    Cause,
    Projection,
    Refusal,
    Slot,
    SymmetricPair,
    Symmetries,
    find,
    pair,
    slot,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.orbits import move_stacks_
from quotient_manifolds.weights import weights_of
from tests.support import networks
from tests.support.architectures import TRANSFORMERS, adapted, bert_and_batch, transformers_model
from tests.support.whole_networks import CAUSAL, SMALL


def encoder():
    return networks.shake(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True))


def lora():
    """BERT with adapters on queries and keys, of which only the first are trained."""
    base, _ = bert_and_batch()
    return adapted(base, ["query", "key"])


def names_of(model, trained=lambda p: p.requires_grad):
    return [name for name, p in weights_of(model).items() if trained(p)]


#: Attention, fused and not, grouped queries under RoPE, tied weights, adapters, and a weight that is computed.
MODELS = {
    "torch": encoder,
    "bert": networks.bert,
    "lora": lora,
    **{name: (lambda name=name: transformers_model(name, "eager")[0]) for name in ("llama", "albert", "gpt2", "t5")},
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), encoder()),
}
every = pytest.mark.parametrize("name", MODELS)
pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries, when they make models


@every
def test_what_is_found_is_a_value(name):
    model = MODELS[name]()
    found, again = find(model), find(copy.deepcopy(model))
    assert found == again
    assert hash(found) == hash(again)
    for same in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert same == found
        assert str(same) == str(found)
    other = dataclasses.replace(found, pairs=found.pairs[1:])
    assert other != found
    assert {found: "one", other: "two"}[again] == "one"


def parts(value):
    """All that a value consists of."""
    if dataclasses.is_dataclass(value):
        yield type(value)
        for f in dataclasses.fields(value):
            yield from parts(getattr(value, f.name))
    elif isinstance(value, tuple):
        for v in value:
            yield from parts(v)
    else:
        yield type(value)


@every
def test_it_holds_names_and_numbers_and_no_module(name):
    kinds = set(parts(find(MODELS[name]())))
    assert kinds <= {Symmetries, SymmetricPair, Refusal, Slot, GL, Cause, str, int, float, bool, type(None)}
    assert {Symmetries, SymmetricPair, Slot, GL} <= kinds
    assert [f.name for f in dataclasses.fields(Slot)] == ["name", "shape", "offset", "size", "stride"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_state_dict_moves_without_the_model(name):
    """And one that has moved on one side alone is another network."""
    model, batch = transformers_model(name, "eager")
    found, before = find(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = model(**batch)[0]
    changes = {}
    for damage in (False, True):
        weights = copy.deepcopy(before)
        move_stacks_(stacks(found.pairs, weights), weights, 10.0, 0)
        for s in (s for p in found.pairs for s in p.H if damage):
            s.of(weights[s.name]).copy_(s.of(before[s.name]))
        model.load_state_dict(weights)
        with torch.no_grad():
            changes[damage] = float((model(**batch)[0] - expected).abs().max() / expected.abs().max())
    assert changes[False] < 1e-6  # some of these networks cast to float32 inside
    assert changes[True] > 1e-3


@every
def test_what_is_trained_makes_no_difference(name):
    model = MODELS[name]()
    found = find(model)
    for change in (lambda i: True, lambda i: False, lambda i: i % 2 == 0):
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(change(i))
        assert find(model) == found


def test_what_is_trained_makes_no_difference_to_an_examination():
    class Own(nn.MultiheadAttention):
        """Of a class that no handler knows."""

        def forward(self, x):
            return super().forward(x, x, x, need_weights=False)[0]

    model, x = nn.Sequential(Own(8, 2, batch_first=True), nn.Linear(8, 3)), torch.randn(2, 5, 8)
    found = find(model, x)
    assert len(found.pairs) == 4
    for wanted in (False, True):
        model[0].requires_grad_(False)
        model[1].requires_grad_(wanted)
        assert find(model, x) == found
        assert not model[0].in_proj_weight.requires_grad
        assert verify(model, x, found).ok


def test_only_what_moves_as_a_whole_is_left():
    model = encoder()
    found, names = find(model), names_of(model)
    assert found.restricted(names) == found
    attention = [name for name in names if name.startswith("self_attn.")]
    assert found.restricted(attention) == found
    assert found.restricted([*attention, "of.another.model"]) == found
    none = found.restricted(())
    assert none.pairs == ()
    assert [(r.name, r.slots) for r in none.refused] == [(p.name, p.slots) for p in found.pairs]
    assert none.refused[0].reason == "frozen: self_attn.in_proj_bias, self_attn.in_proj_weight"
    some = found.restricted(name for name in names if name != "self_attn.out_proj.weight")
    assert [p.kind for p in some.pairs] == ["qk", "qk"]
    assert [(r.kind, r.reason) for r in some.refused] == [("vo", "frozen: self_attn.out_proj.weight")] * 2
    assert some.restricted(names) == some
    assert some.restricted(()).refused[:2] == some.refused  # what is refused stays so, with its cause


def test_weights_themselves_are_no_names():
    """All counted as frozen."""
    model = encoder()
    for wrong in (model.parameters(), weights_of(model).values(), [None]):
        with pytest.raises(TypeError, match="names of weights are strings"):
            find(model).restricted(wrong)
    assert find(model).restricted("linear1.weight") == find(model).restricted(["linear1.weight"])


def test_adapters_or_the_attention_that_they_change():
    """No number belongs to two: of a model that is trained as a whole the attention has adapters among its rows."""
    model = lora()
    found, attention = find(model), {"qk", "vo"}
    factors = {name for p in found.pairs if p.kind == "lora" for name in p.names}
    assert factors == set(names_of(model))
    rows = {name for p in found.pairs if p.kind in attention for name in p.names}
    assert {name for name in factors if "lora_B" in name} == rows & factors
    assert found.refused == ()
    whole, adapters = found.restricted(weights_of(model)), found.restricted(factors)
    assert {p.kind for p in whole.pairs} == attention
    assert {(r.kind, r.cause) for r in whole.refused} == {("lora", Cause.OVERLAPS)}
    assert {p.kind for p in adapters.pairs} == {"lora"}
    assert {(r.kind in attention, r.cause) for r in adapters.refused} == {(True, Cause.FROZEN)}
    for one in (whole, adapters):
        assert len(one.pairs) + len(one.refused) == len(found.pairs)
        assert one.restricted(weights_of(model)) == one
    base = found.restricted(weights_of(model).keys() - factors)
    assert {p.kind for p in base.pairs} == {"vo"}
    # One layer is trained as a whole, of the other one only adapters.
    first = found.restricted(name for name in weights_of(model) if name in factors or ".layer.0." in name)
    assert {(p.kind == "lora", ".layer.0." in p.module) for p in first.pairs} == {(True, False), (False, True)}


def test_adapters_of_attention_that_is_too_thin_for_a_point():
    """They are better than none, whichever is asked first: what moves, or what is a point."""
    for wide, kinds in ((16, {"lora"}), (4, {"qk", "vo"})):
        config = {**SMALL, **CAUSAL, "head_dim": wide}
        model = adapted(LlamaForCausalLM(LlamaConfig(**config)), ["v_proj", "o_proj"])
        found, names = find(model), weights_of(model)
        assert {p.kind for p in found.pairs if p.thin} == ({"vo"} if wide == 16 else set())
        left = found.restricted(names)
        assert not any(p.thin for p in left.pairs)
        assert kinds <= {p.kind for p in left.pairs} <= kinds | {"qk"}
        assert left.of_full_rank().pairs == left.pairs == found.of_full_rank().restricted(names).pairs
        assert {r.name: r.reason for r in left.refused if r.kind == "vo"} == {
            r.name: r.reason for r in found.of_full_rank().refused
        }
        assert left.restricted(names) == left


def test_pairs_of_ones_own():
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4), encoder())
    found, G = find(model), [slot(model, "0.weight", transpose=True), slot(model, "0.bias")]
    mine = pair(G, [slot(model, "1.weight")], GL(3), name="mine")
    both = found.adding(mine)
    assert both.pairs == (*found.pairs, mine)
    assert both.refused == found.refused
    assert both.dimension == found.dimension + 9
    assert found.adding() == found
    assert [r.name for r in both.restricted(name for name in weights_of(model) if name != "0.bias").refused] == ["mine"]
    with pytest.raises(TypeError, match="pairs must be SymmetricPair objects"):
        found.adding(mine.G)
    for name in (found.pairs[0].name, "mine"):
        with pytest.raises(ValueError, match=f"two symmetries are called '{name}'"):
            both.adding(dataclasses.replace(mine, module=name))


def test_no_number_belongs_to_two_pairs():
    """Whatever its place in the others is: part of a slot, the same numbers transposed, or twice in one pair."""
    model = encoder()
    found, rest = find(model), [slot(model, "linear1.weight", columns=slice(0, 4))]
    for own in (
        slot(model, "self_attn.in_proj_weight", slice(0, 2), slice(0, 4)),
        slot(model, "self_attn.in_proj_weight", slice(2, 6), transpose=True),
        slot(model, "self_attn.in_proj_bias", slice(2, 6)),
    ):
        with pytest.raises(
            ValueError, match=r"'mine' uses numbers of .* already belong to pair 'self_attn qk head [01]'"
        ):
            found.adding(pair([own], rest, GL(4), name="mine"))
    twice = pair(rest, [slot(model, "linear1.weight", slice(1), slice(3, 7))], GL(4), name="mine")
    with pytest.raises(ValueError, match="already belong to pair 'mine'"):
        found.adding(twice)
    beside = pair(rest, [slot(model, "linear1.weight", columns=slice(4, 8))], GL(4), name="mine")
    assert len(found.adding(beside).pairs) == len(found.pairs) + 1


def test_a_pair_of_ones_own_answers_what_names_leave_open():
    class Nameless(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            return self.d((self.a(x) @ self.b(x).mT).softmax(-1) @ self.c(x))

    x = torch.randn(2, 5, 4)
    for model, path in ((nn.Sequential(Nameless(), Nameless()), "0."), (Nameless(), "")):
        found = find(model, x)
        assert {r.cause for r in found.refused} == {Cause.UNNAMED}
        G = [slot(model, f"{path}c.weight", transpose=True), slot(model, f"{path}c.bias")]
        left = found.adding(pair(G, [slot(model, f"{path}d.weight")], GL(4))).refused
        assert [r.module for r in left] == (["1"] if path else [])


def test_the_key_bias_may_be_divided_out():
    model = networks.bert()
    found = find(model)
    dropped = found.without_null()
    for p, q in zip(found.pairs, dropped.pairs, strict=True):
        assert p.m - q.m == (p.kind == "qk")
        assert (p.G, p.null, p.dropped) == (q.G, q.null, ())
        assert q.dropped == q.null
        assert set(p.H) == set(q.H) | set(q.dropped)
    assert dropped.without_null() == dropped
    rotary = find(transformers_model("llama", "eager")[0])
    assert rotary.without_null() == rotary


def test_thin_pairs_stay_until_a_manifold_is_needed():
    model = adapted(nn.Sequential(nn.Linear(6, 2), nn.Linear(6, 4)), ["0", "1"])
    found = find(model)
    assert [p.thin for p in found.pairs] == [True, False]
    full = found.of_full_rank()
    assert full.pairs == found.pairs[1:]
    (thin,) = full.refused
    assert thin.cause is Cause.THIN
    assert thin.reason == "a factor has fewer rows than columns: 3 columns, 2 and 6 rows"
    assert full.of_full_rank() == full


def test_some_kinds_and_how_it_is_printed():
    found = find(encoder())
    qk, vo = (found.of_kind([kind]) for kind in ("qk", "vo"))
    assert qk.pairs + vo.pairs == (*found.pairs[::2], *found.pairs[1::2])
    assert found.of_kind(["qk", "vo", "lora"]) == found
    assert found.of_kind(()) == Symmetries()
    assert qk.dimension + vo.dimension == found.dimension == 64
    lines = str(found.restricted(["self_attn.in_proj_weight", "self_attn.in_proj_bias"])).splitlines()
    assert lines == [
        "self_attn qk    2 × GL(4), 9+9 rows", "self_attn vo    2 × none (frozen: self_attn.out_proj.weight)"
    ]  # fmt: skip
    assert str(Symmetries()) == "no symmetric pairs"


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every
def test_names_are_those_of_the_plain_model_in_every_wrapper(name, group):
    model = MODELS[name]()
    found, weights = find(model), weights_of(model)
    wrapped = {
        "compiled": torch.compile(model), "parallel": nn.parallel.DistributedDataParallel(model),
        "both": torch.compile(nn.parallel.DistributedDataParallel(model)),
    }  # fmt: skip
    for what, outer in wrapped.items():
        assert find(outer) == found, what
        for p in found.pairs:
            assert torch.equal(p.gather(weights_of(outer)), p.gather(weights)), what
        moving = [name for name, p in outer.named_parameters() if p.requires_grad]
        assert set(moving).isdisjoint(weights), what
        assert found.restricted(moving) == found.restricted(names_of(outer)) == found.restricted(names_of(model)), what
        assert found.restricted(moving[:1]) == found.restricted(names_of(model)[:1]), what


def test_a_wrapped_model_is_certified_by_its_own_names():
    """They counted as frozen, so that nothing was certified and all was well."""
    model, x = nn.DataParallel(encoder()), torch.randn(2, 5, 8)
    found, names = find(model), dict(model.named_parameters())
    assert all(name.startswith("module.") for name in names)
    certificate = verify(model, x, found.restricted(names))
    assert certificate.ok
    assert certificate.residuals.keys() == certificate.changes.keys() == set(found.pairs)


def test_names_are_those_of_the_plain_model_when_it_is_sharded(group):
    model = networks.vit()
    found = find(model)
    for layer in networks.vit_layers(model):
        fully_shard(layer)
    fully_shard(model)
    assert find(model) == found


@every
def test_assigned_weights_have_the_same_names(name):
    model = MODELS[name]()
    found, old = find(model), weights_of(model)
    state = {name: t.clone() + 1 for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    new = weights_of(model)
    assert find(model).pairs == found.pairs
    assert all(new[name] is not p for name, p in old.items())
    for p in found.pairs:
        torch.testing.assert_close(p.gather(new), p.gather({n: t + 1 for n, t in old.items()}), rtol=0, atol=0)


def test_tied_weights_are_named_once():
    """By the first name, whichever of them a layer knows."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.attention = nn.Embedding(8, 8), encoder()
            self.attention.self_attn.out_proj.weight = self.words.weight

        def forward(self, x):
            return self.attention(x)

    model, x = Tied(), torch.randn(2, 5, 8)
    found = find(model, x)
    assert "attention.self_attn.out_proj.weight" in model.state_dict()
    assert {s.name for p in found.pairs if p.kind == "vo" for s in p.H} == {"words.weight"}
    assert verify(model, x, found).ok
    shared = nn.Sequential(encoder())
    shared.append(shared[0])  # a whole layer, twice
    assert {name.partition(".")[0] for p in find(shared).pairs for name in p.names} == {"0"}
    assert len(find(shared).pairs) == 4


def test_tied_factors_are_refused_wherever_they_lie():
    """Queries that are the keys of another layer, too, as they are rows of both."""
    one = networks.vit()
    first, second = (networks.projections(layer.attention) for layer in networks.vit_layers(one))
    first[0].weight = first[1].weight
    assert {(r.kind, r.cause, r.module) for r in find(one).refused} == {
        ("qk", Cause.TIED, find(one).refused[0].module)
    }  # fmt: skip
    two = networks.vit()
    first, second = (networks.projections(layer.attention) for layer in networks.vit_layers(two))
    second[0].weight = first[1].weight  # a query's matrix of one layer is a key's of the other
    found = find(two)
    assert {p.kind for p in found.pairs} == {"vo"}
    assert {(r.kind, r.cause) for r in found.refused} == {("qk", Cause.TIED)}
    assert len(found.refused) == 4


def test_a_projection_may_hold_no_weight_of_its_own():
    """That of a computed weight is refused, by the name that it would have."""
    layer = nn.MultiheadAttention(8, 2)
    nn.utils.parametrizations.weight_norm(layer.out_proj)
    found = find(layer)
    assert {(r.kind, r.reason) for r in found.refused} == {("vo", "computed, not a parameter: out_proj.weight")}
    assert "out_proj.weight" not in weights_of(layer)
    assert Projection(layer, "out_proj").name("weight") == "out_proj.weight"
