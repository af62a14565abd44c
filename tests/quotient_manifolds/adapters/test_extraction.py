"""Adapters from two models: outputs when peft loads them on the base, and dense singular values."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from quotient_manifolds.adapters import compare, extract, extraction
from quotient_manifolds.lora_command import main
from tests.support import local_hub, networks
from tests.support.networks import shake

#: Of peft, when transformers has renamed what it asks for.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
TOKENS = {"input_ids": torch.arange(8).view(2, 4)}


def bert():
    torch.manual_seed(0)
    return networks.bert()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return shake(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, n_positions=8)))


def layers(model):
    """The layers that are adapted by default."""
    left = ("emb", "wte", "wpe", "head", "classifier")
    found = {n: m for n, m in model.named_modules() if not any(part in n for part in left)}
    return {n: m for n, m in found.items() if getattr(m, "weight", None) is not None and m.weight.dim() == 2}


def outputs(model):
    with torch.no_grad():
        return model.double().eval()(**TOKENS).logits


def adapted(base, folder):
    return outputs(peft.PeftModel.from_pretrained(base, str(folder)))


@pytest.fixture(params=[bert, gpt2])
def models(request, tmp_path):
    """A base in a folder, and another model that a product of rank 2 in every layer makes of it."""
    base, tuned = request.param().double(), request.param().double()
    base.save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(1)
    for layer in layers(tuned).values():
        n, m = layer.weight.shape
        G, H = (torch.randn(k, 2, generator=generator, dtype=torch.float64) for k in (n, m))
        layer.weight.data += 0.1 * G @ H.mT
    tuned.save_pretrained(tmp_path / "tuned")
    return request.param, tuned, tmp_path


def test_a_product_of_low_rank_is_found_again(models):
    make, tuned, folder = models
    found = extract(folder / "base", folder / "tuned", folder / "out", rank=2)
    assert found["layers"].keys() == layers(tuned).keys()
    assert found["left"] == {}
    assert all(at["rank"] == [2, 2] and at["distance"] < 1e-10 for at in found["layers"].values())
    expected, size = outputs(tuned), float((outputs(tuned) - outputs(make().double())).norm())
    assert float((adapted(make(), folder / "out") - expected).norm()) < 1e-6 * size
    cut = extract(folder / "base", folder / "tuned", folder / "cut", rank=1)
    assert float((adapted(make(), folder / "cut") - expected).norm()) > 0.1 * size, "a smaller rank is another model"
    assert min(at["distance"] for at in cut["layers"].values()) > 0.05
    shown = compare(folder / "out", folder / "cut")["layers"]
    assert all(shown[name]["distance"] == pytest.approx(at["distance"]) for name, at in cut["layers"].items())


def test_several_files_are_as_one(models, capsys):
    _, tuned, folder = models
    tuned.save_pretrained(folder / "parts", max_shard_size="6KB")
    assert len([*(folder / "parts").glob("*.safetensors")]) > 2
    for name in ("tuned", "parts"):
        command = ["extract", f"{folder}/base", f"{folder}/{name}", "--rank", "2", "--out", f"{folder}/of {name}"]
        assert main(command) == 0
    one, other = (load_file(folder / f"of {name}" / "adapter_model.safetensors") for name in ("tuned", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)
    part = next((folder / "parts").glob("*1-of*.safetensors"))
    part.rename(folder / "elsewhere")
    assert main(["extract", f"{folder}/base", f"{folder}/parts", "--rank", "2", "--out", f"{folder}/no"]) == 2
    assert f"lacks {part.name}, which its index names; save or download it again" in capsys.readouterr().err
    assert not (folder / "no").exists()


def write(file, **weights):
    save_file({name.replace("__", "."): t for name, t in weights.items()}, file)
    return file


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 1.0])
def test_energy_keeps_the_singular_values_that_hold_it(energy, tmp_path):
    torch.manual_seed(0)
    W, D = torch.randn(2, 7, 5, dtype=torch.float64)
    one, two = write(tmp_path / "one.safetensors", q__weight=W), write(tmp_path / "two.safetensors", q__weight=W + D)
    at = extract(one, two, tmp_path / "out", energy=energy)["layers"]["q"]
    s = torch.linalg.svdvals(D)
    r = next(r for r in range(1, 6) if s[:r].square().sum() >= (energy - 1e-12) * s.square().sum())
    t = load_file(tmp_path / "out/adapter_model.safetensors")
    A, B = (t[f"base_model.model.q.lora_{f}.weight"] for f in "AB")
    assert (len(A), at["rank"]) == (r, [5, r])
    assert torch.allclose(torch.linalg.matrix_norm(D - B @ A), s[r:].norm(), atol=1e-10)
    assert at["distance"] == pytest.approx(float(s[r:].norm() / s.norm()), abs=1e-10)
    assert torch.allclose(B.mT @ B, A @ A.mT, atol=1e-10)
    capped = extract(one, two, tmp_path / "capped", energy=energy, rank=2)["layers"]["q"]["rank"]
    assert capped == [5, min(r, 2)]


def test_what_is_left_out_is_confessed_or_saved_whole(tmp_path, capsys):
    base, tuned = bert(), bert()
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        tuned.classifier.weight.mul_(3)
        tuned.classifier.bias.add_(1)
        tuned.bert.embeddings.LayerNorm.bias.add_(1)
        tuned.bert.encoder.layer[0].output.dense.weight.add_(1)
    tuned.save_pretrained(tmp_path / "tuned")
    command = ["extract", f"{tmp_path}/base", f"{tmp_path}/tuned", "--rank", "1", "--out"]
    assert main([*command, f"{tmp_path}/out"]) == 0
    left, written = capsys.readouterr().out.splitlines()[-2:]
    assert "left out: differences in 3 weights, up to" in left
    assert written == f"{tmp_path}/out: 1 layer of rank 1"
    assert main([*command, f"{tmp_path}/json", "--json"]) == 0
    left = json.loads(capsys.readouterr().out)["left"]
    assert left.keys() == {"classifier.weight", "classifier.bias", "bert.embeddings.LayerNorm.bias"}
    assert left["classifier.weight"] == pytest.approx(2 / 3), "3 W less W, and the larger norm"
    assert not torch.allclose(adapted(bert(), tmp_path / "out"), outputs(tuned), atol=0.1)
    whole = ["--modules-to-save", "classifier", "embeddings.LayerNorm"]
    assert main([*command, f"{tmp_path}/whole", *whole]) == 0
    assert "left out" not in capsys.readouterr().out
    assert torch.allclose(adapted(bert(), tmp_path / "whole"), outputs(tuned), atol=1e-5)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_biases_of_adapted_layers_go_along(make, tmp_path):
    base, tuned = make().double(), make().double()
    base.save_pretrained(tmp_path / "base")
    [(path, layer), (other, _), *_] = layers(tuned).items()
    with torch.no_grad():
        layer.weight.add_(0.1)
        layer.bias.add_(torch.linspace(-1, 1, len(layer.bias)))
        tuned.get_submodule(other).weight.mul_(1.1)
    tuned.save_pretrained(tmp_path / "tuned")
    found = extract(tmp_path / "base", tmp_path / "tuned", tmp_path / "out", energy=1)
    assert found["left"] == {}
    change = outputs(tuned) - outputs(make().double())
    assert float((adapted(make(), tmp_path / "out") - outputs(tuned)).norm()) < 1e-6 * float(change.norm())
    file = tmp_path / "out/adapter_model.safetensors"
    t = load_file(file)
    save_file({k: 0 * v if k.endswith("bias") else v for k, v in t.items()}, file, {"format": "pt"})
    assert float((adapted(make(), tmp_path / "out") - outputs(tuned)).norm()) > 0.1 * float(change.norm())
    with torch.no_grad():
        tuned.load_state_dict(make().state_dict())
        layer.bias.add_(1)
        tuned.get_submodule(other).weight.mul_(1.1)
    tuned.save_pretrained(tmp_path / "tuned")
    found = extract(tmp_path / "base", tmp_path / "tuned", tmp_path / "none", energy=1)
    assert found["left"].keys() == {f"{path}.bias"}, "of a layer that has no product"
    assert not [key for key in load_file(tmp_path / "none/adapter_model.safetensors") if key.endswith("bias")]


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
@pytest.mark.parametrize("size", [1e-200, 1, 1e200])
def test_gram_matrices_give_what_an_svd_gives(shape, size):
    """Products and values right to √ε of the largest singular value, which is less than float32 rounds."""
    torch.manual_seed(0)
    U, _, Vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    sigma = torch.tensor([1, 1e-2, 1e-4, 1e-6, 0], dtype=torch.float64)
    D = U * sigma @ Vh
    left, values, right = extraction._svd(D * size)
    assert torch.allclose(values / size, sigma[:4], rtol=0, atol=2e-8)
    for r in range(1, 5):
        product = left[:, :r] * (values[:r] / size) @ right[:, :r].mT
        assert torch.allclose(product, U[:, :r] * sigma[:r] @ Vh[:r], rtol=0, atol=2e-8)
        assert r == 4 or not torch.allclose(product, D, rtol=0, atol=float(sigma[r]) / 10), "a part is cut off"


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_a_rank_above_that_of_a_difference_has_directions_that_learn(shape, tmp_path):
    before, D = torch.randn(shape), torch.zeros(shape)
    D[0, 1] = 1
    one, two = (write(tmp_path / f"{i}.safetensors", q__weight=W) for i, W in enumerate((before, before + D)))
    found = extract(one, two, tmp_path / "out", rank=3)
    assert found["layers"]["q"]["rank"] == [1, 1]
    t = load_file(tmp_path / "out/adapter_model.safetensors")
    A, B = (t[f"base_model.model.q.lora_{f}.weight"] for f in "AB")
    assert torch.allclose(B @ A, D, atol=1e-6)
    assert torch.linalg.matrix_rank(A, tol=1e-3) == 3
    assert not B[:, 1:].any()


def test_layers_are_chosen_by_the_ends_of_their_paths(tmp_path):
    base, tuned = bert(), shake(bert(), seed=3)
    base.save_pretrained(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "tuned")
    models = tmp_path / "base", tmp_path / "tuned"
    found = extract(*models, tmp_path / "out", rank=1, target_modules=["self.query", "classifier"])
    queries = {f"bert.encoder.layer.{i}.attention.self.query" for i in range(2)}
    assert found["layers"].keys() == {*queries, "classifier"}
    assert not {f"{path}.weight" for path in queries} & found["left"].keys()
    config = json.loads((tmp_path / "out/adapter_config.json").read_text(encoding="utf-8"))
    assert set(config["target_modules"]) == {*queries, "classifier"}
    refused = {
        "uery": "'uery' among target_modules names no matrix of both models",
        "word_embeddings": "'word_embeddings' among target_modules is an embedding, which modules_to_save may name",
    }
    for name, said in refused.items():
        with pytest.raises(ValueError, match=said):
            extract(*models, tmp_path / "no", rank=1, target_modules=["query", name])
    with pytest.raises(ValueError, match="has no weights in 'lassifier', which modules_to_save names"):
        extract(*models, tmp_path / "no", rank=1, modules_to_save=["lassifier"])


W = torch.eye(4)
REFUSED = {
    "q.weight has NaN or infinite entries in one of the models": {"q__weight": W / 0},
    "norm.weight has NaN or infinite entries": {"q__weight": 2 * W, "norm__weight": W[0] / 0},
    r"q has the shapes \(4, 4\) and \(4, 3\), so no product adapts it": {"q__weight": W[:, :3].contiguous()},
    "differ in no layer that may be adapted": {"q__weight": W, "norm__weight": 3 * W[0]},
    "no matrices of one name, but norm.weight and bert.q.weight: load the base": {"bert__q__weight": W},
    "q.weight in .* is of torch.float8_e4m3fn, whose units are unknown": {"q__weight": W.to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("said", REFUSED)
def test_models_between_which_no_adapter_leads(said, tmp_path):
    one = write(tmp_path / "one.safetensors", q__weight=W, norm__weight=W[0].clone())
    two = write(tmp_path / "two.safetensors", **{"norm__weight": W[0].clone(), **REFUSED[said]})
    before = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=said):
        extract(one, two, tmp_path / "out", rank=1)
    assert set(tmp_path.iterdir()) == before, "nothing is left half written"


def test_complex_weights_are_compared_but_not_adapted(tmp_path):
    """The factors of a complex difference were wrong, and said to be exact."""
    phase = torch.randn(3, 2, dtype=torch.complex64)
    one = write(tmp_path / "one.safetensors", q__weight=W, z__weight=phase)
    two = write(tmp_path / "two.safetensors", q__weight=2 * W, z__weight=phase * 1.25)
    found = extract(one, two, tmp_path / "out", rank=1, target_modules=["q"])
    assert found["left"] == {"z.weight": pytest.approx(0.2)}
    with pytest.raises(ValueError, match=r"z\.weight is complex, and factors of LoRA are real"):
        extract(one, two, tmp_path / "no", rank=1, target_modules=["z"])


def test_what_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    one = write(tmp_path / "one.safetensors", q__weight=W)
    with pytest.raises(FileNotFoundError, match="empty has no weights; name a folder that save_pretrained wrote"):
        extract(one, tmp_path / "empty", tmp_path / "out", rank=1)
    for name in ("a", "b"):
        write(tmp_path / "empty" / f"{name}.safetensors", q__weight=W)
    with pytest.raises(FileNotFoundError, match="empty has 2 files of weights without an index"):
        extract(one, tmp_path / "empty", tmp_path / "out", rank=1)
    with pytest.raises(ValueError, match="say to which rank, or which share of energy to keep"):
        extract(one, one, tmp_path / "out")


@pytest.mark.parametrize("first", [True, False])
def test_square_weights_have_their_inputs_where_others_of_their_name_have_them(first, tmp_path):
    """Biases have as many entries as outputs."""
    torch.manual_seed(0)
    before = {"a.c.weight": torch.randn(4, 6), "a.c.bias": torch.zeros(6 if first else 4)}
    before |= {"b.c.weight": torch.randn(4, 4), "b.c.bias": torch.zeros(4)}
    D = torch.zeros(4, 4)
    D[0, 1] = 1
    save_file(before, tmp_path / "one.safetensors")
    save_file({**before, "b.c.weight": before["b.c.weight"] + D}, tmp_path / "two.safetensors")
    models = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    extract(*models, tmp_path / "out", rank=1)
    t = load_file(tmp_path / "out/adapter_model.safetensors")
    product = t["base_model.model.b.c.lora_B.weight"] @ t["base_model.model.b.c.lora_A.weight"]
    assert torch.allclose(product, D.mT if first else D, atol=1e-6)
    if first:
        for file in models:
            t = load_file(file)
            save_file({**t, "b.d.weight": 2 * t["b.c.weight"], "b.d.bias": torch.ones(4)}, file)
        with pytest.raises(ValueError, match=r"nothing tells inputs from outputs in b\.d: name other layers"):
            extract(*models, tmp_path / "no", rank=1)


def test_models_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with local_hub.serving() as hub:
        local_hub.connect_to(hub, tmp_path / "cache", monkeypatch)
        base, tuned = bert(), shake(bert(), seed=3)
        base.save_pretrained(tmp_path / "base")
        tuned.save_pretrained(tmp_path / "tuned", max_shard_size="6KB")
        commits = [hub.push(f"someone/{name}", tmp_path / name) for name in ("base", "tuned")]
        assert main(["extract", "someone/base", "someone/tuned", "--rank", "2", "--out", "out"]) == 0
    config = json.loads((tmp_path / "out/adapter_config.json").read_text(encoding="utf-8"))
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/base", commits[0])
    assert f"from someone/tuned@{commits[1]}" in (tmp_path / "out/README.md").read_text(encoding="utf-8")
