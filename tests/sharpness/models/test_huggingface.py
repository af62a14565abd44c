import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from sharpness import cli
from sharpness.data.images import pixels
from sharpness.models import load
from sharpness.models.huggingface import _preprocessor
from tests import architectures, networks
from tests.extent import EXHAUSTIVE


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
    assert "pairs moved, largest relative change of an output" in printed
    assert "NOT A SYMMETRY" not in printed


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
    found = load(str(tmp_path)).images
    assert (found.size, found.crop, found.resize) == ((8, 8), True, 12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("DeiTImageProcessor", {"size": 18, "crop_size": 16, "do_center_crop": True}, (30, 41)),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 16}, "crop_pct": 0.8}, (30, 41)),
        ("ViTImageProcessor", {"size": {"height": 16, "width": 16}}, (41, 30)),
    ],
)
def test_images_are_prepared_as_by_transformers(name, settings, shape, tmp_path):
    import transformers

    settings = {**settings, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "image_processor_type": name}))
    made = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    processor = getattr(transformers, name).from_pretrained(tmp_path)
    expected = torch.as_tensor(np.asarray(processor(made, return_tensors="np")["pixel_values"][0]))
    how = _preprocessor(tmp_path, SimpleNamespace(num_channels=3))
    assert float((pixels(made, how) - expected).abs().mean()) < 6e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [{"do_flip_channel_order": True}, {"rescale_factor": 1.0}, {"crop_pct": 0.9}, {"a_step_of_tomorrow": 1},
     {"do_resize": False}, {"resample": 4}, {"size": {"shortest_edge": 8}}, {"crop_size": 8}],
)  # fmt: skip
def test_images_that_need_more_are_refused(changes, tmp_path):
    networks.vit().save_pretrained(tmp_path)
    settings = {"size": {"height": 8, "width": 8}, "image_mean": [0.5], "image_std": [0.25], "resample": 2, **changes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"in a way that is not known here \\({next(iter(changes))}\\)"):
        load(str(tmp_path))


def same(processor, folder, made):
    """Whether an image is prepared as by transformers' processor; None if it is refused."""
    processor.save_pretrained(folder)
    try:
        how = _preprocessor(folder, SimpleNamespace(num_channels=3, model_type=""))
    except ValueError:
        return None
    if how is None:  # it says nothing about images
        return None
    expected = torch.as_tensor(np.asarray(processor(made, return_tensors="np")["pixel_values"][0]))
    found = pixels(made, how)
    return found.shape == expected.shape and float((found - expected).abs().max()) < 0.05


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
    assert same(transformers.EfficientNetImageProcessor(), tmp_path, made) is None
    assert same(transformers.CLIPImageProcessor(), tmp_path, made)


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
        ({"architectures": ["BertForTokenClassification"], "num_labels": 7}, "do not have the shapes of config.json"),
        ({"architectures": ["BertForMaskedLM"]}, "they lack cls.predictions"),
        ({"hidden_size": 32}, "do not have the shapes of config.json"),
        ({"hidden_size": "x"}, "cannot be loaded as BertForSequenceClassification"),
        ({"num_hidden_layers": 10**12}, "asks for num_hidden_layers = 1000000000000, which is too large to build"),
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


def test_an_adapter_beside_the_weights_is_refused(bert, capsys):
    """transformers attached it and froze the rest: 2 of 31 tensors were measured, and nothing said so."""
    (bert / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"bert holds a PEFT adapter beside the weights of a model; .*merge_and_unload"
    ):
        load(str(bert))
    (bert / "config.json").unlink()
    with pytest.raises(ValueError, match="bert holds a PEFT adapter without the model that it adapts"):
        load(str(bert))


def test_files_beside_the_weights_that_cannot_be_read(bert):
    (bert / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .*bert cannot be read"):
        _ = load(str(bert)).tokenizer
    (bert / "preprocessor_config.json").write_text(
        '{"size": {"height": "x"}, "image_mean": 1, "image_processor_type": "ViTImageProcessor"}'
    )
    with pytest.raises(ValueError, match=r"preprocessor_config.json does not say how images are preprocessed"):
        load(str(bert))
