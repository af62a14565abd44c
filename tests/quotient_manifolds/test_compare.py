import copy
import math
from collections import Counter

import peft
import pytest
import torch
from torch import nn

from quotient_manifolds import GLQuotientMix
from quotient_manifolds.compare import _path
from quotient_manifolds.symmetries import ALL, find, model_distance, move_
from quotient_manifolds.weights import weights_of
from tests.support import networks
from tests.support.whole_networks import build, random_element


def encoder(heads=2):
    return torch.nn.TransformerEncoderLayer(12, heads, 16, batch_first=True)


def test_distances_are_those_of_the_manifold_and_do_not_see_the_symmetry():
    one, other = encoder(), encoder()
    found = model_distance(one, other)
    both = list(zip(find(one).pairs, find(other).pairs, strict=True))
    assert [(d.name, d.head, d.other_head) for d in found.pairs] == [(p.name, p.head, p.head) for p, _ in both]
    for kind in ("qk", "vo"):
        points = (
            torch.stack([p.gather(weights_of(model)) for p in pairs if p.kind == kind])
            for model, pairs in zip((one, other), zip(*both, strict=True), strict=True)
        )
        expected = next(p for p, _ in both if p.kind == kind).manifold("inv").dist(*points).tolist()
        assert [d.distance for d in found.pairs if d.kind == kind] == pytest.approx(expected, rel=1e-7)
    moved = copy.deepcopy(other)
    move_(moved)
    assert model_distance(one, moved).total == pytest.approx(found.total, rel=1e-6)
    plain = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (other, moved)]
    assert (plain[0] - plain[1]).norm() > 0.1


def test_all_symmetries_are_divided_out():
    torch.manual_seed(0)
    one = build("llama")
    copied = random_element(one, seed=1).of(one)
    move_(copied, find(copied, scope=ALL))
    assert model_distance(one, copied).total > 1
    assert model_distance(one, copied, modulo="all").total < 1e-8
    other = build("llama", seed=2)
    found = model_distance(one, other, modulo="all")
    assert found.total == pytest.approx(model_distance(copied, other, modulo="all").total, rel=0.2)  # minima are local
    kinds = Counter(p.kind for p in found.pairs)
    assert kinds == {"qk": 2, "vo": 2, "glu": 2, "vectors": 4}  # words, two gates, classifier
    assert not found.skipped


def test_vectors_by_hand():
    """In ‖dv‖²/‖v‖² a plane without 0 is a cylinder: its coordinates are the logarithm of the length, and the angle."""
    a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([[0.0, 3.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert _path(a, b) == pytest.approx(math.hypot(math.log(3), math.pi / 2), rel=1e-14)
    assert math.isnan(_path(a, b.flip(0)))


def test_a_lone_zero_is_named():
    one, other = (build("vit", seed) for seed in (1, 2))
    with torch.no_grad():
        layer = networks.feed_forward(networks.vit_layers(other)[0])[1]
        layer.weight[:, 0] = 0
    found = model_distance(one, other, modulo="all")
    name = next(name for name, p in other.named_parameters() if p is layer.weight)
    assert list(found.skipped) == [name]
    assert math.isnan(next(p.distance for p in found.pairs if p.name == name))
    assert not math.isnan(found.total)


def test_models_that_cannot_be_compared():
    with pytest.raises(ValueError, match="different pairs"):
        model_distance(encoder(2), encoder(3))
    with pytest.raises(ValueError, match='"inv" or "mix"'):
        model_distance(encoder(), encoder(), metric="flat")
    with pytest.raises(ValueError, match=r"no wiring is known of a TransformerEncoderLayer"):
        model_distance(encoder(), encoder(), modulo="all")


def test_frozen_models_have_the_same_distance():
    one = encoder()
    other = copy.deepcopy(one)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * torch.randn_like(p))
    expected = model_distance(one, other)
    for p in (*one.parameters(), *other.self_attn.parameters()):
        p.requires_grad_(False)
    found = model_distance(one, other)  # equal to rounding: copies may lie in memory in another way
    assert found.total == pytest.approx(expected.total, rel=1e-9)
    for a, b in zip(found.pairs, expected.pairs, strict=True):
        assert (a.name, a.other_head, a.distance) == (b.name, b.other_head, pytest.approx(b.distance, rel=1e-9))
    assert expected.total > 1


def test_nothing_to_compare_is_no_distance_of_zero():
    with pytest.raises(ValueError, match="no pairs that can be compared: attention of no known kind"):
        model_distance(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"beginning with 'layers\.1\.self_attn qk head 0'"):
        model_distance(*(torch.nn.TransformerEncoder(encoder(), n, enable_nested_tensor=False) for n in (2, 1)))


def test_a_pair_without_full_rank_is_one_nan():
    one, other = encoder(), encoder()
    with torch.no_grad():
        other.self_attn.out_proj.weight[:, :6] = 0
    result = model_distance(one, other)
    found = {(p.kind, p.head): p.distance for p in result.pairs}
    assert [place for place, d in found.items() if math.isnan(d)] == [("vo", 0)]
    assert result.total == pytest.approx(sum(d**2 for d in found.values() if not math.isnan(d)) ** 0.5, rel=1e-14)
    assert [name for name, why in result.skipped.items() if "full column rank" in why] == ["self_attn vo head 0"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
class TestAdapters:
    @staticmethod
    def model(seed, name="default", **options):
        torch.manual_seed(0)
        base = networks.bert()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["query", "value"], **options)
        return peft.get_peft_model(base, config, name)

    def test_loaded_adapters_are_frozen_and_have_names(self):
        one, other = self.model(1, init_lora_weights=False), self.model(2, "other", init_lora_weights=False)
        expected = model_distance(one, other)
        assert {p.kind for p in expected.pairs} == {"lora"}
        assert expected.total > 1
        assert "its adapters are pairs of their own" in next(iter(expected.skipped.values()))
        one.requires_grad_(False)
        other.requires_grad_(False)
        assert model_distance(one, other).pairs == expected.pairs
        merged = [m.merge_and_unload() for m in (one, other)]
        assert {p.kind for p in model_distance(*merged).pairs} == {"qk", "vo"}

    def test_the_scale_belongs_to_the_product(self):
        one, other = (self.model(1, init_lora_weights=False, lora_alpha=alpha) for alpha in (4, 16))
        layer = next(m for m in one.modules() if getattr(m, "lora_A", None))
        B, A = layer.lora_B["default"].weight.detach(), layer.lora_A["default"].weight.detach()
        manifold = GLQuotientMix(*B.shape[:1], A.shape[1])
        points = [manifold.pack_point(scale * B, A.mT.contiguous()) for scale in (2.0, 8.0)]
        found = model_distance(one, other, metric="mix").pairs[0].distance
        assert found == pytest.approx(float(manifold.dist(*points)), rel=1e-7)
        assert model_distance(one, copy.deepcopy(one)).total < 1e-6

    def test_fresh_ones_have_no_distance(self):
        found = model_distance(self.model(1), self.model(2))
        assert all(math.isnan(p.distance) for p in found.pairs)
        assert math.isnan(found.total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_in_float32(dtype):
    """torch has no singular values in half precision."""
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    two = copy.deepcopy(one)
    with torch.no_grad():
        for p in two.parameters():
            p.add_(0.1 * torch.randn_like(p))
    one, two = one.to(dtype), two.to(dtype)
    found = model_distance(one, two)
    expected = model_distance(copy.deepcopy(one).float(), copy.deepcopy(two).float())
    assert found.total == pytest.approx(expected.total, rel=1e-4)
    assert {p.dtype for p in one.parameters()} == {dtype}
