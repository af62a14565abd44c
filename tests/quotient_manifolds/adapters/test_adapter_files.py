"""Files of adapters as their tools write them, against a plain reading of each tool's rule, and files that are none."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from quotient_manifolds.adapters import balance, compare, merge, resize

OUT, IN = 7, 6
NAMES = {
    "kohya": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight", "lora_unet_{}.dora_scale"),
    "diffusers": tuple(f"transformer.{{}}.lora_{end}" for end in ("A.weight", "B.weight", "magnitude_vector")),
    "one model of diffusers": ("{}.lora_A.weight", "{}.lora_B.weight", "{}.lora_magnitude_vector"),
    "older diffusers": ("te.{}.lora_linear_layer.down.weight", "te.{}.lora_linear_layer.up.weight", None),
    "DiffSynth": ("{}.lora_A.default.weight", "{}.lora_B.default.weight", None),
}  # fmt: skip
RANKS = {"one": 2, "two": 3}


def options(kind):
    """What diffusers keeps in the metadata; a pattern of one layer for the rank, and for alpha."""
    prefix = "transformer." if kind == "diffusers" else ""
    config = {"r": 2, "lora_alpha": 8, "rank_pattern": {"two": 3}, "alpha_pattern": {"one": 5}, "use_rslora": False}
    return {f"{prefix}{option}": value for option, value in config.items()}


def write(file, kind, seed=0, magnitudes=False):
    generator = torch.Generator().manual_seed(seed)
    a, b, m = NAMES[kind]
    state, metadata = {}, {"format": "pt", "modelspec.title": "mine"}
    for layer, r in RANKS.items():
        r = 3 if kind in ("older diffusers", "DiffSynth") else r  # whose readers know one rank
        state[a.format(layer)] = torch.randn(r, IN, generator=generator).double()
        state[b.format(layer)] = torch.randn(OUT, r, generator=generator).double()
        if magnitudes:
            state[m.format(layer)] = 1 + torch.rand(OUT, 1, generator=generator).double()
        if kind == "kohya":
            state[f"lora_unet_{layer}.alpha"] = torch.tensor(5.0 if layer == "one" else 8.0)
    if "diffusers" in kind and kind != "older diffusers":
        metadata["lora_adapter_metadata"] = json.dumps(options(kind))
    save_file(state, file, metadata)
    return file


def changes(file, kind):
    """What the tool that wrote the file adds to each weight, and what it replaces norms by."""
    t = load_file(file)
    with safe_open(file, "pt") as opened:
        config = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    config = {option.removeprefix("transformer."): value for option, value in config.items()}
    found = {}
    for layer in RANKS:
        A, B, m = (t.get(name.format(layer)) if name else None for name in NAMES[kind])
        scale = 1.0
        if kind == "kohya":
            scale = float(t[f"lora_unet_{layer}.alpha"]) / len(A)
        elif config:
            by = {name.lstrip("^"): alpha for name, alpha in config["alpha_pattern"].items()}
            ranks = {name.lstrip("^"): r for name, r in config["rank_pattern"].items()}
            assert ranks.get(layer, config["r"]) == len(A), "the file would not load"
            scale = by.get(layer, config["lora_alpha"]) / len(A)
        found[layer] = (scale * B @ A, m)
    return found


@pytest.mark.parametrize("kind", NAMES)
def test_merges_are_read_as_the_tool_reads_them(kind, tmp_path):
    one, two = (write(tmp_path / f"{i}.safetensors", kind, i) for i in range(2))
    merge([one, two], tmp_path / "sum", weights=[0.7, -0.4])
    balance(one, tmp_path / "even")
    resize(one, tmp_path / "small", rank=1)
    X, Y = changes(one, kind), changes(two, kind)
    total, even, small = (changes(tmp_path / name / one.name, kind) for name in ("sum", "even", "small"))
    for layer in RANKS:
        assert torch.allclose(total[layer][0], 0.7 * X[layer][0] - 0.4 * Y[layer][0], atol=1e-8)
        assert torch.allclose(even[layer][0], X[layer][0], atol=1e-8)
        U, s, Vh = torch.linalg.svd(X[layer][0])
        assert torch.allclose(small[layer][0], s[0] * U[:, :1] @ Vh[:1], atol=1e-8)
    # A reading that takes all scales for 1 is wrong where the file states others.
    unscaled = torch.equal(load_file(one)[NAMES[kind][1].format("one")] @ load_file(one)[NAMES[kind][0].format("one")],
                           X["one"][0])  # fmt: skip
    assert unscaled == (kind in ("older diffusers", "DiffSynth"))
    assert load_file(tmp_path / "sum" / one.name).keys() == load_file(one).keys()
    with safe_open(tmp_path / "sum" / one.name, "pt") as file:
        assert file.metadata()["modelspec.title"] == "mine"
    assert max(at["distance"] for at in compare(one, tmp_path / "even" / one.name)["layers"].values()) < 1e-12


@pytest.mark.parametrize("kind", ["kohya", "diffusers", "one model of diffusers"])
def test_dora_of_files_keeps_its_weights(kind, tmp_path):
    """m (W + s B A) / |W + s B A|, row by row; a mean has the means of s B A and of m."""
    one, two = (write(tmp_path / f"{i}.safetensors", kind, i, magnitudes=True) for i in range(2))
    W = torch.randn(OUT, IN).double()

    def weight(delta, m):
        return m * (W + delta) / (W + delta).norm(dim=1, keepdim=True)

    balance(one, tmp_path / "even")
    merge([one, two], tmp_path / "mean", weights=[0.25, 0.75])
    even, mean = (changes(tmp_path / name / one.name, kind) for name in ("even", "mean"))
    X, Y = changes(one, kind), changes(two, kind)
    for layer in RANKS:
        assert torch.allclose(weight(*even[layer]), weight(*X[layer]), atol=1e-8)
        assert not torch.allclose(weight(even[layer][0], 1), weight(*X[layer]), atol=0.1)
        expected = [0.25 * x + 0.75 * y for x, y in zip(X[layer], Y[layer], strict=True)]
        assert torch.allclose(weight(*mean[layer]), weight(*expected), atol=1e-8)
    plain = write(tmp_path / "plain.safetensors", kind)
    for adapters, weights in (([one, two], [1, 1]), ([one], [0.5]), ([one, plain], [0.5, 0.5])):
        with pytest.raises(ValueError, match="DoRA divides by the norm of the adapted weight, so that only a mean"):
            merge(adapters, tmp_path / "no", weights=weights)


def test_biases_of_files_are_merged_as_products_are(tmp_path):
    """diffusers adds s (B A x + b), in files without metadata, such as those of Flux Control, s = 1."""
    for kind, scale in (("one model of diffusers", 5 / 2), ("diffusers", 5 / 2), ("diffusers", 1.0)):
        folder, key = tmp_path / f"{kind} {scale}", NAMES[kind][1].format("one").replace("weight", "bias")
        folder.mkdir()
        one, two = (write(folder / f"{i}.safetensors", kind, i) for i in range(2))
        for file in (one, two):
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() if scale != 1 else None
            save_file({**load_file(file), key: torch.randn(OUT).double()}, file, metadata)
        merge([one, two], folder / "sum", weights=[0.7, -0.4])
        t = load_file(folder / "sum" / one.name)
        expected = scale * (0.7 * load_file(one)[key] - 0.4 * load_file(two)[key])
        assert torch.allclose(t[key], expected, atol=1e-8)
        assert t.keys() == load_file(one).keys(), "no other layer has one"


def test_names_with_and_without_a_prefix_do_not_mix(tmp_path):
    one = write(tmp_path / "one.safetensors", "diffusers")
    two = write(tmp_path / "two.safetensors", "one model of diffusers")
    for both in ([one, two], [two, one]):
        with pytest.raises(ValueError, match=r"only one of .* has names with a prefix: rename the keys of one"):
            merge(both, tmp_path / "out")


FACTORS = {"base_model.model.l.lora_A.weight": torch.ones(2, 3), "base_model.model.l.lora_B.weight": torch.ones(4, 2)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["l"]}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
#: What a file has in place of an adapter: the weights from those that are right, and what is said.
WEIGHTS = {
    "empty": (lambda right: b"", "is no whole safetensors file .*: save or download it again"),
    "truncated": (lambda right: right[:-8], "is no whole safetensors file .*: save or download it again"),
    "cut in the header": (lambda right: right[:30], "is no whole safetensors file .*: save or download it again"),
    "a page": (lambda right: b"<!DOCTYPE html><html>", "is no whole safetensors file .*: save or download it again"),
    "a pointer": (lambda right: POINTER, "is a pointer of Git LFS, not the file itself"),
}
#: The same of configs.
CONFIGS = {
    "": "adapter_config.json is no JSON object in UTF-8 .*: write or download it again",
    '{"peft_type": "LORA",': "adapter_config.json is no JSON object in UTF-8",
    "[]": r"adapter_config.json is no JSON object in UTF-8 \(it is \[\]\)",
    "null": r"adapter_config.json is no JSON object in UTF-8 \(it is null\)",
    POINTER.decode(): "adapter_config.json is a pointer of Git LFS",
    "{}": "adapter_config.json lacks peft_type, r, lora_alpha, so the scale of the products is unknown",
    '{"lora_parameters": {"rank": 2, "scale": 20.0}}': "adapter_config.json lacks peft_type, r, lora_alpha",
    json.dumps({**CONFIG, "peft_type": None}): "adapter_config.json lacks peft_type",
    json.dumps({**CONFIG, "modules_to_save": "head"}): "modules_to_save is not what peft writes there: 'head'",
    json.dumps({**CONFIG, "rank_pattern": ["l"]}): r"rank_pattern is not what peft writes there: \['l'\]",
    json.dumps({**CONFIG, "target_modules": 5}): "target_modules is not what peft writes there: 5",
    json.dumps({**CONFIG, "target_parameters": "l"}): "target_parameters is not what peft writes there: 'l'",
    json.dumps({**CONFIG, "trainable_token_indices": 5}): "trainable_token_indices is not what peft writes there: 5",
    json.dumps(
        {**CONFIG, "modules_to_save": [["head"]]}
    ): r"modules_to_save is not what peft writes there: \[\['head'\]\]",
    json.dumps({**CONFIG, "target_parameters": [5]}): r"target_parameters is not what peft writes there: \[5\]",
    json.dumps({**CONFIG, "lora_dropout": math.nan}): r"is no JSON .* \(NaN is no number of JSON\)",
    json.dumps({**CONFIG, "lora_alpha": 10**400}): r"needs one rank above 0 and one finite alpha",
    json.dumps({**CONFIG, "r": [2]}): r"needs one rank above 0 and one finite alpha, got \[\(\[2\]",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/adapter_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(FACTORS, tmp_path / "one/adapter_model.safetensors")
    balance(tmp_path / "one", tmp_path / "right")
    return tmp_path / "one"


def refused(place, said, tmp_path):
    before = set(tmp_path.iterdir())
    for act in (lambda: balance(place, tmp_path / "out"), lambda: compare(place, place)):
        with pytest.raises(ValueError, match=said) as raised:
            act()
        assert "\n" not in str(raised.value)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_file_that_is_not_whole_is_named(kind, folder, tmp_path):
    spoil, said = WEIGHTS[kind]
    file = folder / "adapter_model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    refused(folder, f"adapter_model.safetensors {said}", tmp_path)
    single = write(tmp_path / "single.safetensors", "kohya")
    single.write_bytes(spoil(single.read_bytes()))
    refused(single, f"single.safetensors {said}", tmp_path)


def test_a_factor_that_is_a_number_is_named(folder, tmp_path):
    save_file({**FACTORS, "base_model.model.l.lora_A.weight": torch.tensor(1.0)}, folder / "adapter_model.safetensors")
    refused(folder, r"l.lora_A.weight has the shape \(\), which is none of a matrix", tmp_path)


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_that_is_none_of_peft_is_named(text, folder, tmp_path):
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    refused(folder, CONFIGS[text], tmp_path)


def test_a_pickle_that_is_not_whole_is_named(folder, tmp_path):
    file = folder / "adapter_model.bin"
    torch.save(FACTORS, file)
    (folder / "adapter_model.safetensors").unlink()
    right = file.read_bytes()
    for part in (b"", right[:-30], POINTER):
        file.write_bytes(part)
        said = "is a pointer of Git LFS" if part == POINTER else "is no whole file of torch.save: save or download it"
        refused(folder, f"adapter_model.bin {said}", tmp_path)
