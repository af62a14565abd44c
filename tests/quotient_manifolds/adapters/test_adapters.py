"""Folders of adapters, against dense products that peft computes and against each other."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import merge_utils
from safetensors.torch import load_file, save_file
from torch import nn

from quotient_manifolds import ConvergenceError, GLQuotientInv, GLQuotientMix, adapters, lora_command
from quotient_manifolds.adapters import (
    Adapter,
    balance,
    compare,
    configs,
    convert,
    folders,
    merge,
    merging,
    products,
    resize,
    storage,
)
from quotient_manifolds.lora_command import main

#: Of peft, about the bias of B, and about patterns for parameters, which it follows nevertheless.
pytestmark = pytest.mark.filterwarnings("ignore:Adapter 'default'", "ignore:The following (rank|alpha)_pattern keys")


class Experts(nn.Module):
    """Two parameters of three experts each."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 7, 5)), nn.Parameter(torch.randn(3, 5, 7))


class Net(nn.Module):
    """A layer of each kind; it is loaded into, never run."""

    def __init__(self):
        super().__init__()
        self.words, self.conv, self.experts = nn.Embedding(9, 12), nn.Conv2d(3, 5, 3), Experts()
        self.one, self.two, self.head = nn.Linear(12, 20), nn.Linear(20, 9), nn.Sequential(nn.Linear(9, 4))


def saved(folder, seed=0, *, r=3, targets=("one", "two"), dtype=torch.float32, **options):
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=r, target_modules=list(targets), init_lora_weights=False, **options)
    model = peft.get_peft_model(net, config)
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            p.data = (p.data.abs() + 0.5 if "magnitude" in name else 0.3 * torch.randn(p.shape)).to(dtype)
    model.save_pretrained(folder)
    return str(folder)


def loaded(folder):
    torch.manual_seed(0)
    return peft.PeftModel.from_pretrained(Net(), folder).double()


def dense(folder):
    """The changes of the weights in peft's own words, and those of the biases."""
    found = {}
    for path, m in loaded(folder).named_modules():
        if isinstance(m, peft.tuners.lora.LoraLayer):
            found[path] = m.get_delta_weight("default").detach()
            if m.lora_bias.get("default"):
                found[f"{path} bias"] = (m.scaling["default"] * m.lora_B["default"].bias).detach()
    return found


def near(one, other, tolerance):
    assert one.keys() == other.keys()
    size = max(float(v.norm()) for v in [*one.values(), *other.values()])
    return max(float((one[k] - other[k]).norm()) for k in one) <= tolerance * size


def weighted(folders, weights):
    parts = [dense(f) for f in folders]
    keys = {k: v for part in parts for k, v in part.items()}
    zeros = {k: torch.zeros_like(v) for k, v in keys.items()}
    return {k: sum(w * p.get(k, zeros[k]) for w, p in zip(weights, parts, strict=True)) for k in keys}


KINDS = {
    "ranks and scales": ({"lora_alpha": 2}, {"r": 5, "lora_alpha": 16}),
    "rslora": ({"use_rslora": True, "lora_alpha": 4}, {"r": 2, "lora_alpha": 3}),
    "patterns": (
        {"rank_pattern": {"one": 2}, "alpha_pattern": {"^two": 3, "one": 9}},
        {"r": 4, "rank_pattern": {"t.o": 6}, "use_rslora": True},
    ),
    "bias": ({"lora_bias": True, "lora_alpha": 4}, {"r": 2}),
    "other layers": ({"targets": ["one"]}, {"targets": ["two"], "r": 2}),
    "an expression": ({"targets": ["one"], "layers_to_transform": None}, {"r": 2, "exclude_modules": ["one"]}),
    "convolutions and embeddings": ({"targets": ["words", "conv"]}, {"targets": ["words", "conv", "one"], "r": 2}),
    "experts": tuple({"target_parameters": ["experts.up", "experts.down"], "r": r, "lora_alpha": 6} for r in (2, 3)),
    "experts and a layer": tuple(
        {"target_parameters": ["up"], "r": 2, "alpha_pattern": {"experts.up": a}, "targets": ["one"]} for a in (3, 5)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_merge_is_the_signed_sum_of_products(kind, tmp_path):
    parents = [saved(tmp_path / str(i), i, **{"targets": ("one", "two"), **o}) for i, o in enumerate(KINDS[kind])]
    weights = [0.7, -0.4]
    merge(parents, tmp_path / "out", weights=weights)
    expected = weighted(parents, weights)
    assert near(dense(tmp_path / "out"), expected, 1e-5)
    assert not near(dense(tmp_path / "out"), weighted(parents, [0.7, 0.4]), 1e-2)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text(encoding="utf-8"))
    assert (config["lora_alpha"], config["alpha_pattern"]) == (config["r"], config["rank_pattern"])
    for layer, (A, B) in factors(tmp_path / "out").items():
        if "experts" not in layer:
            assert torch.allclose(B.mT @ B, A @ A.mT, atol=1e-5), "not balanced"


def factors(folder):
    t = load_file(folder / "adapter_model.safetensors")
    of = sorted({k.rpartition(".lora_")[0] for k in t if "lora_" in k})
    name = {layer: [k for k in t if k.startswith(f"{layer}.lora_") and "bias" not in k] for layer in of}
    return {layer: [t[k].flatten(1) for k in sorted(keys)] for layer, keys in name.items()}


def test_a_smaller_rank_is_the_nearest_product(tmp_path):
    parents = [saved(tmp_path / str(i), i, r=r) for i, r in enumerate((2, 4))]
    merge(parents, tmp_path / "out", weights=[1, -2], rank=3)
    for key, X in weighted(parents, [1, -2]).items():
        U, s, Vh = torch.linalg.svd(X)
        nearest = U[:, :3] * s[:3] @ Vh[:3]
        assert torch.allclose(dense(tmp_path / "out")[key], nearest, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(1, 8), st.floats(0.05, 1), st.integers(0, 9),
)  # fmt: skip
def test_sums_of_any_shape(n, m, ranks, rank, energy, seed):
    torch.manual_seed(seed)
    parts = [(torch.randn(1, n, r).double(), torch.randn(1, m, r).double()) for r in ranks]
    weights = torch.randn(len(ranks)).tolist()
    how = products.Method("sum", weights, rank=rank, energy=energy)
    X = sum(w * G @ H.mT for w, (G, H) in zip(weights, parts, strict=True))
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    shares = s.square().cumsum(-1)[0] / s.square().sum()
    count = 1 + int((shares < energy - 1e-9).sum()) if energy < 1 else s.shape[-1]
    count = min(count, rank)
    G, H, lost = how.factors(parts, whole=False)
    assert torch.allclose(G @ H.mT, (U[..., :count] * s[..., None, :count]) @ Vh[..., :count, :], atol=1e-9)
    assert torch.allclose(G.mT @ G, H.mT @ H, atol=1e-9) or bool((s < 1e-6).any())
    assert lost == pytest.approx(float(s[..., count:].norm() / s.norm()), abs=1e-6)


def exact(folder, r=3, seed=0, near_to=None):
    """An adapter of small whole numbers, which moves of whole numbers change without rounding."""
    saved(folder, seed, r=r, lora_alpha=r)
    generator = torch.Generator().manual_seed(seed)
    t = {k: torch.randint(-9, 10, v.shape, generator=generator).float() for k, v in tensors(folder).items()}
    if near_to:
        t = {k: v + t[k] / 64 for k, v in tensors(near_to).items()}
    save_file(t, f"{folder}/adapter_model.safetensors", {"format": "pt"})
    return str(folder)


def tensors(folder):
    return load_file(f"{folder}/adapter_model.safetensors")


def moved(folder, out):
    """(B M⁻¹, M A) with a matrix of condition 1e4, without any rounding."""
    shutil.copytree(folder, out)
    t = tensors(folder)
    for key, A in t.items():
        if "lora_A" in key:
            r = len(A)
            M = torch.diag(2.0 ** torch.linspace(6, -6, r).round()) @ (torch.eye(r) + 2 * torch.ones(r, r).triu(1))
            M = M.float()
            assert torch.linalg.cond(M) > 1e4
            B = t[key.replace("lora_A", "lora_B")]
            t[key], new = M @ A, (B.double() @ torch.linalg.inv(M.double())).float()
            t[key.replace("lora_A", "lora_B")] = new
            assert torch.equal(new.double() @ t[key].double(), B.double() @ A.double()), "rounded"
    save_file(t, f"{out}/adapter_model.safetensors", {"format": "pt"})
    return str(out)


METHODS = [{"method": "sum"}, {"method": "sum", "rank": 2}, {"method": "inv"}, {"method": "mix"}] + [
    {"method": m, "space": s, "rank": 5} for m in ("ties", "dare") for s in ("core", "knots")
]


@pytest.mark.parametrize("options", METHODS, ids=lambda o: "-".join(map(str, o.values())))
def test_the_merge_does_not_depend_on_the_factors(options, tmp_path):
    one = exact(tmp_path / "one")
    two = exact(tmp_path / "two", seed=1, near_to=one)
    other = moved(two, tmp_path / "moved")
    for parents, out in (([one, two], "a"), ([one, other], "b")):
        merge(parents, tmp_path / out, weights=[0.25, 0.75], **options)
    assert near(dense(tmp_path / "a"), dense(tmp_path / "b"), 1e-6)
    assert not near(dense(tmp_path / "a"), dense(one), 1e-2)
    if options["method"] != "dare":
        merge([two, one], tmp_path / "c", weights=[0.75, 0.25], **options)
        assert near(dense(tmp_path / "a"), dense(tmp_path / "c"), 1e-6)


def test_weights(tmp_path):
    one, two = saved(tmp_path / "one", r=2), saved(tmp_path / "two", 1)
    twin = moved(exact(tmp_path / "exact"), tmp_path / "twin")
    for parents, weights, expected in (
        ([one], None, dense(one)),
        ([one, two], [1, 0], dense(one)),
        ([one, two], None, weighted([one, two], [0.5, 0.5])),
        ([twin, str(tmp_path / "exact")], [1, -1], {k: 0 * v for k, v in dense(one).items()}),
    ):
        merge(parents, tmp_path / "out", weights=weights)
        assert near(dense(tmp_path / "out"), expected, 1e-6)
        shutil.rmtree(tmp_path / "out")
    merge([one, one], tmp_path / "out")
    assert compare(tmp_path / "out", one)["layers"]["one"]["rank"] == [2, 2]


def pairs_of(seed, ranks=(3, 2, 2), n=6, m=5):
    torch.manual_seed(seed)
    return [(torch.randn(1, n, r).double(), torch.randn(1, m, r).double()) for r in ranks]


@pytest.mark.parametrize("density", [0.3, 0.7])
def test_ties_of_products_by_hand(density):
    """Entry by entry: weighted, trimmed, then a sign is elected, then those that agree are averaged."""
    parts, weights = pairs_of(0), [1.0, -0.5, 2.0]
    given = [(G @ H.mT)[0] for G, H in parts]
    X = [w * x for w, x in zip(weights, given, strict=True)]
    least = [sorted(x.abs().flatten().tolist())[-int(density * x.numel())] for x in X]
    expected = torch.zeros_like(X[0])
    for i, j in torch.cartesian_prod(*map(torch.arange, X[0].shape)).tolist():
        left = [float(x[i, j]) if abs(x[i, j]) >= a else 0.0 for x, a in zip(X, least, strict=True)]
        sign = 1 if sum(left) >= 0 else -1
        agreeing = [x for x in left if sign * x > 0]
        expected[i, j] = sum(agreeing) / max(len(agreeing), 1)
    found = products.Method("ties", weights, density=density).array(given)
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(found, products.Method("ties", weights, density=1 - density).array(given), atol=1e-3)
    late = merge_utils.ties(given, torch.tensor(weights).double(), density)
    assert not torch.allclose(found, late, atol=1e-3), "weights come before signs"


def test_dare_drops_entries_or_enlarges_them():
    x = 1 + torch.rand(200, 50, dtype=torch.float64)
    found = products.Method("dare", [2.0], density=0.3).array([x])
    kept = found != 0
    assert torch.allclose(found[kept], 2 * x[kept] / 0.3)
    assert abs(float(kept.double().mean()) - 0.3) < 6 * (0.3 * 0.7 / x.numel()) ** 0.5


def test_the_seed_of_dare_is_its_own(tmp_path):
    one, two, state = saved(tmp_path / "one"), saved(tmp_path / "two", 1), torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        merge([one, two], tmp_path / name, method="dare", seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert near(dense(tmp_path / "a"), dense(tmp_path / "b"), 1e-12)
    assert not near(dense(tmp_path / "a"), dense(tmp_path / "c"), 1e-2)


@pytest.mark.filterwarnings("ignore:The density 1.0")
@pytest.mark.parametrize("name", ["ties", "dare"])
def test_spaces_are_those_of_dense_products(name):
    """KnOTS and Core Space, step by step; entries are kept without chance, so that signs of bases do not matter."""
    parts, weights, density = pairs_of(1), [1.0, -0.5, 2.0], {"ties": 0.4, "dare": 1.0}[name]
    X = [w * (G @ H.mT)[0] for w, (G, H) in zip(weights, parts, strict=True)]

    def ties(arrays):
        return sum(arrays) if name == "dare" else merge_utils.ties(arrays, torch.ones(3).double(), density)

    U, s, Vh = torch.linalg.svd(torch.cat(X, 1), full_matrices=False)
    knots = U @ ties([s[:, None] * V for V in Vh.split(5, 1)])
    roots = [torch.linalg.svd(x, full_matrices=False) for x in X]
    U = torch.linalg.svd(torch.cat([u * s.sqrt() for u, s, _ in roots], 1), full_matrices=False)[0]
    V = torch.linalg.svd(torch.cat([v.mT * s.sqrt() for _, s, v in roots], 1), full_matrices=False)[0]
    core = U @ ties([U.mT @ x @ V for x in X]) @ V.mT
    for space, expected in (("knots", knots), ("core", core)):
        G, H, _ = products.Method(name, weights, space, density).factors(parts, whole=False)
        assert torch.allclose((G @ H.mT)[0], expected, atol=1e-10), space
    assert not torch.allclose(knots, core) or name == "dare"


def test_dare_keeps_the_sum_on_average():
    parts = pairs_of(2)
    how = products.Method("dare", [1.0, -1.0, 1.0])
    many = torch.stack([G @ H.mT for G, H, _ in (how.factors(parts, whole=False) for _ in range(400))])
    expected = sum(w * G @ H.mT for w, (G, H) in zip((1, -1, 1), parts, strict=True))
    assert ((many.mean(0) - expected).abs() < 5 * many.std(0) / 400**0.5).all()
    assert float(many.std(0).mean()) > 0.1


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_every_layer_has_the_mean_of_its_points(metric, tmp_path):
    one = exact(tmp_path / "one")
    two = exact(tmp_path / "two", seed=1, near_to=one)
    merge([one, two], tmp_path / "out", weights=[1, 3], method=metric)
    for layer, (A, B) in factors(tmp_path / "out").items():
        points = torch.stack([torch.cat([b, a.mT]) for a, b in (factors(tmp_path / p)[layer] for p in ("one", "two"))])
        space = {"inv": GLQuotientInv, "mix": GLQuotientMix}[metric](len(B), A.shape[1])
        mean = space.to_matrix(space.mean(points.double(), torch.tensor([0.25, 0.75]).double()))
        assert torch.allclose((B.double() @ A.double()), mean, rtol=1e-5, atol=1e-5 * float(mean.norm()))


def test_what_has_no_mean_on_the_quotient_is_named(tmp_path):
    one, small, part = saved(tmp_path / "one"), saved(tmp_path / "s", r=2), saved(tmp_path / "p", targets=["one"])
    wide = saved(tmp_path / "wide", r=10, targets=["two"])
    zero = changed(one, tmp_path / "zero", lambda k, t: 0 * t if "two.lora_B" in k else t)
    for parents, message in (
        ([one, small], r"one: a mean on the quotient needs equal ranks, not \[3, 2\]"),
        ([one, part], r"two: a mean on the quotient needs equal ranks, not \[3, 0\] \(0: the layer is missing\)"),
        ([one, zero], "two: a product that lacks full rank, as at B = 0, has no place"),
        ([wide, wide], "two: a product that lacks full rank"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(parents, tmp_path / "out", method="inv")
    with pytest.raises(ValueError, match="weights that are not negative"):
        merge([one, one], tmp_path / "out", method="mix", weights=[1, -1])
    square = saved(tmp_path / "square", r=9, targets=["two"])
    other = changed(
        square, tmp_path / "other", lambda k, t: t * torch.tensor([-1.0] + [1.0] * 8)[:, None] if "lora_B" in k else t
    )
    with pytest.raises(ConvergenceError, match=r"^two: "):
        merge([square, other], tmp_path / "out", method="inv")
    assert not (tmp_path / "out").exists()


def changed(folder, out, change=lambda key, t: t, **config):
    shutil.copytree(folder, out)
    save_file({k: change(k, t).contiguous() for k, t in tensors(folder).items()}, f"{out}/adapter_model.safetensors")
    old = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    (out / "adapter_config.json").write_text(json.dumps({**old, **config}), encoding="utf-8")
    return str(out)


def test_saved_modules_and_magnitudes_are_averaged(tmp_path):
    for options in ({"modules_to_save": ["head"]}, {"use_dora": True}):
        kind = next(iter(options))
        one, two = (saved(tmp_path / f"{kind}{i}", i, **options) for i in range(2))
        merge([one, two], tmp_path / kind, weights=[0.25, 0.75])
        a, b, mean = tensors(one), tensors(two), tensors(tmp_path / kind)
        others = [k for k in a if "head" in k or "magnitude" in k]
        assert len(others) == 2
        for key in others:
            assert torch.allclose(mean[key], 0.25 * a[key] + 0.75 * b[key], atol=1e-6)
        loaded(tmp_path / kind)
        merge([one, one], tmp_path / f"{kind}twice")
        assert near(dense(tmp_path / f"{kind}twice"), dense(one), 1e-6)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_of_the_model_are_saved_averaged_or_missed(bias, tmp_path):
    def trained(seed):
        """As PEFT 0.21 saves it; versions before save no biases of ``"lora_only"``."""
        one = saved(tmp_path / f"{seed}", seed, bias="all")
        return with_biases(one, tmp_path / f"{seed} trained", bias, seed)

    one, two = trained(1), trained(2)
    own = {key for key in tensors(one) if key.endswith(".bias")}
    merge([one, two], tmp_path / "mean", weights=[0.25, 0.75])
    weights = dict(loaded(tmp_path / "mean").named_parameters())
    assert len(own) == {"lora_only": 2, "all": 4}[bias]
    for key in own:
        assert torch.allclose(weights[key], (0.25 * tensors(one)[key] + 0.75 * tensors(two)[key]).double(), atol=1e-6)
    for act in (lambda out: merge([one, two], out, weights=[1, -1]), lambda out: convert(one, out, to="diffusers")):
        with pytest.raises(ValueError, match=r"bias is saved as a whole|holds .*bias, which diffusers has no name for"):
            act(tmp_path / "no")
    lost = with_biases(one, tmp_path / "lost", "none", 0, said="lora_only")
    with pytest.warns(UserWarning, match="lost has no biases, though .* PEFT before 0.21 did not save them"):
        compare(one, lost)


def with_biases(folder, out, kind, more, said=None):
    """An adapter with biases of the model, larger by a number, of all layers, its own, or none."""
    shutil.copytree(folder, out)
    end = {"all": ".bias", "lora_only": ".base_layer.bias", "none": "nothing"}[kind]
    found = {k: t + more * k.endswith("bias") for k, t in tensors(folder).items() if "bias" not in k or k.endswith(end)}
    save_file(found, out / "adapter_model.safetensors")
    config = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    (out / "adapter_config.json").write_text(json.dumps({**config, "bias": said or kind}), encoding="utf-8")
    return out


def test_states_that_were_saved_as_they_are(tmp_path):
    """With the name of the adapter in the keys, as ``model.state_dict()`` has them; biases of B have the scale, too."""
    one = saved(tmp_path / "one", lora_bias=True, lora_alpha=7)
    named = {re.sub(r"(lora_[AB])\.", r"\1.default.", k): t for k, t in tensors(one).items()}
    config = json.loads((tmp_path / "one/adapter_config.json").read_text(encoding="utf-8"))
    found = compare(balance(one), balance(Adapter.from_state(named, config)))
    assert max(at["distance"] for at in found["layers"].values()) < 1e-12
    norms = [sorted(float(t.norm()) for k, t in a.state.items() if "bias" in k) for a in (
        balance(one), balance(Adapter.from_state(named, config)))]  # fmt: skip
    assert norms[0] == pytest.approx(norms[1])
    with pytest.raises(ValueError, match="which are the same part of a layer: leave out one"):
        Adapter.from_state({**named, **tensors(one)}, config)


def test_what_is_no_product_and_has_no_mean_is_named(tmp_path):
    head, plain, dora = (
        saved(tmp_path / "h", modules_to_save=["head"]),
        saved(tmp_path / "p"),
        saved(tmp_path / "d", use_dora=True),
    )
    merge([head, plain], tmp_path / "out", weights=[1, 1])
    assert torch.equal(
        tensors(tmp_path / "out")["base_model.model.head.0.bias"], tensors(head)["base_model.model.head.0.bias"]
    )
    shutil.rmtree(tmp_path / "out")
    other, key = saved(tmp_path / "other", 1, modules_to_save=["head"]), "base_model.model.head.0.bias"
    merge([head, other], tmp_path / "out", weights=[1, 0])
    assert torch.equal(tensors(tmp_path / "out")[key], tensors(head)[key]), "what has no weight has no share"
    shutil.rmtree(tmp_path / "out")
    larger = changed(head, tmp_path / "l", lambda k, t: torch.cat([t, t]) if "head" in k else t)
    count = changed(head, tmp_path / "c", lambda k, t: t.long() if "head" in k else t)
    more = changed(count, tmp_path / "m", lambda k, t: t + 2 if "head" in k else t)
    for parents, weights, message in (
        (
            [head, plain],
            [-1, 1],
            r"head\.0\.bias is saved as a whole, .* no meaning with \[-1\]: give such weights, or leave it",
        ),
        ([head, other], [1, -0.5], r"head\.0\.bias is saved as a whole, .* no meaning with \[1, -0\.5\]"),
        ([plain, head], [1, 0], r"head\.0\.bias is saved as a whole, .* no meaning with \[0\]"),
        ([head, larger], None, r"head\.0\.bias .* the shapes {'.*h': \(4,\), '.*l': \(8,\)}"),
        ([dora, plain], None, "DoRA divides by the norm"),
        ([dora, dora], [1, 1], "DoRA divides by the norm"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(parents, tmp_path / "out", weights=weights)
    merge([count, more], tmp_path / "out")
    assert torch.equal(tensors(tmp_path / "out")[key], tensors(count)[key] + 1)


def test_balance(tmp_path):
    one = saved(tmp_path / "one", lora_alpha=7, use_rslora=True, rank_pattern={"two": 2}, modules_to_save=["head"])
    far = changed(one, tmp_path / "far", lambda k, t: 1e4 * t if "lora_A" in k else t / 1e4 if "lora_B" in k else t)
    balance(far, tmp_path / "out")
    assert near(dense(tmp_path / "out"), dense(far), 1e-6)
    assert {key: t.shape for key, t in tensors(tmp_path / "out").items()} == {
        key: t.shape for key, t in tensors(far).items()
    }
    for A, B in factors(tmp_path / "out").values():
        assert torch.allclose(B.mT @ B, A @ A.mT, atol=1e-6)
        assert float((A @ A.mT).fill_diagonal_(0).abs().max()) < 1e-6
    zero = changed(one, tmp_path / "zero", lambda k, t: 0 * t if "two.lora_B" in k else t)
    balance(zero, tmp_path / "new")
    A, B = (t.double() for t in factors(tmp_path / "new")["base_model.model.two"])
    assert A.shape[0] == B.shape[1] == 2
    assert not B.any()
    assert torch.allclose(A @ A.mT, torch.eye(2).to(A) / A.shape[1], atol=1e-6), "an adapter that is new can be trained"
    merge([one, one], tmp_path / "twice", energy=None)
    assert [len(A) for A, _ in factors(tmp_path / "twice").values()] == [6, 4]
    assert near(dense(tmp_path / "twice"), dense(one), 1e-6)


def test_groups_of_a_convolution_have_products_of_their_own(tmp_path):
    """Different ranks, cut and balanced, against products group by group."""

    def grouped(out, r, seed):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Conv2d(6, 8, 3, groups=2))
        config = peft.LoraConfig(r=r, lora_alpha=3, target_modules=["0"], init_lora_weights=False)
        peft.get_peft_model(network, config).save_pretrained(out)
        return str(out)

    def groups(folder, scale):
        [(A, B)] = factors(folder).values()
        return [scale * b.double() @ a.double() for a, b in zip(A.chunk(2), B.chunk(2), strict=True)]

    with pytest.warns(UserWarning, match="groups > 1"):
        one, two = grouped(tmp_path / "one", 2, 0), grouped(tmp_path / "two", 4, 1)
    merge([one, two], tmp_path / "sum", weights=[1, -2])
    merge([one, two], tmp_path / "small", weights=[1, -2], rank=3)
    terms = zip(groups(tmp_path / "one", 3 / 2), groups(tmp_path / "two", 3 / 4), strict=True)
    expected = [x - 2 * y for x, y in terms]
    for X, found, small in zip(expected, groups(tmp_path / "sum", 1), groups(tmp_path / "small", 1), strict=True):
        assert torch.allclose(found, X, atol=1e-6)
        U, s, Vh = torch.linalg.svd(X)
        assert torch.allclose(small, s[0] * U[:, :1] @ Vh[:1], atol=1e-6)
    config = json.loads((tmp_path / "small/adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"]) == (2, 2), "a part for each group"
    assert compare(one, tmp_path / "sum")["layers"]["0"]["rank"] == [2, 6]
    with pytest.raises(ValueError, match=r"^0: a convolution in 2 groups has a rank of at least 2, not 1"):
        resize(one, tmp_path / "no", rank=1)
    wide = changed(one, tmp_path / "wide", lambda k, t: t.expand(8, 1, 3, 3) if "lora_B" in k else t)
    with pytest.raises(ValueError, match=r"has factors \[2, 6, 3, 3\] and \[8, 1, 3, 3\], not of rank 2"):
        balance(wide, tmp_path / "no")


def test_experts_are_balanced_one_by_one(tmp_path):
    one = saved(tmp_path / "one", **KINDS["experts"][0])
    far = changed(one, tmp_path / "far", lambda k, t: 1e3 * t if "lora_A" in k else t / 1e3 if "lora_B" in k else t)
    balance(far, tmp_path / "out")
    assert near(dense(tmp_path / "out"), dense(one), 1e-5)
    for layer, (A, B) in factors(tmp_path / "out").items():
        if "experts" in layer:
            A, B = A.unflatten(0, (3, 2)), B.unflatten(1, (2, 3)).movedim(-1, 0)
            assert torch.allclose(B.mT @ B, A @ A.mT, atol=1e-6)


def test_a_product_of_zero_can_be_trained(tmp_path):
    zero = changed(saved(tmp_path / "one"), tmp_path / "zero", lambda k, t: 0 * t if "lora_B" in k else t)
    merge([zero, zero], tmp_path / "out")
    for A, B in factors(tmp_path / "out").values():
        assert not B.any()
        assert float(A.norm()) == pytest.approx(A.shape[1] ** -0.5)


def test_resize(tmp_path):
    one = saved(tmp_path / "one", r=6, lora_bias=True)
    resize(one, tmp_path / "small", rank=2)
    expected = compare(one, tmp_path / "small")["layers"]
    assert [layer["rank"] for layer in expected.values()] == [[6, 2], [6, 2]]
    for layer in expected.values():
        values = torch.tensor(layer["singular_values"][0]).square()
        assert layer["distance"] == pytest.approx(float(values[2:].sum() / values.sum()) ** 0.5, rel=1e-4)
    resize(one, tmp_path / "most", energy=0.9)
    for layer in compare(one, tmp_path / "most")["layers"].values():
        assert layer["norm"][1] ** 2 >= 0.9 * layer["norm"][0] ** 2
        assert layer["rank"][1] < 6
        values = torch.tensor(layer["singular_values"][1]).square()
        assert float(values[: layer["rank"][1] - 1].sum()) < 0.9 * layer["norm"][0] ** 2
    with pytest.raises(ValueError, match="say to which rank"):
        resize(one, tmp_path / "out")


def test_a_larger_rank_has_directions_that_learn(tmp_path):
    """The product stays; B has gradients in the new directions, along inputs that A did not see."""
    one = saved(tmp_path / "one", lora_alpha=5, rank_pattern={"two": 2})
    resize(one, tmp_path / "large", rank=7)
    assert near(dense(tmp_path / "large"), dense(one), 1e-6)
    old = factors(tmp_path / "one")
    for layer, (A, B) in factors(tmp_path / "large").items():
        r = len(old[layer][0])
        assert (len(A), B.shape[1]) == (7, 7)
        assert not B[:, r:].any()
        assert torch.linalg.matrix_rank(torch.cat([A, old[layer][0]]), tol=1e-4) == 7
        B, x = B.requires_grad_(), torch.randn(30, A.shape[1]).to(A)
        for a, learns in ((A, True), (torch.cat([A[:r], 0 * A[r:]]), False)):
            [gradient] = torch.autograd.grad((x @ (B @ a).T - 1).square().sum(), B)
            assert bool(gradient[:, r:].any()) == learns, "where both factors are 0 nothing is learnt"
    again = resized(one, tmp_path / "again", rank=7)
    assert near(dense(tmp_path / "large"), dense(again), 1e-12), "drawn, but the same"


def resized(one, out, **options):
    resize(one, out, **options)
    return out


def test_one_rank_for_all_layers_or_a_largest_one(tmp_path):
    one = saved(tmp_path / "one", r=6, rank_pattern={"two": 2})
    for energy, ranks in ((None, [4, 4]), (1.0, [4, 2])):
        out = resized(one, tmp_path / f"{energy}", rank=4, energy=energy)
        assert [len(A) for A, _ in factors(out).values()] == ranks


def test_compare(tmp_path):
    one, two = (
        saved(tmp_path / "one", r=2),
        saved(tmp_path / "two", 1, targets=["one"], lora_alpha=5, modules_to_save=["head"]),
    )
    found, a, b = compare(one, two), dense(one), dense(two)
    for layer in ("one", "two"):
        X = a[f"base_model.model.{layer}"]
        Y = b.get(f"base_model.model.{layer}", torch.zeros_like(X))
        assert found["layers"][layer]["norm"] == pytest.approx([float(X.norm()), float(Y.norm())], rel=1e-6)
        distance = float((X - Y).norm()) / max(float(X.norm()), float(Y.norm()))
        assert found["layers"][layer]["distance"] == pytest.approx(distance, rel=1e-6)
        assert found["layers"][layer]["singular_values"][0] == pytest.approx(
            torch.linalg.svdvals(X)[:2].tolist(), rel=1e-6
        )
    assert found["layers"]["two"]["rank"] == [2, 0]
    assert found["differs"]["lora_alpha"] == [8, 5]
    key = "base_model.model.head.0.bias"
    assert found["differs"][key] == [0, pytest.approx(float(tensors(two)[key].norm()))]
    same = compare(one, one)
    assert max(layer["distance"] for layer in same["layers"].values()) < 1e-12
    assert not same["differs"]


def test_half_precision_is_rounded_once(tmp_path):
    one, two = (saved(tmp_path / str(i), i, dtype=torch.bfloat16) for i in range(2))
    merge([one, two], tmp_path / "out")
    assert {t.dtype for t in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert near(dense(tmp_path / "out"), weighted([one, two], [0.5, 0.5]), 1e-2)
    merge([one, saved(tmp_path / "wide", 1)], tmp_path / "both")
    assert {t.dtype for t in tensors(tmp_path / "both").values()} == {torch.float32}
    eight = changed(one, tmp_path / "eight", lambda k, t: t.to(torch.float8_e4m3fn))
    balance(eight, tmp_path / "eight-even")
    assert {t.dtype for t in tensors(tmp_path / "eight-even").values()} == {torch.float32}, "float8 would lose percents"
    assert near(dense(tmp_path / "eight-even"), dense(eight), 1e-6)
    merge([eight, two], tmp_path / "mixed")
    assert {t.dtype for t in tensors(tmp_path / "mixed").values()} == {torch.float32}
    assert near(dense(tmp_path / "mixed"), weighted([eight, two], [0.5, 0.5]), 1e-6)


def test_files_are_aligned(tmp_path):
    given = {"a": torch.ones(3).bfloat16(), "b": torch.randn(2, 3), "c": torch.tensor(5), "d": torch.tensor([True]),
             "e": torch.randn(2).double(), "f": torch.zeros(0, 4)}  # fmt: skip
    with storage.TensorFile(tmp_path / "x.safetensors") as file:
        for key, t in given.items():
            file.update({key: t})
        file.finish({})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[k], t) and found[k].dtype == t.dtype for k, t in given.items())
    assert [*tmp_path.iterdir()] == [tmp_path / "x.safetensors"]


def test_what_cannot_be_read_is_named(tmp_path):
    one = saved(tmp_path / "one")
    pickled, ran = without_tensors(one, tmp_path / "pickled"), tmp_path / "ran"
    (pickled / "adapter_model.safetensors").unlink()

    class Code:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    torch.save({"lora_A": Code()}, pickled / "adapter_model.bin")
    (tmp_path / "named").mkdir()
    for name in ("german", "french"):
        changed(one, tmp_path / "named" / name)
    pointer = without_tensors(one, tmp_path / "pointer")
    (pointer / "adapter_config.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", encoding="utf-8"
    )
    broken = changed(one, tmp_path / "broken")
    (tmp_path / "broken/adapter_model.safetensors").write_bytes(b"not tensors")
    cases = {
        "nothing is no file, and no folder with adapter_config.json": tmp_path / "nothing",
        "it has the adapters french, german: name the folder of one": tmp_path / "named",
        "pickled cannot be read: adapter_model.bin is a pickle of more than tensors, which may run code;": pickled,
        "adapter_config.json is a pointer of Git LFS, not the file itself": pointer,
        "broken cannot be read: adapter_model.safetensors is no whole safetensors file": broken,
        "was made with IA3, whose layers add something else": changed(one, tmp_path / "ia3", peft_type="IA3"),
        "was made with kasa_config": changed(one, tmp_path / "kasa", kasa_config={"a": 1}),
        "was initialised by pissa_niter_4, which replaces": changed(
            one, tmp_path / "pissa", init_lora_weights="pissa_niter_4"
        ),
        r"one has factors \[3, 12\] and \[20, 3\], not of rank 4": changed(one, tmp_path / "r", r=4),
        r"one needs one rank above 0 and one finite alpha, got \[\(0, 8\)\]": changed(one, tmp_path / "r0", r=0),
        "none: adapter_config.json lacks r, so the scale": changed(one, tmp_path / "none", r=None),
        r"one finite alpha, got \[\(3, 'x'\)\]": changed(one, tmp_path / "alpha", lora_alpha="x"),
        r"inf cannot be read: adapter_config.json is no JSON .*Infinity is no number of JSON": changed(
            one, tmp_path / "inf", lora_alpha=float("inf")
        ),
        "ranks: rank_pattern is no regular expression: unterminated": changed(
            one, tmp_path / "ranks", rank_pattern={"two": 3, "[one": 3}
        ),
        "alphas: alpha_pattern is no regular expression: multiple repeat": changed(
            one, tmp_path / "alphas", alpha_pattern={"o**": 3}
        ),
        r"modules: target_modules is no regular expression: missing \)": changed(
            one, tmp_path / "modules", target_modules="(one"
        ),
        "empty has no pairs of factors": without_tensors(one, tmp_path / "empty"),
        "NaN or infinite": changed(one, tmp_path / "nan", lambda k, t: t * torch.nan),
        "has factors of torch.int8 and torch.int8": changed(one, tmp_path / "int8", lambda k, t: t.to(torch.int8)),
        "lora_B.weight is empty, as when DeepSpeed's ZeRO-3 or FSDP": changed(
            one, tmp_path / "shard", lambda k, t: t[:0] if "one.lora_B" in k else t
        ),
        "no pairs of factors in the names of peft": other_names(one, tmp_path / "loha"),
        r"two has factors \[3, 20\] and \[9, 1\]|one has factors": changed(
            one, tmp_path / "groups", lambda k, t: t[:, :1] if "lora_B" in k else t
        ),
    }
    for option in ("peft_type", "r", "lora_alpha"):
        cases[f"adapter_config.json lacks {option}, so the scale"] = lacking = tmp_path / f"no {option}"
        changed(one, lacking)
        config = json.loads((lacking / "adapter_config.json").read_text(encoding="utf-8"))
        del config[option]
        (lacking / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    for message, folder in cases.items():
        with pytest.raises((ValueError, OSError), match=message):
            merge([one, folder], tmp_path / "out")
    assert not ran.exists(), "the code of a pickle was run"
    experts = saved(tmp_path / "experts", **KINDS["experts"][0])
    experts = changed(experts, tmp_path / "apart", alpha_pattern={"experts.up": 3})
    with pytest.raises(ValueError, match=r"experts.* one finite alpha, got \[\(2, [36]\), \(2, [36]\)\]"):
        balance(experts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


FORMATS = {
    "kohya": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight", "lora_unet_{}.alpha"),
    "diffusers": ("unet.{}.lora_A.weight", "unet.{}.lora_B.weight", None),
    "older diffusers": ("unet.{}_lora.down.weight", "unet.{}_lora.up.weight", None),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_single_files_keep_their_names(kind, tmp_path):
    """Sums, balanced factors and distances of files without a config, whose products are computed by hand."""
    torch.manual_seed(0)

    def product(path, layer):
        t = load_file(path)
        a, b, alpha = (name and name.format(layer) for name in FORMATS[kind])
        A, B = t[a].double(), t[b].double()
        return (float(t[alpha]) / len(A) if alpha else 1.0) * B.flatten(1) @ A.flatten(1)

    files = [tmp_path / f"{r}.safetensors" for r in (2, 3)]
    for r, file in zip((2, 3), files, strict=True):
        shapes = {"one": ((r, 6), (7, r), ()), "conv": ((r, 4, 3, 3), (9, r, 1, 1), ())}
        given = {
            (name, k): size for k, sizes in shapes.items() for name, size in zip(FORMATS[kind], sizes, strict=True)
        }
        save_file({name.format(k): torch.randn(size) for (name, k), size in given.items() if name}, file)
    merge(files, tmp_path / "out", weights=[1, -2])
    balance(files[1], tmp_path / "even")
    out, even = tmp_path / "out" / files[0].name, tmp_path / "even" / files[1].name
    assert load_file(out).keys() == load_file(files[0]).keys()
    for layer in ("one", "conv"):
        expected = product(files[0], layer) - 2 * product(files[1], layer)
        assert torch.allclose(product(out, layer), expected, atol=1e-5)
        assert torch.allclose(product(even, layer), product(files[1], layer), atol=1e-5)
    assert max(layer["distance"] for layer in compare(files[1], even)["layers"].values()) < 1e-6
    peft_one = saved(tmp_path / "peft")
    other, (a, b, _) = tmp_path / "other.safetensors", FORMATS["diffusers" if kind == "kohya" else "kohya"]
    save_file({a.format("one"): torch.ones(2, 6), b.format("one"): torch.ones(7, 2)}, other)
    for one in (peft_one, other):
        with pytest.raises(ValueError, match="differ in the format of their names"):
            merge([files[0], one], tmp_path / "no")
    save_file(load_file(files[0]) | {"lora_unet_three.dora_scale": torch.ones(7)}, tmp_path / "dora.safetensors")
    with pytest.raises(ValueError, match=r"holds lora_unet_three\.dora_scale, which is no factor"):
        merge([tmp_path / "dora.safetensors"], tmp_path / "no")


NAMES = {
    **FORMATS,
    "saved as it is": ("{}.lora_A.default.weight", "{}.lora_B.default.weight", None),
    "peft": ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight", None),
}
METADATA = {"unet.r": 2, "unet.lora_alpha": 8, "unet.rank_pattern": {"two": 3}}


def bare(
    folder, names, ranks=(("one", 2), ("two", 3)), *, alphas=None, metadata=None, config=None, size=(7, 6), **more
):
    """Write random factors and what is said of their scales; return the place and the products B A."""
    generator, found, state = torch.Generator().manual_seed(0), {}, {**more}
    a, b, alpha = NAMES[names]
    for layer, r in ranks:
        A, B = (torch.randn(s, generator=generator).double() for s in ((r, size[1]), (size[0], r)))
        state |= {a.format(layer): A, b.format(layer): B}
        state |= {alpha.format(layer): torch.as_tensor(alphas[layer])} if alphas and layer in alphas else {}
        found[layer] = B @ A
    folder.mkdir()
    if config is not None:
        text = json.dumps({"peft_type": "LORA", "target_modules": ["one", "two"], **config}, ensure_ascii=False)
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    header = {"lora_adapter_metadata": json.dumps(metadata)} if metadata else {}
    place = folder / "adapter_model.safetensors"
    save_file(state, place, {"format": "pt", "modelspec.title": "mine", "sshs_model_hash": "0", **header})
    return place, found


RSLORA = {**METADATA, "unet.use_rslora": True, "unet.alpha_pattern": {"^one": 5}}
TWO = {"ranks": (("unet.one", 2), ("text.two", 3)), "metadata": {**METADATA, "text.r": 3, "text.lora_alpha": 1}}
PEFT = {"r": 2, "lora_alpha": 8, "rank_pattern": {"two": 3}}
SCALES = {
    "none": ({"names": "diffusers"}, (1, 1)),
    "default": ({"names": "saved as it is"}, (1, 1)),
    "alpha": ({"names": "kohya", "alphas": {"one": torch.tensor(3.0).half(), "two": [5.0]}}, (3 / 2, 5 / 3)),
    "metadata": ({"names": "diffusers", "metadata": METADATA}, (8 / 2, 8 / 3)),
    "rslora in metadata": ({"names": "diffusers", "metadata": RSLORA}, (5 / 2**0.5, 8 / 3**0.5)),
    "two models": ({"names": "saved as it is", **TWO}, (8 / 2, 1 / 3)),
    "config beside": ({"names": "peft", "config": PEFT}, (8 / 2, 8 / 3)),
}


@pytest.mark.parametrize("kind", SCALES)
def test_every_scale_that_a_file_states_is_read_and_kept(kind, tmp_path):
    made, scales = SCALES[kind]
    place, found = bare(tmp_path / "a", **made)
    balance(place, tmp_path / "even")
    merge([place, place], tmp_path / "sum", weights=[1, 1], energy=None)
    a, b, alpha = NAMES[made["names"]]
    for name, times in (("even", 1), ("sum", 2)):
        out = tmp_path / name / place.name
        t, again = load_file(out), folders.read(out)
        for (layer, product), scale, r in zip(found.items(), scales, (2, 3), strict=True):
            A, B = t[a.format(layer)], t[b.format(layer)]
            assert torch.allclose(B @ A, times * scale * product, atol=1e-12), "the result has the scale 1"
            assert again.rank_and_scale(a.format(layer).partition(".lora_")[0])[1] == 1
            assert len(A) == times * (3 if kind in ("none", "default") else r), "one rank, if nothing says the scales"
            assert alpha is None or t[alpha.format(layer)] == times * r
        with storage.safe_open(out, "pt") as file:
            assert file.metadata()["modelspec.title"] == "mine"
            assert "sshs_model_hash" not in file.metadata(), "it was that of other weights"
            said = json.loads(file.metadata().get("lora_adapter_metadata", "{}"))
        for model in {option.partition(".")[0] for option in said}:  # as diffusers reads it
            config = peft.LoraConfig(**configs.of_model(said, f"{model}."))
            assert (config.lora_alpha, config.alpha_pattern) == (config.r, config.rank_pattern)
    assert (tmp_path / "even/adapter_config.json").exists() == (kind == "config beside")


ALPHAS = {"names": "kohya", "alphas": {"one": 1.0, "two": 1.0}}
HALF = {"lora_unet_one.r": 2, "lora_unet_one.lora_alpha": 2, "lora_unet_two.r": 3}
UNCLEAR = {
    "one.alpha must be one number other than 0": {"names": "kohya", "alphas": {"one": 0.0, "two": 1.0}},
    "an alpha for 1 of 2 layers, but others lack it": {"names": "kohya", "alphas": {"one": 1.0}},
    "the metadata lora_adapter_metadata has one, too": {**ALPHAS, "metadata": {**HALF, "lora_unet_two.lora_alpha": 3}},
    "lora_adapter_metadata lacks lora_alpha": {**ALPHAS, "metadata": HALF},
    "lora_adapter_metadata lacks r, lora_alpha": {"names": "diffusers", "metadata": {"transformer.r": 2}},
    "the names of PEFT, whose scale is in adapter_config.json: name the folder": {"names": "peft"},
    "unet.one.diff_b, the change of a bias, which is no": {"names": "diffusers", "unet.one.diff_b": torch.ones(7)},
}


@pytest.mark.parametrize("message", UNCLEAR)
def test_a_scale_that_is_unclear_is_refused(message, tmp_path):
    place, _ = bare(tmp_path / "a", **UNCLEAR[message])
    with pytest.raises(ValueError, match=re.escape(message)):
        balance(place, tmp_path / "out")


def test_a_single_file_keeps_one_rank_and_its_metadata(tmp_path):
    place, _ = bare(tmp_path / "a", "diffusers", (("one", 4), ("two", 4)))
    state = load_file(place)
    state["unet.two.lora_B.weight"][:, 1:] *= 1e-3  # so that one direction holds nearly all energy
    save_file(state, place, {"ss_network_dim": "4", "ss_network_alpha": "4", "ss_tag": "x"})
    resize(place, tmp_path / "out", energy=0.9)
    t = load_file(tmp_path / "out" / place.name)
    [rank] = {len(v) for k, v in t.items() if "lora_A" in k}
    assert 1 < rank < 4, "the largest that a layer needs"
    with storage.safe_open(tmp_path / "out" / place.name, "pt") as file:
        said = {"ss_network_dim": f"{rank}", "ss_network_alpha": f"{rank}"}
        assert file.metadata() == {"format": "pt", "ss_tag": "x", **said}


def test_all_that_is_absent_is_named_together(tmp_path, capsys):
    place, _ = bare(tmp_path / "a", "kohya", alphas={"one": 2.0, "two": 3.0})
    absent = [str(tmp_path / name) for name in ("nope", "neither")]
    commands = (["merge", *absent, str(place), "--out", str(tmp_path / "out")], ["compare", *absent])
    for command in commands:
        assert main(command) == 2
        said = capsys.readouterr().err
        assert all(f"{name} is no file" in said for name in absent), said
        assert str(place) not in said
    with pytest.raises(FileNotFoundError) as error:
        merge([absent[0]] * 2, tmp_path / "out")
    assert str(error.value).count("is no file") == 1


@pytest.mark.skipif(os.name == "nt", reason="no such names there")
def test_a_name_of_several_lines_is_one_entry_of_the_card(tmp_path):
    place, _ = bare(tmp_path / "one\n- two", "kohya", alphas={"one": 2.0, "two": 3.0})
    merge([place] * 2, tmp_path / "out")
    lines = (tmp_path / "out/README.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("- ") for line in lines) == 2
    assert all(r"one\n- two" in line for line in lines if line.startswith("- "))


@pytest.mark.parametrize("size", [(4, 12), (9, 3), (4, 3)])
def test_no_direction_is_dead_where_the_rank_exceeds_a_layer(size, tmp_path):
    place, found = bare(tmp_path / "a", "kohya", (("one", 6),), alphas={"one": 6.0}, size=size)
    balance(place, tmp_path / "out")
    t = load_file(tmp_path / "out" / place.name)
    A, B = (t[name.format("one")] for name in NAMES["kohya"][:2])
    assert (A.shape, B.shape) == ((6, size[1]), (size[0], 6))
    assert torch.allclose(B @ A, found["one"], atol=1e-12)
    assert float(A.norm(dim=1).min()) > 0.1 * size[1] ** -0.5
    assert int((B.norm(dim=0) > 0).sum()) == min(size)
    if size[1] >= 6:
        assert float((A @ A.mT).fill_diagonal_(0).abs().max()) < 1e-12


def test_names_with_signs_of_expressions_are_read_again(tmp_path):
    layers = nn.ModuleDict({"a+b": nn.Linear(6, 5), "aab": nn.Linear(6, 5)})
    config = peft.LoraConfig(r=3, target_modules=["a+b", "aab"], rank_pattern={r"a\+b": 1}, init_lora_weights=False)
    peft.get_peft_model(layers, config).save_pretrained(tmp_path / "one")
    merge([tmp_path / "one"] * 2, tmp_path / "out")
    assert [at["rank"] for at in compare(tmp_path / "one", tmp_path / "out")["layers"].values()] == [[1, 1], [3, 3]]
    again = nn.ModuleDict({"a+b": nn.Linear(6, 5), "aab": nn.Linear(6, 5)})
    peft.PeftModel.from_pretrained(again, tmp_path / "out")  # where sizes that differ are an error


def test_experts_of_versions_that_swap_their_sides(tmp_path):
    """PEFT 0.18, 0.19.0 and 0.19.1 took other sides of an expert for its inputs, which square ones do not show."""
    options = {"r": 2, "lora_alpha": 2, "target_parameters": ["experts.up"], "target_modules": []}

    def made(version, *size):
        config = {**options, "peft_version": version}
        return bare(tmp_path / f"{version} {size}", "peft", (("experts", 4),), size=size, config=config)[0]

    square = made("0.18.1", 6, 6), made("0.20.0", 6, 6)
    old, new, swapped = made("0.18.1", 6, 5), made("0.20.0", 6, 5), made("0.20.0", 5, 6)
    for act in (compare, lambda *both: merge(both, tmp_path / "out")):
        with pytest.raises(
            ValueError, match=r"experts: .* cannot be told from their transposes in .*; PEFT 0\.19\.0 and"
        ):
            act(*square)
        with pytest.raises(ValueError, match=r"are \[\(2, 6, 5\), \(2, 5, 6\)\] in .*; PEFT 0\.19\.0 and"):
            act(old, swapped)
    for both in ((made("0.19.1@x", 6, 6), square[1]), (old, new)):
        assert compare(*both)["layers"]["experts"]["distance"] < 1e-12


def test_tokens_that_one_adapter_trained(tmp_path):
    one = saved(tmp_path / "one", trainable_token_indices={"words": [1, 4]})
    two = saved(tmp_path / "two", 1)
    [key] = (k for k in tensors(one) if "token" in k)
    for parents, out in (([one, two], "a"), ([two, one], "b")):
        merge(parents, tmp_path / out)
        assert torch.equal(tensors(tmp_path / out)[key], tensors(one)[key])
        assert near(dense(tmp_path / out), weighted(parents, [0.5, 0.5]), 1e-6)
        row = loaded(tmp_path / out).get_submodule("base_model.model.words")(torch.tensor([4]))
        assert torch.equal(row[0], tensors(one)[key][1].double())


def test_pickles_of_tensors_are_read(tmp_path):
    one = saved(tmp_path / "one", dtype=torch.bfloat16)
    old = tmp_path / "old"
    changed(one, old)
    torch.save(tensors(old), old / "adapter_model.bin")
    (old / "adapter_model.safetensors").unlink()
    for place in (old, old / "adapter_model.bin"):
        assert max(at["distance"] for at in compare(one, place)["layers"].values()) < 1e-12
    balance(old, tmp_path / "out")
    assert near(dense(tmp_path / "out"), dense(one), 1e-2)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    torch.save([1], old / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle of more than tensors"):
        balance(old, tmp_path / "no")


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_text_is_utf_8_whatever_the_locale(start, tmp_path, monkeypatch):
    place, _ = bare(tmp_path / "é×", "peft", config={**PEFT, "base_model_name_or_path": "Modèle/空"})
    config = place.with_name("adapter_config.json")
    config.write_text(start + config.read_text(encoding="utf-8"), encoding="utf-8")
    # As where the locale is C: a file that is opened without an encoding is ASCII.
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    balance(place.parent, tmp_path / "out")
    assert f"- 1 × {place.parent}\n" in (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert folders.read(tmp_path / "out").config["base_model_name_or_path"] == "Modèle/空"


def without_tensors(folder, out):
    changed(folder, out)
    save_file({}, out / "adapter_model.safetensors")
    return out


def other_names(folder, out):
    changed(folder, out)
    t = {k.replace("lora_A", "hada_w1_a"): v for k, v in tensors(out).items()}
    save_file(t, out / "adapter_model.safetensors")
    return out


def test_what_cannot_be_merged_is_named(tmp_path):
    one = saved(tmp_path / "one")
    narrow = changed(one, tmp_path / "narrow", lambda k, t: t[:, :7] if "one.lora_A" in k else t)
    tokens, others = (changed(one, tmp_path / f"t{i}", trainable_token_indices=[i]) for i in (1, 2))
    half, head = saved(tmp_path / "half", dtype=torch.float16), saved(tmp_path / "head", modules_to_save=["head"])
    head = changed(head, tmp_path / "bad", lambda k, t: t * torch.nan if "head" in k else t)
    for more, message in (
        ({"adapters": [one, narrow]}, r"one: experts, outputs and inputs are \[\(1, 20, 12\), \(1, 20, 7\)\] in"),
        ({"adapters": [one, tokens, others]}, r"the adapters trained different tokens, .*: \[\[1\], \[2\]\]"),
        ({"adapters": []}, "0 adapters need as many weights"),
        ({"weights": [1, 2]}, "1 adapters need as many weights, finite"),
        ({"weights": [float("nan")]}, "finite"),
        ({"method": "flat"}, "method must be one of sum, ties, dare, inv, mix"),
        ({"space": "flat"}, "space core or knots, .* got .*'sum', .*'flat'"),
        ({"density": 0}, "density and energy above 0 and at most 1, .*density=0"),
        ({"rank": 0}, "rank must be a whole number of at least 1 and below 2147483648, got 0"),
        ({"rank": 2.5}, "rank must be .* at least 1 and below 2147483648, got 2.5"),
        ({"energy": 2}, "energy above 0 and at most 1, .*energy=2"),
        ({"energy": 0}, "energy above 0 and at most 1, .*energy=0"),
        ({"weights": [1e308]}, "one: the product is too large for float64; use smaller weights"),
        ({"adapters": [one, one], "weights": [1e200, 1e-200]}, "one: the product is too large"),
        ({"adapters": [half], "weights": [1e12]}, "lora_A.weight would have NaN or infinite entries in torch.float16"),
        ({"adapters": [head]}, "head.0.bias would have NaN or infinite entries"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            merge(**{"adapters": [one], "out": tmp_path / "out", **more})
    other = changed(one, tmp_path / "other", base_model_name_or_path="another")
    with pytest.warns(UserWarning, match="one is of the model None, .*other of 'another'"):
        merge([one, other], tmp_path / "out")


def test_nothing_is_half_written(tmp_path, monkeypatch):
    one, out = saved(tmp_path / "one"), tmp_path / "out"
    before = set(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="exists already; name a new folder"):
        merge([one], one)
    with pytest.raises(FileNotFoundError, match="create it first"):
        merge([one], tmp_path / "no/where")

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(merging, "merged_config", killed)
    with pytest.raises(KeyboardInterrupt):
        merge([one], out)
    assert set(tmp_path.iterdir()) == before
    monkeypatch.undo()
    out.mkdir()
    merge([one], out)
    assert near(dense(out), dense(one), 1e-6)
    assert str(one) in (out / "README.md").read_text(encoding="utf-8")
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to("empty")
    merge([one], link)
    assert link.is_symlink()
    assert near(dense(tmp_path / "empty"), dense(one), 1e-6)


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither fork nor signals")
def test_what_a_killed_command_leaves_goes_with_the_next(tmp_path):
    one, out, mine = saved(tmp_path / "one"), tmp_path / "out[1]", tmp_path / ".out[1].quotient-lora-mine"
    kept = {tmp_path / "one", mine}
    (mine / "new").mkdir(parents=True)
    (mine / "notes.txt").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later: this process has threads
        child = os.fork()
    if not child:
        try:
            merging.merged_config = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            merge([one], out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    [left] = set(tmp_path.iterdir()) - kept
    assert left.name.startswith(".out[1].quotient-lora-"), "there is no half-written result"
    merge([one], tmp_path / "other")
    assert left.exists(), "it may be that of a command that runs"
    merge([one], out)
    assert set(tmp_path.iterdir()) == kept | {out, tmp_path / "other"}


def test_two_commands_with_one_folder(tmp_path):
    one, out = saved(tmp_path / "one"), tmp_path / "out"
    with storage.new_folder(out) as first:
        with pytest.raises(FileExistsError, match=r"another command is writing .*out; wait for it"):
            balance(one, out)
        assert first.exists()
        (first / "mine").touch()
    assert [p.name for p in out.iterdir()] == ["mine"]
    late = tmp_path / "late"
    with pytest.raises(FileExistsError, match="late exists already"), storage.new_folder(late):
        shutil.copytree(out, late)
    assert [p.name for p in late.iterdir()] == ["mine"]


def test_the_command(tmp_path, capsys):
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two", 1, r=2)
    out = str(tmp_path / "out")
    assert main(["merge", one, two, "--weights", "1", "-5e-1", "--out", out]) == 0
    assert near(dense(out), weighted([one, two], [1, -0.5]), 1e-5)
    assert main(["resize", out, "--rank", "2", "--out", f"{out}2"]) == 0
    assert main(["balance", one, "--out", f"{out}3"]) == 0
    most = max(at["distance"] for at in compare(out, f"{out}2")["layers"].values())
    assert capsys.readouterr().out == (
        f"{out}: 2 layers of rank 5\n"
        f"{out}2: 2 layers of rank 2, which cut off at most {100 * most:.3g} % of a product\n"
        f"{out}3: 2 layers of rank 3\n"
    )
    assert main(["compare", one, out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare(one, out)
    assert main(["compare", one, out]) == 0
    table = capsys.readouterr().out
    assert [line.split()[:4] for line in table.splitlines()[1:3]] == [[name, "3", "/", "5"] for name in ("one", "two")]
    assert ["differs", "ONE", "OTHER"] in [line.split() for line in table.splitlines()]
    assert ["r", "3", "5"] in [line.split() for line in table.splitlines()]
    assert main(["merge", one, "--out", out]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    other = changed(one, tmp_path / "other", base_model_name_or_path="another")
    with pytest.warns(UserWarning, match="of 'another'"):
        assert main(["merge", one, other, "--out", f"{out}4"]) == 0


def test_a_new_process_merges_without_peft_and_loads_without_a_warning(tmp_path):
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two", 1, r=2, targets=["two"])
    two = changed(two, tmp_path / "other", base_model_name_or_path="another")
    code = f"""
import sys
from quotient_manifolds.lora_command import command
sys.argv = ["quotient-lora", "merge", {one!r}, {two!r}, "--out", {str(tmp_path / "out")!r}]
assert command() == 0
assert not {{"peft", "transformers"}} & set(sys.modules)
"""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONWARNDEFAULTENCODING"}  # libraries name no encoding
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, encoding="utf-8", env=env)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'out'}: 2 layers of rank 3 to 5\n"), done.stderr
    assert done.stderr == f"quotient-lora: {one} is of the model None, {two} of 'another'\n"
    peft.PeftModel.from_pretrained(Net(), str(tmp_path / "out"))  # where a warning is an error


def test_help_needs_no_torch():
    code = """
import sys
from quotient_manifolds.lora_command import main
try:
    main(["--help"])
except SystemExit:
    print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert "quotient-lora merge one two" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither fork nor signals")
def test_a_command_that_is_told_to_end_removes_what_it_began(tmp_path, monkeypatch):
    one, seen = saved(tmp_path / "one"), []

    def ended(*_):
        seen.append(len([*tmp_path.iterdir()]))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(merging, "merged_config", ended)
    monkeypatch.setattr(warnings, "formatwarning", None)
    monkeypatch.setattr(sys, "argv", ["quotient-lora", "merge", one, "--out", str(tmp_path / "out")])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a command that does not listen goes on
    try:
        assert lora_command.command() == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (seen, [*tmp_path.iterdir()]) == ([2], [tmp_path / "one"])


@pytest.mark.parametrize(("closed", "arguments", "code", "said"), [
    (True, ["compare", "{}", "{}", "--json"], 141, ""), (True, ["--help"], 141, ""),
    (False, ["compare", "{}", "{}"], 2, "quotient-lora: [Errno 28] No space left on device\n"),
    (False, ["--help"], 2, "quotient-lora: [Errno 28] No space left on device\n"),
])  # fmt: skip
def test_nobody_reads_the_output(closed, arguments, code, said, tmp_path, monkeypatch, capsys):
    one = saved(tmp_path / "one")
    reader, writer = os.pipe()
    os.close(reader)
    if not closed:
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(warnings, "formatwarning", None)
    monkeypatch.setattr(sys, "argv", ["quotient-lora", *(word.format(one) for word in arguments)])
    before = signal.getsignal(signal.SIGTERM)
    with open(writer, "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        try:
            assert lora_command.command() == code
        finally:
            signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == said


def test_a_command_that_is_interrupted_says_so(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(adapters, "compare", interrupted)
    assert main(["compare", "one", "two"]) == 130
    assert capsys.readouterr().err == "quotient-lora: interrupted\n"


def test_the_config_says_which_layers_and_keeps_what_is_common(tmp_path):
    one = saved(tmp_path / "one", modules_to_save=["head"], lora_dropout=0.1)
    two = changed(one, tmp_path / "two", target_modules=["two", "one"])
    merge([one, two], tmp_path / "same")
    merge([one, saved(tmp_path / "part", targets=["two"])], tmp_path / "other")
    same, other = (
        json.loads((tmp_path / n / "adapter_config.json").read_text(encoding="utf-8")) for n in ("same", "other")
    )
    assert set(same["target_modules"]) == set(other["target_modules"]) == {"one", "two"}
    assert (same["modules_to_save"], same["lora_dropout"]) == (["head"], 0.1)
    assert other["rank_pattern"] == {"^one": 3}
    assert not compare(one, two)["differs"]
    old = json.loads((tmp_path / "one" / "adapter_config.json").read_text(encoding="utf-8"))
    bare = {k: old[k] for k in ("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save")}
    (tmp_path / "one" / "adapter_config.json").write_text(json.dumps(bare), encoding="utf-8")
    merge([one], tmp_path / "old")
    new = json.loads((tmp_path / "old" / "adapter_config.json").read_text(encoding="utf-8"))
    assert new.keys() - bare.keys() == {"init_lora_weights"}
    assert near(dense(tmp_path / "old"), dense(one), 1e-6)
