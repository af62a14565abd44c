import importlib.util
import json
import pickle
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import ToTensor

from sharpness import cli
from sharpness.checkpoints import load_state_dict
from sharpness.data import DataChoice
from sharpness.models import LoadedModel, image_transform, load
from tests.support import architectures, networks
from tests.support.extent import EXHAUSTIVE
from tests.support.small_clip import fine_tuned, name_small_models


@pytest.mark.filterwarnings("ignore")
def test_timm_and_open_clip_names(tmp_path, monkeypatch, capsys):
    import timm

    name_small_models(tmp_path / "configs", monkeypatch)
    model = networks.shake(timm.create_model("vit_tiny_patch16_224", pretrained=False).float(), 0.01)
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": {"module." + k: v for k, v in model.state_dict().items()}}, path)
    loaded = load("vit_tiny_patch16_224", str(path))
    assert torch.equal(loaded.model.head.weight, model.head.weight)
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = load_state_dict(tmp_path / "weights.safetensors")
    assert torch.equal(found["head.weight"], model.head.weight)
    assert cli.main(["symmetries", "small"]) == 0
    assert "visual.transformer.resblocks.1.attn qk    2 × GL(16), 33+33 rows" in capsys.readouterr().out


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.mark.filterwarnings("ignore")
def test_mistakes_are_one_line_and_no_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.pt").write_bytes(pickle.dumps(Trap()))
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{", encoding="utf-8")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"architectures": ["NoSuchModel"]}', encoding="utf-8")
    vit = "vit_tiny_patch16_224"
    for arguments, words in [
        ([vit, "--checkpoint", "trap.pt"], "pickled code is never executed"),
        ([vit, "--checkpoint", "list.pt"], "holds no state dict"),
        ([vit, "--checkpoint", "other.pt"], "are not those of VisionTransformer"),
        ([vit, "--checkpoint", "broken.safetensors"], "not a readable safetensors file"),
        ([vit, "--checkpoint", "absent.pt"], "there is no checkpoint file absent.pt"),
        (["empty"], "has no config.json"),
        (["bad"], "bad cannot be loaded: It looks like the config file"),
        (["odd"], "odd cannot be loaded: AttributeError: module transformers has no attribute NoSuchModel"),
        (["nonsense"], "not the name of an open_clip or timm model"),
        (["org/bert-base"], "no copy of org/bert-base in the cache"),
    ]:
        assert cli.main(["symmetries", *arguments]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.startswith("sharpness: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore")
def test_names_with_a_tag_and_heads_of_two(tmp_path):
    import timm

    with pytest.raises(ValueError, match="names an architecture without weights"):  # they were random
        load("vit_tiny_patch16_224")
    with pytest.raises(OSError, match=r"no copy of timm/vit_tiny_patch16_224.augreg_in21k in the cache"):
        load("vit_tiny_patch16_224.augreg_in21k")
    white = load("vit_tiny_patch16_224.augreg_in21k", untrained=True).transform(Image.new("RGB", (300, 256), "white"))
    assert torch.equal(white, torch.ones(3, 224, 224))  # mean and deviation are 0.5
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=7)
    torch.save(model.state_dict(), tmp_path / "ten.pt")
    assert load("deit_tiny_distilled_patch16_224", str(tmp_path / "ten.pt")).model.num_classes == 7


def test_a_path_that_is_not_there_is_called_so():
    for name in ("./brt", "brt"):
        with pytest.raises(ValueError, match=f"there is no folder '{name}'"):
            load(name)


def test_a_function_that_fails_says_how(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_network.py").write_text("def network():\n    return 1 / 0\n", encoding="utf-8")
    (tmp_path / "odd_syntax.py").write_text("def network(:\n", encoding="utf-8")
    with pytest.raises(ValueError, match="odd_network:network failed: ZeroDivisionError"):
        load("odd_network:network")
    with pytest.raises(ValueError, match="'odd_syntax:network' is not an importable module:function: SyntaxError"):
        load("odd_syntax:network")


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "vit", "llama", "t5", "clip", "whisper", "gpt2"])
def test_a_transformers_folder(name, tmp_path, capsys):
    model, _ = architectures.transformers_model(name, "eager")
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert type(loaded.model) is type(model)
    assert not loaded.model.training
    if name == "whisper":
        assert loaded.example is None
        assert cli.main(["symmetries", str(tmp_path), "--verify"]) == 2
        assert "which are known for images and texts only; give --data" in capsys.readouterr().err
        return
    loaded.model(**loaded.example)
    assert cli.main(["symmetries", str(tmp_path), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "symmetries moved, largest relative change of an output" in printed
    assert "NOT A SYMMETRY" not in printed


def picture(shape):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))


@pytest.mark.filterwarnings("ignore")
def test_the_images_of_a_transformers_folder(tmp_path):
    networks.vit().save_pretrained(tmp_path)
    assert load(str(tmp_path)).transform is None
    settings = {"size": {"height": 8, "width": 8}, "image_mean": [0.5], "image_std": [0.25], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    x = load(str(tmp_path)).transform(Image.new("RGB", (20, 30), "white"))  # the network takes grey values
    assert torch.equal(x, torch.full((1, 8, 8), 2.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("DeiTImageProcessor", {"size": 18, "crop_size": 16, "do_center_crop": True}, (30, 41)),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 16}, "crop_pct": 0.8}, (30, 41)),
        ("ViTImageProcessor", {"size": {"height": 16, "width": 16}}, (41, 30)),
        ("BitImageProcessor", {"size": {"shortest_edge": 24}, "crop_size": 16}, (64, 30)),
        ("BitImageProcessor", {"size": {"shortest_edge": 24}, "crop_size": 16}, (9, 31)),
    ],
)
def test_images_are_prepared_as_by_transformers(name, settings, shape, tmp_path):
    import transformers

    settings = {**settings, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**settings, "image_processor_type": name}), encoding="utf-8"
    )
    processor = getattr(transformers, name).from_pretrained(tmp_path)
    expected = torch.as_tensor(np.asarray(processor(picture(shape), return_tensors="np")["pixel_values"][0]))
    found = image_transform(tmp_path, SimpleNamespace(num_channels=3))(picture(shape))
    assert torch.equal(found, expected)


def same(processor, folder, made):
    """Whether an image is prepared as by the processor that transformers reads from a folder; None if it is refused."""
    import transformers

    processor.save_pretrained(folder)
    try:
        found = image_transform(folder, SimpleNamespace(num_channels=3))(made)
    except ValueError:
        return None
    processor = transformers.AutoImageProcessor.from_pretrained(folder)  # others than named, before 5.9
    return torch.equal(found, torch.as_tensor(np.asarray(processor(made, return_tensors="np")["pixel_values"][0])))


@pytest.mark.filterwarnings("ignore")
def test_every_processor_is_followed_or_refused(tmp_path):
    """EfficientNet's normalises twice, others pad or cut into tiles: all of that was left out in silence."""
    import transformers

    small = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
    made = Image.fromarray(small).resize((260, 315), Image.Resampling.BICUBIC)
    by_model = transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    names = sorted(set(re.findall(r"\w+ImageProcessor\b", str(list(by_model.values())))))
    for name in random.Random(0).sample(names, len(names) if EXHAUSTIVE else 12):
        try:
            found = same(getattr(transformers, name)(), tmp_path, made)
        except (TypeError, ImportError):  # cannot be made without more arguments or libraries
            continue
        assert found in (None, True), name
    assert same(transformers.EfficientNetImageProcessor(), tmp_path, made)
    assert same(transformers.CLIPImageProcessor(), tmp_path, made)
    assert same(transformers.ViltImageProcessor(), tmp_path, made) is None  # a mask beside the pixels


@pytest.fixture
def bert(tmp_path):
    torch.set_default_dtype(torch.float32)
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(num_hidden_layers=2, **size))
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def changed(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **entries}), encoding="utf-8")


def test_weights_that_do_not_match_the_configuration_are_refused_by_name(bert, capsys):
    """Each of these was measured with random weights, exit code 0."""
    from safetensors.torch import load_file, save_file

    sound, weights = (bert / "config.json").read_text(encoding="utf-8"), load_file(bert / "model.safetensors")
    assert load(str(bert)).model.config.num_hidden_layers == 2
    for entries, words in (
        ({"num_hidden_layers": 1}, "unexpected are 16, such as bert.encoder.layer.1.attention.output.LayerNorm.bias"),
        ({"num_hidden_layers": 3}, "missing are 16, such as bert.encoder.layer.2.attention.output.LayerNorm.bias"),
        (
            {"architectures": ["BertForTokenClassification"], "num_labels": 7},
            "mismatched are 2, such as classifier.bias",
        ),
        ({"architectures": ["BertForMaskedLM"]}, "missing are .*, such as cls.predictions"),
        ({"hidden_size": 32}, "mismatched are .*, such as bert.embeddings"),
        ({"hidden_size": "x"}, "bert cannot be loaded: "),
        ({"architectures": [3]}, "bert cannot be loaded: TypeError"),
    ):
        changed(bert, **entries)
        with pytest.raises(ValueError, match=words):
            load(str(bert))
        assert cli.main(["symmetries", str(bert)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        (bert / "config.json").write_text(sound, encoding="utf-8")
    half = {k: v for i, (k, v) in enumerate(weights.items()) if i % 2}
    save_file(half, bert / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing are 21, such as bert"):
        load(str(bert))
    headless = {k: v for k, v in weights.items() if not k.startswith("classifier")}
    save_file(headless, bert / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing are 2, such as classifier.bias; use"):
        load(str(bert))


def test_an_adapter_beside_the_weights_is_refused(bert, capsys):
    """transformers attached it and froze the rest: 2 of 31 tensors were measured, and nothing said so."""
    (bert / "adapter_config.json").write_text("{}", encoding="utf-8")
    for name in ("config.json", "absent"):  # and without the model that it adapts
        with pytest.raises(ValueError, match=r"bert holds a PEFT adapter; .*merge_and_unload"):
            load(str(bert))
        (bert / name).unlink(missing_ok=True)


def test_files_beside_the_weights_that_cannot_be_read(bert):
    (bert / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"the tokenizer in .*bert cannot be read"):
        _ = load(str(bert)).tokenizer
    (bert / "preprocessor_config.json").write_text(
        '{"size": {"height": "x"}, "image_mean": 1, "image_processor_type": "ViTImageProcessor"}',
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match=r"the image processor in .*bert cannot be read"):
        load(str(bert)).transform(picture((4, 4)))


@pytest.mark.filterwarnings("ignore")
def test_a_soups_checkpoint(tmp_path, monkeypatch):
    """A checkpoint as those of the public "model soups", in half precision, is read by a function of one's own."""
    pytest.importorskip("open_clip")
    name_small_models(tmp_path / "configs", monkeypatch)
    expected, path = fine_tuned().eval(), tmp_path / "model_0.pt"
    state = {"module." + k: v.half() for k, v in networks.shake(expected).state_dict().items()}
    torch.save(state, path)
    loaded = load("tests.support.small_clip:fine_tuned", str(path))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(loaded.model(x), expected(x), atol=1e-2)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    white = (1 - torch.tensor([0.48145466, 0.4578275, 0.40821073])) / torch.tensor([0.26862954, 0.26130258, 0.27577711])
    assert torch.allclose(loaded.transform(Image.new("RGB", (40, 50), "white")), white[:, None, None].expand(3, 32, 32))
    torch.save({**state, "module.model.visual.proj": torch.zeros(3, 3)}, path)
    with pytest.raises(ValueError, match="are not those of FineTuned"):
        load("tests.support.small_clip:fine_tuned", str(path))


@pytest.mark.filterwarnings("ignore")
def test_timm_with_another_number_of_classes(tmp_path):
    import timm

    torch.set_default_dtype(torch.float32)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=7)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded = load("vit_tiny_patch16_224", str(tmp_path / "weights.pt"))
    assert loaded.model.head.weight.shape[0] == loaded.num_classes == 7
    assert loaded.transform(picture((300, 256))).shape == (3, 224, 224)


IMAGENETTE = {"n01440764": 0, "n02102040": 217, "n03888257": 701}  # three of its classes, by their numbers in ImageNet


@pytest.mark.filterwarnings("ignore")
def test_some_of_the_classes_of_imagenet(tmp_path):
    """Folders of WordNet ids were numbered 0, 1, …, also for models of all classes of ImageNet."""
    pytest.importorskip("timm")
    for name in IMAGENETTE:
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / name / "x.png")
    mine = LoadedModel(torch.nn.Identity(), transform=ToTensor(), num_classes=1000)
    for names in ({}, {f"LABEL_{i}": i for i in range(1000)}, {"tench, Tinca tinca": 0, "goldfish": 1}):
        ((_, labels),) = DataChoice(str(tmp_path)).load(replace(mine, labels=names))
        assert sorted(labels.tolist()) == list(IMAGENETTE.values())
    others = replace(mine, num_classes=3, labels={"church": 0, "tench": 1, "dog": 2})  # these are all: sorted
    assert sorted(DataChoice(str(tmp_path)).load(others)[0][1].tolist()) == [0, 1, 2]
    with pytest.raises(ValueError, match="the label 'n01440764', which is not the name of a class"):
        DataChoice(str(tmp_path)).load(replace(mine, num_classes=20))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("own", "longest"), [(None, 16), (12, 12)])
def test_texts_are_cut_where_the_positions_of_the_model_end(own, longest, tmp_path):
    """Unless the tokenizer says where; transformers gives one that does not say 1e30 tokens."""
    from tests.support.texts import wordpiece

    networks.bert(layers=1).save_pretrained(tmp_path)
    wordpiece(["a", "b"], 20, length=own).save_pretrained(tmp_path)
    (tmp_path / "long.tsv").write_text("text\tlabel\n" + "a " * 30 + "\t0\n", encoding="utf-8")
    loaded = load(str(tmp_path), None)
    batch = DataChoice(str(tmp_path / "long.tsv")).load(loaded, torch.device("cpu"))[0]
    assert batch["input_ids"].shape == (1, longest)


def test_a_module_may_be_called_module(tmp_path):
    """Its name was taken for a wrapper's, so that one of two tensors was lost."""
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert set(load_state_dict(tmp_path / "weights.pt")) == set(model.state_dict())


LINEAR = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([3.0])}


def below(prefix, shift=0.0):
    return {prefix + k: v + shift for k, v in LINEAR.items()}


@pytest.mark.parametrize(
    ("saved", "left"),
    [
        (below("_orig_mod."), ""),  # torch.compile
        ({"state_dict": below("_orig_mod.module.")}, ""),
        ({"state_dict": below("module._orig_mod.")}, ""),
        ({"model": LINEAR, "epoch": 3}, "epoch"),  # DeiT, nanoGPT
        ({"model_state_dict": LINEAR, "optimizer_state_dict": {"state": {}}}, "optimizer_state_dict"),
        ({"state_dict": LINEAR, "state_dict_ema": below("", 1.0)}, "state_dict_ema"),  # timm
        ({"state_dict": below("model."), "pytorch-lightning_version": "2"}, "pytorch-lightning_version"),
        ({"n_averaged": torch.tensor(3), **below("module.")}, "n_averaged"),  # torch.optim.swa_utils
    ],
    ids=["compiled", "compiled-last", "compiled-first", "model", "tutorial", "averages", "lightning", "swa"],
)
def test_what_wrappers_put_around_weights_is_stripped_and_what_is_left_out_said(saved, left, tmp_path):
    """None of these were read, and averages were left out in silence."""
    torch.save(saved, path := tmp_path / "weights.pt")
    assert load_state_dict(path) == LINEAR
    loaded = load("tests.sharpness.test_models:linear", str(path))
    assert loaded.model.weight.item() == 2
    assert loaded.remarks == ((f"of the checkpoint these entries were not read: {left}",) if left else ())


def linear():
    return torch.nn.Linear(1, 1)


def test_a_models_own_names_are_kept(tmp_path):
    """Where all begin alike, only the model tells whether a wrapper put the beginning there."""
    torch.save({"module.model." + k: v for k, v in LINEAR.items()}, path := tmp_path / "weights.pt")
    assert load("tests.sharpness.test_models:named_model", str(path)).model.model.weight.item() == 2
    assert load_state_dict(path, ["model.weight"]) == below("model.")
    compiled = {f"{k}._orig_mod.{name}": v for k in "ab" for name, v in LINEAR.items()}  # layer by layer
    torch.save(compiled, path)
    assert load_state_dict(path) == {f"{k}.{name}": v for k in "ab" for name, v in LINEAR.items()}


def named_model():
    return torch.nn.ModuleDict({"model": linear()})


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_files_that_hold_something_else_are_named(bert, tmp_path, capsys):
    """A pointer was "header too large", and for a pickle the advice was torch's: to run what is in it."""
    for name in ("a.safetensors", "a.pt"):
        (tmp_path / name).write_text(POINTER, encoding="utf-8")
        with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS, not the file itself: type `git"):
            load_state_dict(tmp_path / name)
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"broken.safetensors is not a readable safetensors file"):
        load_state_dict(tmp_path / "broken.safetensors")
    (bert / "model.safetensors").write_text(POINTER, encoding="utf-8")
    with pytest.raises(ValueError, match=r"model.safetensors is a pointer of Git LFS"):
        load(str(bert))
    (bert / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(1), "more": Trap()}, bert / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"bert cannot be loaded: a file is not a plain state dict of .* never exec"):
        load(str(bert))
    (bert / "tokenizer.json").write_text(POINTER, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json is a pointer of Git LFS"):
        _ = replace(load("torch.nn:PReLU"), folder=bert, model=SimpleNamespace(config=None)).tokenizer


def test_wrong_names_and_patterns_are_refused_before_libraries_are_imported(monkeypatch):
    """It took 11 to 29 s, and advised to install what was installed."""
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    for name, words in (
        ("hf-hub:vit_tiny_patch16_224", "is no name of the Hugging Face Hub: these are owner/name"),
        ("runs/*", "is a pattern; name one model"),
        ("bert-base-uncased", "It is not the name of an open_clip or timm model either, nor module:function"),
    ):
        monkeypatch.delitem(sys.modules, "open_clip", raising=False)
        with pytest.raises(ValueError, match=words):
            load(name)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else found(name))
    with pytest.raises(ValueError, match=r"timm model either \(install the extra timm, pip install '.\[timm\]'"):
        load("bert-base-uncased")


def test_open_clips_names_are_those_of_its_files():
    open_clip = pytest.importorskip("open_clip")
    files = {path.stem for path in (Path(open_clip.__file__).parent / "model_configs").glob("*.json")}
    assert files == {*open_clip.list_models()}
