import copy
import functools
from dataclasses import replace

import geoopt
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import sharpness
from quotient_manifolds.passes import Wide
from quotient_manifolds.symmetries import (
    GL,
    Slot,
    SymmetricPair,
    Symmetries,
    find,
    move_,
    pair,
    slot,
)
from quotient_manifolds.symmetries.attention import HANDLERS
from quotient_manifolds.symmetries.discovery import ALL
from quotient_manifolds.weights import weights_of
from reproduction.baselines import distance
from sharpness import MEASURES, evaluate, get_measure
from sharpness.lengths import vector_lengths
from sharpness.patches import trainable
from tests.support import architectures, networks
from tests.support.extent import EXHAUSTIVE, checkered, share
from tests.support.whole_networks import BACKBONES, CAUSAL, SMALL, build, headed, heads, inputs, loss


def worst(model, family, measure, **options):
    options = {"steps": 2, "progress": False, **options}
    return float(sharpness.evaluate(model, list(inputs(family)), loss, measure=measure, **options))


@functools.cache
def unmoved(family, measure):
    return worst(build(family), family, measure)


def moved(family, kinds=None):
    model = build(family)
    found = find(model, scope=ALL, classes=True)
    if kinds == ["heads"]:
        kinds = {p.kind for p in found.pairs}
    move_(model, found, kinds=kinds)
    return model


@functools.cache
def still_and_moved(family):
    return build(family), moved(family)


@pytest.mark.parametrize(
    ("family", "measure", "geodesic"),
    checkered(
        ("vit", "bert", "llama", "gpt2-untied", "llama-tied", "distilbert"),
        ("complete-inv", "complete-mix"),
        ("second-order", "exact"),
    ),
)
def test_the_complete_measures_see_no_symmetry(family, measure, geodesic):
    """Pre-norm and post-norm LayerNorm, RMSNorm with SwiGLU and grouped queries, tied and untied, ReLU."""
    measure, (model, twin) = get_measure(measure, geodesic=geodesic), still_and_moved(family)
    before = worst(model, family, measure)
    assert before > 1e-3
    assert worst(twin, family, measure) == pytest.approx(before, rel=1e-8)


@pytest.mark.parametrize("kind", ["heads", "gain", "shift", "reader", "writer", "rotation"])
def test_the_other_measures_see_some(kind):
    """Of every kind of move at least one measure of the literature takes notice, by more than 5 %."""
    changes = []
    for name in ("geodesic-inv", "adaptive", "euclidean"):
        changes.append(abs(worst(moved("vit", [kind]), "vit", name) / unmoved("vit", name) - 1))
    assert max(changes) > 0.05
    assert worst(moved("vit", [kind]), "vit", "complete-inv") == pytest.approx(unmoved("vit", "complete-inv"))


def test_single_precision():
    def single(model):
        batches = [{key: value.float() for key, value in batch.items()} for batch in inputs("vit")]
        options = {"measure": "complete-inv", "steps": 4, "progress": False}
        return float(sharpness.evaluate(model.float(), batches, loss, **options))

    values = [single(model) for model in (build("vit"), moved("vit"))]
    assert values[1] == pytest.approx(values[0], rel=1e-3)


def test_local_measures_at_the_canonical_form():
    models, options = (build("vit"), moved("vit")), {"measure": "complete-inv"}
    norms = [float(sharpness.gradient_norm(m, list(inputs("vit")), loss, **options)) for m in models]
    assert norms[1] == pytest.approx(norms[0], rel=1e-8)
    largest = [float(sharpness.hessian(m, list(inputs("vit")), loss, num_matvecs=3, **options)) for m in models]
    assert largest[1] == pytest.approx(largest[0], rel=1e-4)


def test_the_model_stays_and_directions_lead_back():
    model = moved("vit")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    batches = list(inputs("vit"))
    result = sharpness.evaluate(model, batches, loss, measure="complete-inv", steps=3, progress=False)
    with torch.no_grad(), sharpness.perturbed(model, result.direction(0)):
        assert float(loss(model, batches[0])) == pytest.approx(result.batches[0].worst_loss, rel=1e-10)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())

    def failing(model, batch):
        if failing.calls > 3:
            raise KeyboardInterrupt
        failing.calls += 1
        return loss(model, batch)

    failing.calls = 0
    with pytest.raises(KeyboardInterrupt):
        sharpness.evaluate(model, batches, failing, measure="complete-inv", progress=False)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_wiring_that_is_not_the_models_is_refused():
    model = build("vit")
    networks.vit_layers(model)[0].layernorm_before.register_forward_hook(lambda m, i, out: out.tanh())
    with pytest.raises(ValueError, match="canonical form of ViTForImageClassification"):
        worst(model, "vit", "complete-inv")


def test_pairs_that_are_given_are_those_of_the_canonical_form():
    model = build("vit")
    own = worst(model, "vit", "complete-inv")
    assert worst(model, "vit", "complete-inv", symmetries=find(model)) == own
    assert worst(model, "vit", "complete-inv", symmetries=find(model, scope=ALL, classes=True)) == own
    assert worst(model, "vit", "complete-inv", symmetries=Symmetries()) != own


@pytest.mark.parametrize("wrong", ["qk", (), [None]])
def test_symmetries_are_the_value_that_was_found(wrong):
    model = build("vit")
    for make in (
        lambda: sharpness.WeightSpace(model, MEASURES["geodesic-inv"], wrong),
        lambda: sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1, symmetries=wrong),
    ):
        with pytest.raises(TypeError, match=r"symmetries must be as find\(model\) returns them"):
            make()


def test_sam_is_refused():
    model = build("vit")
    with pytest.raises(ValueError, match="one by one"):
        sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1, measure="complete-inv")


def test_only_trainable_parameters():
    model = build("vit")
    for name in ("adaptive", "geodesic-inv"):
        with networks.training(model, r"layers?\.1\."):
            some = worst(model, "vit", name)
        assert some < worst(model, "vit", name)
    with networks.training(model, "q_proj|query"):  # whose pairs have keys too
        assert worst(model, "vit", "geodesic-inv") == pytest.approx(worst(model, "vit", "adaptive", rho=0.1))


def test_directions_of_some_parameters_lead_back():
    model, batches = build("vit"), list(inputs("vit"))
    for only in ("mlp|classifier", "classifier", "attention"):
        options = {"measure": "complete-inv", "steps": 3, "progress": False}
        with networks.training(model, only):
            result = sharpness.evaluate(model, batches, loss, **options)
        with torch.no_grad(), sharpness.perturbed(model, result.direction(0)):
            assert float(loss(model, batches[0])) == pytest.approx(result.batches[0].worst_loss, rel=1e-10)


def test_half_precision():
    """A model in bfloat16 is measured in float32, whether it casts its inputs itself or not."""
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch = images, torch.arange(6) % 3
    for name in ("timm", "vit"):
        model = build(name).bfloat16()
        for measure in ("complete-inv", "adaptive"):
            options = {"measure": measure, "steps": 2, "progress": False}
            found = [
                float(sharpness.evaluate(m, [(b, batch[1])], scored, **options))
                for m, b in ((model, images), (copy.deepcopy(model).float(), images.float()))
            ]
            assert found[0] == pytest.approx(found[1], rel=1e-4)


def scored(model, batch):
    scores = model(batch[0])
    return nn.functional.cross_entropy(getattr(scores, "logits", scores), batch[1])


def test_a_replaced_head_is_measured_with_its_heads():
    model = build("vit")
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(8, 3)).double()
    with pytest.warns(UserWarning, match="divides out its heads and key biases alone"):
        assert worst(model.eval(), "vit", "complete-inv") > 0
    assert worst(model.eval(), "vit", "adaptive") > 0


def test_the_metric_of_vectors_on_a_linear_model():
    """One neuron: the loss rises by ρ ‖(w, b)‖ ‖(x, 1)‖, whatever the basis of the inputs."""
    layer = nn.Linear(3, 1).double()
    x = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    measure = replace(MEASURES["adaptive"], name="vectors", elementwise="vector")
    with torch.no_grad():
        length = torch.hypot(layer.weight.norm(), layer.bias.norm()) * torch.hypot(x.norm(), torch.ones(()))
    found = sharpness.evaluate(layer, [x], lambda m, x: m(x).sum(), measure=measure, rho=0.1, progress=False)
    assert float(found) == pytest.approx(0.1 * float(length))


def test_a_network_of_unknown_wiring_is_not_measured_as_complete_without_a_word():
    model = build("torch-pre").layers[0]
    x = torch.randn(2, 3, 8)
    with pytest.warns(
        UserWarning,
        match="TransformerEncoderLayer: no adapter describes how this network is wired, so complete-inv divides",
    ):
        sharpness.evaluate(model, [x], lambda m, b: m(b).square().mean(), measure="complete-inv", steps=1, rho=0.1)


def test_bad_models_are_named():
    model, batch = networks.vit(), networks.images()
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        sharpness.evaluate(frozen, [batch], rho=0.1)
    with pytest.raises(ValueError, match="parameters lie on meta; load the whole model on one device"):
        sharpness.evaluate(copy.deepcopy(model).to("meta"), [batch], rho=0.1)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter 'classifier\.bias' has NaN"):
        sharpness.evaluate(model, [batch], rho=0.1)


def test_weights_that_cannot_be_differentiated_are_named():
    with torch.inference_mode():
        model = torch.nn.Linear(4, 3)
    batch = (torch.randn(5, 4), torch.arange(5) % 3)
    with pytest.raises(
        ValueError, match=r"'weight' was made under torch.inference_mode, where .*; make the model outside"
    ):
        sharpness.evaluate(model, [batch], measure="adaptive")
    model = torch.nn.Linear(4, 3)
    model.weight = torch.nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"'weight' has dtype torch.float8_e4m3fn; only real"):
        sharpness.evaluate(model, [batch], measure="adaptive")


def test_shards_that_cannot_be_measured_are_refused():
    """ZeRO-3's and FSDP1's parameters have marks; FSDP2's are measured, see test_sharded."""
    model = networks.vit()
    model.classifier.weight.ds_id = 1
    with pytest.raises(ValueError, match=r"'classifier\.weight' is a shard of one \(FSDP, DTensor or ZeRO-3\)"):
        sharpness.evaluate(model, [networks.images()], rho=0.1)


def test_names_are_without_the_prefixes_of_wrappers_alone():
    """A layer called module had lost its name in pairs, but not in parameters."""
    net = torch.nn.ModuleDict({"module": networks.vit(), "head": torch.nn.Linear(2, 2)})
    names = set(weights_of(net))
    assert all(name.startswith(("module.", "head.")) for name in names)
    assert all(p.module.startswith("module.vit") for p in find(net).pairs)
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": networks.vit()})})
    assert set(weights_of(wrapped)) == {name for name, _ in networks.vit().named_parameters()}
    assert all(p.module.startswith("vit") for p in find(wrapped).pairs)


def tied(how):
    """A small language model whose tables are one tensor, tied as people tie them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11, bias=False))
    if how == "one Parameter":
        net[3].weight = net[0].weight
    elif how == ".data":
        net[3].weight.data = net[0].weight.data
    elif how == "nn.Parameter(w)":
        net[3].weight = nn.Parameter(net[0].weight)
    elif how == "half frozen":
        net[3].weight = nn.Parameter(net[0].weight, requires_grad=False)
    elif how == "expanded":
        net[3].weight = nn.Parameter(torch.randn(1, 6).expand(11, 6))
    elif how == "cache":
        net.register_buffer("table", net[0].weight.data.mT)
    elif how == "overlapping":
        both = torch.randn(17, 6)
        net[0].weight, net[3].weight = nn.Parameter(both[:11]), nn.Parameter(both[6:])
    return net


@pytest.mark.parametrize("how", [".data", "nn.Parameter(w)", "half frozen", "expanded", "cache", "overlapping"])
def test_parameters_that_share_memory_are_refused(how):
    """Copies of two Parameters move apart, where the network has one number: a value of another network."""
    batch = torch.arange(11), 3 * torch.arange(11) % 11
    model = tied(how)
    for measured in (
        lambda: sharpness.evaluate(model, [batch], measure="euclidean", rho=0.3),
        lambda: sharpness.gradient_norm(model, [batch], measure="adaptive"),
        lambda: sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.3, measure="euclidean"),
        lambda: distance(model, {}),
    ):
        with pytest.raises(ValueError, match=r"share memory but are two tensors|is expanded"):
            measured()


def test_tied_parameters_and_disjoint_views_are_measured():
    assert len(trainable(tied("one Parameter"))) == 3
    columns, views = torch.randn(6, 12), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    views[0].weight, views[1].weight = nn.Parameter(columns[:, ::2]), nn.Parameter(columns[:, 1::2])
    assert len(trainable(views)) == 4
    assert len(trainable(nn.LSTM(4, 4, 2))) == 8


def test_points_of_a_manifold_are_not_measured_as_flat_weights():
    net = nn.Linear(3, 4)
    net.weight = geoopt.ManifoldParameter(torch.eye(4, 3), manifold=geoopt.Stiefel())
    batch = torch.randn(5, 3), torch.arange(5) % 4
    with pytest.raises(ValueError, match=r"'weight' is a point of the manifold Stiefel.*freeze"):
        sharpness.evaluate(net, [batch], measure="euclidean", rho=0.1)
    with pytest.raises(ValueError, match=r"'weight' is a point of the manifold Stiefel"):
        sharpness.GeodesicSAM(net, torch.optim.SGD(net.parameters(), 0.1), rho=0.1, measure="euclidean")
    with networks.training(net, "bias"):
        assert float(sharpness.evaluate(net, [batch], measure="euclidean", rho=0.1)) > 0


NETWORKS = [(f, n) for f, (*_, usual) in BACKBONES.items() for n in (heads(f) if EXHAUSTIVE else [usual])]
UNWIRED = [
    "bert-decoder", "mpnet", "deberta_v2", "t5", "bart", "whisper", "gpt2-cross", "bloom", "gptj", "gemma2", "gemma3",
    "vit", "deit", "swin", "dinov2", "beit",
]  # fmt: skip
#: What every run of the tests asks of each network. The metric of the pairs, by which the other measure differs, is
#: asked of six families above.
WHOLE = ("complete-inv", "complete-mix") if EXHAUSTIVE else ("complete-inv",)
#: The biases of the heads' output projections.


def first_output(model, batch):
    with Wide():  # layers that cast to float32 round differently after a move
        found = model(**batch)
    if "loss" in found:
        return found.loss
    out = next(t for t in found.values() if isinstance(t, torch.Tensor) and t.dim() > 1)
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sin().mean()


def value(model, batch, measure="complete-inv", **options):
    return float(evaluate(model, [batch], first_output, measure=measure, rho=0.1, steps=2, progress=False, **options))


def moved_copy(model):
    twin = copy.deepcopy(model)
    assert move_(twin, condition=30.0, seed=3)
    return twin


def by_parameter(model, symmetries=None):
    """The lengths of vectors, pairs of heads left out, by parameter."""
    symmetries = Symmetries() if symmetries is None else Symmetries(wiring=symmetries.wiring)
    weights = weights_of(model)
    return {weights[name]: length for name, length in vector_lengths(model, symmetries).items()}


def test_rows_columns_and_tables():
    """Against sums that are written out."""
    model = build("vit")
    lengths = by_parameter(model, find(model, scope=("neurons",)))
    fc1, fc2 = networks.feed_forward(networks.vit_layers(model)[0])
    patches = model.vit.embeddings.patch_embeddings.projection
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
    lengths = by_parameter(odd)
    assert all(lengths[p].expand_as(p).shape == p.shape for p in odd.parameters())


def test_other_layouts():
    conv1d, linear = Conv1D(2, 3), nn.Linear(3, 2, bias=False)
    lengths = by_parameter(nn.Sequential(conv1d, linear))
    expected = torch.hypot(conv1d.weight[:, 1].norm(), conv1d.bias[1])
    torch.testing.assert_close(lengths[conv1d.weight].expand_as(conv1d.weight)[0, 1], expected)
    torch.testing.assert_close(lengths[linear.weight].expand_as(linear.weight)[1, 2], linear.weight[1].norm())


def test_a_bias_beside_weights_of_pairs_is_a_vector_of_its_own():
    """Entry by entry: of a row, what no pair moves counts; a bias goes with its row if both or neither are in pairs."""
    fused, out = networks.shake(nn.Linear(3, 6)), networks.shake(nn.Linear(4, 3))
    model = nn.Sequential(fused, out)
    G = (slot(model, "0.weight", slice(2, 4), transpose=True), slot(model, "0.bias", slice(2, 4)))
    pair = SymmetricPair("own", "vo", GL(2), G, (slot(model, "1.weight", columns=slice(0, 2)),))
    weights = weights_of(model)
    lengths = {weights[n]: length for n, length in vector_lengths(model, Symmetries((pair,))).items()}
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


def own_pairs(group):
    for e in range(2):
        up = Slot("gate_up", (2, 3, 8), 24 * e + 1, (3, 4), (8, 2))
        bias = Slot("gate_up_bias", (2, 8), 8 * e + 1, (1, 4), (8, 2))
        down = Slot("down", (2, 4, 3), 12 * e, (3, 4), (1, 3))
        yield SymmetricPair(f"expert {e}", "glu", group, (up, bias), (down,))


@pytest.mark.parametrize("positive", [False, True])
def test_lengths_at_a_users_own_pairs(positive):
    """Lengths of what no pair moves stay; positive pairs are not divided out: each column's length goes with it."""
    experts = Experts().double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = tuple(own_pairs(GL(4, diagonal=True, positive=positive)))
    before, weights, out = vector_lengths(experts, Symmetries(pairs)), copy.deepcopy(experts), experts(x)
    move_(experts, Symmetries(pairs), condition=30.0)
    torch.testing.assert_close(experts(x), out)
    after = vector_lengths(experts, Symmetries(pairs))
    for (name, p), old in zip(experts.named_parameters(), weights.parameters(), strict=True):
        stays = (p == old) | (positive and torch.ones_like(p, dtype=torch.bool))
        torch.testing.assert_close((after[name] * old)[stays], (before[name] * p)[stays], rtol=1e-12, atol=1e-14)
    assert any(bool((p != old).any()) for p, old in zip(experts.parameters(), weights.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*is wired, so|.*its adapter does not fit")
@pytest.mark.parametrize("name", share(UNWIRED, 2))
def test_moves_of_heads_change_nothing_without_a_wiring(name):
    """A bias of an output projection had the length of its row, which depends on the heads' representative."""
    model, batch = architectures.transformers_model(name, "eager")
    assert not find(model, scope=ALL).wired
    twin = moved_copy(model)
    for measure in WHOLE:
        assert value(twin, batch, measure) == pytest.approx(value(model, batch, measure), rel=1e-8)


@pytest.mark.filterwarnings("ignore:.*is wired, so|.*its adapter does not fit")
@pytest.mark.parametrize("name", ["mpnet", "bart"])
def test_moves_of_frozen_heads_change_nothing_either(name):
    """A bias of an output projection had the length of its frozen row."""
    model, batch = architectures.transformers_model(name, "eager")
    weights = weights_of(model)
    frozen = {weights[name] for pair in find(model).pairs for name in pair.names}
    twin = moved_copy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.requires_grad_(p not in frozen)
        q.requires_grad_(p not in frozen)
    assert value(twin, batch) == pytest.approx(value(model, batch), rel=1e-8)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT
def test_moves_of_adapters_beside_thin_heads_change_nothing():
    """Heads that are wider than the network are no points, and leave the adapters that are rows of them."""
    config = {**SMALL, **CAUSAL, "head_dim": 16, "attn_implementation": "eager"}
    network = architectures.adapted(LlamaForCausalLM(LlamaConfig(**config)), ["v_proj"])
    network.requires_grad_()
    words = torch.arange(10).view(2, 5) % 7
    batch = {"input_ids": words, "labels": words}
    found, values = find(network), []
    for _ in range(2):
        one = evaluate(network, [batch], rho=0.3, steps=2, progress=False)
        other = evaluate(network, [batch], rho=0.3, steps=2, progress=False, symmetries=found.of_kind(["qk", "vo"]))
        values.append((float(one[0.3]), float(other[0.3])))
        move_(network, found, kinds=["lora"], condition=1000.0)
    before, after = values
    assert after[0] == pytest.approx(before[0], rel=1e-4)
    assert after[1] != pytest.approx(before[1], rel=0.05)


@pytest.mark.parametrize("what", ["outputs", "embeddings"])
def test_symmetries_that_frozen_weights_break_are_remarked(what):
    """What moves frozen and trained weights together is not divided out, and these heads can be moved by no other."""
    model, (batch,) = build("vit"), inputs("vit")
    twin = moved("vit", ["heads"])
    for m in (model, twin):
        outputs = [networks.projections(layer.attention)[3].weight for layer in networks.vit_layers(m)]
        frozen = {*outputs} if what == "outputs" else {*m.vit.embeddings.parameters()}
        for p in m.parameters():
            p.requires_grad_(p not in frozen)
    one, two = (
        evaluate(m, [batch], loss, measure="complete-inv", rho=0.1, steps=2, progress=False) for m in (model, twin)
    )
    said = [r for r in one.remarks if "train these as well" in r]
    assert (float(two) == pytest.approx(float(one), rel=1e-8)) == (not said) == (what == "embeddings")
    names = ", ".join(name for name, p in twin.named_parameters() if p in {*outputs})
    assert all(
        "complete-inv from dividing out symmetries that move trained ones too" in r and r.endswith(names) for r in said
    )


@pytest.mark.parametrize(("family", "name"), share(NETWORKS, 2))
def test_no_move_of_a_wired_network_changes_the_measure(family, name):
    """test_architectures moves every one of them."""
    model, batch = headed(family, name)
    twin, softmax = copy.deepcopy(model), "labels" in batch
    assert move_(twin, find(twin, scope=ALL, classes=softmax), condition=30.0)
    for measure in WHOLE:
        one, two = (value(m, batch, measure) for m in (model, twin))
        assert two == pytest.approx(one, rel=1e-8)


def scales_of_mixer(m):
    """One number a channel, its row of the projection against its kernel; one a state, rows of the input and output."""
    channels, rank, states = m.conv1d.out_channels, m.time_step_rank, m.ssm_state_size
    scaled = slot(m, "in_proj.weight", slice(0, channels), transpose=True)
    B, C = (slot(m, "x_proj.weight", slice(i, i + states), transpose=True) for i in (rank, rank + states))
    kernels = slot(m, "conv1d.weight", transpose=True)
    return [
        pair([scaled], [kernels], GL(channels, diagonal=True), kind="conv"),
        pair([B], [C], GL(states, diagonal=True), kind="state"),
    ]


@pytest.mark.filterwarnings("ignore:.*is wired, so|.*its adapter does not fit")
def test_moves_of_states_and_convolutions_change_nothing(monkeypatch):
    """A depthwise convolution's bias had the length of a kernel that is scaled against the projection before it."""
    from transformers import MambaConfig, MambaModel

    mixer = "transformers.models.mamba.modeling_mamba.MambaMixer"
    monkeypatch.setitem(HANDLERS, mixer, scales_of_mixer)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 20, "time_step_rank": 3}
    model = networks.shake(MambaModel(MambaConfig(**sizes)).double(), 0.2)
    assert {p.kind for p in find(model).pairs} == {"conv", "state"}
    twin = moved_copy(model)
    for options in ({}, {"measure": "complete-mix"}):
        one, two = (value(m, architectures.IDS, **options) for m in (model, twin))
        assert two == pytest.approx(one, rel=1e-8)


@pytest.mark.filterwarnings("ignore:.*is wired, so|.*its adapter does not fit")
def test_frozen_integers_are_as_the_numbers_that_they_stand_for():
    """Packed weights of a quantised base do not move, so no vector of theirs has a length."""

    class Cast(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.to(x))

    values, start = [], torch.nn.Linear(4, 3)
    whole, x = torch.randint(-3, 4, (4, 4)), torch.randn(6, 4)
    for dtype in (torch.float64, torch.int8):
        layer = Cast(4, 4, bias=False)
        layer.weight = torch.nn.Parameter(whole.to(dtype), requires_grad=False)
        model, batch = torch.nn.Sequential(layer, torch.nn.Tanh(), start), (x, torch.arange(6) % 3)
        result = sharpness.evaluate(model, [batch], measure="complete-inv", rho=0.1, steps=3, progress=False)
        values.append(float(result))
    assert values[0] == values[1] > 0
