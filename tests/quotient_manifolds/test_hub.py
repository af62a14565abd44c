"""Adapters by their names on the Hub, which is one on this machine."""

import json
import sys

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from quotient_manifolds import hub as names
from quotient_manifolds.adapters import compare, merge
from quotient_manifolds.lora_command import main
from tests.support import local_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with local_hub.serving() as hub:
        local_hub.connect_to(hub, tmp_path / "cache", monkeypatch)
        yield hub


def adapter(folder, seed=0, config=True):
    """A folder of PEFT, with one layer of rank 2; without the config one file, as of diffusers."""
    folder.mkdir()
    torch.manual_seed(seed)
    factors = {
        f"base_model.model.q.lora_{f}.weight": torch.randn(*shape) for f, shape in (("A", (2, 3)), ("B", (4, 2)))
    }
    if config:
        save_file(factors, folder / "adapter_model.safetensors")
        entries = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"]}
        (folder / "adapter_config.json").write_text(json.dumps(entries), encoding="utf-8")
    else:
        save_file({k.removeprefix("base_model.model."): v for k, v in factors.items()}, folder / "lora.safetensors")
    (folder / "model.safetensors.bin").write_bytes(b"a pickle")
    return folder


def test_adapters_by_name(hub, tmp_path, monkeypatch, capsys):
    first = hub.push("someone/one", adapter(tmp_path / "one"))
    other = hub.push("someone/two", adapter(tmp_path / "two", seed=1))
    assert main(["merge", "someone/one", f"someone/two@{other}", "--out", "merged"]) == 0
    (line, *_) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fetching")]
    assert line.endswith(f"of someone/one at {first[:12]} from {hub.url}")
    merge(["one", "two"], "by_folder")
    assert compare("merged", "by_folder")["layers"]["q"]["distance"] == 0
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert f"0.5 × someone/one@{first}\n" in card
    assert f"0.5 × someone/two@{other}\n" in card
    assert compare("someone/one", "someone/two")["layers"]["q"]["distance"] > 0.1
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert compare("someone/one", "one")["layers"]["q"]["distance"] == 0
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_an_adapter_of_one_file(hub, tmp_path):
    hub.push("someone/file", adapter(tmp_path / "file", config=False))
    assert compare("someone/file", "file/lora.safetensors")["layers"]["q"]["distance"] == 0


def test_adapters_that_are_refused(hub, tmp_path, capsys):
    (tmp_path / "pickle").mkdir()
    for name in ("adapter_config.json", "adapter_model.bin"):
        (tmp_path / "pickle" / name).write_bytes(b"{}")
    hub.push("someone/pickle", tmp_path / "pickle")
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, adapter(tmp_path / name, config=False) / f"{name}.safetensors")
    hub.push("someone/several", tmp_path / "a")
    for name, words in {
        "someone/absent": "no model of this name on http",
        "someone/pickle": "has no safetensors weights at its top, only pickles such as adapter_model.bin, which",
        "someone/several": "has no adapter_config.json, but 2 files such as a.safetensors; fetch one",
        "someone/one.safetensors": "someone/one.safetensors is no file",
    }.items():
        assert main(["balance", name, "--out", "out"]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_was_fetched_in_part_or_changed_is_refused(hub, tmp_path, monkeypatch):
    """The library returned what there was, and what has another commit."""
    hub.push("someone/one", adapter(tmp_path / "one"))
    repository = names.repository("someone/one", "model", "lora")
    hub.push("someone/one", adapter(tmp_path / "two", seed=1))
    with pytest.raises(OSError, match="someone/one was changed while it was fetched; try again"):
        repository.fetch(["adapter_config.json"])
    repository = names.repository("someone/one", "model", "lora")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: repository.place)
    with pytest.raises(OSError, match=r"lacks adapter_model.safetensors; fetch it again"):
        repository.fetch(["adapter_config.json", "adapter_model.safetensors"])


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError, match=r"someone/one is not here; .* install the extra lora, pip install '\.\[lora\]'"
    ):
        compare("someone/one", "someone/two")


def test_what_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "here").mkdir(parents=True)
    for name in ("someone/one", "someone/one@main", "a/b@refs/pr/1", "hf-hub:x", "someone/here@main", "a.b/c_d-1.0"):
        assert names.is_name(name), name
    for name in (
        "one",
        "./someone/one",
        "/a/b",
        "someone/here",
        "a/b/c",
        "a/b.pt",
        "a/b.csv@x",
        "a//b",
        "a/b/",
        "a/b@",
        "a\\b/c",
    ):
        assert not names.is_name(name), name
    assert names.is_name("a/b/c", 3)
    assert names.split_name("hf_hub:a/b@refs/pr/1") == ("a/b", (), "refs/pr/1")
    for name in ("hf-hub:a", "a/b--c", "a/b..c", "hf-hub:a/b@"):
        with pytest.raises(ValueError, match="is no name of the Hugging Face Hub"):
            names.split_name(name)
