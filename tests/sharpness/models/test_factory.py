import pickle
from pathlib import Path

import pytest
import torch

from sharpness import cli
from sharpness.models import load, load_state_dict
from tests import networks


@pytest.mark.filterwarnings("ignore")
def test_timm_and_open_clip_names(tmp_path, capsys):
    import timm

    model = networks.shake(timm.create_model("vit_tiny_patch16_224", pretrained=False).float(), 0.01)
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": {"module." + k: v for k, v in model.state_dict().items()}}, path)
    loaded = load("vit_tiny_patch16_224", str(path))
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
        (["nonsense"], "not the name of an open_clip or timm model"),
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

    assert load("vit_tiny_patch16_224.augreg_in21k").images.mean == (0.5, 0.5, 0.5)
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=7)
    torch.save(model.state_dict(), tmp_path / "ten.pt")
    assert load("deit_tiny_distilled_patch16_224", str(tmp_path / "ten.pt")).model.num_classes == 7
    with pytest.raises(ValueError, match="a separate head is only for open_clip"):
        load("torch.nn:PReLU", head="head.pt")


def test_a_path_that_is_not_there_is_called_so():
    with pytest.raises(FileNotFoundError, match=r"there is no folder './brt'"):
        load("./brt")
    with pytest.raises(ValueError, match=r"there is no folder of this name"):
        load("brt")


def test_a_function_that_fails_says_how(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_network.py").write_text("def network():\n    return 1 / 0\n")
    (tmp_path / "odd_syntax.py").write_text("def network(:\n")
    with pytest.raises(ValueError, match="odd_network:network failed: ZeroDivisionError"):
        load("odd_network:network")
    with pytest.raises(ValueError, match="'odd_syntax:network' is not an importable module:function: SyntaxError"):
        load("odd_syntax:network")
