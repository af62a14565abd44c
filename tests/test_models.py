import json
import pickle
from pathlib import Path

import pytest
import torch

from sharpness import cli
from sharpness.models import load, load_state_dict

from . import architectures, networks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "vit", "llama", "t5", "clip", "whisper", "gpt2"])
def test_a_transformers_folder(name, tmp_path, capsys):
    model, _ = architectures.transformers_model(name, "eager")
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert type(loaded.model) is type(model)
    assert not loaded.model.training
    loaded.model(**loaded.example)
    assert cli.main(["symmetries", str(tmp_path), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "pairs, largest relative change of an output" in printed
    assert "NOT A SYMMETRY" not in printed


@pytest.mark.filterwarnings("ignore")
def test_timm_and_open_clip_names(tmp_path, capsys):
    import timm

    model = networks.shake(timm.create_model("vit_tiny_patch16_224", pretrained=False).float(), 0.01)
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": {"module." + k: v for k, v in model.state_dict().items()}}, path)
    loaded = load("vit_tiny_patch16_224", str(path))
    assert loaded.source == "timm"
    assert torch.equal(loaded.model.head.weight, model.head.weight)
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = load_state_dict(tmp_path / "weights.safetensors")
    assert torch.equal(found["head.weight"], model.head.weight)
    assert cli.main(["symmetries", "ViT-B-32"]) == 0
    assert "visual.transformer.resblocks.11.attn qk   12 × GL(64), 769+769 rows" in capsys.readouterr().out


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
    (tmp_path / "bad" / "config.json").write_text("{")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    vit = "vit_tiny_patch16_224"
    for arguments, words in [
        ([vit, "--checkpoint", "trap.pt"], "pickled code is never executed"),
        ([vit, "--checkpoint", "list.pt"], "holds no state dict"),
        ([vit, "--checkpoint", "other.pt"], "are not those of VisionTransformer"),
        ([vit, "--checkpoint", "broken.safetensors"], "not a readable safetensors file"),
        ([vit, "--checkpoint", "absent.pt"], "there is no checkpoint file absent.pt"),
        (["empty"], "has no config.json"),
        (["bad"], "not valid JSON"),
        (["odd"], "'NoSuchModel', which transformers does not have"),
        (["nonsense"], "neither a folder"),
    ]:
        assert cli.main(["symmetries", *arguments]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.startswith("sharpness: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "executed").exists()


# -- fine-tuned image towers of CLIP ----------------------------------------------------------------------------------


@pytest.fixture
def soup(tmp_path):
    """A checkpoint as those of the public "model soups": half precision, left-overs of the text tower, a head."""
    open_clip = pytest.importorskip("open_clip")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    clip = open_clip.create_model("ViT-B-32-quickgelu", pretrained=None)
    head = torch.nn.Linear(512, 10)
    state = {"module.model." + k: v.half() for k, v in clip.state_dict().items() if not k.startswith("transformer.")}
    state |= {"module.classification_head." + k: v.half() for k, v in head.state_dict().items()}
    torch.save(state, tmp_path / "model_0.pt")
    return tmp_path / "model_0.pt", clip.eval(), head


@pytest.mark.filterwarnings("ignore")
def test_a_soups_checkpoint(soup, tmp_path):
    path, clip, head = soup
    loaded = load("ViT-B-32-quickgelu", str(path))
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        f = clip.encode_image(x)
        expected = head(f / f.norm(dim=-1, keepdim=True))
        assert torch.allclose(loaded.model(x), expected, atol=1e-2)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.images.size == (224, 224)
    assert loaded.images.crop
    assert loaded.images.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    with pytest.raises(ValueError, match="uses QuickGELU: name the model ViT-B-32-quickgelu"):
        load("ViT-B-32", str(path))
    torch.save({"weight": head.weight.detach()}, tmp_path / "head.pt")
    torch.save(clip.state_dict(), tmp_path / "clip.pt")
    zero_shot = load("ViT-B-32-quickgelu", str(tmp_path / "clip.pt"), head=str(tmp_path / "head.pt"))
    with torch.no_grad():
        assert torch.allclose(zero_shot.model(x) + head.bias, expected, atol=1e-5)
    torch.save({"model.visual.proj": torch.zeros(3, 3), "classification_head.weight": head.weight}, path)
    with pytest.raises(ValueError, match="are not those of"):
        load("ViT-B-32-quickgelu", str(path))
    torch.save({"other": torch.zeros(3, 3)}, tmp_path / "head.pt")
    with pytest.raises(ValueError, match=r"has no matrix weight \(classes × features\) for the head"):
        load("ViT-B-32-quickgelu", str(tmp_path / "clip.pt"), head=str(tmp_path / "head.pt"))


@pytest.mark.filterwarnings("ignore")
def test_timm_with_another_number_of_classes(tmp_path):
    import timm

    torch.set_default_dtype(torch.float32)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=7)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded = load("vit_tiny_patch16_224", str(tmp_path / "weights.pt"))
    assert loaded.model.head.weight.shape[0] == 7
    assert loaded.images.size == (224, 224)
    assert len(loaded.images.mean) == 3


@pytest.mark.filterwarnings("ignore")
def test_the_image_format_of_a_transformers_folder(tmp_path):
    networks.vit().save_pretrained(tmp_path)
    assert load(str(tmp_path)).images is None
    settings = {"size": {"height": 8, "width": 8}, "image_mean": [0.5], "image_std": [0.25], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = load(str(tmp_path)).images
    assert (found.size, found.mean, found.std, found.channels, found.crop, found.resample) == (
        (8, 8), (0.5,), (0.25,), 1, False, "bilinear",
    )  # fmt: skip
    settings |= {"do_center_crop": True, "size": {"shortest_edge": 12}, "crop_size": {"height": 8, "width": 8}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert load(str(tmp_path)).images.crop


# -- no model but the user's ------------------------------------------------------------------------------------------


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
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_weights_that_do_not_match_the_configuration_are_refused_by_name(bert, capsys):
    """Each of these was measured with random weights, exit code 0."""
    from safetensors.torch import load_file, save_file

    sound, weights = (bert / "config.json").read_text(), load_file(bert / "model.safetensors")
    assert load(str(bert)).model.config.num_hidden_layers == 2
    for entries, words in (
        ({"num_hidden_layers": 1}, "they have besides bert.encoder.layer.1.attention.output.LayerNorm.bias"),
        ({"num_hidden_layers": 3}, "they lack bert.encoder.layer.2.attention.output.LayerNorm.bias"),
        ({"architectures": ["BertForTokenClassification"], "num_labels": 7}, "other shapes than config.json"),
        ({"architectures": ["BertForMaskedLM"]}, "they lack cls.predictions"),
        ({"hidden_size": 32}, "have other shapes than config.json says"),
        ({"hidden_size": "x"}, "cannot be loaded as BertForSequenceClassification"),
        ({"num_hidden_layers": 10**12}, "asks for num_hidden_layers = 1000000000000, more than can be built"),
        ({"architectures": [3]}, "names the architecture 3, which transformers does not have"),
    ):
        changed(bert, **entries)
        with pytest.raises(ValueError, match=words):
            load(str(bert))
        assert cli.main(["symmetries", str(bert)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        (bert / "config.json").write_text(sound)
    half = {k: v for i, (k, v) in enumerate(weights.items()) if i % 2}
    save_file(half, bert / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"they lack .* and .* more"):
        load(str(bert))
    headless = {k: v for k, v in weights.items() if not k.startswith("classifier")}
    save_file(headless, bert / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"they lack classifier.bias, classifier.weight; a model with random"):
        load(str(bert))


def test_files_beside_the_weights_that_cannot_be_read(bert):
    (bert / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .*bert cannot be read"):
        _ = load(str(bert)).tokenizer
    (bert / "preprocessor_config.json").write_text('{"size": {}, "image_mean": 1}')
    with pytest.raises(ValueError, match=r"preprocessor_config.json does not say how images are made ready"):
        load(str(bert))


def test_a_path_that_is_not_there_is_called_so():
    with pytest.raises(FileNotFoundError, match=r"there is no folder './brt'"):
        load("./brt")
    with pytest.raises(ValueError, match=r"is neither a folder \(there is none of this name\)"):
        load("brt")


def test_a_function_that_fails_says_how(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_network.py").write_text("def network():\n    return 1 / 0\n")
    (tmp_path / "odd_syntax.py").write_text("def network(:\n")
    with pytest.raises(ValueError, match="odd_network:network failed: ZeroDivisionError"):
        load("odd_network:network")
    with pytest.raises(ValueError, match="'odd_syntax:network' is not an importable module:function: SyntaxError"):
        load("odd_syntax:network")
