"""Adapters of a model in memory, against the deltas that peft computes and against the same adapters as files."""

import copy

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quotient_manifolds.adapters import Adapter, balance, compare, convert, merge, resize
from tests.quotient_manifolds.adapters.test_adapters import KINDS, Net, exact, moved, near, saved

pytestmark = pytest.mark.filterwarnings("ignore:Adapter '", "ignore:The following (rank|alpha)_pattern keys")


def model_of(*folders):
    """A model with an adapter of each folder, called ``of_0``, ``of_1``, …"""
    torch.manual_seed(0)
    model = peft.PeftModel.from_pretrained(Net(), folders[0], "of_0")
    for i, folder in enumerate(folders[1:], 1):
        model.load_adapter(folder, f"of_{i}")
    return model


def deltas(model, name):
    layers = {path: m for path, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    known = {path: m for path, m in layers.items() if name in m.lora_A or name in m.lora_embedding_A}
    found = {path: m.get_delta_weight(name).detach() for path, m in known.items()}
    biased = {path: m for path, m in known.items() if m.lora_bias.get(name)}
    return found | {f"{p} bias": (m.scaling[name] * m.lora_B[name].bias).detach() for p, m in biased.items()}


def summed(parts, weights):
    keys = {k: torch.zeros_like(v) for part in parts for k, v in part.items()}
    return {k: sum(w * part.get(k, zero) for w, part in zip(weights, parts, strict=True)) for k, zero in keys.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "experts" not in kind])
def test_a_sum_in_memory_is_that_of_the_deltas(kind, tmp_path):
    folders = [saved(tmp_path / str(i), i, **{"targets": ("one", "two"), **o}) for i, o in enumerate(KINDS[kind])]
    model, weights = model_of(*folders), [0.7, -0.4]
    before, active = copy.deepcopy(model.state_dict()), model.active_adapters
    both = merge([Adapter.from_model(model, f"of_{i}") for i in range(2)], weights=weights)
    both.add_to(model, "both")
    expected = summed([deltas(model, f"of_{i}") for i in range(2)], weights)
    assert near(deltas(model, "both"), expected, 1e-5)
    assert not near(deltas(model, "both"), summed([deltas(model, f"of_{i}") for i in range(2)], [0.7, 0.4]), 1e-2)
    assert model.active_adapters == active
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("kind", ["patterns", "bias", "experts", "convolutions and embeddings"])
def test_files_and_memory_are_one_code(kind, tmp_path):
    folders = [saved(tmp_path / str(i), i, **{"targets": ("one", "two"), **o}) for i, o in enumerate(KINDS[kind])]
    adapters = [Adapter.from_model(model_of(folder), "of_0") for folder in folders]
    for method in ("sum", "ties", "dare"):
        options = {"method": method, "rank": 2, "seed": 3}
        merge(folders, tmp_path / method, **options)
        found, written = merge(adapters, **options), load_file(tmp_path / method / "adapter_model.safetensors")
        assert found.state.keys() == written.keys()
        for key, t in written.items():
            torch.testing.assert_close(found.state[key].float(), t)  # of a file in single precision
    layers = compare(adapters[0], folders[0])["layers"].values()
    assert [layer["distance"] for layer in layers] == pytest.approx([0.0] * len(layers), abs=1e-6)


def beside(adapter):
    return {key for key in adapter.state if not key.endswith(("lora_A.weight", "lora_B.weight"))}


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["head"]}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_one_adapter_gives_itself_back(options, tmp_path):
    model = model_of(saved(tmp_path / "one", lora_alpha=5, **options))
    own = Adapter.from_model(model, "of_0")
    for again in (merge([own]), balance(own)):
        again.add_to(model, "again")
        found, expected = deltas(model, "again"), deltas(model, "of_0")
        assert near(found, expected, 1e-6)
        assert beside(again) == beside(own)
        for key in beside(again):
            assert torch.allclose(again.tensor(key) * (own.rank_and_scale(key.rpartition(".lora_")[0])[1] ** -1
                                  if "lora_B.bias" in key else 1), own.tensor(key), atol=1e-6)  # fmt: skip
        model.delete_adapter("again")
    assert not compare(own, balance(own))["differs"].keys() - {"lora_alpha", "use_rslora", "init_lora_weights"}
    balance(own, tmp_path / "file").add_to(model, "of a file")
    assert near(deltas(model, "of a file"), deltas(model, "of_0"), 1e-6)
    assert len(beside(own)) == {"modules_to_save": 2, "use_dora": 2, "lora_bias": 2}.get(next(iter(options), ""), 0)


def test_every_client_gets_the_nearest_product_of_its_rank(tmp_path):
    """A server's step: the exact sum of what clients of different ranks send, cut to the rank of each."""
    ranks, weights = (1, 2, 4), [0.2, 0.3, 0.5]
    states = [Adapter.from_model(model_of(saved(tmp_path / str(i), i, r=r)), "of_0") for i, r in enumerate(ranks)]
    sent = [Adapter.from_state(s.state, s.config, name=f"client {i}") for i, s in enumerate(states)]
    models = [model_of(tmp_path / str(i)) for i in range(3)]
    total = summed([deltas(m, "of_0") for m in models], weights)
    for model, r in zip(models, ranks, strict=True):
        merge(sent, weights=weights, rank=r, energy=None).add_to(model, "new")
        for key, found in deltas(model, "new").items():
            U, s, Vh = torch.linalg.svd(total[key])
            assert torch.allclose(found, U[:, :r] * s[:r] @ Vh[:r], atol=1e-5)
    factors = [
        {key: t[..., :1, :] if "_A" in key else t[..., :1] for key, t in client.state.items()} for client in sent
    ]
    mean = {key: sum(w * f[key] for w, f in zip(weights, factors, strict=True)) for key in factors[0]}
    Adapter.from_state(mean, sent[0].config).add_to(models[0], "of factors")
    assert not near(deltas(models[0], "of factors"), deltas(models[0], "new"), 0.1)


def test_the_factors_make_no_difference(tmp_path):
    one, two = exact(tmp_path / "one"), exact(tmp_path / "two", seed=1, near_to=tmp_path / "one")
    other = moved(two, tmp_path / "moved")
    found = []
    for pair in ((one, two), (one, other)):
        model = model_of(*pair)
        resize(merge([Adapter.from_model(model, f"of_{i}") for i in range(2)]), rank=2).add_to(model, "small")
        found.append(deltas(model, "small"))
    assert near(*found, 1e-6)
    factors = [Adapter.from_model(model_of(folder), "of_0").state for folder in (two, other)]
    assert not all(torch.allclose(factors[0][key], factors[1][key], rtol=0.1) for key in factors[0])


def test_what_does_not_fit_is_named_and_harms_no_model(tmp_path):
    model = model_of(saved(tmp_path / "one"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    own = Adapter.from_model(model, "of_0")
    with pytest.raises(ValueError, match="has no adapter 'other'; it has of_0"):
        Adapter.from_model(model, "other")
    with pytest.raises(ValueError, match="Linear has no adapter 'default'; it has none"):
        Adapter.from_model(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has an adapter 'of_0' already"):
        own.add_to(model, "of_0")
    with pytest.raises(ValueError, match="lacks lora_alpha, so the scale of the products"):
        Adapter.from_state(own.state, {"peft_type": "LORA", "r": 3})
    with pytest.raises(ValueError, match="no pairs of factors"):
        Adapter.from_state({"weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="has the names of PEFT, whose scale is in"):
        Adapter.from_state(own.state)
    kohya = {"lora_unet_q.lora_down.weight": torch.ones(2, 6), "lora_unet_q.lora_up.weight": torch.ones(7, 2)}
    with pytest.raises(ValueError, match="adapter has not the names of PEFT: convert it to peft first"):
        Adapter.from_state(kohya).add_to(model, "new")
    saved(tmp_path / "more", targets=("one", "two", "words"))
    more = Adapter.from_model(model_of(tmp_path / "more"), "of_0")
    fewer = {key: t for key, t in more.state.items() if ".one." not in key}
    with pytest.raises(ValueError, match="does not fit PeftModel, which has not the same"):
        Adapter.from_state(fewer, more.config).add_to(model, "new")
    assert list(model.peft_config) == ["of_0"]
    # What peft wrapped for the adapter has another name.
    after = {key.replace(".base_layer", ""): t for key, t in model.state_dict().items()}
    assert after.keys() == {key.replace(".base_layer", "") for key in before}
    assert all(torch.equal(after[key.replace(".base_layer", "")], t) for key, t in before.items())


def test_what_is_no_adapter_is_named():
    """Each ended in an AttributeError, a KeyError of torch or, at the overflow, in an adapter of infinite entries."""
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5))
    model = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    own = Adapter.from_model(model)
    A, B = torch.full((1, 3), 6e4).half(), torch.ones(2, 1).half()
    large = Adapter.from_state({"l.lora_A.weight": A, "l.lora_B.weight": B})
    for said, act in {
        "Linear is no model of peft": lambda: own.add_to(torch.nn.Linear(2, 2), "new"),
        "must be text without a dot, got 'new.one'": lambda: own.add_to(model, "new.one"),
        "must be a mapping of names to tensors, and has a str": lambda: Adapter.from_state({"l.lora_A.weight": "x"}),
        "must be a mapping of names to tensors, and has a int": lambda: Adapter.from_state(3),
        "density and energy above 0 and at most 1": lambda: merge([own], density=torch.ones(2)),
        "would have NaN or infinite entries in torch.float16": lambda: merge([large], weights=[1e9]),
    }.items():
        with pytest.raises((TypeError, ValueError), match=said):
            act()


def test_what_is_no_path_no_rank_no_flag_and_no_config_is_named(tmp_path):
    """What the fuzz found last: each ended in a raw error of Python or torch."""
    one = saved(tmp_path / "one", 0)
    state, config = Adapter.from_model(model_of(one), "of_0").state, {"r": 3, "lora_alpha": 8, "peft_type": "LORA"}
    wrong = {
        "has a NUL character": lambda: merge([one, one], f"{tmp_path}/a\0b"),
        "rank must be a whole number of at least 1 and below": lambda: resize(one, tmp_path / "small", rank=2**70),
        "one_rank must be True or False": lambda: convert(one, tmp_path / "kohya", to="kohya", one_rank=torch.ones(2)),
        "lora_alpha is an array": lambda: Adapter.from_state(state, {**config, "lora_alpha": torch.ones(2)}),
    }
    for words, call in wrong.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
