"""Adapters in the names of other tools, by a plain reading of each tool's rule, and there and back."""

import json
import re

import peft
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import nn

from quotient_manifolds.adapters import Adapter, compare, convert
from quotient_manifolds.adapters.folders import WEIGHTS, read
from quotient_manifolds.lora_command import main

#: Of peft, about the bias of B.
pytestmark = pytest.mark.filterwarnings("ignore:Adapter 'default'")
PATHS = ("down_blocks.0.to_q", "mid-block.to_out.0", "conv")
FILE = "pytorch_lora_weights.safetensors"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down_blocks = nn.ModuleList([nn.Module()])
        self.down_blocks[0].to_q = nn.Linear(6, 7)
        self.add_module("mid-block", nn.Module())
        getattr(self, "mid-block").to_out = nn.Sequential(nn.Linear(6, 5))
        self.conv = nn.Conv2d(3, 4, 3)


def saved(folder, **options):
    """An adapter of peft in float64, with ranks and scales of its own in each layer, and the base beside it."""
    torch.manual_seed(0)
    options = {"r": 2, "lora_alpha": 3, "rank_pattern": {"to_q": 4}, "alpha_pattern": {"conv": 8}, **options}
    config = peft.LoraConfig(target_modules=["to_q", "to_out.0", "conv"], init_lora_weights=False, **options)
    net = Net()
    save_file(dict(net.state_dict()), folder / "base.safetensors")
    model = peft.get_peft_model(net, config).double()
    model.save_pretrained(folder / "peft")
    return folder / "peft"


def of_peft(folder):
    """What peft adds to each weight."""
    model = peft.PeftModel.from_pretrained(Net(), str(folder)).double()
    found = {p: m for p, m in model.base_model.model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    return {path: m.get_delta_weight("default").detach() for path, m in found.items()}


def product(A, B):
    return (B.flatten(1) @ A.flatten(1)).reshape(len(B), *A.shape[1:])


def of_kohya(folder):
    """W += alpha / r up down, by the names of the network's modules with underscores."""
    t = load_file(folder / FILE)
    found = {}
    for path in PATHS:
        name = f"lora_unet_{path.replace('.', '_')}"
        A, B = t.pop(f"{name}.lora_down.weight"), t.pop(f"{name}.lora_up.weight")
        found[path] = float(t.pop(f"{name}.alpha")) / len(A) * product(A, B)
        t.pop(f"{name}.dora_scale", None)
    assert not t
    return found


def of_diffusers(folder):
    """By the config in the metadata, as peft reads it."""
    t = load_file(folder / FILE)
    with safe_open(folder / FILE, "pt") as file:
        said = json.loads(file.metadata()["lora_adapter_metadata"])
    config = peft.LoraConfig(**{key.removeprefix("unet."): value for key, value in said.items()})
    found = {}
    for path in PATHS:
        A, B = (t[f"unet.{path}.lora_{f}.weight"] for f in "AB")
        by = [(v, k) for k, v in config.alpha_pattern.items() if re.match(rf"(.*\.)?({k})$", path)]
        ranks = [v for k, v in config.rank_pattern.items() if re.match(rf"(.*\.)?({k})$", path)]
        assert (ranks or [config.r])[0] == len(A), "the file would not load"
        alpha = by[0][0] if by else config.lora_alpha
        found[path] = alpha / (len(A) ** 0.5 if config.use_rslora else len(A)) * product(A, B)
    return found


def of_diffsynth(folder):
    """Without any scale."""
    t = load_file(folder / FILE)
    return {path: product(*(t[f"unet.{path}.lora_{f}.default.weight"] for f in "AB")) for path in PATHS}


READERS = {"peft": of_peft, "kohya": of_kohya, "diffusers": of_diffusers, "diffsynth": of_diffsynth}


def near(one, other, tolerance=1e-6):
    assert one.keys() == other.keys()
    return all(float((one[k] - other[k]).norm()) <= tolerance * float(other[k].norm()) for k in one)


@pytest.mark.parametrize(("to", "alpha"), [("kohya", "8"), ("diffsynth", "4")])
def test_metadata_say_the_one_rank(to, alpha, tmp_path):
    """Their alpha is that of every layer; diffsynth's products have no scale beside their factors."""
    place, said = tmp_path / FILE, {"ss_network_dim": "Dynamic", "ss_network_alpha": "Dynamic", "ss_tag": "x"}
    state = dict[str, torch.Tensor]()
    for layer, rank in (("one", 2), ("two", 4)):
        factors = {"lora_down.weight": (rank, 5), "lora_up.weight": (6, rank)}
        state |= {f"lora_unet_{layer}.{part}": torch.randn(shape) for part, shape in factors.items()}
        state[f"lora_unet_{layer}.alpha"] = torch.tensor(2.0 * rank)
    save_file(state, place, said)
    for one_rank, of in ((False, {}), (True, {"ss_network_dim": "4", "ss_network_alpha": alpha})):
        convert(place, tmp_path / f"{one_rank}", to=to, one_rank=one_rank)
        with safe_open(tmp_path / f"{one_rank}" / FILE, "pt") as file:
            assert {**said, **of}.items() <= file.metadata().items()


@pytest.mark.parametrize("one_rank", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["alpha", "rslora"])
@pytest.mark.parametrize("way", [*((to,) for to in READERS), ("diffusers", "kohya", "diffsynth", "kohya")])
def test_every_tool_reads_the_same_products_and_back(way, options, one_rank, tmp_path):
    place = saved(tmp_path, **options)
    expected = of_peft(place)
    for i, to in enumerate(way):
        model = None if to == "peft" else "unet"
        convert(place, tmp_path / f"{i}", to=to, base=tmp_path / "base.safetensors", model=model, one_rank=one_rank)
        assert near(READERS[to](tmp_path / f"{i}"), expected)
        place = tmp_path / f"{i}" if to == "peft" else tmp_path / f"{i}" / FILE
        t = load_file(place / WEIGHTS if to == "peft" else place)
        ranks = {len(v) for key, v in t.items() if "lora_A" in key or "lora_down" in key}
        assert ranks == ({4} if one_rank else {2, 4})
    options = ["--to", "peft", "--base", f"{tmp_path}/base.safetensors", "--out", f"{tmp_path}/back"]
    assert main(["convert", str(place), *options]) == 0
    assert near(of_peft(tmp_path / "back"), expected)
    if not one_rank and "diffsynth" not in way:
        one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("peft", "back"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), "factors are the same"
    if not one_rank and way in (("diffusers",), ("peft",)):
        texts = [(tmp_path / name / "adapter_config.json").read_text(encoding="utf-8") for name in ("peft", "back")]
        one, two = map(json.loads, texts)
        assert {**one, "target_modules": sorted(one["target_modules"])} == two, "nothing of the config is lost"


def test_a_wrong_scale_is_another_adapter(tmp_path):
    place = saved(tmp_path)
    convert(place, tmp_path / "out", to="kohya", model="unet")
    t = load_file(tmp_path / "out" / FILE)
    save_file({k: 1.01 * v if k.endswith("alpha") else v for k, v in t.items()}, tmp_path / "out" / FILE)
    assert not near(of_kohya(tmp_path / "out"), of_peft(place))


def test_magnitudes_and_metadata_go_along(tmp_path):
    state = {f"lora_unet_{n}.{end}": t.double() for n in ("to_q", "to_k") for end, t in {
        "lora_down.weight": torch.randn(2, 6), "lora_up.weight": torch.randn(7, 2), "alpha": torch.tensor(1.5),
        "dora_scale": torch.rand(7, 1)}.items()}  # fmt: skip
    save_file(state, tmp_path / "kohya.safetensors", {"ss_tag": "mine"})
    save_file({"to_q.weight": torch.ones(7, 6), "to_k.weight": torch.zeros(7, 6)}, tmp_path / "base.safetensors")
    place = tmp_path / "kohya.safetensors"
    for i, to in enumerate(("peft", "diffusers", "kohya")):
        convert(place, tmp_path / f"{i}", to=to, base=tmp_path / "base.safetensors", model="unet")
        place = tmp_path / f"{i}" / (FILE if to != "peft" else WEIGHTS)
        with safe_open(place, "pt") as file:
            assert file.metadata()["ss_tag"] == "mine"
        m = {"peft": "base_model.model.to_q.lora_magnitude_vector", "diffusers": "unet.to_q.lora_magnitude_vector"}
        key = m.get(to, "lora_unet_to_q.dora_scale")
        assert torch.equal(load_file(place)[key].flatten(), state["lora_unet_to_q.dora_scale"].flatten())
    config = json.loads((tmp_path / "0/adapter_config.json").read_text(encoding="utf-8"))
    assert (config["use_dora"], config["lora_alpha"], config["r"]) == (True, 1.5, 2)
    after = load_file(place)
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key].double(), state[key]) for key in state)
    net = nn.Module()
    net.to_q, net.to_k = nn.Linear(6, 7), nn.Linear(6, 7)
    loaded = peft.PeftModel.from_pretrained(net, str(tmp_path / "0")).base_model.model.to_q
    m = loaded.lora_magnitude_vector["default"].weight.double()
    assert torch.allclose(m, state["lora_unet_to_q.dora_scale"].flatten())


def plain(names):
    """An adapter in memory with these endings of keys."""
    shapes = {"down": (2, 6), "up": (7, 2), "A": (2, 6), "B": (7, 2)}
    return {name: torch.ones(shapes[re.findall("down|up|A|B", name)[-1]]) for name in names}


def keys(layer, a="lora_down", b="lora_up"):
    return [f"{layer}.{a}.weight", f"{layer}.{b}.weight"]


Q = keys("to_q", "lora_A", "lora_B")
TWO = keys("unet.q", "lora_A", "lora_B") + keys("text_encoder.q", "lora_A", "lora_B")
UNET, BASE = {"to": "kohya", "model": "unet"}, {"to": "peft", "base": "base"}
REFUSED = {
    "underscores of lora_unet_to_q stand for dots: give the model, --base": (keys("lora_unet_to_q"), {"to": "peft"}),
    "which underscores of lora_unet_up_x stand for dots: .* has 0 layers": (keys("lora_unet_up_x"), BASE),
    "which underscores of lora_unet_a_b_c stand for dots: .* has 2 layers": (keys("lora_unet_a_b_c"), BASE),
    "does not say of which model it is, as kohya's names do: give it, --model unet": (Q, {"to": "kohya"}),
    r"has layers of 2 models, \['text_encoder', 'unet'\], which peft cannot tell": (TWO, {"to": "peft"}),
    "has layers of several models, which are not all called 'unet'": (TWO, UNET),
    "several layers would be called lora_unet_to_q": (Q + keys("to.q", "lora_A", "lora_B"), UNET),
    r"holds unet\.attn1\.processor\.to_q": (keys("unet.attn1.processor.to_q", "lora.down", "lora.up"), {"to": "peft"}),
    "to must be one of peft, diffusers, diffsynth, kohya, got 'comfy'": (Q, {"to": "comfy"}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_name_is_refused(said, tmp_path):
    names, options = REFUSED[said]
    if "base" in options:
        options = {**options, "base": tmp_path / "base.safetensors"}
        save_file({f"{n}.weight": torch.ones(1) for n in ("a.b_c", "a_b.c")}, options["base"])
    before = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=said):
        convert(Adapter.from_state(plain(names)), tmp_path / "out", **options)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_bias": True}, r"holds .*lora_B\.bias, which kohya has no name for"),
        ({"modules_to_save": ["head"]}, "holds .*head.bias, which kohya has no name for"),
        ({"target_modules": ["words"]}, "holds .*words, which kohya has no name for"),
        ({"target_modules": ["square"], "fan_in_fan_out": True}, "holds .*square, which kohya has no name for"),
    ],
)
def test_parts_of_peft_without_a_name_are_refused(options, said, tmp_path):
    from transformers.pytorch_utils import Conv1D

    layers = {"q": nn.Linear(6, 6), "head": nn.Linear(6, 2), "words": nn.Embedding(5, 6), "square": Conv1D(6, 6)}
    config = peft.LoraConfig(r=2, **{"target_modules": ["q"], **options})
    peft.get_peft_model(nn.Sequential(nn.ModuleDict(layers)), config).save_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match=said):
        convert(tmp_path / "one", tmp_path / "out", to="kohya", model="unet")
    assert not (tmp_path / "out").exists()


def test_two_models_of_a_pipeline(tmp_path):
    names = [f"{m}.q" for m in ("unet", "text_encoder", "text_encoder_2")]
    state = {key: torch.rand_like(t) for layer in names for key, t in plain(keys(layer, "lora_A", "lora_B")).items()}
    save_file(state, tmp_path / "one.safetensors")
    convert(tmp_path / "one.safetensors", tmp_path / "two", to="kohya")
    assert {layer for layer in read(tmp_path / "two" / FILE).layers} == {"lora_unet_q", "lora_te1_q", "lora_te2_q"}
    convert(tmp_path / "two" / FILE, tmp_path / "three", to="diffusers")
    found = compare(tmp_path / "one.safetensors", tmp_path / "three" / FILE)["layers"]
    assert found.keys() == {*names}
    assert max(at["distance"] for at in found.values()) < 1e-7
