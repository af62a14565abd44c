"""Collections: random recipes, resumed and shared training, and checkpoints that a sweep can read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image
from safetensors.torch import load_file

from reproduction import cli, collection
from reproduction import finetune as training_loop
from reproduction.collection import train_collection
from reproduction.finetune import set_dropout_
from reproduction.recipes import Recipe, random_recipe
from reproduction.vision import SmallViT, vit_cifar10
from sharpness import Search
from sharpness import cli as measuring
from sharpness.checkpoints import load_state_dict
from sharpness.data import DataChoice
from sharpness.models import load
from sharpness.study import read_config, run_sweep
from tests.support.sweeps import repeated
from tests.support.texts import bert_folder

MODULE = """
import torch
from reproduction.vision import SmallViT

def tiny():
    torch.manual_seed(0)
    return SmallViT(width=16, depth=1, heads=2, hidden=16, classes=3, size=8)
"""


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Class folders of images that differ in their colour."""
    torch.set_default_dtype(torch.float32)
    (tmp_path / "tinyvit.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 8)):
        for c, name in enumerate(("blue", "green", "red")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (8, 8, 3), dtype=np.uint8)
                pixels[:, :, 2 - c] += 120
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def test_a_collection_of_images_is_trained_measured_and_ranked(images, capsys):
    arguments = ["finetune", "tinyvit:tiny", "train", "--test", "test", "--models", "4", "--lr", "1e-3", "1e-2",
                 "--epochs", "2", "6", "--batch", "8", "--num-examples", "48", "--subset-seed", "0", "--points", "16",
                 "--out", "collection", "--quiet"]  # fmt: skip
    assert cli.main(arguments) == 0
    weights = sorted(Path("collection").glob("model_*.safetensors"))
    assert [p.name for p in weights] == [f"model_{i:02d}.safetensors" for i in range(4)]
    recipes = [json.loads(p.with_suffix(".json").read_text(encoding="utf-8"))["recipe"] for p in weights]
    assert [r["seed"] for r in recipes] == [0, 1, 2, 3]
    assert len({r["lr"] for r in recipes}) == 4
    config = json.loads(Path("collection/sweep.json").read_text(encoding="utf-8"))
    assert (config["data"]["num_examples"], config["train"]["num_examples"]) == (16, 48)
    config |= {"rho": {"geodesic-inv": [0.1], "geodesic-mix": [0.05], "adaptive": [0.1, 0.2]}, "steps": 3}
    Path("collection/sweep.json").write_text(json.dumps(config), encoding="utf-8")
    assert measuring.main(["sweep", "collection/sweep.json", "--out", "out", "--quiet"]) == 0
    rows = [json.loads(line) for line in Path("out/results.jsonl").read_text(encoding="utf-8").splitlines()]
    fits = [r for r in rows if r["kind"] == "fit"]
    assert min(r["train_error"] for r in fits) < 0.2  # two classes in three would be chance
    capsys.readouterr()
    assert measuring.main(["table", "out", "--target", "test-loss"]) == 0
    assert "4 models with a test-loss: too few to correlate" in capsys.readouterr().out
    Path("many.jsonl").write_text("".join(json.dumps(r) + "\n" for r in repeated(rows, 3)), encoding="utf-8")
    assert measuring.main(["table", "many.jsonl", "--target", "test-loss", "--format", "csv"]) == 0
    assert "\nrelative_flatness," in capsys.readouterr().out


def test_the_same_models_however_often_it_was_stopped_and_split(images, monkeypatch):
    data = DataChoice("train", num_examples=30, subset_seed=0)
    recipes = [replace(random_recipe(s, epochs=(1, 2)), batch=8) for s in range(3)]
    train_collection("tinyvit:tiny", data, "whole", recipes=recipes, progress=False)
    for i in (1, 2):
        train_collection("tinyvit:tiny", data, "split", recipes=recipes, shard=f"{i}/2", progress=False)
    full, calls = collection.finetune, []

    def stopped(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return full(*arguments, **options)

    monkeypatch.setattr(collection, "finetune", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_collection("tinyvit:tiny", data, "stopped", recipes=recipes, progress=False)
    first = Path("stopped/model_00.safetensors").stat().st_mtime_ns
    train_collection("tinyvit:tiny", data, "stopped", recipes=recipes, progress=False)
    assert len(calls) == 4  # one done, one stopped, two left
    assert Path("stopped/model_00.safetensors").stat().st_mtime_ns == first
    for i in range(3):
        one = load_state_dict(f"whole/model_{i:02d}.safetensors")
        for other in ("split", "stopped"):
            two = load_state_dict(f"{other}/model_{i:02d}.safetensors")
            assert all(torch.equal(one[k], two[k]) for k in one)
        assert i == 0 or not torch.equal(one["cls_token"], load_state_dict("whole/model_00.safetensors")["cls_token"])


def test_what_does_not_fit_is_refused(images, capsys):
    data, recipe = DataChoice("train", num_examples=20, subset_seed=0), [Recipe(epochs=1, batch=20)]
    train_collection("tinyvit:tiny", data, "c", recipes=recipe, progress=False)
    train_collection("tinyvit:tiny", data, "c", recipes=recipe, progress=False)
    with pytest.raises(ValueError, match="was written for other test data"):
        train_collection("tinyvit:tiny", data, "c", recipes=recipe, test=DataChoice("train"), progress=False)
    for ranges in ({"epochs": (6, 2)}, {"lr": (1e-3, 1e-5)}):
        with pytest.raises(ValueError, match="ranges go from the smaller value to the larger"):
            random_recipe(0, **ranges)
    command = ["finetune", "tinyvit:tiny", "train", "--out", "d", "--quiet", "--lr", "1e-5", "1e-4"]
    assert cli.main([*command, "1e-3"]) == 2
    assert cli.main([*command, "--vary", "seed"]) == 2
    said = capsys.readouterr().err
    assert "--lr takes a range of two values" in said
    assert "--lr takes one value" in said


def test_label_noise_and_mixup_reach_the_targets(images):
    data = DataChoice("train", num_examples=40, subset_seed=0)
    training, _ = collection._training(load("tinyvit:tiny"), data)
    order, labels = torch.arange(40), training.labels
    _, plain = next(training.steps(Recipe(batch=40), labels, order, torch.Generator().manual_seed(0)))
    assert torch.equal(plain.argmax(1), labels)
    assert set(plain.unique().tolist()) == {0.0, 1.0}
    _, mixed = next(training.steps(Recipe(batch=40, mixup=0.8), labels, order, torch.Generator().manual_seed(0)))
    assert torch.allclose(mixed.sum(1), torch.ones(40))
    assert len(mixed.unique()) > 2
    noisy = Recipe(batch=40, label_noise=1.0, epochs=30, lr=3e-3, dropout=0.0)
    clean = replace(noisy, label_noise=0.0)
    last = [training_loop.finetune(load("tinyvit:tiny").model, training, r)[-1] for r in (noisy, clean)]
    assert last[0] > 3 * last[1]


def test_autocast_passes_are_in_bfloat16_and_weights_are_not(images):
    training, _ = collection._training(load("tinyvit:tiny"), DataChoice("train", num_examples=40, subset_seed=0))
    recipe = Recipe(epochs=4, batch=20, lr=1e-3, dropout=0.0)
    found = {}
    for autocast in (False, True):
        model = load("tinyvit:tiny").model
        *_, linear = (m for m in model.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_hook(lambda m, x, y, key=autocast: found.update({key: y.dtype}))
        found[autocast, "losses"] = training_loop.finetune(model, training, recipe, autocast=autocast)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (found[False], found[True]) == (torch.float32, torch.bfloat16)
    assert found[True, "losses"] != found[False, "losses"]
    assert found[True, "losses"] == pytest.approx(found[False, "losses"], rel=0.02)


def test_augmentation_keeps_shape_and_range():
    x = torch.rand(6, 3, 16, 16)
    for name in ("none", "flip", "rand-m9-n2", "rand-m1-n0"):
        torch.manual_seed(0)
        found = training_loop._augmentation(name)(x, torch.Generator().manual_seed(0))
        assert found.shape == x.shape
        assert 0 <= found.min() <= found.max() <= 1
        assert torch.equal(found, x) == (name == "none")
    for wrong in ("rand-9-2", "rand-mx-n1", "cut"):
        with pytest.raises(ValueError, match="augmentation is"):
            Recipe(augmentation=wrong)
    with pytest.raises(ValueError, match="a recipe needs lr > 0"):
        Recipe(lr=0)


def test_random_recipes_differ_and_repeat():
    found = [random_recipe(s) for s in range(40)]
    assert found[3] == random_recipe(3)
    assert {r.label_smoothing > 0 for r in found} == {r.mixup > 0 for r in found} == {True, False}
    assert {r.augmentation.split("-")[0] for r in found} == {"none", "flip", "rand"}
    assert all(3e-5 <= r.lr <= 1e-3 and 2 <= r.epochs <= 6 for r in found)
    assert all(r.mixup == 0 and r.augmentation == "none" for s in range(9) if (r := random_recipe(s, images=False)))


def test_the_public_vit_and_its_dropout():
    torch.set_default_dtype(torch.float32)
    net = vit_cifar10()
    assert sum(p.numel() for p in net.parameters()) == 811_146
    assert "transformer.layers.5.self_attn.in_proj_weight" in net.state_dict()
    small = SmallViT(width=8, depth=1, heads=2, size=8).train()
    set_dropout_(small, 0.0)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(small(x), small(x))


SENTENCES = ["a good film", "a bad film", "good good fun", "bad sad mess", "this is good", "this is bad"]


def test_a_collection_of_texts(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    texts = SENTENCES * 20
    bert_folder(texts, tmp_path / "bert")
    lines = [json.dumps({"text": t, "label": "good" if "good" in t else "bad"}) for t in texts]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "collection"
    arguments = ["finetune", tmp_path / "bert", tmp_path / "train.jsonl", "--test", tmp_path / "test.jsonl",
                 "--label-map", "bad=0,good=1", "--vary", "seed", "--models", "2", "--lr", "5e-3", "--epochs", "6",
                 "--batch", "16", "--points", "24", "--max-length", "12", "--out", out, "--quiet"]  # fmt: skip
    (tmp_path / "other.jsonl").write_text('{"content": "good", "label": "good"}', encoding="utf-8")
    assert cli.main([str(a).replace("test.jsonl", "other.jsonl") for a in arguments]) == 2
    assert "other.jsonl has no column 'text'; it has content, label" in capsys.readouterr().err
    assert not list(out.iterdir())  # nothing was trained for it
    assert cli.main([str(a) for a in arguments]) == 0
    models = [load(str(out / f"model_{i:02d}")) for i in range(2)]
    assert models[0].labels == {"bad": 0, "good": 1}
    assert models[0].tokenizer is not None
    classifiers = [m.model.classifier.weight for m in models]
    assert not torch.allclose(*classifiers, atol=1e-2)  # heads and orders of their own
    body = load(str(tmp_path / "bert")).model.embeddings.word_embeddings.weight
    near = models[0].model.bert.embeddings.word_embeddings.weight
    assert torch.cosine_similarity(near.flatten(), body.flatten(), dim=0) > 0.5  # fine-tuned, not trained anew
    config = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert config["data"]["label_map"] == {"bad": 0, "good": 1}
    config |= {"rho": {"geodesic-inv": [0.1], "geodesic-mix": [0.05], "adaptive": [0.1]}, "steps": 2}
    (out / "sweep.json").write_text(json.dumps(config), encoding="utf-8")
    assert measuring.main(["sweep", str(out / "sweep.json"), "--out", str(tmp_path / "results"), "--quiet"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results/results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert max(r["test_error"] for r in rows if r["kind"] == "fit") < 0.1
    assert all(r["distance"] > 0 for r in rows if r["kind"] == "baselines")


def test_labels_that_are_no_classes(tmp_path):
    torch.set_default_dtype(torch.float32)
    bert_folder(SENTENCES, tmp_path / "b")
    (tmp_path / "t.jsonl").write_text('{"text": "good", "label": 3}\n{"text": "bad", "label": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"labels of .* are the numbers \[1, 3\]"):
        train_collection(str(tmp_path / "b"), DataChoice(str(tmp_path / "t.jsonl")), tmp_path / "z")
    with pytest.raises(ValueError, match="a shard is i/n"):
        train_collection(str(tmp_path / "b"), DataChoice(str(tmp_path / "t.jsonl")), tmp_path / "z", shard="3/2")


def test_a_folder_with_other_models_is_refused(images):
    data = DataChoice("train", num_examples=12, subset_seed=0)
    train_collection("tinyvit:tiny", data, "collection", recipes=[Recipe(epochs=1, batch=8)], progress=False)
    with pytest.raises(ValueError, match=r"model_00.json was made with another recipe"):
        train_collection(
            "tinyvit:tiny", data, "collection", recipes=[Recipe(lr=1e-3, epochs=1, batch=8)], progress=False
        )
    with pytest.raises(ValueError, match=r"model_00.json was made with another data"):
        train_collection(
            "tinyvit:tiny",
            replace(data, subset_seed=1),
            "collection",
            recipes=[Recipe(epochs=1, batch=8)],
            progress=False,
        )


def test_a_model_whose_weights_are_gone_is_trained_again(images):
    data = DataChoice("train", num_examples=12, subset_seed=0)
    weights, kept = (Path("collection") / f"model_{i:02d}.safetensors" for i in range(2))
    arguments = {"recipes": [Recipe(seed=s, epochs=1, batch=8) for s in range(2)], "progress": False}
    train_collection("tinyvit:tiny", data, "collection", **arguments)
    before, written = load_file(weights), kept.stat().st_mtime_ns
    weights.unlink()
    train_collection("tinyvit:tiny", data, "collection", **arguments)
    assert all(torch.equal(v, before[k]) for k, v in load_file(weights).items())
    assert kept.stat().st_mtime_ns == written


def test_mistakes_leave_nothing_behind(images, capsys):
    assert cli.main(["finetune", "tinyvit:tiny", "nowhere", "--out", "collection", "--quiet"]) == 2
    assert "there is no data at nowhere" in capsys.readouterr().err
    assert not Path("collection").exists()
    torch.save({"x": torch.zeros(4, 3, 8, 8), "y": torch.zeros(4, dtype=torch.long)}, "t.pt")
    assert cli.main(["finetune", "tinyvit:tiny", "t.pt", "--out", "collection", "--quiet"]) == 2
    assert "which collections need" in capsys.readouterr().err


def test_measured_images_are_of_all_classes(images):
    assert cli.main(["finetune", "tinyvit:tiny", "train", "--models", "1", "--epochs", "1", "1", "--points", "12",
                     "--out", "collection", "--quiet"]) == 0  # fmt: skip
    found = read_config("collection/sweep.json")
    _, y = found.data.load(load("tinyvit:tiny"))[0]
    assert len(y) == 12
    assert set(y.tolist()) == {0, 1, 2}


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_folder_of_images(images):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                       intermediate_size=8, num_labels=3)  # fmt: skip
    ViTForImageClassification(config).save_pretrained("vit")
    settings = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    Path("vit/preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    arguments = [
        "finetune",
        "vit",
        "train",
        "--models",
        "1",
        "--epochs",
        "1",
        "1",
        "--points",
        "6",
        "--out",
        "collection",
    ]
    assert cli.main([*arguments, "--quiet"]) == 0
    assert load("collection/model_00").transform is not None
    sweep = structs.replace(read_config("collection/sweep.json"), measures=("adaptive",), search=Search(steps=1))
    assert run_sweep(sweep, "out", progress=False) == []


def test_a_head_that_was_there_is_not_kept_nor_a_folder_of_somebody_elses_replaced(tmp_path):
    torch.set_default_dtype(torch.float32)
    bert_folder(SENTENCES, tmp_path / "bert")
    table = tmp_path / "t.jsonl"
    table.write_text(
        "".join(json.dumps({"text": t, "label": "no" if "bad" in t else "yes"}) + "\n" for t in SENTENCES),
        encoding="utf-8",
    )
    names = {"no": 0, "yes": 1}
    one = [Recipe(lr=1e-9, epochs=1, batch=8)]
    train_collection(
        str(tmp_path / "bert"), DataChoice(str(table), label_map=names), tmp_path / "a", recipes=one, progress=False
    )
    first = str(tmp_path / "a" / "model_00")
    (tmp_path / "b" / "model_00").mkdir(parents=True)
    (tmp_path / "b" / "model_00" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="contains files that this program did not write"):
        train_collection(first, DataChoice(str(table)), tmp_path / "b", recipes=one, progress=False)
    (tmp_path / "b" / "model_00" / "config.json").unlink()
    # The names of the classes are those of the model.
    two = [replace(one[0], seed=5)]
    train_collection(first, DataChoice(str(table)), tmp_path / "b", recipes=two, progress=False)
    found = load(str(tmp_path / "b" / "model_00"))
    assert found.labels == {"no": 0, "yes": 1}
    before = load(first).model
    assert torch.allclose(found.model.bert.pooler.dense.weight, before.bert.pooler.dense.weight, atol=1e-5)
    assert not torch.allclose(found.model.classifier.weight, before.classifier.weight, atol=1e-3)
