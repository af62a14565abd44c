import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds.symmetries import GL, Symmetries, find, move_, pair, slot, stacks
from sharpness.measures import MEASURES
from sharpness.measuring import direction_of
from tests.support import networks
from tests.support.architectures import transformers_model
from tests.support.snapshots import GEODESIC


def test_frozen_pairs_and_partly_covered_parameters_count_elementwise():
    model, batch = networks.shake(networks.Encoder()), networks.tokens()
    free = float(sharpness.evaluate(model, [batch], rho=0.2))
    attention = model.encoder.layers[0].self_attn
    attention.out_proj.weight.requires_grad_(False)  # the V–O pairs fall away; in_proj_weight is covered in part
    trained = find(model).restricted(name for name, p in model.named_parameters() if p.requires_grad)
    assert [p.kind for p in trained.pairs] == ["qk"] * 2
    assert {r.kind for r in trained.refused} == {"vo"}
    twin = copy.deepcopy(model)
    move_(twin, trained, condition=100.0)
    one, two = (float(sharpness.evaluate(m, [batch], rho=0.2, restarts=1)) for m in (model, twin))
    assert abs(one - two) < 1e-8 * one
    assert one < free
    # What is left of in_proj_weight has the adaptive metric.
    direction = sharpness.evaluate(model, [batch], rho=0.2).direction(0)
    assert (direction.tensors["encoder.layers.0.self_attn.in_proj_weight"][16:] != 0).any()


@pytest.mark.parametrize("measure", GEODESIC)
def test_dead_units_of_a_head_count_as_absent(measure):
    batch = networks.images()
    model = networks.trained_vit()
    with torch.no_grad():
        keys = networks.projections(networks.vit_layers(model)[0].attention)[1]
        keys.weight[3] = 0
        keys.bias[3] = 0
    twin = copy.deepcopy(model)
    weights = dict(twin.named_parameters())
    for s in stacks(find(twin).pairs, weights):
        A = torch.eye(8) + 0.3 * torch.randn(len(s), 8, 8)
        s.scatter_(s.manifold().act(s.gather(weights).detach(), A), weights)
    results = [sharpness.evaluate(m, [batch], measure=measure, rho=0.01, restarts=1) for m in (model, twin)]
    assert [r.num_null for r in results] == [1, 1]
    assert abs(float(results[0]) - float(results[1])) < 1e-8 * float(results[0])
    assert "1 directions of pairs" in str(results[0])
    alive = sharpness.evaluate(networks.vit(), [batch], measure=measure, rho=0.01)
    assert alive.num_null == 0


def test_mix_reports_when_its_ball_leaves_the_manifold():
    model, batch = networks.vit(), networks.images()
    weights = dict(model.named_parameters())
    sigma = min(
        torch.linalg.svdvals(s.manifold().to_matrix(s.gather(weights).detach()))[:, 7].min()
        for s in stacks(find(model).pairs, weights)
    )
    result = sharpness.evaluate(model, [batch], measure="geodesic-mix", rho=float(sigma), steps=1)
    assert result.min_singular_value == pytest.approx(float(sigma), rel=1e-6)
    assert "largest rho over the smallest singular value of a pair: 1\n" in str(result)
    assert "leaves the manifold" in str(result)
    small = sharpness.evaluate(model, [batch], measure="geodesic-mix", rho=0.1 * float(sigma), steps=1)
    assert "leaves the manifold" not in str(small)
    assert small.to_dict()["min_singular_value"] == small.min_singular_value


def test_a_layer_that_takes_no_part_is_named():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = networks.TinyAttention(), networks.TinyAttention()

        def forward(self, x):
            return self.used(x)

    model, batch = networks.shake(Half()), networks.tokens(width=4)
    lost, whole = (sum(p.numel() for p in m.parameters()) for m in (model.unused, model))
    said = "weights got no gradient from any batch, so the result says nothing about them: unused"
    remark = f"{lost:,} of {whole:,} {said}"
    for measure in ("geodesic-inv", "geodesic-mix", "adaptive"):
        found, local = results(model, batch, measure)
        assert found.remarks == local.remarks == (remark,)
        assert remark in str(found).splitlines()
        assert remark in str(local).splitlines()
        assert found.to_dict()["remarks"] == local.to_dict()["remarks"] == [remark]
        assert all(bool(t.any()) != name.startswith("unused") for name, t in found.direction(0).tensors.items())
        model.unused.requires_grad_(False)
        frozen, _ = results(model, batch, measure)
        assert (float(frozen), frozen.remarks) == (pytest.approx(float(found), rel=1e-12), ())
        model.unused.requires_grad_(True)


def results(model, batch, measure, **options):
    found = sharpness.evaluate(model, [batch], measure=measure, rho=0.1, steps=3, **options)
    return found, sharpness.gradient_norm(model, [batch], measure=measure)


def test_single_weights_without_a_gradient_are_named_and_none_at_all_is_an_error():
    model, (x, y) = networks.shake(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))), networks.tokens(width=4)

    def loss(m, batch):
        hidden = F.linear(m[0](batch[0]), m[1].weight, m[1].bias.detach())
        return F.cross_entropy(hidden.mean(1), batch[1])

    options = {"measure": "adaptive", "rho": 0.1, "steps": 2}
    (remark,) = sharpness.evaluate(model, [(x, y)], loss, **options).remarks
    assert remark == "24 of 60 weights got no gradient from any batch, so the result says nothing about them: 1.bias, 2"
    with networks.training(model, r"0|1\.weight"):
        assert sharpness.evaluate(model, [(x, y)], loss, **options).remarks == ()
    with (
        networks.training(model, r"1\.bias|2"),
        pytest.raises(ValueError, match="depends on none of the weights that are measured"),
    ):
        sharpness.evaluate(model, [(x, y)], loss, **options)
    many = nn.ModuleDict({"used": model, **{f"idle{i}": nn.Linear(1, 1) for i in range(14)}})
    (remark,) = sharpness.evaluate(many, [(x, y)], lambda m, b: loss(m["used"], b), **options).remarks
    assert remark.endswith(": used.1.bias, used.2, " + ", ".join(f"idle{i}" for i in range(10)) + " and 4 more")


def test_complex_pairs_beside_an_odd_number_of_coordinates():
    """Complex numbers begin at even places; a head with five biases came before them and ended in a traceback."""
    model, batch = transformers_model("llama", "eager")
    odd = nn.Sequential()
    odd.model, odd.extra = model, nn.Parameter(torch.ones(5, dtype=torch.float64))

    def loss(m, b):
        return (m.model(**b)[0].square().mean(-1) * m.extra.sum()).mean()

    result = sharpness.evaluate(odd, [batch], loss, rho=0.05, steps=2)
    assert float(result) > 0
    with torch.no_grad(), sharpness.perturbed(odd, result.direction(0)):
        assert float(loss(odd, batch)) == pytest.approx(result.batches[0].worst_loss, rel=1e-5)


def test_pairs_that_are_not_the_models_are_named():
    model, batch = networks.vit(), networks.images()
    found = find(networks.bert())
    with pytest.raises(ValueError, match="head 0' belongs to another model: ViTForImageClassification has no weight"):
        sharpness.evaluate(model, [batch], rho=0.1, symmetries=found)
    with pytest.raises(TypeError, match="as find"):
        sharpness.evaluate(model, [batch], rho=0.1, symmetries=list(find(model).pairs))
    networks.projections(networks.vit_layers(model)[0].attention)[3].weight.requires_grad_(False)
    given = sharpness.evaluate(model, [batch], rho=0.1, steps=2, symmetries=find(networks.vit()))
    assert float(given) == float(sharpness.evaluate(model, [batch], rho=0.1, steps=2))


class Gated(nn.Module):
    """Two attention layers of which a batch reaches one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = networks.TinyAttention(), networks.TinyAttention()

    def forward(self, x):
        gate = (x[0, 0, 0] > 0).to(x.dtype)
        return gate * self.first(x) + (1 - gate) * self.second(x)


def test_a_pair_is_certified_once_whatever_later_batches_reach():
    model = networks.shake(Gated())
    x, y = networks.tokens(count=6, width=4)
    batches = [(x.index_fill(2, torch.tensor([0]), sign), y) for sign in (1.0, -1.0)]
    assert sharpness.evaluate(model, batches, rho=0.1, steps=1).num_uncertified == 0
    half = sharpness.evaluate(model, batches[:1], rho=0.1, steps=1)
    assert half.num_uncertified == len(half.direction(0).symmetries.pairs) // 2
    assert "got no gradient from these data, so nothing certifies their symmetry" in str(half)


@pytest.fixture
def coordinates():
    model = networks.vit()
    space = sharpness.WeightSpace(model, MEASURES["geodesic-inv"])
    return model, space.patches, space


def test_every_coordinate_belongs_to_one_patch(coordinates):
    _, patches, space = coordinates
    assert space.dim == sum(p.dim for p in patches)
    taken = torch.zeros(space.dim)
    for _, part in space.each(taken):
        part += 1
    assert bool((taken == 1).all())


def test_norms_add_up_and_random_vectors_are_horizontal(coordinates):
    _, _, space = coordinates
    xi = space.random(torch.Generator().manual_seed(0))
    with space.attached():
        of_pairs = [square for (*_, head), square in direction_of(space, xi).squares.items() if head is not None]
    assert sum(of_pairs) == pytest.approx(sum(float(part @ part) for p, part in space.each(xi) if p.pairs), rel=1e-12)
    squares = [float(part @ part) for _, part in space.each(xi)]
    assert space.norm(xi) == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
    assert torch.allclose(space.project(xi), xi, atol=1e-12)
    other = torch.randn(space.dim, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(space.project(other), other, atol=1e-3)
    assert space.norm(space.project(other)) < space.norm(other)


def test_spectrum_is_that_of_the_products(coordinates):
    model, _, space = coordinates
    weights = dict(model.named_parameters())
    found = stacks(find(model).pairs, weights)
    products = [s.manifold().to_matrix(s.gather(weights).detach()) for s in found]
    least = min(float(torch.linalg.svdvals(p)[:, s.group.h - 1].min()) for p, s in zip(products, found, strict=True))
    assert space.spectrum == (pytest.approx(least, rel=1e-9), 0)
    assert space.unreached.pairs == set(range(len(space.pairs))) != set()
    assert space.residuals == {}


@pytest.mark.parametrize("measure", ["adaptive", "geodesic-inv"])
def test_zero_weights_have_no_part_in_a_random_direction(measure):
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    space = sharpness.WeightSpace(model, sharpness.MEASURES[measure])
    with space.attached():
        found = direction_of(space, xi := space.random(torch.Generator().manual_seed(0))).tensors
    assert not found["bias"].any()
    assert (found["weight"] / model.weight).norm().detach() == pytest.approx(space.norm(xi))


@pytest.mark.parametrize("n", [3, 4])
def test_a_pair_may_have_a_part_of_a_weight_with_an_odd_number_of_entries(n):
    """Its part did not move: the other entries of the weight were written after it, and its old values with them."""
    model = nn.Sequential(nn.Linear(n, n, bias=False), nn.Linear(n, n, bias=False))
    G, H = slot(model, "1.weight", columns=slice(0, 2)), slot(model, "0.weight", slice(0, 2), transpose=True)
    space = sharpness.WeightSpace(model, MEASURES["geodesic-inv"], Symmetries((pair([G], [H], GL(2)),)))
    v = space.random(torch.Generator().manual_seed(0))
    with space.attached():
        velocity = space.push_forward_to_copies(v)
        for patch, c in space.each(v):
            if patch.pairs:
                u = patch._vector(c)
                torch.testing.assert_close(patch.stack.gather(velocity), u)
                space.move_to(v)
                torch.testing.assert_close(patch.stack.gather(space.copies), patch.retract(u))
                assert not torch.allclose(patch.stack.gather(space.copies), patch.tangent.x)
