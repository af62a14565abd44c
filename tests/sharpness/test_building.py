import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.symmetries import apply_random_symmetry_, find_symmetric_pairs
from quotient_manifolds.symmetries.whole import apply_random_moves_, neuron_pairs, wiring_of
from sharpness import MEASURES, get_measure
from tests.whole_networks import build, inputs, loss


def worst(model, family, measure, **options):
    options = {"steps": 2, "progress": False, **options}
    return float(sharpness.evaluate(model, list(inputs(family)), loss, measure=measure, **options))


def moved(family, kinds=None):
    model = build(family)
    if kinds != ["heads"]:
        apply_random_moves_(model, classes=True, kinds=kinds)
    if kinds is None or kinds == ["heads"]:
        apply_random_symmetry_(model)
        apply_random_symmetry_(model, pairs=neuron_pairs(wiring_of(model)))
    return model


@pytest.mark.parametrize("geodesic", ["second-order", "exact"])
@pytest.mark.parametrize("family", ["vit", "bert", "llama", "gpt2-untied", "llama-tied", "distilbert"])
@pytest.mark.parametrize("measure", ["complete-inv", "complete-mix"])
def test_the_complete_measures_see_no_symmetry(family, measure, geodesic):
    """Pre-norm and post-norm LayerNorm, RMSNorm with SwiGLU and grouped queries, tied and untied, ReLU."""
    measure = get_measure(measure, geodesic=geodesic)
    before = worst(build(family), family, measure)
    assert before > 1e-3
    assert worst(moved(family), family, measure) == pytest.approx(before, rel=1e-8)


@pytest.mark.parametrize("kind", ["heads", "gain", "shift", "reader", "writer", "rotation"])
def test_the_other_measures_see_some(kind):
    """Of every kind of move at least one measure of the literature takes notice, by more than 5 %."""
    changes = []
    for name in ("geodesic-inv", "adaptive", "euclidean"):
        before = worst(build("vit"), "vit", name)
        changes.append(abs(worst(moved("vit", [kind]), "vit", name) / before - 1))
    assert max(changes) > 0.05
    assert worst(moved("vit", [kind]), "vit", "complete-inv") == pytest.approx(
        worst(build("vit"), "vit", "complete-inv")
    )


def test_single_precision():
    def single(model):
        batches = [{key: value.float() for key, value in batch.items()} for batch in inputs("vit")]
        options = {"measure": "complete-inv", "steps": 4, "progress": False}
        return float(sharpness.evaluate(model.float(), batches, loss, **options))

    values = [single(model) for model in (build("vit"), moved("vit"))]
    assert values[1] == pytest.approx(values[0], rel=1e-3)


def test_local_measures_at_the_canonical_form():
    models, options = (build("vit"), moved("vit")), {"measure": "complete-inv"}
    norms = [sharpness.gradient_norm(m, list(inputs("vit")), loss, **options).gradient_norm for m in models]
    assert norms[1] == pytest.approx(norms[0], rel=1e-8)
    largest = [sharpness.hessian(m, list(inputs("vit")), loss, num_matvecs=3, **options).max_eigenvalue for m in models]
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
    model.vit.layers[0].layernorm_before.register_forward_hook(lambda m, i, out: out.tanh())
    with pytest.raises(ValueError, match="canonical form of ViTForImageClassification"):
        worst(model, "vit", "complete-inv")


def test_pairs_that_are_given_are_those_of_the_canonical_form():
    model = build("vit")
    assert worst(model, "vit", "complete-inv", pairs=find_symmetric_pairs(model)) == worst(model, "vit", "complete-inv")
    assert worst(model, "vit", "complete-inv", pairs=[]) != worst(model, "vit", "complete-inv")


def test_sam_is_refused():
    model = build("vit")
    with pytest.raises(ValueError, match="one by one"):
        sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), 0.1), rho=0.1, measure="complete-inv")


def test_only_some_parameters():
    """Against a model whose other weights are frozen."""
    model = build("vit")
    frozen = copy.deepcopy(model)
    for name, p in frozen.named_parameters():
        p.requires_grad_("layers.1" in name)
    for name in ("adaptive", "geodesic-inv"):
        some = worst(model, "vit", name, only=r"layers\.1\.")
        assert some == pytest.approx(worst(frozen, "vit", name), rel=1e-10)
        assert some < worst(model, "vit", name)
    queries = worst(model, "vit", "geodesic-inv", only="q_proj")  # whose pairs have keys too
    assert queries == pytest.approx(worst(model, "vit", "adaptive", only="q_proj", rho=0.1))
    with pytest.raises(ValueError, match="matches no trainable"):
        worst(model, "vit", "adaptive", only="nothing")


def test_directions_of_some_parameters_lead_back():
    model, batches = build("vit"), list(inputs("vit"))
    for only in ("mlp|classifier", "classifier", "attention"):
        options = {"measure": "complete-inv", "steps": 3, "progress": False, "only": only}
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
    with pytest.warns(UserWarning, match="how TransformerEncoderLayer is wired, so complete-inv divides out its heads"):
        sharpness.evaluate(model, [x], lambda m, b: m(b).square().mean(), measure="complete-inv", steps=1, rho=0.1)
