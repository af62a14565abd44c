"""Nothing is missed: null dimensions of Jacobians are what the groups predict."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import Projection, attention_pairs, find_symmetric_pairs, registry, verify
from quotient_manifolds.symmetries.modules import ByClass

from ... import networks


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
    pairs = [p for p in find_symmetric_pairs(module) if p.group is not None]
    return sum(p.group.dimension for p in pairs) + sum(b.size[1] for p in pairs for b in p.null)


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
        k, v, o = (Projection(nn.Linear(8, 8)) for _ in range(3))
        return list(attention_pairs("layer", heads=2, q=Projection(query), k=k, v=v, o=o))

    for query, reason in (
        (OwnForward(8, 8), "OwnForward is a subclass of Linear with its own forward"),
        (quantised(), "quantised: the weight has dtype int8"),
    ):
        found = pairs(query)
        assert {p.reason for p in found if p.kind == "qk"} == {reason}
        assert all(p.group is not None for p in found if p.kind == "vo")
    assert all(p.group is not None for p in pairs(Renamed(8, 8)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("known", [True, False], ids=["known", "examined"])
@pytest.mark.parametrize("bits", ["8 bit", "4 bit"])
def test_quantised_weights_are_refused_layer_by_layer(bits, known, monkeypatch):
    model, batch = networks.quantised_bert(bits)
    model.bert.encoder.layer[1].requires_grad_(True)
    if not known:
        monkeypatch.setattr(registry, "_HANDLERS", ByClass())
    found = find_symmetric_pairs(model, batch=None if known else batch)
    for p in found:
        assert p.reason.startswith("quantised: the weight has dtype") == ("layer.0." in p.module), p.reason
    assert [str(p.group) for p in found if "layer.1." in p.module] == ["GL(32)"] * 4
    report = verify(model, batch)
    assert report.ok, str(report)
    assert len(report.certificate.residuals) == 4


def quantised():
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    return linear
