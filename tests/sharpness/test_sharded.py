"""Sharded models (FSDP2): the twin and its owners, what is refused, and the same results as whole over processes."""

import itertools
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sharpness
from quotient_manifolds.symmetries import (
    Symmetries,
    UnknownAttentionError,
    canonicalize_,
    find,
    manifold_parameters_,
    model_distance,
    move_,
    stacks,
    verify,
    whole,
)
from reproduction.additive import AdditiveMeasure
from sharpness.sharded import ShardedSpace, ShardedState, Shards
from tests.support import networks, sharded, training
from tests.support.extent import EXHAUSTIVE
from tests.support.processes import together

#: How the last of two processes fails.
WAYS = ("error", "interrupt", "kill")
#: Model and processes, over which the examples are spread.
JOBS = [("vit", 2), ("llama", 3), ("bert", 4)]
if EXHAUSTIVE:
    JOBS = [(name, size) for name in sharded.MODELS for size in (2, 3, 4)]


def assert_close(one, two, tolerance, path=()):
    if isinstance(one, dict):
        assert set(one) == set(two), path
        for key in one:
            assert_close(one[key], two[key], tolerance, (*path, key))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_close(a, b, tolerance, (*path, i))
    elif isinstance(one, float):
        assert abs(one - two) <= tolerance * max(abs(one), 1e-3), (path, one, two)
    elif isinstance(one, torch.Tensor):
        assert one.shape == two.shape
        assert float((one - two).norm()) <= tolerance * max(float(one.norm()), 1e-3), path
    else:
        assert one == two, path


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Where all processes have left what they found."""
    folder = tmp_path_factory.mktemp("sharded")
    for name, size in JOBS:
        done = together(size, sharded.work_sharded, sharded.measure, folder, name, folder=folder)
        assert not any(done.codes), done.output
    for how in WAYS:
        together(2, sharded.work_sharded, sharded.fail, folder, how, folder=folder)
    return folder


@pytest.mark.parametrize(("name", "size"), JOBS)
def test_sharded_equals_whole(out, name, size):
    build, batch = sharded.MODELS[name]
    whole = sharded.results(name, build(), [batch()])
    assert all(max(of_all.values()) < 1e-10 for of_all in whole["residuals"].values())
    for rank in range(size):
        found = torch.load(out / f"{name}-{size}-{rank}.pt", weights_only=False)
        assert found["untouched"]
        assert_close(whole, found["results"], 1e-10)


@pytest.mark.parametrize(("name", "size"), JOBS)
def test_every_process_draws_its_part_of_a_random_vector(out, name, size):
    """Horizontal, of the length and mean loss of the whole model's vectors, and the same from the same seed."""
    build, batch = sharded.MODELS[name]
    whole = sharded.random_vectors(name, build(), [batch()])
    found = [torch.load(out / f"{name}-{size}-{rank}.pt", weights_only=False)["random"] for rank in range(size)]
    assert sum(f["dim"] for f in found) >= whole["dim"]  # entries of pairs are counted twice where a row lies elsewhere
    for f in found:
        assert f["same"]
        assert f["horizontal"] < 1e-12
        assert f["square"] == pytest.approx(whole["square"], rel=10 * whole["square"] ** -0.5)
        assert abs(f["products"]) < 5 * whole["square"] ** 0.5
        if name in sharded.VARIED:
            assert f["mean"] == found[0]["mean"]
            assert abs(f["mean"] - whole["mean"]) < 4 * (f["std_error"] ** 2 + whole["std_error"] ** 2) ** 0.5
    parts = [f["part"][:50] for f in found]
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(parts, 2))


def test_a_process_that_fails_ends_all_and_leaves_the_weights(out):
    for how in WAYS:
        said, untouched, seconds = json.loads((out / f"{how}-0.json").read_text(encoding="utf-8"))
        assert said.startswith("RemoteError: another process of the group ended"), said
        assert untouched
        assert seconds < 60
    own = {how: json.loads((out / f"{how}-1.json").read_text(encoding="utf-8"))[:2] for how in ("error", "interrupt")}
    assert own["error"] == ["RuntimeError: no more", True]
    assert own["interrupt"] == ["KeyboardInterrupt: ", True]


# -- in one process ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_twin_has_the_same_pairs_and_no_memory():
    model = networks.vit()
    expected = [(p.name, p.group, p.n, p.m) for p in find(model).pairs]
    shards = Shards(sharded.sharded(model))
    assert [(p.name, p.group, p.n, p.m) for p in find(shards.twin).pairs] == expected
    matrices = [p for p in shards.twin.parameters() if p.dim() > 1]
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in matrices)
    assert not any(hasattr(m, "reshard") or m._forward_pre_hooks for m in shards.twin.modules())
    assert type(shards.twin).__name__ == "ViTForImageClassification"


def test_hooks_of_the_user_stand_on_the_twin():
    """They may change what a layer computes, which discovery looks for."""
    model = networks.vit()
    query = networks.projections(networks.vit_layers(model)[0].attention)[0]
    query.register_forward_hook(lambda m, x, y: y.relu())
    name = next(name for name, m in model.named_modules() if m is query)
    shards = Shards(sharded.sharded(model))
    assert list(shards.twin.get_submodule(name)._forward_hooks) == list(query._forward_hooks)


def test_all_parameters_of_a_pair_have_one_owner_and_owners_have_alike(monkeypatch):
    shards = Shards(fully_shard(networks.vit(layers=6)))
    found = stacks(find(shards.twin).pairs, shards.weights)
    shards.world.size = 3
    with monkeypatch.context() as patched:
        patched.setattr(shards, "collect", lambda rows: {})
        shards.place(found, {})
    assert all(len({shards.owner[name] for name in p.names}) == 1 for s in found for p in s.pairs)
    load = [sum(shards.weights[name].numel() for name, rank in shards.owner.items() if rank == r) for r in range(3)]
    assert min(load) == max(load) > 0


@pytest.mark.parametrize("count", [1, 5, 6, 7])
def test_rows_are_those_of_chunks(count):
    """As torch.chunk cuts, so does FSDP: the last processes may have fewer rows, or none."""
    model = fully_shard(nn.Linear(3, count))
    shards = Shards(model)
    for size in (1, 2, 3, 4):
        shards.world.size = size
        parts = list(torch.arange(count).chunk(size))
        found = [torch.arange(count)[shards.rows("weight", rank)] for rank in range(size)]
        assert [t.tolist() for t in found if len(t)] == [t.tolist() for t in parts]


def test_a_state_keeps_rows_and_reads_them_whole():
    model = fully_shard(nn.Linear(3, 2))
    shards = Shards(model)
    state = ShardedState(shards)
    assert torch.equal(state["weight"], model.weight.full_tensor())
    value = torch.arange(6.0).view(2, 3)
    state["weight"] = value
    value += 1  # what is kept is a copy
    assert torch.equal(state["weight"], torch.arange(6.0).view(2, 3))


def evaluated(model, **options):
    return sharpness.evaluate(model, [networks.images()], measure="adaptive", steps=1, progress=False, **options)


def test_what_is_refused():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"has param_dtype=torch\.bfloat16 in its mixed-precision policy"):
        evaluated(fully_shard(networks.vit(), mp_policy=policy))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"has reduce_dtype=torch\.bfloat16"):
        evaluated(fully_shard(networks.vit(), mp_policy=policy))
    hooked = fully_shard(networks.vit())
    hooked.classifier.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="has a hook that runs after every backward pass"):
        evaluated(hooked)
    silent = sharded.sharded(networks.vit())
    silent.set_requires_gradient_sync(False)
    with pytest.raises(ValueError, match="no gradient reached the shards"):
        evaluated(silent)
    broken = networks.vit()
    broken.classifier.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'classifier\.weight' has NaN or infinite entries"):
        ShardedSpace(sharded.sharded(broken), sharpness.MEASURES["adaptive"])
    part = networks.vit()
    fully_shard(networks.vit_layers(part)[0])
    with pytest.raises(ValueError, match="is not sharded while others are; call fully_shard on the whole model"):
        evaluated(part)
    hybrid = fully_shard(networks.vit(), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="only FSDP2 over a mesh of one dimension"):
        evaluated(hybrid)
    with pytest.raises(ValueError, match=r"is torch.bfloat16, in which small changes are lost"):
        evaluated(fully_shard(networks.vit().bfloat16()))
    model = sharded.sharded(networks.vit())
    with pytest.raises(ValueError, match="the Hessian of a sharded model is not measured"):
        sharpness.hessian(model, [networks.images()])
    with pytest.raises(ValueError, match="works on whole models, and this one is sharded; load it whole"):
        sharpness.evaluate(
            model, [networks.images()], progress=False,
            measure=AdditiveMeasure("additive", pair_metric="inv", rho=0.1),
        )  # fmt: skip


#: All that takes a model and needs whole weights, on the sharded model m, another one w, and a batch b.
NEED_WHOLE = {
    "find": lambda m, w, b: find(m, b), "verify": lambda m, w, b: verify(m, b),
    "move": lambda m, w, b: move_(m), "points": lambda m, w, b: manifold_parameters_(m),
    "distance": lambda m, w, b: model_distance(m, w), "distance to": lambda m, w, b: model_distance(w, m),
    "aligned": lambda m, w, b: model_distance(w, m, modulo="all"), "align": lambda m, w, b: whole.align_models(m, w),
    "align to": lambda m, w, b: whole.align_models(w, m),
    "canonicalize": lambda m, w, b: canonicalize_(m),
    "independence": lambda m, w, b: whole.independence_test(m, w),
    "independence of": lambda m, w, b: whole.independence_test(w, m),
    "space": lambda m, w, b: sharpness.WeightSpace(m, sharpness.MEASURES["adaptive"]),
    "sam": lambda m, w, b: sharpness.GeodesicSAM(m, torch.optim.SGD(m.parameters(), lr=0.1), rho=0.1),
    "direction": lambda m, w, b: sharpness.perturbed(m, evaluated(w).direction(0)).__enter__(),
}  # fmt: skip


@pytest.mark.parametrize("function", NEED_WHOLE)
def test_what_needs_whole_weights_says_what_works(function):
    """Also after a pass without gradients, when FSDP2 keeps whole weights, which look usable and which nobody reads."""
    model, batch = fully_shard(networks.vit()), networks.images()
    with torch.no_grad():
        model(batch[0])
    message = r"is a shard of one .*; do this before fully_shard, .*on the whole checkpoint"
    with pytest.raises(ValueError, match=message):
        NEED_WHOLE[function](model, networks.vit(), batch)


def test_attention_of_an_unknown_class_is_examined_before_it_is_sharded():
    torch.manual_seed(0)
    model, batch = networks.TinyAttention(), networks.tokens(width=4)
    model.attention = type("Unknown", (nn.MultiheadAttention,), {})(4, 2, batch_first=True)
    known = find(model, batch)
    expected = sharpness.evaluate(model, [batch], steps=2, progress=False)
    with pytest.raises(
        UnknownAttentionError, match=r"Unknown .* pass symmetries=find\(model, batch\) of before fully_shard"
    ):
        sharpness.evaluate(fully_shard(model), [batch], steps=2, progress=False)
    found = sharpness.evaluate(model, [batch], steps=2, symmetries=known, progress=False)
    assert len(found.batches[0].history) == 3
    assert float(found) == pytest.approx(float(expected), rel=1e-10)


def test_adapters_leave_no_symmetry_that_a_complete_measure_misses():
    """So nothing is remarked: all that moves lies in pairs, of a sharded model also, whose pairs are its twin's."""
    model, batch = training.lora(), (training.X, training.Y.argmax(1))
    options = {"measure": "complete-inv", "steps": 2, "progress": False}
    expected = sharpness.evaluate(model, [batch], **options)
    found = sharpness.evaluate(fully_shard(model), [batch], **options)
    assert found.remarks == expected.remarks == ()
    assert float(found) == pytest.approx(float(expected), rel=1e-10)


def test_no_direction_is_kept_and_pairs_of_the_model_can_be_named():
    torch.manual_seed(0)
    whole = networks.vit()
    some = Symmetries(find(whole).pairs[:2])
    expected = sharpness.evaluate(whole, [networks.images()], steps=2, symmetries=some)
    model = sharded.sharded(whole)
    with pytest.raises(KeyError):
        evaluated(model).direction(0)
    with pytest.raises(ValueError, match="a sharded model keeps no directions"):
        evaluated(model, keep_directions=True)
    assert Symmetries(find(model).pairs[:2]) == some
    found = sharpness.evaluate(model, [networks.images()], steps=2, symmetries=some, progress=False)
    assert float(found) == pytest.approx(float(expected), rel=1e-10)
    with pytest.raises(ValueError, match="belongs to another model"):
        sharpness.evaluate(model, [networks.images()], symmetries=find(networks.bert()), progress=False)


def test_frozen_weights_are_folded_and_put_back():
    """The canonical form moves frozen weights too, in place; they come back, on an error also."""
    torch.manual_seed(0)
    whole = networks.vit()
    whole.vit.embeddings.requires_grad_(False)
    for layer in networks.feed_forward(networks.vit_layers(whole)[0]):
        layer.requires_grad_(False)
    expected = float(sharpness.evaluate(whole, [networks.images()], measure="complete-inv", steps=2, progress=False))
    model, calls = sharded.sharded(whole), []
    before = sharded.rows_of(model)
    options = {"measure": "complete-inv", "steps": 2, "progress": False}
    assert float(sharpness.evaluate(model, [networks.images()], **options)) == pytest.approx(expected, rel=1e-10)
    assert sharded.same(before, sharded.rows_of(model))

    def stops(model, batch):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("no more")
        return nn.functional.cross_entropy(model(batch[0]).logits, batch[1])

    with pytest.raises(RuntimeError, match="no more"):
        sharpness.evaluate(model, [networks.images()], stops, **options)
    assert sharded.same(before, sharded.rows_of(model))


def test_gathered_weights_are_given_back_first():
    """After a pass without a gradient FSDP keeps the root's weights whole; then nothing would look sharded."""
    torch.manual_seed(0)
    model, images = fully_shard(networks.vit()), networks.images()
    expected = float(evaluated(model))
    with torch.no_grad():
        model(images[0])
    assert not any(type(p).__name__ == "DTensor" for p in model.parameters())
    assert float(evaluated(model)) == expected
    with pytest.raises(ValueError, match="the loss of batch 0 is nan"):
        sharpness.evaluate(model, [images], lambda m, b: m(b[0]).logits.sum() * torch.nan, progress=False)
    assert float(evaluated(model)) == expected


def test_gradients_of_the_user_stay_as_they_are():
    model = sharded.sharded(networks.vit())
    model(networks.images()[0]).logits.square().sum().backward()
    before = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
    evaluated(model)
    assert before
    assert all(torch.equal(before[n], p.grad.to_local()) for n, p in model.named_parameters() if n in before)
