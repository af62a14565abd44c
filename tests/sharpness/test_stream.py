import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quotient_manifolds.symmetries import (
    GL,
    SymmetricPair,
    apply_random_symmetry_,
    find_symmetric_pairs,
    mixers,
    registry,
)
from quotient_manifolds.symmetries.blocks import Block, block
from quotient_manifolds.symmetries.modules import Wide
from quotient_manifolds.symmetries.whole import apply_random_moves_, canonical_form, neuron_pairs, wiring_of
from sharpness import evaluate
from sharpness.stream import vector_lengths
from tests import architectures, networks
from tests.extent import EXHAUSTIVE
from tests.whole_networks import BACKBONES, build, headed, heads

NETWORKS = [(f, n) for f, (*_, usual) in BACKBONES.items() for n in (heads(f) if EXHAUSTIVE else [usual])]
UNWIRED = [
    "bert-decoder", "mpnet", "deberta_v2", "t5", "bart", "whisper", "gpt2-cross", "bloom", "gptj", "gemma2", "gemma3",
    "vit", "deit", "swin", "dinov2", "beit",
]  # fmt: skip
#: The biases of the heads' output projections.
OUTPUTS = r"(attn|attention|output|attn\.o|layers\.\d+|h\.\d+)\.(o|o_proj|out_proj|c_proj|dense)\.bias$"


def loss(model, batch):
    found = model(**batch)
    if "loss" in found:
        return found.loss
    out = next(t for t in found.values() if isinstance(t, torch.Tensor) and t.dim() > 1)
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sin().mean()


def value(model, batch, measure="complete-inv", **options):
    with Wide():  # layers that cast to float32 round differently after a move
        return float(evaluate(model, [batch], loss, measure=measure, rho=0.1, steps=3, progress=False, **options))


def moved(model):
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 30.0, seed=3) > 0
    return twin


def test_rows_columns_and_tables():
    """Against sums that are written out."""
    model = build("vit")
    lengths = vector_lengths(model, wiring_of(model))
    layer = model.vit.layers[0]
    fc1, fc2, patches = layer.mlp.fc1, layer.mlp.fc2, model.vit.embeddings.patch_embeddings.projection
    for row in (0, 5):
        expected = (fc1.weight[row].square().sum() + fc1.bias[row] ** 2).sqrt()
        torch.testing.assert_close(lengths[fc1.weight].expand_as(fc1.weight)[row, 3], expected)
        torch.testing.assert_close(lengths[fc1.bias][row], expected)
    torch.testing.assert_close(lengths[fc2.weight].expand_as(fc2.weight)[2, 7], fc2.weight[:, 7].norm())
    torch.testing.assert_close(lengths[fc2.bias].expand_as(fc2.bias)[2], fc2.bias.norm())
    column = patches.weight[:, 0, 1, 2].norm()
    torch.testing.assert_close(lengths[patches.weight].expand_as(patches.weight)[4, 0, 1, 2], column)
    positions = model.vit.embeddings.position_embeddings
    torch.testing.assert_close(lengths[positions].expand_as(positions)[0, 3, 1], positions[0, 3].norm())
    assert set(lengths) == set(model.parameters())


def test_what_has_no_rows_with_biases():
    odd = nn.Sequential(nn.ConvTranspose2d(4, 2, 3), nn.LayerNorm([4, 7]), nn.Embedding(5, 3))
    lengths = vector_lengths(odd, None)
    assert all(lengths[p].expand_as(p).shape == p.shape for p in odd.parameters())


def test_other_layouts():
    conv1d, linear = Conv1D(2, 3), nn.Linear(3, 2, bias=False)
    lengths = vector_lengths(nn.Sequential(conv1d, linear), None)
    expected = torch.hypot(conv1d.weight[:, 1].norm(), conv1d.bias[1])
    torch.testing.assert_close(lengths[conv1d.weight].expand_as(conv1d.weight)[0, 1], expected)
    torch.testing.assert_close(lengths[linear.weight].expand_as(linear.weight)[1, 2], linear.weight[1].norm())


def test_a_bias_beside_weights_of_pairs_is_a_vector_of_its_own():
    """Entry by entry: of a row, what no pair moves counts; a bias goes with its row if both or neither are in pairs."""
    fused, out = networks.shake(nn.Linear(3, 6)), networks.shake(nn.Linear(4, 3))
    G = (block(fused, "weight", slice(2, 4), transpose=True), block(fused, "bias", slice(2, 4)))
    pair = SymmetricPair("own", "vo", GL(2), G, (block(out, "weight", columns=slice(0, 2)),))
    lengths = vector_lengths(nn.Sequential(fused, out), None, [pair])
    for row in (0, 1, 4, 5):
        expected = torch.hypot(fused.weight[row].norm(), fused.bias[row])
        torch.testing.assert_close(lengths[fused.weight].expand_as(fused.weight)[row, 2], expected)
        torch.testing.assert_close(lengths[fused.bias].expand_as(fused.bias)[row], expected)
    for row in range(3):
        torch.testing.assert_close(lengths[out.weight].expand_as(out.weight)[row, 3], out.weight[row, 2:].norm())
        torch.testing.assert_close(lengths[out.bias].expand_as(out.bias)[row], out.bias.norm())


class Experts(nn.Module):
    """Two gated experts as three-dimensional parameters: gates and up-projections alternate."""

    def __init__(self):
        super().__init__()
        shapes = {"gate_up": (2, 3, 8), "gate_up_bias": (2, 8), "down": (2, 4, 3), "down_bias": (2, 3)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.linspace(-1, 2, torch.Size(shape).numel()).sin().view(shape)))

    def forward(self, x):
        gate, up = (x @ self.gate_up + self.gate_up_bias[:, None]).unflatten(-1, (4, 2)).unbind(-1)
        return ((gate.sigmoid() * up) @ self.down + self.down_bias[:, None]).sum(0)


def own_pairs(experts, group):
    for e in range(2):
        up = Block(experts, "gate_up", (2, 3, 8), 24 * e + 1, (3, 4), (8, 2))
        bias = Block(experts, "gate_up_bias", (2, 8), 8 * e + 1, (1, 4), (8, 2))
        down = Block(experts, "down", (2, 4, 3), 12 * e, (3, 4), (1, 3))
        yield SymmetricPair(f"expert {e}", "glu", group, (up, bias), (down,))


@pytest.mark.parametrize("positive", [False, True])
def test_lengths_at_a_users_own_pairs(positive):
    """Lengths of what no pair moves stay; positive pairs are not divided out: each column's length goes with it."""
    experts = Experts().double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = list(own_pairs(experts, GL(4, diagonal=True, positive=positive)))
    before, weights, out = vector_lengths(experts, None, pairs), copy.deepcopy(experts), experts(x)
    apply_random_symmetry_(experts, 30.0, pairs=pairs)
    torch.testing.assert_close(experts(x), out)
    after = vector_lengths(experts, None, pairs)
    for p, old in zip(experts.parameters(), weights.parameters(), strict=True):
        stays = (p == old) | (positive and torch.ones_like(p, dtype=torch.bool))
        torch.testing.assert_close((after[p] * old)[stays], (before[p] * p)[stays], rtol=1e-12, atol=1e-14)
    assert any(bool((p != old).any()) for p, old in zip(experts.parameters(), weights.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:no adapter describes")
@pytest.mark.parametrize("name", UNWIRED)
def test_moves_of_heads_change_nothing_without_a_wiring(name):
    """A bias of an output projection had the length of its row, which depends on the heads' representative."""
    model, batch = architectures.transformers_model(name, "eager")
    assert not canonical_form(model).wired
    twin = moved(model)
    for measure in ("complete-inv", "complete-mix"):
        assert value(twin, batch, measure) == pytest.approx(value(model, batch, measure), rel=1e-8)
    if name not in ("t5", "gptj", "gemma2", "gemma3"):  # no such biases
        one, two = (value(m, batch, only=OUTPUTS) for m in (model, twin))
        assert two == pytest.approx(one, rel=1e-8)


@pytest.mark.parametrize(("family", "name"), NETWORKS)
def test_no_move_of_a_wired_network_changes_the_measure(family, name):
    model, batch = headed(family, name)
    twin, softmax = copy.deepcopy(model), "labels" in batch
    assert apply_random_moves_(twin, classes=softmax)
    apply_random_symmetry_(twin, 30.0, pairs=[*find_symmetric_pairs(twin), *neuron_pairs(wiring_of(twin))])
    for measure in ("complete-inv", "complete-mix"):
        one, two = (value(m, batch, measure) for m in (model, twin))
        assert two == pytest.approx(one, rel=1e-8)


@pytest.mark.filterwarnings("ignore:no adapter describes")
def test_moves_of_states_and_convolutions_change_nothing(monkeypatch):
    """A depthwise convolution's bias had the length of a kernel that is scaled against the projection before it."""
    from transformers import MambaConfig, MambaModel

    mixer = "transformers.models.mamba.modeling_mamba.MambaMixer"
    monkeypatch.setitem(registry._HANDLERS, mixer, lambda m, name: [first for first, *_ in mixers.proposals(m, name)])
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 20, "time_step_rank": 3}
    model = networks.shake(MambaModel(MambaConfig(**sizes)).double(), 0.2)
    assert {p.kind for p in find_symmetric_pairs(model)} == {"conv", "state"}
    twin = moved(model)
    for options in ({}, {"measure": "complete-mix"}, {"only": r"conv1d\.bias"}):
        one, two = (value(m, architectures.IDS, **options) for m in (model, twin))
        assert two == pytest.approx(one, rel=1e-8)
