"""Data sets from files; whatever is wrong with one is said in a sentence that names it."""

import gzip
import io
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from sharpness import cli
from sharpness.data import DataChoice, TextColumns
from sharpness.data.examples import choose
from sharpness.data.loading import load_examples
from sharpness.models import ImageFormat, LoadedModel

from . import networks

FORMAT = ImageFormat((8, 8), (0.25,), (0.5,), channels=1)
COLOUR = ImageFormat((6, 4), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.fixture
def pictures():
    rng = np.random.default_rng(0)
    return {f"{c}/{i}.png": rng.integers(0, 256, (6, 4, 3), dtype=np.uint8) for c in ("dog", "cat") for i in range(3)}


@pytest.fixture
def folder(tmp_path, pictures):
    for name, pixels in pictures.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels))
    return tmp_path / "images"


def test_class_folders(folder, pictures):
    found = load_examples(str(folder), images=COLOUR)
    assert (len(found), found.classes) == (6, ("cat", "dog"))
    x, y = found.batch([0, 4])
    assert y.tolist() == [0, 1]
    for got, name in zip(x, ("cat/0.png", "dog/1.png"), strict=True):
        expected = (pictures[name] / 255 - np.array(COLOUR.mean)) / np.array(COLOUR.std)
        assert np.allclose(got.permute(1, 2, 0).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("inside", ["", "data/train"])
def test_zip_archives(tmp_path, folder, pictures, inside):
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, pixels in pictures.items():
            archive.writestr(f"{inside}/{name}".lstrip("/"), png(pixels))
    found = load_examples(f"{path}:{inside}" if inside else str(path), images=COLOUR)
    same = load_examples(str(folder), images=COLOUR)
    assert found.classes == same.classes
    for a, b in zip(found.batch(range(6)), same.batch(range(6)), strict=True):
        assert torch.equal(a, b)
    if inside:
        with pytest.raises(
            ValueError, match=r"no images CLASS/NAME below .*; name a folder in it, as .*images.zip:data"
        ):
            load_examples(str(path), images=COLOUR)


def test_resizing_and_cropping(tmp_path):
    (tmp_path / "a").mkdir()
    wide = np.zeros((20, 40), dtype=np.uint8)
    wide[:, 10:30] = 255  # the middle square is white
    (tmp_path / "a" / "x.png").write_bytes(png(wide))
    crop = ImageFormat((10, 10), (0.0,), (1.0,), channels=1, crop=True, resample="nearest")
    x, _ = load_examples(str(tmp_path), images=crop).batch([0])
    assert x.shape == (1, 1, 10, 10)
    assert bool((x == 1).all())
    squeezed = ImageFormat((10, 10), (0.0,), (1.0,), channels=1, resample="nearest")
    x, _ = load_examples(str(tmp_path), images=squeezed).batch([0])
    assert float(x.mean()) == pytest.approx(0.5, abs=0.11)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, packed):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (5, 8, 8), dtype=np.uint8), np.arange(5, dtype=np.uint8)
    for name, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels)):
        head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        data = head + array.tobytes()
        (tmp_path / f"t-{name}{'.gz' * packed}").write_bytes(gzip.compress(data) if packed else data)
    path = tmp_path / f"t-images-idx3-ubyte{'.gz' * packed}"
    x, y = load_examples(str(path), images=FORMAT).batch([1, 3])
    assert y.tolist() == [1, 3]
    assert np.allclose(x[:, 0].numpy(), (pixels[[1, 3]] / 255 - 0.25) / 0.5, atol=1e-6)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="is no readable idx file"):
        load_examples(str(path), images=FORMAT)


# -- text ----------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer: a token a word, numbered by its length."""

    def __call__(self, texts, pairs=None, *, truncation, max_length, padding, return_tensors):
        rows = [[len(w) for w in t.split()] for t in texts]
        if pairs is not None:
            rows = [row + [0] + [len(w) for w in t.split()] for row, t in zip(rows, pairs, strict=True)]
        rows = [row[:max_length] for row in rows]
        wide = max(map(len, rows))
        return {"input_ids": torch.tensor([row + [0] * (wide - len(row)) for row in rows])}


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "no header"])
def test_tables(tmp_path, kind):
    rows = [('a "bc', "x", "no"), ("def ghij", "yy zz", "YES")]
    path = tmp_path / f"data.{'tsv' if kind == 'no header' else kind}"
    if kind == "jsonl":
        lines = [json.dumps({"one": a, "two": b, "what": c}) for a, b, c in rows]
    elif kind == "csv":
        lines = ["one,two,what", *(f'"{a.replace(chr(34), chr(34) * 2)}",{b},{c}' for a, b, c in rows)]
    else:
        lines = ["one\ttwo\twhat"] * (kind == "tsv") + ["\t".join(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    names = ("0", "1", "2") if kind == "no header" else ("one", "two", "what")
    columns = TextColumns(names[0], names[1], names[2], {"no": 3, "yes": 5}, header=kind != "no header", max_length=4)
    batch = load_examples(str(path), text=columns, tokenizer=Words()).batch([1, 0])
    assert batch["labels"].tolist() == [5, 3]
    assert batch["input_ids"].tolist() == [[3, 4, 0, 2], [1, 3, 0, 1]]


def test_labels_by_number_and_by_the_models_names(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\na\t1\nb\tEntailment\n")
    found = load_examples(str(path), tokenizer=Words(), labels={"entailment": 2})
    assert found.batch([0, 1])["labels"].tolist() == [1, 2]


# -- choosing ------------------------------------------------------------------------------------------------------


def test_choosing():
    assert choose(5) == [0, 1, 2, 3, 4]
    assert choose(5, 2) == [0, 1]
    some = choose(100, 10, seed=1)
    assert some == choose(100, 10, seed=1) != choose(100, 10, seed=2)
    assert len(set(some)) == 10
    assert choose(100, 20, seed=1)[:10] == some  # a larger choice holds the smaller one
    with pytest.raises(ValueError, match="6 examples were asked for, but there are 5"):
        choose(5, 6)


def test_batches(folder):
    mine = LoadedModel(torch.nn.Identity(), "function", images=COLOUR)
    batches = DataChoice(str(folder), batch_size=2, num_examples=5, subset_seed=3).load(mine)
    order = choose(6, 5, 3)
    assert [len(y) for _, y in batches] == [2, 2, 1]
    assert torch.cat([y for _, y in batches]).tolist() == [i // 3 for i in order]


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no data at"):
        load_examples(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="does not say what it expects; give size, mean, std"):
        load_examples(str(folder))
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the class folder empty of .* holds no image"):
        load_examples(str(folder), images=COLOUR)
    (folder / "empty").rmdir()
    broken = folder / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"the image cat/0.png cannot be read .*; remove it or replace it"):
        load_examples(str(folder), images=COLOUR).batch([0])
    (tmp_path / "a.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is no readable zip archive"):
        load_examples(str(tmp_path / "a.zip"), images=COLOUR)
    (tmp_path / "x-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="needs its labels beside it, in x-labels-idx1-ubyte"):
        load_examples(str(tmp_path / "x-images-idx3-ubyte"), images=FORMAT)
    table = tmp_path / "t.tsv"
    for content, columns, message in (
        (b"text\tlabel\nfine\t0\n\xff\xfe\t1\n", TextColumns(), r"line 3 of .*t.tsv is not UTF-8"),
        (b"text\tlabel\nfine\t0\n", TextColumns("words"), r"no column 'words'; it has text, label"),
        (b"text\tlabel\nfine\n", TextColumns(), r"row 1 of .*t.tsv has 1 columns, not 2"),
        (b"text\tlabel\n", TextColumns(), "has no rows"),
        (b"text\tlabel\nfine\tmaybe\n", TextColumns(), r"the label 'maybe', which stands for no class .*--label-map"),
        (
            b"text\tlabel\nfine\tmaybe\n",
            TextColumns(label_map={"yes": 1}),
            r"'maybe', which stands for no class \(yes\)",
        ),
    ):
        table.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_examples(str(table), text=columns, tokenizer=Words())
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        load_examples(str(table))
    lines = tmp_path / "t.jsonl"
    for content, message in ((b"{}\nno\n", "line 2 of .* is no JSON"), (b"3\n", "line 1 of .* is no JSON object")):
        lines.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_examples(str(lines), tokenizer=Words())
    lines.write_text('{"text": "a\\u2028b", "label": 1}\n{"label": 0}\n'.replace("\\u2028", "\u2028"))
    with pytest.raises(ValueError, match=r"row 2 of .* has no column 'text'; it has label"):
        load_examples(str(lines), tokenizer=Words())
    with pytest.raises(ValueError, match="which chooses its examples itself"):
        DataChoice("module:function", num_examples=3).load(LoadedModel(torch.nn.Identity(), "function"))


# -- through the command line --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_run_on_a_table(tmp_path, capsys):
    from reproduction.pretrain import wordpiece

    torch.set_default_dtype(torch.float32)
    table = tmp_path / "data.tsv"
    words = ["good film", "bad film", "a good day", "a bad day"] * 3
    table.write_text("sentence\tclass\n" + "".join(f"{w}\t{'pos' if 'good' in w else 'neg'}\n" for w in words))
    model = networks.bert(layers=1)
    model.config.label2id = {"neg": 0, "pos": 1, "none": 2}
    folder = tmp_path / "bert"
    model.save_pretrained(folder)
    command = ["run", str(folder), str(table), "--text", "sentence", "--label", "class", "--rho", "0.05"]
    command += ["--steps", "2", "--quiet", "--batch-size", "6", "--num-examples", "6", "--subset-seed", "1"]
    assert cli.main(command) == 2
    assert "the model has no tokenizer" in capsys.readouterr().err
    wordpiece([*words, "and some other words"], 100, length=16).save_pretrained(folder)
    assert cli.main(command) == 2
    assert "use its own tokenizer" in capsys.readouterr().err
    wordpiece(["a", "b", "c"], 20, length=16).save_pretrained(folder)
    assert cli.main(command) == 0
    assert "geodesic-inv sharpness of BertForSequenceClassification: 1 batch" in capsys.readouterr().out
    assert cli.main([*command, "--label-map", "pos=7,neg=0"]) == 2
    err = capsys.readouterr().err
    assert "the labels go from 0 to 7, but BertForSequenceClassification has fewer classes" in err
    assert err.count("\n") == 1


@pytest.mark.filterwarnings("ignore")
def test_run_on_images(folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "image_network.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).float()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.set_default_dtype(torch.float32)
    command = [
        "run",
        "image_network:model",
        str(folder),
        "--measure",
        "adaptive",
        "--rho",
        "0.05",
        "--steps",
        "2",
        "--quiet",
    ]
    assert cli.main(command) == 2
    assert "give size, mean, std" in capsys.readouterr().err
    assert cli.main([*command, "--image-size", "8", "--mean", "0.5", "0.5", "0.5", "--std", "1"]) == 0
    assert "adaptive sharpness of Sequential" in capsys.readouterr().out


# -- folders of datasets -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_folders_of_datasets(tmp_path, pictures):
    datasets = pytest.importorskip("datasets")
    names = sorted({n.split("/")[0] for n in pictures})
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {
        "picture": [{"bytes": png(p), "path": None} for p in pictures.values()],
        "label": [names.index(n.split("/")[0]) for n in pictures],
    }
    found = datasets.Dataset.from_dict(rows, features=features)
    found.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": found, "test": found.select([0, 1])}).save_to_disk(tmp_path / "parts")
    one = load_examples(str(tmp_path / "one"), images=COLOUR)
    x, y = one.batch([0, 3])
    assert one.classes == ("cat", "dog")
    assert y.tolist() == [1, 0]
    expected = (pictures["cat/0.png"] / 255 - np.array(COLOUR.mean)) / np.array(COLOUR.std)
    assert np.allclose(x[1].permute(1, 2, 0).numpy(), expected, atol=1e-6)
    assert len(load_examples(f"{tmp_path / 'parts'}:test", images=COLOUR)) == 2
    assert not DataChoice(f"{tmp_path / 'parts'}:test").is_text
    assert not DataChoice(str(tmp_path / "parts")).is_text
    with pytest.raises(ValueError, match="has the parts train, test; name one"):
        load_examples(str(tmp_path / "parts"), images=COLOUR)
    with pytest.raises(ValueError, match="has no column 'kind'"):
        load_examples(str(tmp_path / "one"), images=COLOUR, text=TextColumns(label="kind"))
    texts = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    data = datasets.Dataset.from_dict({"text": ["x y", "y"], "label": [1, 0]}, features=texts)
    data.save_to_disk(tmp_path / "texts")
    assert DataChoice(str(tmp_path / "texts")).is_text

    def tokenizer(*columns, **options):
        return {"input_ids": torch.tensor([[len(t)] for t in columns[0]])}

    batch = load_examples(str(tmp_path / "texts"), tokenizer=tokenizer).batch([0, 1])
    assert batch["labels"].tolist() == [1, 0]
    # The model's own numbers of the names come first.
    other = load_examples(str(tmp_path / "texts"), tokenizer=tokenizer, labels={"GOOD": 0, "bad": 1, "good": 0})
    assert other.batch([0, 1])["labels"].tolist() == [0, 1]
    # Names in other letters are the same names; other names, and unlabelled rows, are an error.
    turned = load_examples(str(tmp_path / "texts"), tokenizer=tokenizer, labels={"GOOD": 0, "BAD": 1})
    assert turned.batch([0, 1])["labels"].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"the classes of .* \(bad, good\) are not the model's \(yes, no\)"):
        load_examples(str(tmp_path / "texts"), tokenizer=tokenizer, labels={"yes": 0, "no": 1})
    data = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, -1]}, features=texts)
    data.save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(ValueError, match="has the label -1, which is none of its classes"):
        load_examples(str(tmp_path / "unlabelled"), tokenizer=tokenizer)
