"""Nothing is missed: null dimensions are what the groups predict; what names and shapes say."""

import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.passes import Wide, widened
from quotient_manifolds.symmetries import (
    Heads,
    Projection,
    SymmetricPair,
    UnknownAttentionError,
    attention_pairs,
    check_coverage,
    find,
    verify,
)
from quotient_manifolds.symmetries.attention import (
    _LATENT,
    _LATENT_SIZES,
    HANDLERS,
    candidates,
    pairs_of_roles,
    proposals,
)
from quotient_manifolds.symmetries.roles import possible_heads, roles_of
from quotient_manifolds.weights import ByClass
from tests.support import networks, zoo


def null_dimension(module, run, tolerance):
    """Dimension of the null space of the Jacobian of the outputs with respect to all parameters."""
    names = [n for n, _ in module.named_parameters()]
    values = tuple(p.detach() for p in module.parameters())

    def outputs(*values):
        return run(
            lambda *a, **k: torch.func.functional_call(module, dict(zip(names, values, strict=True)), a, k)
        ).flatten()

    blocks = torch.func.jacrev(outputs, argnums=tuple(range(len(values))))(*values)
    J = torch.cat([b.reshape(b.shape[0], -1) for b in blocks], dim=1)
    J = J / J.norm(dim=0).clamp_min(1e-300).median()
    assert J.shape[0] >= J.shape[1]
    s = torch.linalg.svdvals(J)
    rank = int((s > tolerance * s[0]).sum())
    gap = s[rank - 1] / s[rank] if rank < len(s) else torch.inf
    assert gap > 30, "the spectrum has no clear gap"
    return J.shape[1] - rank


def predicted(module):
    """Group dimensions of all pairs, and the null directions that the key bias spans."""
    found = find(module)
    return found.dimension + sum(s.size[1] for p in found.pairs for s in p.null)


class BertLayerWithoutNorm(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        attention.output.LayerNorm = nn.Identity()

    def forward(self, x):
        return self.attention.output.dense(self.attention.self(x)[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nothing_is_missed_in_bert_and_vit():
    from transformers import BertConfig, ViTConfig
    from transformers.models.bert.modeling_bert import BertAttention
    from transformers.models.vit.modeling_vit import ViTAttention

    options = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    x = torch.randn(8, 6, 8)
    for config, make in ((BertConfig(**options), lambda c: BertLayerWithoutNorm(BertAttention(c))),
                         (ViTConfig(**options), ViTAttention)):  # fmt: skip
        # ViT's eager softmax casts to float32, which would blur the null space.
        config._attn_implementation = "eager" if isinstance(config, BertConfig) else "sdpa"
        layer = networks.shake(make(config), 0.4)

        def run(f):
            found = f(x)
            return found[0] if isinstance(found, tuple) else found

        # 32 on Q–K, 32 on V–O, 8 of b_k; and b_v moves into b_o since attention rows sum to one: 8 more.
        assert predicted(layer) == 72
        assert null_dimension(layer, run, 1e-10) == 80


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_nothing_is_missed_under_rope_and_grouped_queries(name):
    import transformers

    module = getattr(transformers.models, name.lower())
    modeling = getattr(module, f"modeling_{name.lower()}")
    options = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "head_dim": 4,
    }
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    layer = networks.shake(getattr(modeling, f"{name}Attention")(config, 0), 0.5)
    x = torch.randn(12, 6, 8)
    angle = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1])
    angle = torch.cat([angle, angle], -1)[None]
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    plain = nn.functional.softmax

    def run(f):
        return f(x, position_embeddings=(angle.cos(), angle.sin()), attention_mask=mask)[0]

    # The library's softmax and norms cast to float32, which blurs the null space: keep them in float64 here.
    def softmax(t, dim=-1, dtype=None):
        return plain(t, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "softmax", softmax)
        patch.setattr(torch.Tensor, "to", lambda self, *a, **k: self)
        found = null_dimension(layer, run, 1e-9)
    # Llama: 2 kv heads × (2 frequencies × 2 on Q–K + 16 on V–O). Qwen3: V–O, and the norms' weights against
    # each other: one number a dimension, less what RoPE mixes (both dimensions of a plane alike).
    assert predicted(layer) == {"Llama": 2 * (4 + 16), "Qwen3": 32}[name]
    assert found == predicted(layer) + {"Llama": 0, "Qwen3": 2}[name]


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Renamed(nn.Linear):
    """A subclass that computes what nn.Linear does."""


def test_modules_that_are_no_linear_maps_are_refused_with_a_reason():
    def pairs(query):
        layer = nn.ModuleDict({"q": query, **{name: nn.Linear(8, 8) for name in "kvo"}})
        return attention_pairs(Heads(2), **{name: Projection(layer, name) for name in "qkvo"})

    for query, reason in (
        (OwnForward(8, 8), "OwnForward is a subclass of Linear with its own forward"),
        (quantised(), "quantised: the weight has dtype int8"),
    ):
        found = pairs(query)
        assert {p.reason for p in found if p.kind == "qk"} == {reason}
        assert all(isinstance(p, SymmetricPair) for p in found if p.kind == "vo")
    assert all(isinstance(p, SymmetricPair) for p in pairs(Renamed(8, 8)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("known", [True, False], ids=["known", "examined"])
@pytest.mark.parametrize("bits", ["8 bit", "4 bit"])
def test_quantised_weights_are_refused_layer_by_layer(bits, known, monkeypatch):
    model, batch = networks.quantised_bert(bits)
    model.bert.encoder.layer[1].requires_grad_(True)
    if not known:
        monkeypatch.setattr(HANDLERS, "of", ByClass().of)
    found = find(model, None if known else batch)
    assert all(p.reason.startswith("quantised: the weight has dtype") for p in found.refused)
    assert {p.module for p in found.refused} == {"bert.encoder.layer.0.attention"}
    assert [(p.module, str(p.group)) for p in found.pairs] == [("bert.encoder.layer.1.attention", "GL(32)")] * 4
    report = verify(model, batch)
    assert report.ok, str(report)
    assert len(report.residuals) == 4


def quantised():
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    return linear


class Named(nn.Module):
    def __init__(self, **widths):
        super().__init__()
        for name, width in widths.items():
            self.add_module(name, nn.Linear(8, width))


@pytest.mark.parametrize(
    ("widths", "letters"),
    [
        ({"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}, "q k v o"),
        ({"to_q": 8, "to_kv": 16, "to_out": 8}, "q kv o"),
        ({"Wqkv": 24, "Wo": 8}, "qkv o"),
        ({"query_key_value": 24, "dense": 8}, "qkv o"),
        ({"q_lin": 8, "k_lin": 8, "v_lin": 8, "out_lin": 8, "gate": 8}, "q k v o"),
        ({"query": 8, "key": 8, "value": 8, "pos_query_proj": 8, "dense": 8}, "q k v o"),
        ({"fc1": 8, "fc2": 8}, None),
        ({"q_proj": 8, "k_proj": 8, "v_proj": 8}, None),
        ({"q": 8, "query": 8, "k": 8, "v": 8, "o": 8}, None),
    ],
    ids=str,
)
def test_names_say_the_roles(widths, letters):
    found = roles_of(Named(**widths))
    said = None if found is None else {p.letters for p in found.values()}
    assert said == (None if letters is None else set(letters.split()))
    if "pos_query_proj" in widths:
        assert [c for c, p in found.items() if p.further] == ["q"]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("order", ["qkv", "qvk"])
def test_rows_of_one_matrix(blocks, order):
    """Against the tensor of rows reshaped and split as a forward pass would."""
    heads, kv_heads, size = 4, 2, 3
    layer = Named(qkv=(heads + 2 * kv_heads) * size, o=heads * size)
    share = {"q": heads // blocks, "k": kv_heads // blocks, "v": kv_heads // blocks}
    parts = layer.qkv.weight.unflatten(0, (blocks, -1)).split([share[c] * size for c in order], dim=1)
    split = {c: part.reshape(-1, size, 8) for c, part in zip(order, parts, strict=True)}
    place = Heads(heads, kv_heads, size, blocks=blocks, order=order)
    layer.o = nn.Linear(heads * size, 8)
    for p in pairs_of_roles(roles_of(layer), qk=place, vo=place):
        x, g = p.gather(dict(layer.named_parameters())), p.head * kv_heads // heads
        first, second = ("q", "k") if p.kind == "qk" else ("v", None)
        assert torch.equal(x[:8].T, split[first][p.head if first == "q" else g])
        if second:
            assert torch.equal(x[9 : 9 + 8].T, split[second][g])


def test_places_try_every_divisor():
    layer = Named(q_proj=12, k_proj=6, v_proj=6)
    layer.o_proj = nn.Linear(12, 8)
    assert {(p.number, p.kv_number, p.size) for p in possible_heads(roles_of(layer), "qk")} == {
        (12, 6, 1), (6, 3, 2), (4, 2, 3), (2, 1, 6)
    }  # fmt: skip


class QuantLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))


def test_layers_of_other_classes_and_names():
    """I-BERT's linear layers are no subclass of torch's; CPM-Ant projects; a layer of positions belongs to the keys."""
    layer = nn.Module()
    for name in ("project_q", "project_k", "project_v", "attention_out"):
        layer.add_module(name, QuantLinear())
    layer.linear_pos = nn.Linear(8, 8, bias=False)
    found = roles_of(layer)
    assert sorted({p.letters for p in found.values()}) == ["k", "o", "q", "v"]
    assert [p.module for p in found["k"].further] == [layer.linear_pos]
    assert found["q"].module is layer.project_q


def test_a_layer_of_two_names_is_one_projection():
    """A class may offer another library's name beside its own."""
    layer = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer.add_module(name, nn.Linear(8, 8))
    plain = roles_of(layer)
    layer.out_proj, layer.query = layer.o_proj, layer.q_proj
    assert roles_of(layer) == plain
    layer.out_proj = nn.Linear(8, 8)
    assert roles_of(layer) is None


def test_tensors_with_an_axis_of_heads():
    """As in Funnel: the positions' keys are (rows, heads, head size), and a row a head is added to the queries."""
    layer = Named(q=6, k=6, v=6)
    layer.o = nn.Linear(6, 8)
    layer.r_kernel, layer.r_w_bias = nn.Parameter(torch.randn(5, 2, 3)), nn.Parameter(torch.randn(2, 3))
    place = Heads(2, 2, 3)
    _, _, qk, _ = pairs_of_roles(roles_of(layer), qk=place, vo=place)
    q, k = (torch.cat([m.weight[3:].T, m.bias[None, 3:]]) for m in (layer.q, layer.k))
    assert torch.equal(
        qk.gather(dict(layer.named_parameters())), torch.cat([q, layer.r_w_bias[1:], k, layer.r_kernel[:, 1]])
    )


#: What is found of tiny layers, and what else leaves the outputs as they are: a latent vector of r dimensions is
#: normalised between two projections, which may be rotated, and scaled against the norm's gains: r (r - 1) / 2 + r.
LAYERS = {"deepseek_v2": (8 + 8 + 2, 10), "deepseek_v3": (8 + 8 + 2, 6 + 3)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_missed(name):
    model, batch = zoo.transformers_model(name, **zoo.LAYERS[name])
    (path, module), *_ = candidates(model, ()).items()
    pairs = [p for p in find(model, batch).pairs if p.module == path]
    call = {}
    module.register_forward_pre_hook(lambda m, args, kwargs: call.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    call = {k: None if type(v).__name__.endswith("Cache") else v for k, v in call.items()}
    call["hidden_states"] = torch.randn(12, *call["hidden_states"].shape[1:])[:, :6]
    call["attention_mask"] = torch.zeros(1, 1, 6, 6)
    call = widened(call) | {"position_embeddings": sliced(call["position_embeddings"])}

    def run(f):
        with Wide():
            found = f(**call)
        return found[0] if isinstance(found, tuple) else found

    dimension, others = LAYERS[name]
    assert sum(p.group.dimension for p in pairs) == dimension
    assert null_dimension(module, run, 1e-9) == dimension + others


def sliced(embeddings):
    """Rotations of the first six positions, of one example."""
    if isinstance(embeddings, tuple):
        return tuple(t[:1, :6].double() for t in embeddings)
    return embeddings[:1, :6].to(torch.complex128)


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_gradient_is_not_certified():
    """One token attends to itself alone; its values are seen as ever."""
    model, batch = zoo.transformers_model("deepseek_v2")
    batch["input_ids"] = batch["input_ids"][:, :1]

    def outputs(*_):
        with Wide():
            return model(**batch)

    found = find(model, batch, forward=outputs)
    assert {(p.kind, p.reason) for p in found.refused} == {("qk", "not certified: the gradient is zero")}
    assert {(p.kind, str(p.group)) for p in found.pairs} == {("vo", "GL(6)")}
    with pytest.raises(UnknownAttentionError, match="the gradient is zero"):
        check_coverage(model, outputs, found)


def test_latent_attention_without_the_queries_that_are_known_is_let_be():
    layer = nn.Module()
    for name in (*_LATENT, *_LATENT_SIZES):
        setattr(layer, name, 1)
    assert proposals(layer) == []


class Latent(nn.Module):
    """Latent attention of two heads, none of whose dimensions are rotated, with a gate or without."""

    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim = 5, 2, 0, 3

    def __init__(self, gated):
        super().__init__()
        self.add_module("q_gate_proj" if gated else "q_proj", nn.Linear(6, 2 * (2 + 3 * gated)))
        self.kv_a_proj_with_mqa, self.kv_b_proj, self.o_proj = nn.Linear(6, 5), nn.Linear(5, 10), nn.Linear(6, 6)

    def forward(self, x):
        source = self.q_gate_proj if hasattr(self, "q_gate_proj") else self.q_proj
        latent = nn.functional.normalize(self.kv_a_proj_with_mqa(x), dim=-1)
        q, kv = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (source(x), self.kv_b_proj(latent)))
        y = (q[..., :2] @ kv[..., :2].mT).softmax(-1) @ kv[..., 2:]
        y = y * q[..., 2:].sigmoid() if hasattr(self, "q_gate_proj") else y
        return self.o_proj(y.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize(("gated", "values"), [(False, "GL(3)"), (True, "(ℝ*)^3")])
def test_latent_attention_without_a_rotated_part(gated, values):
    found = find(nn.Sequential(Latent(gated)), torch.randn(2, 5, 6))
    assert [(p.kind, str(p.group)) for p in found.pairs] == [("qk", "GL(2)"), ("vo", values)] * 2
    assert found.refused == ()


class Unwatched(Latent):
    """The same in code that no mode of torch sees, such as a fused kernel."""

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return super().forward(x)


def test_latent_attention_that_cannot_be_watched_is_told_by_its_names_and_examined():
    model = nn.Sequential(Unwatched(gated=False), nn.Flatten(), nn.Linear(30, 3))
    x, y = torch.randn(4, 5, 6), torch.arange(4) % 3
    with pytest.raises(UnknownAttentionError, match="cannot be watched"):
        check_coverage(model, lambda: model(x))
    found = sharpness.evaluate(model, [(x, y)], rho=0.1, steps=2)
    assert "Unwatched (4 pairs)" in found.remarks[0]
    assert found.symmetries.pairs == find(model, (x, y)).pairs


def test_heads_that_are_refused_need_no_group():
    """RoPE turns no plane of so few dimensions."""
    layer = nn.ModuleDict({name: nn.Linear(4, 4) for name in "qkvo"})
    heads = Heads(2, reason="norms between", group="half", rotary_size=1)
    found = attention_pairs(heads, **{name: Projection(layer, name) for name in layer})
    assert [(p.kind, getattr(p, "reason", "")) for p in found] == [("qk", "norms between"), ("vo", "")] * 2
