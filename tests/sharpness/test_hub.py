"""Models and data by their names on the Hub, which is one on this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from sharpness import cli
from sharpness.data import DataChoice
from sharpness.hub_data import fetch_data
from sharpness.models import load
from sharpness.study.rows import job_key
from sharpness.sweeps import plan_of
from tests.support import local_hub, networks
from tests.support.small_clip import SMALL
from tests.support.texts import wordpiece

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    with local_hub.serving() as hub:
        local_hub.connect_to(hub, tmp_path / "cache", monkeypatch)
        yield hub


@pytest.fixture
def bert(tmp_path):
    networks.bert(layers=1).save_pretrained(tmp_path / "bert")
    wordpiece(["a", "b"], 20, length=12).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def texts(folder):
    rows = "".join(f"{'a b'[i % 3 :]} a\t{i % 3}\n" for i in range(12))
    (folder / "dev.tsv").write_text(f"text\tlabel\n{rows}", encoding="utf-8")
    return "dev.tsv"


def spoilt(folder, **entries):
    """Change the configuration of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **entries}), encoding="utf-8")


def measured(name, data, *options):
    """What ``sharpness run`` writes of a model."""
    settings = ["--measure", "adaptive", "--steps", "2", "--quiet", "--out", "r.json"]
    assert cli.main(["run", name, data, *settings, *options]) == 0
    return json.loads(Path("r.json").read_text(encoding="utf-8"))


def value(found):
    return found["results"][0]["sharpness"]


def test_a_model_is_measured_as_its_folder_and_its_commit_is_known(hub, bert, tmp_path, capfd):
    data, first = texts(tmp_path), hub.push("someone/bert", bert)
    by_folder = measured("bert", data)
    assert "fetching" not in capfd.readouterr().err
    by_name = measured("someone/bert", data)
    assert value(by_name) == value(by_folder)
    assert by_name["model"] == {**by_folder["model"], "name": f"someone/bert@{first}"}
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("fetching")]
    size = sum(path.stat().st_size for path in bert.iterdir()) / 1e6
    assert line == f"fetching 4 files, {size:.3g} MB, of someone/bert at {first[:12]} from {hub.url}"

    with torch.no_grad():
        (model := load("bert").model).classifier.weight.mul_(2)
    model.save_pretrained(bert)
    second = hub.push("someone/bert", bert)
    assert second != first
    moved = measured("someone/bert", data)
    assert moved["model"]["name"] == f"someone/bert@{second}"
    assert value(moved) != value(by_name)
    assert "fetching 1 file, " in capfd.readouterr().err
    assert value(measured(f"someone/bert@{first}", data)) == value(by_name)
    assert "fetching" not in capfd.readouterr().err

    (bert / "README.md").write_text("new", encoding="utf-8")
    hub.tags["v2"], hub.tags["v3"] = second, hub.push("someone/bert", bert)
    plans = [plan_of((f"someone/bert{tag}",), data=data) for tag in (f"@{first}", "@v2", "@v3", "")]
    jobs = [[job_key(job) for job in plan.jobs(*plan.checkpoints)] for plan in plans]
    assert len({key for keys in jobs[:3] for key in keys}) == 3
    assert [checkpoint.name for plan in plans for checkpoint in plan.checkpoints][1:] == [
        "someone/bert@v2", "someone/bert@v3", "someone/bert",
    ]  # fmt: skip


def test_commands_that_write_no_file_print_the_commit(hub, bert, tmp_path, capsys):
    commit = hub.push("someone/bert", bert)
    said = f"- someone/bert is someone/bert@{commit}"
    for line in ("compare bert someone/bert", "same someone/bert bert", "canonicalize someone/bert --out new"):
        assert cli.main(line.split()) == 0
        assert said in capsys.readouterr().out.splitlines()
    assert cli.main(["symmetries", "someone/bert", "--json"]) == 0
    found = capsys.readouterr()
    assert said in found.err.splitlines()
    assert json.loads(found.out)


def test_a_spectrum_records_the_commits(hub, bert, tmp_path):
    commit, data = hub.push("someone/bert", bert), texts(tmp_path)
    options = ["--matrix", "ggn", "--k", "1", "--quiet", "--out", "s.json"]
    assert cli.main(["spectrum", "someone/bert", data, *options]) == 0
    found = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert found["model"]["name"] == f"someone/bert@{commit}"


def test_of_several_processes_one_says_what_is_fetched(hub, bert, monkeypatch, capsys):
    hub.push("someone/bert", bert)
    monkeypatch.setenv("RANK", "1")
    load("someone/bert")
    assert "fetching" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "spectrum"])
def test_data_that_are_not_there_are_known_before_a_model_is_fetched(command, hub, bert, tmp_path, capsys):
    hub.push("someone/bert", bert)
    assert cli.main([command, "someone/bert", "x.tsv"]) == 2
    said = capsys.readouterr().err
    assert "there is no data at x.tsv" in said
    assert "fetching" not in said


def test_a_model_and_data_that_are_not_there_are_named_together(hub, bert, capsys):
    model, data = "no model of this name on http", "no data set of this name on http"
    for line, *words in (
        ("run no/such no/rows/train", model, data),
        ("spectrum no/such no/rows/train", model, data),
        ("symmetries no/such --data no/rows/train", model, data),
        ("run no/such x.tsv", model, "there is no data at x.tsv"),
        ("run ./bert/2 x.tsv", "there is no folder './bert/2'; and there is no data at x.tsv"),
        ("spectrum ./bert/2 no/rows/train", "there is no folder './bert/2'", data),
        ("compare no/such not/this", "there is no folder no/such", "there is no folder not/this"),
        ("canonicalize no/such --adapter not/this --out new", "there is no folder no/such", "no folder not/this"),
    ):
        assert cli.main(line.split()) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert all(word in said for word in words), said


def test_data_without_a_split_are_refused_before_the_hub_is_asked(hub, bert, tables, capsys):
    hub.push("someone/rows", tables, "datasets")
    for line in ("run bert someone/rows", "spectrum bert someone/rows", "sweep bert --data someone/rows --out o"):
        assert cli.main(line.split()) == 2
        assert "there is no data at someone/rows; a data set on the Hub is named with its" in capsys.readouterr().err
    assert not hub.requests


def test_a_command_asks_for_each_name_once(hub, bert, tables, tmp_path):
    hub.push("someone/bert", bert)
    hub.push("someone/rows", tables, "datasets")
    commands = (
        "run someone/bert someone/rows/plain/test --measure adaptive --steps 1 --quiet --out r.json",
        "spectrum someone/bert someone/rows/plain/test --matrix ggn --k 1 --quiet --out s.json",
        "sweep someone/bert --data someone/rows/plain/test --measure adaptive --steps 1 --quiet --out out",
    )
    asked = ["/api/datasets/someone/rows/revision/main?blobs=true", "/api/models/someone/bert/revision/main?blobs=true"]
    measured("someone/bert", "someone/rows/plain/test")
    assert sorted(path for path in hub.requests if "blobs" in path) == asked  # fetching asks in its own way
    for command in commands:
        hub.requests.clear()
        assert cli.main(command.split()) == 0
        assert sorted(hub.requests) == asked
    (bert / "README.md").write_text("new", encoding="utf-8")
    commit = hub.push("someone/bert", bert)
    assert measured("someone/bert", "someone/rows/plain/test")["model"]["name"].endswith(commit)  # it asks anew


#: Names that are not there, in every place where a command takes one.
ABSENT = [
    "run no/such dev.tsv", "run bert no/such/train", "spectrum no/such dev.tsv", "spectrum bert no/such/train",
    "compare bert no/such", "same no/such bert", "symmetries no/such", "canonicalize no/such --out new",
]  # fmt: skip


def test_a_name_that_is_not_there_is_refused_before_torch_is_imported():
    """Torch and what it brings take seconds."""
    code = f"""
import sys
from quotient_manifolds import lora_command
from sharpness import cli

for line in {ABSENT}:
    assert cli.main(line.split()) == 2, line
assert lora_command.main(["merge", "one", "no/such", "--out", "new"]) == 2
assert "torch" not in sys.modules
assert cli.main(["compare", "not-here.pt", "nor-this.pt"]) == 2
assert "torch" in sys.modules  # where a file is asked for it is imported: the line above can fail
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no copy of no/such in the cache") == len(ABSENT) + 1


def test_a_sweep_of_names(hub, bert, tmp_path):
    commit = hub.push("someone/bert", bert)
    config = {"checkpoints": ["bert", "someone/bert"], "data": texts(tmp_path), "measures": ["adaptive"], "steps": 1}
    (tmp_path / "sweep.json").write_text(json.dumps({**config, "initial": "someone/bert"}), encoding="utf-8")
    assert cli.main(["sweep", "sweep.json", "--out", "out", "--quiet"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["model"] for row in rows] == ["bert", f"someone/bert@{commit}"]
    assert rows[0]["sharpness"] == rows[1]["sharpness"]


def test_what_is_a_folder_here_is_not_looked_up(hub, bert, tmp_path):
    shutil.copytree(bert, tmp_path / "someone" / "bert")
    load("someone/bert")
    assert not hub.requests
    with pytest.raises(FileNotFoundError, match="no model of this name on http"):
        load("hf-hub:someone/bert")


REFUSED = {
    "someone/absent": "no model of this name on http",
    "someone/gated": "someone/gated is gated: ask for access on http",
    "someone/bert@v9": "someone/bert has no revision 'v9'; name a branch, a tag or a commit",
    "someone/pickle": "has no safetensors weights at its top, only pickles such as pytorch_model.bin, which are not",
    "someone/nothing": "has no safetensors weights at its top; load it",
    "someone/adapter": "is a PEFT adapter; merge it",
    "hf-hub:bert": "'hf-hub:bert' is no name of the Hugging Face Hub: these are owner/name",
    "hf-hub:some one/bert": "is no name of the Hugging Face Hub",
    "someone/be--rt": "is no name of the Hugging Face Hub",
    "someone/bert@": "there is no folder 'someone/bert@'",
    "bert-base": "has an owner: owner/name",
    "someone/bert --checkpoint x.pt": "a model on the Hub has its own weights; leave out the checkpoint",
}


def test_names_that_are_refused(hub, bert, capsys):
    repositories = {
        "bert": [], "gated": [], "pickle": ["config.json", "pytorch_model.bin"], "nothing": ["config.json"],
        "adapter": ["adapter_config.json", "adapter_model.safetensors"],
    }  # fmt: skip
    for name, files in repositories.items():
        (folder := bert.parent / name).mkdir(exist_ok=True)
        for file in files:
            (folder / file).write_bytes(b"{}")
        hub.push(f"someone/{name}", bert if not files else folder)
    hub.gated.add(("models", "someone/gated"))
    for given, words in REFUSED.items():
        assert cli.main(["symmetries", *given.split(" --")[0:1], *given.split()[1:] * (" --" in given)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert words in said[-1], given
        assert all("etching" in line or not line for line in said[:-1]), said
    assert not list((bert.parent / "cache").rglob("*.bin"))


def test_without_the_hub_the_copy_in_the_cache_is_read(hub, bert, monkeypatch, capsys):
    commit = hub.push("someone/bert", bert)
    weights = load(f"someone/bert@{commit}").model.classifier.weight
    load("someone/bert")  # of which only the name is new
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    for name in ("someone/bert", f"someone/bert@{commit}", "someone/bert@main"):
        assert torch.equal(load(name).model.classifier.weight, weights)
    for name in ("someone/other", "someone/bert@v1", f"someone/bert@{commit[::-1]}"):
        with pytest.raises(ConnectionError, match=r"no copy of .* in the cache .*; HF_HUB_OFFLINE forbids"):
            load(name)
    assert not hub.requests
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "answer", lambda _: (500, {}, b""))
    assert torch.equal(load("someone/bert").model.classifier.weight, weights)
    assert f"reading the copy of someone/bert at {commit[:12]} in the cache" in capsys.readouterr().err
    with pytest.raises(ConnectionError, match=r"answers with an error \(.*500.*\): try again later"):
        load("someone/other")


def forget_files(monkeypatch):
    """As huggingface_hub before 2.0, and what other libraries fetched file by file."""
    monkeypatch.setattr(huggingface_hub, "get_cached_repo_tree", lambda *_, **__: {}["unknown"], raising=False)


@pytest.mark.parametrize("noted", [True, False])
def test_a_copy_in_part_is_refused_without_the_hub_and_completed_with_it(noted, hub, bert, tmp_path, monkeypatch):
    hub.push("someone/bert", bert)
    copy = load("someone/bert").folder
    if not noted:
        forget_files(monkeypatch)
    absent = "tokenizer.json" if noted else "model.safetensors"
    (copy / absent).unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        (OSError, ValueError), match=r"the copy of someone/bert in the cache \(HF_HUB.*\) (lacks|has no)"
    ):
        load("someone/bert")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert load("someone/bert").tokenizer is not None


def test_weights_in_parts(hub, bert, monkeypatch):
    model = load(str(bert)).model
    (bert / "model.safetensors").unlink()
    model.save_pretrained(bert, max_shard_size="5KB")
    hub.push("someone/bert", bert)
    parts = sorted(load("someone/bert").folder.glob("model-*.safetensors"))
    assert len(parts) > 1
    forget_files(monkeypatch)
    parts[0].unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=f"has {len(parts) - 1} of {len(parts)} parts of the weights"):
        load("someone/bert")


def test_code_in_a_repository_is_neither_fetched_nor_run(hub, bert, tmp_path, capsys):
    (bert / "mine.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n", encoding="utf-8")
    spoilt(bert, auto_map={"AutoModel": "mine.Mine", "AutoConfig": "mine.Config"})
    hub.push("someone/known", bert)
    load("someone/known")  # transformers has this class
    spoilt(bert, architectures=["Mine"])
    hub.push("someone/mine", bert)
    spoilt(bert, model_type="mine")
    hub.push("someone/type", bert)
    for name, words in (("mine", "transformers has no attribute Mine"), ("type", "cannot be loaded")):
        assert cli.main(["symmetries", f"someone/{name}"]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "mark").exists()
    assert not list((tmp_path / "cache").rglob("*.py"))


def timm_folder(folder, **entries):
    import timm

    folder.mkdir()
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=1)
    save_file(model.state_dict(), folder / "model.safetensors")
    known = {"input_size": [3, 32, 32], "num_classes": 3, "classifier": "head", "first_conv": "patch_embed.proj"}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": {"img_size": 32, "depth": 1}}
    config |= {"label_names": ["x", "y", "z"], "pretrained_cfg": {**known, "tag": "x"}, **entries}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def test_models_of_timm(hub, tmp_path):
    model = timm_folder(tmp_path / "vit")
    hub.push("someone/vit", tmp_path / "vit")
    hub.push("timm/vit_tiny_patch16_224.augreg_in21k", tmp_path / "vit")
    names = ("vit", "someone/vit", "hf-hub:someone/vit", "hf_hub:someone/vit@main", "vit_tiny_patch16_224.augreg_in21k")
    for name in names:
        loaded = load(name)
        assert torch.equal(loaded.model.head.weight, model.head.weight)
        assert loaded.example.shape == (2, 3, 32, 32)
        assert (loaded.num_classes, loaded.labels) == (3, {"x": 0, "y": 1, "z": 2})
    assert not load(names[-1], untrained=True).labels
    timm_folder(tmp_path / "other", num_classes=5)
    with pytest.raises(ValueError, match=r"other cannot be loaded: RuntimeError: .* size mismatch for head.weight"):
        load("other")  # timm leaves such a head random
    (tmp_path / "other" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"other has no model.safetensors; save the weights"):
        load("other")


def test_models_of_open_clip(hub, bert, tmp_path):
    import open_clip

    (folder := tmp_path / "clip").mkdir()
    model = open_clip.CLIP(**{k: v for k, v in SMALL.items()})
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": SMALL}), encoding="utf-8")
    hub.push("someone/clip", folder)
    for path in bert.iterdir():
        shutil.copy(path, folder)
    hub.push("someone/both", folder)
    for name in ("someone/clip", "hf-hub:someone/clip", "hf-hub:someone/both"):
        assert torch.equal(load(name).model.visual.proj, model.visual.proj)
    assert type(load("someone/both").model).__name__ == "BertForSequenceClassification"
    config = {**SMALL, "text_cfg": {"hf_model_name": "someone/bert"}}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}), encoding="utf-8")
    hub.push("someone/other", folder)
    with pytest.raises(ValueError, match="its texts are read by someone/bert, another model on the Hub"):
        load("hf-hub:someone/other")


# -- data --------------------------------------------------------------------------------------------------------------

CARD = """---
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/train-*
  - split: test
    path: plain/test.csv
- config_name: other
  data_files: other.jsonl
dataset_info:
- config_name: plain
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': {0}
          '1': {1}
          '2': {2}
---
"""


@pytest.fixture
def tables(tmp_path):
    """A data set of two configurations, whose card names its classes in another order than the model."""
    (folder := tmp_path / "tables" / "plain").mkdir(parents=True)
    for name, rows in {"train-1": "a,0\nb,1\n", "train-2": "NA,2\n", "test": "01,0\nb a,2\n"}.items():
        (folder / f"{name}.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    (folder.parent / "other.jsonl").write_text('{"text": "a", "label": 1}\n', encoding="utf-8")
    (folder.parent / "README.md").write_text(CARD.format("LABEL_2", "LABEL_1", "LABEL_0"), encoding="utf-8")
    return folder.parent


def labels(source, loaded):
    """The labels of the only batch."""
    (batch,) = DataChoice(source).load(loaded)
    return batch["labels"].tolist()


def test_data_by_name(hub, bert, tables, tmp_path, capsys, monkeypatch):
    commit, loaded = hub.push("someone/rows", tables, "datasets"), load("bert")
    assert labels("someone/rows/plain/test", loaded) == [2, 0]
    line = capsys.readouterr().err.splitlines()
    assert sum("fetching 1 file" in said for said in line) == 2  # the card, and one table
    assert not list((tmp_path / "cache").rglob("train*"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert labels("someone/rows/plain/test", loaded) == [2, 0]
    with pytest.raises(OSError, match=r"lacks plain/train-1.csv; fetch it again"):
        labels("someone/rows/plain/train", loaded)
    with monkeypatch.context() as forgetting:
        forget_files(forgetting)
        assert labels(f"someone/rows/plain/test@{commit}", loaded) == [2, 0]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert labels("someone/rows/plain/train", loaded) == [2, 1, 0]
    assert labels("someone/rows/other/train@main", loaded) == [1]
    rows = fetch_data("someone/rows/plain/train").files
    assert [path.name for path in rows] == ["train-1.csv", "train-2.csv"]

    by_name = measured("bert", "someone/rows/plain/test")
    assert by_name["data"]["source"] == f"someone/rows/plain/test@{commit}"
    (tmp_path / "test.csv").write_text("text,label\n01,2\nb a,0\n", encoding="utf-8")
    assert value(by_name) == value(measured("bert", "test.csv"))
    (tables / "plain" / "test.csv").write_text("text,label\na,1\n", encoding="utf-8")
    second, first = hub.push("someone/rows", tables, "datasets"), commit
    plans = [plan_of(("bert",), data="someone/rows/plain/test", measure=("adaptive",))]
    plans.append(plan_of(("bert",), data=f"someone/rows/plain/test@{first}", measure=("adaptive",)))
    assert [plan.data.source for plan in plans] == [f"someone/rows/plain/test@{c}" for c in (second, first)]
    keys = [{job_key(job) for job in plan.jobs(*plan.checkpoints)} for plan in plans]
    assert not keys[0] & keys[1]


def test_parquet_by_name(hub, bert, tmp_path):
    """Without a card datasets tells the splits by the names of files; a folder takes the place of a configuration."""
    import datasets

    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y", "z"])})
    for part, label in (("one", 1), ("two", 2)):
        place = tmp_path / "parquet" / part / "validation"
        place.mkdir(parents=True)
        datasets.Dataset.from_dict({"text": ["a"], "label": [label]}, kinds).to_parquet(place / "0000.parquet")
    hub.push("someone/parquet", tmp_path / "parquet", "datasets")
    loaded = load("bert")
    assert labels("someone/parquet/one/validation", loaded) == [1]
    assert labels("someone/parquet/two/validation@main", loaded) == [2]
    assert sorted(labels("someone/parquet/validation", loaded)) == [1, 2]


def test_data_that_are_refused(hub, bert, tables, tmp_path):
    loaded = load("bert")
    hub.push("someone/rows", tables, "datasets")
    (tables / "script.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')", encoding="utf-8")
    hub.push("someone/script", tables, "datasets")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "rows.pkl").write_bytes(b"a pickle")
    hub.push("someone/none", tmp_path / "none", "datasets")
    hub.push("someone/gated", tables, "datasets")
    hub.gated.add(("datasets", "someone/gated"))
    hub.push("someone/bert", bert)
    for source, words in {
        "someone/rows": "there is no data at someone/rows; a data set on the Hub is named with its split",
        "someone/rows/test": "has the configurations plain, other; name one and a split of it, as someone/rows/plain/",
        "someone/rows/plain": "has the splits train, test; name one as someone/rows/plain/train",
        "someone/rows/plain/dev": "has the splits train, test; name one as someone/rows/plain/train",
        "someone/rows/none/test": "has no configuration 'none'; it has plain, other",
        "someone/script/plain/test": r"is a script, which is not run; .* someone/script/plain/test@refs/convert",
        "someone/none/train": r"has no tables \(.csv .*someone/none/train@refs/convert/parquet",
        "someone/absent/train": "no data set of this name on http",
        "someone/bert/train": "no data set of this name on http",
        "someone/rows/plain/test@v1": "has no revision 'v1'",
        "someone/gated/plain/test": r"gated: ask for access on http://.*/datasets/someone/gated",
        "someone/rows/a/b/c": "there is no data at someone/rows/a/b/c",
        "tables/plain/dev.csv": "there is no data at tables/plain/dev.csv",
    }.items():
        with pytest.raises((ValueError, OSError), match=words):
            DataChoice(source).load(loaded)
    assert not (tmp_path / "mark").exists()
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".py", ".pkl")]
