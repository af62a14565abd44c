"""Latent attention and state-space layers: what shapes propose, and what gradients choose."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import UnknownAttentionError, check_coverage, find_symmetric_pairs
from quotient_manifolds.symmetries.modules import Wide, widened
from quotient_manifolds.symmetries.registry import candidates
from quotient_manifolds.symmetries.roles import _LATENT, _LATENT_SIZES, proposals

from ... import zoo
from .test_attention import null_dimension
from .test_discovery import changes

#: What is found of tiny layers, and what else leaves the outputs as they are: a latent vector of r dimensions is
#: normalised between two projections, which may be rotated, and scaled against the norm's gains: r (r - 1) / 2 + r.
#: In Jamba the step is one of two; and one number scales D and the gains of C against the output projection.
LAYERS = {"deepseek_v2": (8 + 8 + 2, 10), "deepseek_v3": (8 + 8 + 2, 6 + 3), "jamba": (8 + 2, 3 + 1)}
#: A layer of linear attention, of few and small heads: each has pairs that are moved one by one.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_missed(name):
    model, batch = zoo.transformers_model(name, **zoo.LAYERS[name])
    (path, module), *_ = candidates(model, ()).items()
    pairs = [p for p in find_symmetric_pairs(model, batch=batch) if p.group is not None and p.module == path]
    call = {}
    module.register_forward_pre_hook(lambda m, args, kwargs: call.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    call = {k: None if type(v).__name__.endswith("Cache") else v for k, v in call.items()}
    call["hidden_states"] = torch.randn(12, *call["hidden_states"].shape[1:])[:, :6]
    if name != "jamba":
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
@pytest.mark.parametrize("name", ["bamba", "qwen3_next-linear"])
def test_moves_leave_the_outputs(name):
    name, *linear = name.split("-")
    model, batch = zoo.transformers_model(name, **(LINEAR if linear else {}))

    def outputs():
        with Wide():
            return [model(**batch)[0]]

    found = find_symmetric_pairs(model, batch=batch, forward=lambda *_: outputs())
    assert {p.kind for p in found} == {"conv", "qk", "vo"}
    pairs = [p for p in found if p.kind == "conv"]
    assert pairs
    assert all(p.group is not None for p in pairs)
    whole, half = changes(outputs, pairs)
    assert whole < 1e-10
    assert half > 1e-4


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_gradient_is_not_certified():
    """One token attends to itself alone; its values are seen as ever."""
    model, batch = zoo.transformers_model("deepseek_v2")
    batch["input_ids"] = batch["input_ids"][:, :1]

    def outputs(*_):
        with Wide():
            return model(**batch)

    found = find_symmetric_pairs(model, batch=batch, forward=outputs)
    assert {p.reason for p in found if p.kind == "qk"} == {"not certified: the gradient is zero"}
    assert {str(p.group) for p in found if p.kind == "vo"} == {"GL(6)"}
    with pytest.raises(UnknownAttentionError, match="the gradient is zero"):
        check_coverage(model, outputs, found)


def test_latent_attention_without_the_queries_that_are_known_is_let_be():
    layer = nn.Module()
    for name in (*_LATENT, *_LATENT_SIZES):
        setattr(layer, name, 1)
    assert proposals(layer, "") == []


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
    found = find_symmetric_pairs(nn.Sequential(Latent(gated)), batch=torch.randn(2, 5, 6))
    assert [(p.kind, str(p.group)) for p in found] == [("qk", "GL(2)"), ("vo", values)] * 2
