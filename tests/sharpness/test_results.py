"""Results: their table and files, and the shares of layers, heads and parts in a worst direction."""

import json
import re
from dataclasses import replace

import pytest
import torch

import sharpness
from quotient_manifolds.symmetries import ALL, GL, PairStack, Symmetries, find, move_, pair, slot
from quotient_manifolds.symmetries.exchange import digest
from quotient_manifolds.symmetries.pairs import coverage
from sharpness import LayerShare, LayerShares
from sharpness.direction import PARTS
from sharpness.measuring import parts_of, squares_of
from sharpness.results import settings
from tests.support import networks
from tests.support.whole_networks import build, inputs, loss


def test_table_json_and_directions(tmp_path):
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=[0.1, 0.2], steps=2)
    said = re.findall(
        r"^sharpness \d.* nats at ρ = (\S+) \(geodesic-inv\):\n    loss \d.* %?", str(result), re.MULTILINE
    )
    assert said == ["0.1", "0.2"]
    how = settings(result)
    assert how.startswith("worst of ViTForImageClassification: 1 batches, Measure(name='geodesic-inv'")
    assert "geodesic='second-order'" in how
    assert "Search(steps=2," in how
    result.to_json(tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert found == result.to_dict()
    assert found["sharpness"]["0.1"] == float(result[0.1])
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]
    with pytest.raises(ValueError, match="several radii"):
        result.direction(0)
    with pytest.raises(KeyError, match="no direction for batch 5"):
        result[0.1].direction(5)
    with pytest.raises(KeyError, match="was not measured"):
        result[0.7]
    without = sharpness.evaluate(model, [batch], rho=0.1, steps=2, keep_directions=False)
    with pytest.raises(KeyError, match="keep_directions"):
        without.direction(0)
    assert without.symmetries == find(model).restricted(dict(model.named_parameters()))
    assert found["symmetries"] == {"dimension": find(model).dimension, "digest": digest(without.symmetries)}
    assert digest(without.symmetries) != digest(find(model).of_kind(["qk"]))


def by_hand(model, result, metric):
    """Shares of every pair and of what is left of every parameter, from the direction's tensors alone."""
    direction = result.direction(0)
    weights, tensors = dict(model.named_parameters()), direction.tensors
    total, found = direction.norm**2, {}
    left = {name: (direction.tensors[name] / p.detach()).nan_to_num(0).square()
            for name, p in model.named_parameters()}  # fmt: skip
    for p in find(model).pairs:
        one = PairStack([p])
        found[p.name] = float(one.manifold(metric).norm(one.gather(weights).detach(), one.gather(tensors)) ** 2) / total
        for name, taken in coverage([one], weights).items():
            left[name] = left[name].masked_fill(taken, 0)
    return found, {name: float(v.sum()) / total for name, v in left.items()}


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_shares_against_the_metric_pair_by_pair(metric):
    model, batch = networks.trained_vit(), networks.images()
    result = sharpness.evaluate(model, [batch], measure=f"geodesic-{metric}", rho=0.05, progress=False)
    found = result.by_layer()
    pairs, rest = by_hand(model, result, metric)
    assert sum(s.share for s in found) == pytest.approx(1)
    kinds = {"Q–K": "qk", "V–O": "vo"}
    heads = {f"{s.layer}.attention {kinds[s.part]} head {s.head}": s.share for s in found if s.head is not None}
    assert heads == pytest.approx(pairs, rel=1e-6)
    assert len({round(v, 6) for v in heads.values()}) == len(heads)  # an exchange of heads would be seen
    layers = [name for name, m in model.named_modules() if m in set(networks.vit_layers(model))]
    for layer in layers:
        mine = sum(v for name, v in rest.items() if name.startswith(f"{layer}."))
        weights = [s for s in found if s.layer == layer and s.head is None]
        assert {s.part for s in weights} == {"MLP", "norms and biases"}
        assert sum(s.share for s in weights) == pytest.approx(mine, rel=1e-6)
    order = list(dict.fromkeys(s.layer for s in found))
    assert order.index(layers[0]) < order.index(layers[1]) < order.index("classifier")


def test_a_measure_without_pairs_has_layers_only():
    model, batch = networks.bert(), networks.text()
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, progress=False)
    found = result.by_layer()
    assert {s.head for s in found} == {None}
    assert {"bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"} <= {s.layer for s in found}
    assert sum(s.share for s in found) == pytest.approx(1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_have_layers():
    peft = pytest.importorskip("peft")
    base = networks.bert()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    result = sharpness.evaluate(model, [networks.text()], rho=0.01, progress=False)
    lora = [s for s in result.by_layer() if s.part == "LoRA"]
    assert [s.layer.rpartition("encoder.")[2] for s in lora] == ["layer.0", "layer.1"]


def test_several_batches_and_radii_and_the_table():
    model = networks.vit()
    batches = [networks.images(seed=s) for s in (0, 1)]
    result = sharpness.evaluate(model, batches, rho=[0.01, 0.05], progress=False)
    with pytest.raises(ValueError, match="several radii"):
        result.by_layer()
    found = result[0.05].by_layer()
    assert sum(s.share for s in found) == pytest.approx(1)
    single = sharpness.evaluate(model, batches[:1], rho=0.05, progress=False).by_layer()
    assert [s.share for s in found] != pytest.approx([s.share for s in single], rel=1e-3)
    text = str(found)
    assert text.splitlines()[0].split()[:4] == ["layer", "Q–K", "V–O", "MLP"]
    assert len(text.splitlines()) == 1 + len({s.layer for s in found})
    without = sharpness.evaluate(model, batches, rho=0.01, keep_directions=False, progress=False)
    with pytest.raises(KeyError, match="keep_directions=True"):
        without.by_layer()


def test_names_that_collide_make_no_difference():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4)))
    pairs = (
        pair([slot(model, f"{i}.weight", transpose=True)], [slot(model, f"{i + 1}.weight")], GL(4), name=name)
        for i, name in ((0, "pair"), (2, "3.weight"))
    )
    batch = torch.randn(8, 4), torch.arange(8) % 4
    result = sharpness.evaluate(model, [batch], rho=0.1, symmetries=Symmetries(tuple(pairs)), progress=False)
    assert sum(s.share for s in result.by_layer()) == pytest.approx(1)
    assert sum(s.share for s in result.by_layer() if s.part == "other pairs") == pytest.approx(1)


def test_a_direction_without_length():
    model = torch.nn.Linear(4, 3)
    batch = torch.randn(6, 4), torch.arange(6) % 3
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, progress=False)
    direction, (found,) = result.direction(0), result.batches
    still = replace(direction, norm=0.0, squares=dict.fromkeys(direction.squares, 0.0))
    both = {(0, 0.1): direction, (1, 0.1): still}
    twice = replace(result, batches=(found, replace(found, batch=1)), _directions=both)
    assert twice.by_layer() == result.by_layer()
    with pytest.raises(ValueError, match="the loss did not rise at this radius"):
        replace(result, _directions={(0, 0.1): still}).by_layer()
    average = sharpness.average(model, [batch], measure="adaptive", rho=0.1, progress=False)
    with pytest.raises(KeyError, match="an average has none"):
        average.by_layer()


def test_wrapped_and_bare_attention():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model, batch = networks.vit(), networks.images()
    names = [s.layer for s in sharpness.evaluate(model, [batch], rho=0.05, progress=False).by_layer()]
    wrapped = sharpness.evaluate(Wrapper(model), [batch], rho=0.05, progress=False)
    assert [s.layer for s in wrapped.by_layer()] == names
    tiny = networks.shake(networks.TinyAttention(8))
    layers = [s.layer for s in sharpness.evaluate(tiny, [networks.tokens()], rho=0.05, progress=False).by_layer()]
    assert (layers[0], layers[-1]) == ("attention", "head")


def test_a_layer_called_module_keeps_its_name():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(4, 3, bias=False)
            self.weight = torch.nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return self.module(x) + x @ self.weight.T

    batch = torch.randn(6, 4), torch.arange(6) % 3
    result = sharpness.evaluate(Model(), [batch], measure="adaptive", rho=0.1, progress=False)
    assert set(result.direction(0).tensors) == {"weight", "module.weight"}


def test_the_innermost_block_counts():
    nn = torch.nn
    inner = nn.ModuleDict({"attention": nn.MultiheadAttention(2, 1), "out": nn.Linear(2, 2)})
    outer = {"attention": nn.MultiheadAttention(2, 1), "b": nn.ModuleList([nn.Linear(2, 2), inner])}
    model = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleDict({**outer, "c": nn.Linear(2, 2)})])})
    parts = parts_of(model, dict(model.named_parameters()), [])
    assert parts["a.0.b.1.out.weight"].layer == "a.0.b.1"
    assert parts["a.0.c.weight"].layer == parts["a.0.b.0.weight"].layer == "a.0"


def test_the_table_of_shares():
    found = LayerShares([LayerShare("a.0", "Q–K", 0, 0.5), LayerShare("a.0", "Q–K", 1, 0.25),
                         LayerShare("head", "head", None, 0.25)])  # fmt: skip
    assert found.by_part() == {"Q–K": 0.75, "head": 0.25}
    assert str(found).splitlines() == ["layer    Q–K   head", "a.0    75.0%       ", "head          25.0%"]


def test_every_entry_belongs_to_one_part():
    """Squares of ones count entries: by hand for a ViT of two layers."""
    model = build("vit")
    space = sharpness.WeightSpace(model, sharpness.MEASURES["adaptive"])
    found = dict.fromkeys(PARTS, 0)
    parts = parts_of(model, dict(model.named_parameters()), find(model).pairs)
    for (_, part, _), square in squares_of(space.each(torch.ones(space.dim)), parts).items():
        found[part] += square
    assert {part: square for part, square in found.items() if square} == {
        "Q–K": 2 * 2 * (64 + 8),
        "V–O": 2 * (2 * 64 + 8),
        "MLP": 2 * 2 * 96,
        "embeddings": 8 + 40 + 128,
        "norms and biases": 8 + 5 * 16 + 2 * (8 + 12 + 8),
        "head": 27,
    }


class Fused(torch.nn.Module):
    """Two heads of size 2, of a class that nobody wrote down, whose rows go [head][q, k, v]; named as timm's."""

    def __init__(self, normed):
        super().__init__()
        self.qkv, self.proj = torch.nn.Linear(4, 12), torch.nn.Linear(4, 4)
        self.normed = normed

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, 2)).permute(3, 0, 2, 1, 4)
        q, k = (torch.nn.functional.normalize(t, dim=-1) if self.normed else t for t in (q, k))
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Patches(torch.nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.patch_embed = torch.nn.Module()
        self.patch_embed.proj = torch.nn.Conv2d(1, 4, 2, 2)
        self.blocks = torch.nn.Sequential(torch.nn.ModuleDict({"attn": Fused(normed)}))
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        x = self.patch_embed.proj(x).flatten(2).mT
        return self.head((x + self.blocks[0]["attn"](x)).mean(1))


@pytest.mark.parametrize("measure", ["adaptive", "geodesic-inv"])
@pytest.mark.parametrize("normed", [False, True])
def test_parts_of_attention_that_no_handler_knows(measure, normed):
    """They are those of its weights' roles, whatever their names, under every measure; without a symmetry too."""
    model, x = networks.shake(Patches(normed)), torch.randn(6, 1, 4, 4)
    result = sharpness.evaluate(model, [(x, torch.arange(6) % 3)], measure=measure, rho=0.05, steps=3, progress=False)
    found = {(s.layer, s.part) for s in result.by_layer()}
    assert found == {
        ("patch_embed.proj", "embeddings"), ("patch_embed.proj", "norms and biases"), ("head", "head"),
        ("blocks.0", "Q–K"), ("blocks.0", "V–O"), ("blocks.0", "norms and biases"),
    }  # fmt: skip
    if measure == "adaptive":
        xi, names = result.direction(0), dict(model.named_parameters())
        square = {n: (v / names[n].detach()).nan_to_num(0).square() / xi.norm**2 for n, v in xi.tensors.items()}
        rows = square["blocks.0.attn.qkv.weight"].sum(1) + square["blocks.0.attn.qkv.bias"]
        by_part = result.by_layer().by_part()
        assert by_part["Q–K"] == pytest.approx(float(rows.view(2, 3, 2)[:, :2].sum()))
        values = rows.view(2, 3, 2)[:, 2].sum() + square["blocks.0.attn.proj.weight"].sum()
        assert by_part["V–O"] == pytest.approx(float(values))


@pytest.mark.parametrize("measure", ["complete-inv", "geodesic-mix", "adaptive", "euclidean"])
def test_shares_add_up(measure):
    model = build("bert")
    result = sharpness.evaluate(model, inputs("bert"), loss, measure=measure, steps=3, progress=False)
    shares = result.by_layer().by_part()
    assert sum(shares.values()) == pytest.approx(1)
    assert {"Q–K", "V–O", "MLP", "embeddings"} <= set(shares)


def test_shares_of_the_complete_measure_do_not_move():
    shares = []
    for move in (False, True):
        model = build("gpt2-untied")
        if move:
            move_(model, find(model, scope=ALL))
        options = {"measure": "complete-inv", "steps": 3, "progress": False}
        shares.append(sharpness.evaluate(model, inputs("gpt2-untied"), loss, **options).by_layer().by_part())
    assert shares[0] == pytest.approx(shares[1], rel=1e-6)


def test_directions_are_kept_by_default_up_to_a_size(monkeypatch):
    """The first one was kept whatever its size."""
    model, batch = networks.vit(), networks.images()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for room, kept in ((2**31, 2), (size, 1), (size - 1, 0)):
        monkeypatch.setattr("sharpness.evaluation._DIRECTIONS", room)
        options = {"measure": "euclidean", "rho": [0.1, 0.2], "steps": 2, "progress": False}
        assert len(sharpness.evaluate(model, [batch], **options)._directions) == kept


def test_a_trace_from_one_random_vector_has_no_error():
    """It read ± 0."""
    found = sharpness.hessian(torch.nn.Linear(2, 2), [(torch.eye(2), torch.arange(2))], num_matvecs=3)
    assert found.std_error is None
    assert "±" not in str(found)


def test_a_number_has_as_many_digits_as_its_error():
    model = torch.nn.Linear(4, 3)
    batch = torch.randn(6, 4), torch.arange(6) % 3
    result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1, progress=False)
    (found,) = result.batches
    for values, words in (
        ((0.512345,), "sharpness 0.512 nats"),
        ((0.4, 0.6), "sharpness 0.50 ± 0.10 nats"),
        ((0.5123, 0.5125), "sharpness 0.51240 ± 0.00010 nats"),
        ((100.0, 190.0), "sharpness 145 ± 45 nats"),
        ((0.5, 0.5), "sharpness 0.5 nats"),
    ):
        batches = tuple(replace(found, batch=i, value=value) for i, value in enumerate(values))
        assert str(replace(result, batches=batches)).startswith(words + " at ρ = 0.1 (adaptive)")
    regression = replace(found, base_error=None, worst_error=None)
    assert "nats" not in str(replace(result, batches=(regression,)))
