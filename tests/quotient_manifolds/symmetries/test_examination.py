"""What is found of classes that nobody wrote down: groups, by null spaces; symmetries, by moves."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from quotient_manifolds.passes import Wide, default_forward, record, tensors
from quotient_manifolds.symmetries import (
    GL,
    Cause,
    Heads,
    SymmetricPair,
    Symmetries,
    UnknownAttentionError,
    check_coverage,
    examination,
    find,
    pair,
    slot,
    stacks,
    verify,
)
from quotient_manifolds.symmetries.attention import HANDLERS, candidates, proposals
from quotient_manifolds.symmetries.found import merged, placed
from quotient_manifolds.symmetries.orbits import change, move_stacks_, preserve_values
from quotient_manifolds.symmetries.roles import roles_of
from quotient_manifolds.weights import ByClass, naming, weights_of
from tests.support import architectures, networks, zoo
from tests.support.extent import EXHAUSTIVE, share

#: One line an architecture: library, name, group on queries and keys, on values and outputs.
TABLE = Path(__file__).parents[3] / "docs/tables/architectures.csv"
#: One of each kind, for every run of the tests.
SOME = {
    "bloom", "dinov3_vit", "cohere", "stablelm", "glm", "olmo2", "llama4_text", "yoso",
    "qwen3_next", "diffllama", "gpt_bigcode", "nystromformer", "beit_base_patch16_224", "custom",
    "sizes, bias_k and bias_v", "decoder layer",
}  # fmt: skip


#: Models whose classes are in the table.
KNOWN_MODELS = [
    *(("transformers", name) for name in architectures.TRANSFORMERS if EXHAUSTIVE or name in {
        "bert", "albert", "deberta_v2", "gpt2-cross", "bloom", "gpt_neox", "gptj", "llama", "phi3-partial", "qwen3",
        "swin",
    }),
    *(("torch", name) for name in zoo.TORCH if EXHAUSTIVE or name in {"sizes, bias_k and bias_v", "zero attention"}),
    *(("timm", name) for name in ("swin_tiny_patch4_window7_224", "beit_base_patch16_224", "vit_tiny_patch16_224")),
    *(("open_clip", name) for name in ("custom", "scale_attn_inner") if EXHAUSTIVE),
]  # fmt: skip


@pytest.fixture
def nobody(monkeypatch):
    """Forget every class."""
    monkeypatch.setattr(HANDLERS, "of", ByClass().of)


def nullities(module, call, kinds):
    """Dimension of what leaves the outputs as they are, of all h × h matrices of a head: no list of groups."""
    rows = {kind: [] for kind in kinds}
    with examination.examination(module, call) as alone:
        plain = {kind: replace(p, group="GL", rotary_size=0, reason="") for kind, p in kinds.items()}
        name_of = naming(alone.twin)
        pairs = {
            p.kind: merged(placed(p.pairs(plain[p.kind]), "", name_of))
            for p in proposals(alone.twin)
            if p.kind in kinds
        }
        for sample in alone.sample(max(place.size for place in kinds.values()) ** 2 + 20):
            for kind in kinds:
                one, two = examination.moments(pairs[kind], alone.weights, [sample])
                rows[kind].append(((one - two) / one.norm()).flatten(2)[:, :4])
    for kind, place in kinds.items():
        C, found = torch.cat(rows[kind]), set()
        for head in range(C.shape[1]):
            s = torch.linalg.svdvals(C[:, head])
            seen = s > 1e-9
            assert not seen.any() or not (~seen).any() or s[seen].min() > 30 * s[~seen].max(), "no clear gap"
            found.add(place.size**2 - int(seen.sum()))
        yield kind, found


def known_sizes(module):
    """The head sizes that a module stores under common names."""
    names = ("head_dim", "head_size", "attention_head_size")
    stored = (getattr(m, name, None) for m in module.modules() for name in names)
    return {size for size in stored if isinstance(size, int)}


def without_quotient(h):
    """Dimensions of nothing, of one scale or shift, of rotations of planes, and of O(h) with or without a scale."""
    return {0, 1, h // 2, h * (h - 1) // 2, h * (h - 1) // 2 + 1}


def word(p):
    """The group of a pair, or the reason in place of it."""
    return str(p.group) if isinstance(p, SymmetricPair) else p.reason


def by_layer(found, model):
    """Pairs and what is refused, in the order of the modules, and in them head by head, queries and keys first."""
    order = [name for name, _ in model.named_modules()]
    return sorted((*found.pairs, *found.refused), key=lambda p: (order.index(p.module), p.head or 0, p.kind))


def words(claims):
    """The groups of a model's pairs, as "(ℂ*)^4, GL(4)" for a head; reasons in place of them."""
    found = {"qk": [], "vo": []}
    for p in claims:
        said = word(p) if isinstance(p, SymmetricPair) else word(p).split(",")[0].replace(examination._NONE, "none")
        for kind in (p.kind,) if p.kind in found else found if said == Cause.UNCERTIFIED.value else ():
            if said not in found[kind] and said != Cause.UNREACHED.value:
                found[kind].append(said)
    return tuple(" + ".join(found[kind]) for kind in ("qk", "vo"))


@torch.no_grad()
def changes(run, pairs, weights):
    """Relative change of the outputs when all pairs move, and when G alone does."""
    found = stacks(pairs, weights)
    with Wide(), preserve_values(weights[name] for s in found for name in s.names):
        before, kept = run(), {name: t.clone() for name, t in weights.items()}
        move_stacks_(found, weights, 3.0, 1)
        whole = run()
        for s in found:
            s.scatter_(torch.cat([s.gather(weights)[..., : s.n, :], s.gather(kept)[..., s.n :, :]], -2), weights)
        half = run()
    scale = max(float(b.abs().max()) for b in before)
    return [max(float((a - b).nan_to_num().abs().max()) for a, b in zip(x, before, strict=True)) / scale
            for x in (whole, half)]  # fmt: skip


def check(model, batch):
    """Hold what is found of a model against null spaces and moves; give the groups in words."""

    def outputs(model=model):
        torch.manual_seed(0)  # ViT-MAE draws its mask
        with Wide():
            return [t for t in tensors(default_forward(model, batch)) if t.is_floating_point()]

    modules = candidates(model, ())
    first = {}
    for name, module in modules.items():
        if roles_of(module) is not None:
            first.setdefault(examination._kind(module), name)
    for name, call in record(outputs, {name: modules[name] for name in first.values()}).items():
        kinds, expected = {}, {}
        with examination.examination(modules[name], call) as alone:
            for proposal, heads in alone.heads():
                head = [p.group for p in proposal.pairs(heads) if p.head == 0 and isinstance(p, SymmetricPair)]
                if not (heads.reason or heads.cause is not Cause.BROKEN):
                    kinds[proposal.kind], expected[proposal.kind] = heads, {sum(g.dimension for g in head)}
                elif heads.cause is not Cause.UNCERTIFIED:  # of heads of this size nothing is left that has a quotient
                    sizes = {place.size for place in kinds.values()} | known_sizes(alone.twin)
                    place = next((p for p in proposal.heads if p.size in sizes), None)
                    if place is not None:
                        kinds[proposal.kind], expected[proposal.kind] = place, without_quotient(place.size)
        for kind, found in nullities(modules[name], call, kinds) if kinds else ():
            assert found <= expected[kind], (name, kind, kinds[kind])
    found = find(model, batch, forward=lambda m, _: outputs(m)).of_full_rank()
    if found.pairs:
        whole, half = changes(outputs, found.pairs, weights_of(model))
        assert whole < 1e-10, "moves change the outputs"
        assert half > 1e-4, "and so should one half of a move"
    return words(by_layer(found, model))


def rows():
    with TABLE.open(encoding="utf-8") as file:
        return {
            (r["library"], r["model"]): (r["queries and keys"], r["values and outputs"]) for r in csv.DictReader(file)
        }


CASES = share([pytest.param(*key, id="-".join(key)) for key in rows() if EXHAUSTIVE or key[1] in SOME], 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), CASES)
def test_groups_are_null_spaces_and_moves_leave_the_outputs(library, name, nobody):
    assert check(*zoo.MODELS[library](name)) == rows()[library, name]


def same(found, others):
    """Whether two values divide out the same rows by the same groups."""
    one, two = ({(p.name, p.group, *map(frozenset, (p.G, p.H, p.null))) for p in s.pairs} for s in (found, others))
    return one == two


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), share(KNOWN_MODELS, 2))
def test_what_is_known_is_what_is_found(library, name, monkeypatch):
    """Every line of the table of classes, against the examination."""
    model, batch = zoo.MODELS[library](name)
    known = find(model)
    monkeypatch.setattr(HANDLERS, "of", ByClass().of)
    assert same(known, find(model, batch, forward=wide))


def wide(model, batch):
    with Wide():
        return default_forward(model, batch)


def tampered(name, change, nobody):
    model, batch = zoo.transformers_model(name)
    change(model)
    return find(model, batch, forward=wide)


def clip(model):
    for layer in model.layers:
        layer.self_attn.config.clip_qkv = 0.3


def test_options_and_hooks_that_break_a_symmetry_are_seen(nobody):
    """OLMo clips what comes of its projections; a hook bends the values of one layer."""
    clipped = tampered("olmo", clip, nobody)
    assert clipped.pairs == ()
    assert clipped.refused

    def bend(model):
        model.layers[1].self_attn.v_proj.register_forward_hook(lambda m, x, y: y + 0.01 * y.tanh())

    found = tampered("olmo", bend, nobody)
    assert {(p.module, p.kind) for p in found.refused} == {("layers.1.self_attn", "vo")}


def test_names_that_say_nothing_and_modules_that_are_not_reached(nobody):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = (nn.MultiheadAttention(8, n, batch_first=True) for n in (2, 4))
            self.odd = nn.Linear(8, 8)

        def forward(self, x):
            return self.odd(self.used(x, x, x, need_weights=False)[0])

    found = find(networks.shake(Pair()), torch.randn(2, 5, 8))
    assert [(p.module, p.cause) for p in found.refused] == [("idle", Cause.UNREACHED)]
    assert [(p.module, str(p.group)) for p in found.pairs] == [("used", "GL(4)")] * 4
    with pytest.raises(ValueError, match="holds no tensor"):
        find(networks.shake(Pair()), [])


def test_a_model_in_single_precision_is_examined_and_left_alone(nobody):
    torch.set_default_dtype(torch.float32)
    model = networks.vit()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = find(model, networks.images())
    assert {str(p.group) for p in found.pairs} == {"GL(8)"}
    assert found.refused == ()
    assert all(v.dtype is torch.float32 and torch.equal(v, before[k]) for k, v in model.state_dict().items())


def identity(x):
    return x


class Plain(nn.Module):
    """Attention of one head, with something done to its values."""

    def __init__(self, change=identity):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(4, 4) for _ in range(4))
        self.change = change

    def forward(self, x):
        v = self.change(self.v_proj(x))
        return self.o_proj(nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), v))


def groups(model, batch=None):
    found = find(model, torch.randn(2, 5, 4) if batch is None else batch)
    return list(map(word, by_layer(found, model)))


class Around(Plain):
    """Attention whose inputs come from another attention layer that it holds."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, Plain())

    def forward(self, x):
        return super().forward(getattr(self, self.name)(x))


@pytest.mark.parametrize("name", ["first", "attention"])
def test_attention_around_another(name):
    """It is named, and not covered, whether or not the names tell which weights are its own."""
    model, x = nn.Sequential(Around(name)), torch.randn(2, 5, 4)
    found, unnamed = find(model, x), Cause.UNNAMED.value
    assert [(p.module, word(p)) for p in by_layer(found, model)] == [("0", unnamed), *[(f"0.{name}", "GL(4)")] * 2]
    with pytest.raises(UnknownAttentionError, match=f"'0' of class .*Around computes attention .*{unnamed}"):
        check_coverage(model, lambda: model(x), found)
    # A module that only holds attention has no line of its own.
    inner = find(nn.Sequential(nn.Sequential(Plain())), x)
    assert ({p.module for p in inner.pairs}, inner.refused) == ({"0.0"}, ())


def test_frozen_weights_are_examined_as_others():
    model = nn.Sequential(Plain())
    x = torch.randn(2, 5, 4)
    found = find(model, x)
    assert list(map(word, by_layer(found, model))) == ["GL(4)", "GL(4)"]
    rest = found.restricted(name for name in weights_of(model) if "q_proj" not in name)
    assert list(map(word, by_layer(rest, model))) == ["frozen: 0.q_proj.bias, 0.q_proj.weight", "GL(4)"]
    model.requires_grad_(False)
    assert find(model, x) == found
    assert [p.cause for p in found.restricted(()).refused] == [Cause.FROZEN] * 2
    assert not any(p.requires_grad for p in model.parameters())


class Eager(Plain):
    def forward(self, x):
        return self.o_proj((self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ self.v_proj(x))


def test_what_has_no_gradient_is_not_certified():
    """One token attends to itself alone, whatever its queries and keys are."""
    assert groups(nn.Sequential(Eager())) == ["GL(4)", "GL(4)"]
    assert groups(nn.Sequential(Eager()), torch.randn(2, 1, 4)) == ["not certified: the gradient is zero", "GL(4)"]


def test_factors_of_too_few_rows_are_refused_and_break_nothing():
    model = nn.Sequential(Plain())
    model[0].o_proj = nn.Linear(4, 2)
    found = find(model, torch.randn(2, 5, 4))
    assert ([(p.kind, p.thin) for p in found.pairs], found.refused) == ([("qk", False), ("vo", True)], ())
    thin = "a factor has fewer rows than columns: 4 columns, 5 and 2 rows"
    assert list(map(word, by_layer(found.of_full_rank(), model))) == ["GL(4)", thin]
    assert verify(model, torch.randn(2, 5, 4)).ok


class OwnCache:
    def update(self, k):
        return k


class Remembering(Plain):
    def forward(self, x, cache):
        return super().forward(cache.update(x))


class Detached(Plain):
    def forward(self, x):
        return super().forward(x).detach()


def test_modules_that_cannot_run_alone_have_a_reason():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = Remembering(), Detached(), Plain()

        def forward(self, x):
            return self.three(self.two(self.one(x, OwnCache())))

    first, second, *rest = groups(Model())
    assert first == "could not be examined alone: AttributeError: 'NoneType' object has no attribute 'update'"
    assert second.startswith("could not be examined alone: ValueError: no output depends on the weights")
    assert rest == ["GL(4)", "GL(4)"]


def test_modules_that_differ_are_not_taken_for_one(monkeypatch):
    """A stored function, a hook, or what a buffer holds: of each, one layer is bent and one is not."""

    class Bend(nn.Module):
        def __init__(self, amount):
            super().__init__()
            self.register_buffer("amount", torch.tensor(amount))

        def forward(self, x):
            return x + self.amount * x.tanh()

    sound, bent = ["GL(4)", "GL(4)"], ["GL(4)", examination._NONE]
    assert groups(nn.Sequential(Plain(), Plain(torch.tanh), Plain())) == [*sound, *bent, *sound]
    assert groups(nn.Sequential(Plain(torch.tanh), Plain())) == [*bent, *sound]
    hooked = nn.Sequential(Plain(), Plain())
    hooked[0].v_proj.register_forward_hook(lambda m, x, y: y)
    hooked[1].v_proj.register_forward_hook(lambda m, x, y: y.tanh())
    assert groups(hooked) == [*sound, *bent]
    masked = nn.Sequential(Plain(Bend(0.0)), Plain(Bend(1.0)))
    assert examination._kind(masked[0]) == examination._kind(masked[1])
    assert groups(masked) == [*sound, *bent]
    monkeypatch.setattr(examination.Examination, "keeps", lambda *_: True)
    # The move on its own inputs is what tells them apart; else the whole model does.
    assert groups(masked) == [*sound, "GL(4)", Cause.CHANGES.value]


def test_modules_of_one_kind_are_examined_once(monkeypatch):
    count, claims = [], examination.Examination.claims
    monkeypatch.setattr(examination.Examination, "claims", lambda alone: count.append(1) or claims(alone))
    assert groups(nn.Sequential(*(Plain() for _ in range(4)))) == ["GL(4)"] * 8
    assert len(count) == 1


class Drawing(Plain):
    def forward(self, x):
        return super().forward(x) + torch.randn(x.shape)


def test_passes_that_are_compared_draw_the_same_numbers():
    model, x = nn.Sequential(Drawing(), Drawing()), torch.randn(2, 5, 4)
    assert groups(model, x) == ["GL(4)"] * 4
    assert verify(model, x).ok
    assert not torch.equal(model(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_reformer_is_certified_alike_at_two_lengths():
    """Inputs longer than a chunk are hashed at random."""
    from transformers import ReformerConfig, ReformerModel

    config = ReformerConfig(
        vocab_size=40, hidden_size=16, num_attention_heads=2, attention_head_size=4, attn_layers=["local", "lsh"],
        axial_pos_embds=False, max_position_embeddings=64, feed_forward_size=8, lsh_attn_chunk_length=8,
        local_attn_chunk_length=8, is_decoder=False, num_buckets=4,
    )  # fmt: skip
    model = networks.shake(ReformerModel(config).double())
    short, long = (find(model, {"input_ids": torch.arange(n).unsqueeze(0) % 37 + 3}) for n in (6, 32))
    assert same(short, long)
    assert [str(p.group) for p in long.pairs if p.kind == "vo"] == ["GL(4)"] * 4


class Brittle(Plain):
    """Not finite at any other values than those it was made with."""

    def __init__(self):
        super().__init__()
        self.known = self.v_proj.weight.detach().double()

    def forward(self, x):
        same = torch.equal(self.v_proj.weight.double(), self.known)
        return super().forward(x) if same else super().forward(x) * float("nan")


def test_what_is_not_finite_is_no_symmetry():
    nan = torch.full((2, 1, 3, 3), float("nan"))
    assert not list(examination._groups(Heads(1, 1, 3), nan, nan))
    b = torch.tensor([1.0, 2.0, -float("inf"), float("nan")])
    assert change([b], [b]) == 0
    assert change([b], [b + torch.tensor([0.5, 0.0, 0.0, 0.0])]) == 0.25
    assert not change([b], [torch.full((4,), float("nan"))]) <= 1e9
    assert not change([torch.ones(1), b], [torch.ones(1), b * float("nan")]) <= 1e9
    assert not change([b, torch.ones(1)], [b * float("nan"), torch.ones(1)]) <= 1e9
    assert groups(nn.Sequential(Brittle())) == ["GL(4)", examination._LOCAL]
    batch = torch.randn(2, 5, 4)
    batch[0, 0, 0] = float("nan")
    assert groups(nn.Sequential(Plain()), batch) == [
        "could not be examined alone: ValueError: its gradients are not finite on this batch"
    ]


class Caching(Plain):
    """It also returns its keys and values."""

    def forward(self, x):
        return super().forward(x), (self.k_proj(x), self.v_proj(x))


@pytest.mark.parametrize(("reads", "expected"), [(False, "GL(4)"), (True, examination._NONE)])
def test_what_nothing_reads_of_an_output_does_not_count(reads, expected):
    """Keys and values are returned for a cache; the model reads the keys, or neither."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Caching()

        def forward(self, x):
            y, (keys, _) = self.attention(x)
            return y + keys.tanh() if reads else y

    model, x = Reader(), torch.randn(2, 5, 4)
    assert groups(model, x) == [expected, "GL(4)"]
    assert verify(model, x).ok


class Headed(Plain):
    """A second layer whose name says nothing, beside the output projection of one name or the other."""

    def __init__(self, output, *, used=False):
        super().__init__()
        self.add_module(output, self._modules.pop("o_proj"))
        self.output, self.used, self.head = output, used, nn.Linear(4, 4)

    def forward(self, x):
        y = (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ self.v_proj(x)
        y = getattr(self, self.output)(y)
        return self.head(y.tanh()) if self.used else y


def test_a_layer_that_is_not_used_is_ignored():
    found = [groups(nn.Sequential(Headed(name))) for name in ("o_proj", "proj")]
    assert found == [["GL(4)", "GL(4)"]] * 2
    assert groups(nn.Sequential(Headed("o_proj", used=True))) == ["GL(4)", "GL(4)"]
    assert groups(nn.Sequential(Headed("proj", used=True))) == [Cause.UNNAMED.value]


class Stacked(nn.Module):
    """Three heads of size 2, each with its own matrix, as in TransformerLens; keys and values may be shared by all."""

    def __init__(self, kv_number):
        super().__init__()
        self.W_Q, self.b_Q = nn.Parameter(torch.randn(3, 4, 2)), nn.Parameter(torch.randn(3, 2))
        self._W_K, self._b_K = nn.Parameter(torch.randn(kv_number, 4, 2)), nn.Parameter(torch.randn(kv_number, 2))
        self._W_V, self._b_V = nn.Parameter(torch.randn(kv_number, 4, 2)), nn.Parameter(torch.randn(kv_number, 2))
        self.W_O, self.b_O = nn.Parameter(torch.randn(3, 2, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        weights = (self.W_Q, self.b_Q), (self._W_K, self._b_K), (self._W_V, self._b_V)
        q, k, v = (torch.einsum("bsd,hde->bhse", x, W.expand(3, 4, 2)) + b.expand(3, 2)[:, None] for W, b in weights)
        z = (q @ k.mT).softmax(-1) @ v
        return torch.einsum("bhse,hed->bsd", z, self.W_O) + self.b_O


@pytest.mark.parametrize("kv_number", [3, 1])
def test_one_matrix_for_each_head(kv_number):
    model, x = nn.Sequential(Stacked(kv_number)), torch.randn(2, 5, 4)
    pairs = find(model, x).pairs
    rows = {"qk": (15 // kv_number, 5), "vo": (5, 12 // kv_number)}
    assert [(str(p.group), p.n, p.m) for p in pairs] == [("GL(2)", *rows[kind]) for kind in ("qk", "vo")] * kv_number
    assert verify(model, x).ok


class Grouped(nn.Module):
    """Four query heads of size 2 and two of keys; the first two query heads share the first one, or the odd ones do."""

    def __init__(self, *, cyclic):
        super().__init__()
        self.cyclic, self.q_proj, self.o_proj = cyclic, nn.Linear(4, 8), nn.Linear(8, 4)
        self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (t.repeat(1, 2, 1, 1) if self.cyclic else t.repeat_interleave(2, 1) for t in (k, v))
        return self.o_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("cyclic", [False, True])
def test_which_heads_share_keys_is_examined(cyclic):
    model, x = nn.Sequential(Grouped(cyclic=cyclic)), torch.randn(2, 5, 4)
    pairs = find(model, x).pairs
    assert [(str(p.group), p.n, p.m) for p in pairs] == [("GL(2)", 10, 5), ("GL(2)", 5, 8)] * 2
    first = [
        b.offset // (2 * 4) for b in pairs[0].G if b.name == "0.q_proj.weight"
    ]  # of the query heads, by their rows
    assert first == ([0, 2] if cyclic else [0, 1])
    assert verify(model, x).ok


class Narrow(Plain):
    """It computes in single precision inside, so that torch refuses it in float64."""

    def forward(self, x):
        weights = (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1, dtype=torch.float32)
        return self.o_proj(weights @ self.v_proj(x))


def test_a_model_that_cannot_run_in_float64_is_examined_there():
    model, x = nn.Sequential(Narrow()), torch.randn(2, 5, 4)
    with pytest.raises(RuntimeError, match="scalar type"):
        model(x)
    assert groups(model, x) == ["GL(4)", "GL(4)"]
    assert groups(model.float(), x.float()) == ["GL(4)", "GL(4)"]


class Nameless(nn.Module):
    """Attention, but its names do not say of what."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.normalise = nn.Softmax(-1)

    def forward(self, x):
        return self.d(self.normalise(self.a(x) @ self.b(x).mT) @ self.c(x))


class Receptance(nn.Module):
    """Keys and values without queries, as in RWKV."""

    def __init__(self):
        super().__init__()
        self.key, self.value, self.receptance, self.output = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        weights = self.key(x).exp()
        mean = (weights * self.value(x)).cumsum(1) / weights.cumsum(1)
        return self.output(self.receptance(x).sigmoid() * mean)


def test_attention_without_names_has_a_reason():
    """At the module that holds its weights; not where a pair of the user describes it, and not at other modules."""
    x = torch.randn(2, 5, 4)
    for layer in (Nameless(), Receptance()):
        model = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh())
        found = find(model, x)
        assert ([(p.module, p.cause) for p in found.refused], found.pairs) == ([("1", Cause.UNNAMED)], ())
    model = nn.Sequential(Nameless())
    found = find(model, x)
    with pytest.raises(UnknownAttentionError, match="calls softmax"):
        check_coverage(model, lambda: model(x), found)
    values = [slot(model, "0.c.weight", transpose=True), slot(model, "0.c.bias")]
    own = pair(values, [slot(model, "0.d.weight")], GL(4))
    assert found.adding(own) == Symmetries((own,))
    check_coverage(model, lambda: model(x), found.adding(own))
    assert find(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x) == Symmetries()


def test_scales_that_have_to_be_positive():
    model, x = nn.Sequential(Plain(torch.relu)), torch.randn(1, 5, 4)
    nn.init.zeros_(model[0].v_proj.bias)  # with x and -x every unit rests on some token: one that never does is linear
    assert groups(model, torch.cat([x, -x])) == ["GL(4)", *["(ℝ+)^1"] * 4]


class Relative(Plain):
    """Two heads with terms of positions: added to the queries, and multiplied with them, of each head or of all."""

    def __init__(self, *, shared):
        super().__init__()
        if shared:
            self.rel_pos_h = nn.Parameter(torch.randn(5, 2))
        else:
            self.bias_u, self.bias_v = (nn.Parameter(torch.randn(2, 2)) for _ in range(2))
            self.relative_k_proj = nn.Linear(4, 4, bias=False)
        self.register_buffer("positions", torch.randn(5, 4))

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (2, 2)).transpose(1, 2) for m in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "rel_pos_h"):
            scores = q @ k.mT + q @ self.rel_pos_h.T
        else:
            positions = self.relative_k_proj(self.positions).unflatten(-1, (2, 2)).transpose(0, 1)
            scores = (q + self.bias_u[:, None]) @ k.mT + (q + self.bias_v[:, None]) @ positions.mT
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize(("shared", "count"), [(False, 2), (True, 1)])
def test_rows_of_positions(shared, count):
    """One group acts on all heads where they share a row."""
    found = find(nn.Sequential(Relative(shared=shared)), torch.randn(2, 5, 4))
    assert [str(p.group) for p in found.of_kind(["qk"]).pairs] == ["GL(2)"] * count
    assert [str(p.group) for p in found.of_kind(["vo"]).pairs] == ["GL(2)"] * 2
    assert found.refused == ()
