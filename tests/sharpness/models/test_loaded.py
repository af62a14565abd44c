import pytest
import torch

from sharpness.data import DataChoice
from sharpness.models import load
from tests import networks
from tests.small_clip import name_small_models


@pytest.fixture
def soup(tmp_path, monkeypatch):
    """A checkpoint as those of the public "model soups": half precision, left-overs of the text tower, a head."""
    open_clip = pytest.importorskip("open_clip")
    name_small_models(tmp_path / "configs", monkeypatch)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    clip = open_clip.create_model("small-quickgelu", pretrained=None)
    head = torch.nn.Linear(24, 10)
    state = {"module.model." + k: v.half() for k, v in clip.state_dict().items() if not k.startswith("transformer.")}
    state |= {"module.classification_head." + k: v.half() for k, v in head.state_dict().items()}
    torch.save(state, tmp_path / "model_0.pt")
    return tmp_path / "model_0.pt", clip.eval(), head


@pytest.mark.filterwarnings("ignore")
def test_a_soups_checkpoint(soup, tmp_path):
    path, clip, head = soup
    loaded = load("small-quickgelu", str(path))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        f = clip.encode_image(x)
        expected = head(f / f.norm(dim=-1, keepdim=True))
        assert torch.allclose(loaded.model(x), expected, atol=1e-2)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.images.size == (32, 32)
    assert loaded.images.crop
    assert loaded.images.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    with pytest.raises(ValueError, match="uses QuickGELU: name the model small-quickgelu"):
        load("small", str(path))
    torch.save({"weight": head.weight.detach()}, tmp_path / "head.pt")
    torch.save(clip.state_dict(), tmp_path / "clip.pt")
    zero_shot = load("small-quickgelu", str(tmp_path / "clip.pt"), head=str(tmp_path / "head.pt"))
    with torch.no_grad():
        assert torch.allclose(zero_shot.model(x) + head.bias, expected, atol=1e-5)
    torch.save({"model.visual.proj": torch.zeros(3, 3), "classification_head.weight": head.weight}, path)
    with pytest.raises(ValueError, match="are not those of"):
        load("small-quickgelu", str(path))
    torch.save({"other": torch.zeros(3, 3)}, tmp_path / "head.pt")
    with pytest.raises(ValueError, match=r"has no matrix weight \(classes × features\) for the head"):
        load("small-quickgelu", str(tmp_path / "clip.pt"), head=str(tmp_path / "head.pt"))


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
@pytest.mark.parametrize(("own", "longest"), [(None, 16), (12, 12)])
def test_texts_are_cut_where_the_positions_of_the_model_end(own, longest, tmp_path):
    """Unless the tokenizer says where; transformers gives one that does not say 1e30 tokens."""
    from tests.texts import wordpiece

    networks.bert(layers=1).save_pretrained(tmp_path)
    wordpiece(["a", "b"], 20, length=own).save_pretrained(tmp_path)
    (tmp_path / "long.tsv").write_text("text\tlabel\n" + "a " * 30 + "\t0\n")
    loaded = load(str(tmp_path), None)
    batch = DataChoice(str(tmp_path / "long.tsv")).load(loaded, torch.device("cpu"))[0]
    assert batch["input_ids"].shape == (1, longest)
