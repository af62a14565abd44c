import csv
import io
import json

import numpy as np
import pandas
import pytest
import torch
import transformers
from PIL import Image
from torchvision.transforms import ToTensor

import sharpness
from sharpness import cli
from sharpness.data import DataChoice, Examples, is_sorted
from sharpness.models import LoadedModel, load
from tests.support import networks, tiny
from tests.support.pictures import COLOUR, GREY, MEAN, STD, Words, opened, png, transform
from tests.support.texts import wordpiece


@pytest.fixture
def folder(tmp_path, pictures):
    for name, pixels in pictures.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels))
    return tmp_path / "images"


@pytest.fixture
def pictures():
    rng = np.random.default_rng(0)
    return {f"{c}/{i}.png": rng.integers(0, 256, (6, 4, 3), dtype=np.uint8) for c in ("dog", "cat") for i in range(3)}


def test_choosing():
    assert Examples(5, list).choose() == [0, 1, 2, 3, 4]
    assert Examples(5, list).choose(2) == [0, 1]
    some = Examples(100, list).choose(10, seed=1)
    assert some == Examples(100, list).choose(10, seed=1) != Examples(100, list).choose(10, seed=2)
    assert len(set(some)) == 10
    assert Examples(100, list).choose(20, seed=1)[:10] == some  # a larger choice holds the smaller one
    with pytest.raises(ValueError, match="6 examples were asked for, but there are 5"):
        Examples(5, list).choose(6)


def test_examples_that_stand_class_by_class_are_chosen_at_random():
    """The first half of IMDB is of one class."""
    labels = [1] * 50 + [0] * 50
    assert is_sorted(labels)
    assert is_sorted(torch.tensor(labels).tolist())
    for other in ([0, 0, 1, 0], [0, 1, 2], [0.1, 0.2, 0.3], [5], [1, 1, 1]):
        assert not is_sorted(other)
    chosen = Examples(100, list, sorted=True).choose(20)
    assert {labels[i] for i in chosen} == {0, 1}
    assert chosen == Examples(100, list).choose(20, seed=0)


@pytest.mark.parametrize(("labels", "by_class"), [([1] * 6 + [0] * 6, True), ([0, 1] * 6, False)])
def test_every_format_knows_the_order_of_its_classes(tmp_path, labels, by_class, pictures):
    datasets = pytest.importorskip("datasets")

    def tokenizer(*columns, **options):
        return {"input_ids": torch.tensor([[len(t)] for t in columns[0]])}

    texts = [{"text": "x" * i, "label": label} for i, label in enumerate(labels)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    torch.save({"x": torch.zeros(12, 3), "y": torch.tensor(labels)}, tmp_path / "tensors.pt")
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])}
    datasets.Dataset.from_list(texts, features=datasets.Features(kinds)).save_to_disk(tmp_path / "texts")
    image = {"bytes": png(next(iter(pictures.values()))), "path": None}
    rows = [{"image": image, "label": label} for label in labels]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    datasets.Dataset.from_list(rows, features=datasets.Features(kinds)).save_to_disk(tmp_path / "images")
    for name in ("table.jsonl", "tensors.pt", "texts", "images"):
        found = opened(str(tmp_path / name), COLOUR, tokenizer=tokenizer)
        assert found.sorted == by_class, name


# -- images ------------------------------------------------------------------------------------------------------------


def test_class_folders(folder, pictures):
    found = opened(str(folder), COLOUR)
    assert (found.size, found.classes) == (6, {"cat": 0, "dog": 1})
    x, y = found.batch([0, 4])
    assert y.tolist() == [0, 1]
    for got, name in zip(x, ("cat/0.png", "dog/1.png"), strict=True):
        expected = (pictures[name] / 255 - np.array(MEAN)) / np.array(STD)
        assert np.allclose(got.permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_what_a_listing_leaves_out_is_counted(folder, tmp_path, capsys):
    """Half of the images were left out in silence, and a hidden folder became class 0, which moved all labels."""
    assert opened(str(folder), COLOUR, num_classes=2).remarks == ()
    image = png(np.zeros((6, 4, 3), dtype=np.uint8))
    for name in (
        ".ipynb_checkpoints/0.png",
        "__MACOSX/cat/._0.png",
        "cat/._0.png",
        "cat/notes.txt",
        "cat/more/9.png",
        "x.png",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image)
    Image.open(io.BytesIO(image)).save(folder / "dog" / "9.gif")
    found = opened(folder, COLOUR, num_classes=2)
    assert (found.size, found.classes) == (7, {"cat": 0, "dog": 1})
    assert torch.equal(found.batch([6])[0], found.batch([6])[0])
    (remark,) = found.remarks
    assert f"6 of the 13 files of {folder} are left out, such as .ipynb_checkpoints/0.png: they are hidden" in remark
    torch.set_default_dtype(torch.float32)
    command = ["run", "tests.support.pictures:picture_network", str(folder), "--measure", "adaptive", "--rho", "0.1"]
    command += ["--steps", "1", "--quiet"]
    assert cli.main(command) == 0
    assert remark in capsys.readouterr().out
    assert cli.main([*command, "--out", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["remarks"] == [remark]


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    """The label of folder 10 was 2."""
    for name in map(str, range(12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(np.full((8, 8), int(name), dtype=np.uint8)))
    found = opened(str(tmp_path), transform((8, 8), (0.0,), (1 / 255,), "L"))
    assert found.classes == {str(i): i for i in range(12)}
    x, y = found.batch(range(12))
    assert x[:, 0, 0, 0].round().tolist() == y.tolist() == list(range(12))


def test_images_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"the image a/x.png cannot be read; remove it or replace it: cannot identify"):
        opened(str(tmp_path), GREY).batch([0])
    (tmp_path / "a" / "x.png").write_bytes(png(np.zeros((40, 40), dtype=np.uint8)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"the image a/x.png cannot be read; .*: Image size \(1600 pixels\) exceeds"):
        opened(str(tmp_path), GREY).batch([0])


def test_the_models_own_numbers_of_classes(folder):
    plain = opened(str(folder), COLOUR)
    found = opened(str(folder), COLOUR, labels={"Dog": 0, "bird": 1, "Cat": 2})
    assert plain.batch(range(6))[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert found.batch(range(6))[1].tolist() == [2, 2, 2, 0, 0, 0]
    assert found.classes == {"Dog": 0, "bird": 1, "Cat": 2}
    other = opened(str(folder), COLOUR, labels={"LABEL_0": 0, "LABEL_1": 1})
    assert other.batch(range(6))[1].tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"has the label 'dog', which is not the name of a class \(cat, bird\)"):
        opened(str(folder), COLOUR, labels={"cat": 0, "bird": 1})


@pytest.mark.filterwarnings("ignore")
def test_run_on_images(folder, capsys):
    torch.set_default_dtype(torch.float32)
    command = [
        "run",
        "tests.support.pictures:flat",
        str(folder),
        "--measure",
        "adaptive",
        "--rho",
        "0.05",
        "--steps",
        "2",
    ]
    assert cli.main([*command, "--quiet"]) == 2
    assert "does not say how to prepare them; give it an image_transform" in capsys.readouterr().err
    assert cli.main(["run", "tests.support.pictures:picture_network", *command[2:], "--quiet"]) == 0
    assert "nats at ρ = 0.05 (adaptive)" in capsys.readouterr().out


def test_names_that_differ_in_case_and_labels_that_are_none(tmp_path):
    for name in "aA":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(np.zeros((8, 8), dtype=np.uint8)))
    found = opened(str(tmp_path), GREY, labels={"a": 0, "A": 1})
    assert found.classes == {"a": 0, "A": 1}
    assert found.batch([0, 1])[1].tolist() == [1, 0]  # A comes before a


def test_pictures_of_16_bits(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    (tmp_path / "a").mkdir()
    Image.fromarray(ramp).save(tmp_path / "a" / "x.png")
    (found,), _ = opened(tmp_path, transform((8, 8), (0.0,), (1.0,), "L")).batch([0])
    assert np.allclose(found[0].numpy(), ramp / 65535, atol=3e-3)


@pytest.mark.parametrize(
    ("pixels", "right"),
    [
        (np.linspace(0, 1, 64, dtype=np.float32), np.linspace(0, 1, 64)),
        (np.linspace(0, 255, 64, dtype=np.float32), r"pixels go from 0 to 255, not within 0 to 1, .* of floats; save"),
        (np.full(64, np.nan, dtype=np.float32), "pixels go from nan to nan, not within 0 to 1"),
        (np.arange(64, dtype=np.int32) * 9999, "pixels go from 0 to 629937, not within 0 to 65535, .* of 16 bits"),
        (np.arange(64, dtype=np.int32) - 1, "pixels go from -1 to 62, not within 0 to 65535"),
    ],
)
def test_grey_pictures_of_more_than_8_bits_are_read_or_refused(tmp_path, pixels, right):
    """Floats from 0 to 1 became black, and whole numbers beyond 65535 white."""
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels.reshape(8, 8)).save(tmp_path / "a" / "x.tif")
    found = opened(tmp_path, transform((8, 8), (0.0,), (1.0,), "L"))
    if isinstance(right, str):
        with pytest.raises(ValueError, match=right):
            found.batch([0])
    else:  # to half a step of 8 bits
        assert np.allclose(found.batch([0])[0].flatten().numpy(), right, atol=0.51 / 255)


@pytest.mark.filterwarnings("ignore")
def test_pictures_are_turned_as_their_orientation_says(tmp_path, pictures):
    """Files in folders were read as stored, but those that datasets decodes were turned."""
    datasets = pytest.importorskip("datasets")
    (pixels, *_), exif = pictures.values(), Image.Exif()
    exif[0x0112] = 6  # the first row of the file is the right-hand side of the picture
    (tmp_path / "images" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(path := tmp_path / "images" / "a" / "x.png", exif=exif)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a"])})
    rows = {"image": [{"bytes": path.read_bytes(), "path": None}], "label": [0]}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "saved")
    expected = np.rot90(pixels, -1) / 255
    for source in ("images", "saved"):
        (found,), _ = opened(tmp_path / source, ToTensor()).batch([0])
        assert np.allclose(found.permute(1, 2, 0).numpy(), expected, atol=1e-6), source


def test_images_of_several_sizes_make_no_batch(tmp_path):
    (tmp_path / "a").mkdir()
    for size in (4, 8):
        (tmp_path / "a" / f"{size}.png").write_bytes(png(np.zeros((size, size), dtype=np.uint8)))
    with pytest.raises(
        ValueError, match=r"the images of .* do not make a batch: RuntimeError: stack expects each tensor"
    ):
        opened(tmp_path, ToTensor()).batch([0, 1])


def test_batches(folder):
    mine = LoadedModel(torch.nn.Identity(), transform=COLOUR)
    batches = DataChoice(str(folder), batch_size=2, num_examples=5, subset_seed=3).load(mine)
    order = Examples(6, list).choose(5, 3)
    assert [len(y) for _, y in batches] == [2, 2, 1]
    assert torch.cat([y for _, y in batches]).tolist() == [i // 3 for i in order]


@pytest.mark.parametrize("tensors", [{"y": torch.tensor(3)}, {"x": torch.zeros(2, 3), "y": torch.tensor([1])}], ids=len)
def test_tensors_without_examples_are_refused(tmp_path, tensors):
    torch.save(tensors, tmp_path / "data.pt")
    with pytest.raises(ValueError, match=r"data.pt: the tensors have unequal numbers of examples, or none, \{"):
        opened(tmp_path / "data.pt")


def test_batches_are_equal_and_classes_are_mixed(folder, tmp_path):
    """A last batch of one example would count as much as the others, and the first images are all of one class."""
    torch.save({"x": torch.arange(40.0)[:, None], "y": torch.arange(40)}, tmp_path / "data.pt")
    mine, path = LoadedModel(torch.nn.Identity(), transform=COLOUR), str(tmp_path / "data.pt")
    batches = DataChoice(path, batch_size=39).load(mine)
    assert [len(y) for _, y in batches] == [20, 20]
    assert torch.cat([y for _, y in batches]).tolist() == list(range(40))
    assert [len(y) for _, y in DataChoice(path, batch_size=16, batches=2).load(mine)] == [16, 16]
    ((_, found),) = DataChoice(str(folder), num_examples=4).load(mine)
    assert found.tolist() == [i // 3 for i in Examples(6, list).choose(4, 0)]
    assert set(found.tolist()) == {0, 1}


def test_what_is_wrong_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no data at"):
        opened(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="does not say how to prepare them; give it an image_transform"):
        opened(str(folder))
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the class folder empty of .* holds no image"):
        opened(str(folder), COLOUR)
    (folder / "empty").rmdir()
    broken = folder / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"the image cat/0.png cannot be read; remove it or replace it"):
        opened(str(folder), COLOUR).batch([0])
    table = tmp_path / "t.tsv"
    for content, columns, message in (
        (b"text\tlabel\nfine\t0\n\xff\xfe\t1\n", {}, "t.tsv is not UTF-8; convert the file: "),
        (b"text\tlabel\nfine\t0\n", {"text": "words"}, r"no column 'words'; it has text, label"),
        (b"text\tlabel\nfine\n", {}, r"row 1 of .*t.tsv has 1 columns, not 2"),
        (b"text\tlabel\n", {}, "has no rows"),
        (
            b"text\tlabel\nfine\tmaybe\n",
            {},
            r"the label 'maybe', which is not the name of a class .*--label-map",
        ),
        (
            b"text\tlabel\nfine\tmaybe\n",
            {"label_map": {"yes": 1}},
            r"'maybe', which is not the name of a class \(yes\)",
        ),
    ):
        table.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            opened(str(table), tokenizer=Words(), **columns)
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        opened(str(table))
    lines = tmp_path / "t.jsonl"
    for content, message in (
        (b"{}\nno\n", "line 2 of .* is not a JSON object: Expecting value"),
        (b"3\n", "line 1 of .* is not a JSON object"),
    ):
        lines.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            opened(str(lines), tokenizer=Words())
    lines.write_text('{"text": "a\\u2028b", "label": 1}\n{"label": 0}\n'.replace("\\u2028", "\u2028"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"row 2 of .* has no column 'text'; it has label"):
        opened(str(lines), tokenizer=Words())
    with pytest.raises(ValueError, match="which makes its batches itself; omit"):
        DataChoice("module:function", num_examples=3).load(LoadedModel(torch.nn.Identity()))


# -- labels ------------------------------------------------------------------------------------------------------------


def labelled(path, kind, labels):
    """Write a source that has one example of every label."""
    path = path / f"data.{kind}"
    if kind == "folders":
        for name in map(str, labels):
            (path / name).mkdir(parents=True)
            (path / name / "x.png").write_bytes(png(np.zeros((8, 8), dtype=np.uint8)))
        return path
    frame = pandas.DataFrame({"text": ["a bc"] * len(labels), "label": labels})
    if kind == "tsv":
        frame.to_csv(path, sep="\t", index=False)
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        pytest.importorskip("datasets")
        frame.to_parquet(path)
    return path


def numbers_of(path, **known):
    found = opened(path, GREY, tokenizer=Words(), **known)
    batch = found.batch(range(found.size))
    return (batch["labels"] if isinstance(batch, dict) else batch[1]).tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "labels"),
    [("folders", [3, 7]), *((k, v) for k in ("tsv", "jsonl", "parquet") for v in ([3, 7], [1.0, 0.0], [True, False]))],
)
def test_labels_that_are_whole_numbers(tmp_path, kind, labels):
    """Folders 3 and 7 were the classes 0 and 1; numbers with a point, and truth values, were refused."""
    path = labelled(tmp_path, kind, labels)
    assert numbers_of(path, num_classes=10) == [int(label) for label in labels]
    assert numbers_of(path, num_classes=10, labels={f"LABEL_{i}": i for i in range(10)}) == list(map(int, labels))
    names = {str(int(label)): i for i, label in enumerate(labels)}  # names come first, numbers though they seem to be
    assert numbers_of(path, labels=names) == numbers_of(path, label_map=names) == [0, 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["folders", "tsv", "jsonl", "parquet"])
def test_labels_beyond_the_classes(tmp_path, kind):
    path = labelled(tmp_path, kind, [0, 7])
    with pytest.raises(ValueError, match="'7', which is class 7, but the classes of the model are 0 to 2; say what"):
        numbers_of(path, num_classes=3)
    with pytest.raises(ValueError, match="'0', which is class -100, but the classes of the model are 0 to …; say what"):
        numbers_of(path, label_map={"0": -100, "7": 0})


@pytest.mark.parametrize("kind", ["tsv", "folders"])
def test_labels_are_mapped_to_names_of_classes(tmp_path, kind):
    path, known = labelled(tmp_path, kind, ["neg", "pos"]), {"negative": 4, "positive": 2}
    assert numbers_of(path, labels=known, label_map={"neg": "Negative", "pos": 1}) == [4, 1]
    with pytest.raises(ValueError, match=r"neg=bad: the model has no class 'bad' \(negative, positive\); give"):
        numbers_of(path, labels=known, label_map={"neg": "bad", "pos": 1})
    assert cli._label_map("neg=negative,pos=1") == {"neg": "negative", "pos": 1}


def test_folders_that_are_some_of_the_models_classes(tmp_path):
    """They were numbered 0, 1, …, whatever the model's number of classes, and whatever their names."""
    path = labelled(tmp_path, "folders", ["cat", "dog"])
    assert numbers_of(path, num_classes=2) == [0, 1]
    (remark,) = opened(path, GREY).remarks
    assert "are taken for the classes 0 to 1 in the order of their names; if the model numbers them otherwise" in remark
    with pytest.raises(ValueError, match=r"is 2 in .*, such as 'cat', but 10 in the model, which does not name them; "):
        numbers_of(path, num_classes=10)
    with pytest.raises(ValueError, match=r"'cat', which is not the name of a class \(Katze, Hund\); say"):
        numbers_of(path, num_classes=2, labels={"Katze": 0, "Hund": 1})


# -- saved datasets ----------------------------------------------------------------------------------------------------


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
    one = opened(str(tmp_path / "one"), COLOUR)
    x, y = one.batch([0, 3])
    assert one.classes == {"cat": 0, "dog": 1}
    assert y.tolist() == [1, 0]
    expected = (pictures["cat/0.png"] / 255 - np.array(MEAN)) / np.array(STD)
    assert np.allclose(x[1].permute(1, 2, 0).numpy(), expected, atol=1e-6)
    assert opened(tmp_path / "parts" / "test", COLOUR).size == 2
    with pytest.raises(ValueError, match=r"has the splits train, test; name one as .*parts/train"):
        opened(str(tmp_path / "parts"), COLOUR)
    with pytest.raises(ValueError, match="has no column 'kind'"):
        opened(str(tmp_path / "one"), COLOUR, label="kind")
    texts = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    data = datasets.Dataset.from_dict({"text": ["x y", "y"], "label": [1, 0]}, features=texts)
    data.save_to_disk(tmp_path / "texts")

    def tokenizer(*columns, **options):
        return {"input_ids": torch.tensor([[len(t)] for t in columns[0]])}

    batch = opened(str(tmp_path / "texts"), tokenizer=tokenizer).batch([0, 1])
    assert batch["labels"].tolist() == [1, 0]
    # The model's own numbers of the names come first.
    other = opened(str(tmp_path / "texts"), tokenizer=tokenizer, labels={"GOOD": 0, "bad": 1, "good": 0})
    assert other.batch([0, 1])["labels"].tolist() == [0, 1]
    # Names in other letters are the same names; other names, and unlabelled rows, are an error.
    turned = opened(str(tmp_path / "texts"), tokenizer=tokenizer, labels={"GOOD": 0, "BAD": 1})
    assert turned.batch([0, 1])["labels"].tolist() == [0, 1]
    # Names that are numbers are names all the same.
    texts["label"] = datasets.ClassLabel(names=["1", "0"])
    datasets.Dataset.from_dict({"text": ["x y", "y"], "label": [1, 0]}, features=texts).save_to_disk(
        tmp_path / "digits"
    )
    with pytest.raises(ValueError, match=r"digits has the label '0', which is not the name of a class \(bad, good\)"):
        opened(str(tmp_path / "digits"), tokenizer=tokenizer, labels={"bad": 0, "good": 1})
    with pytest.raises(ValueError, match=r"has the label 'good', which is not the name of a class \(yes, no\)"):
        opened(str(tmp_path / "texts"), tokenizer=tokenizer, labels={"yes": 0, "no": 1})
    data = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, -1]}, features=texts)
    data.save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(
        ValueError, match=r"has the label '-1', which is not the name of a class .* or use a split with labels"
    ):
        opened(str(tmp_path / "unlabelled"), tokenizer=tokenizer)
    found.cast_column("label", datasets.Value("int64")).map(lambda row: {"label": -1}).save_to_disk(tmp_path / "none")
    with pytest.raises(
        ValueError, match=r"has the label '-1', which is not the name of a class .* or use a split with labels"
    ):
        opened(tmp_path / "none", COLOUR)


@pytest.mark.filterwarnings("ignore")
def test_parquet_files_of_texts_and_of_images(tmp_path, pictures):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["bad", "good"])
    kinds = datasets.Features({"text": datasets.Value("string"), "label": names})
    datasets.Dataset.from_dict({"text": ["a bc", "d"], "label": [1, 0]}, features=kinds).to_parquet(
        tmp_path / "t.parquet"
    )
    found = opened(tmp_path / "t.parquet", tokenizer=Words())
    assert found.classes == {"bad": 0, "good": 1}
    batch = found.batch([1, 0])
    assert batch["labels"].tolist() == [0, 1]
    assert batch["input_ids"].tolist() == [[1, 0], [1, 2]]
    kinds = datasets.Features({"image": datasets.Image(), "label": names})
    rows = {"image": [{"bytes": png(p), "path": None} for p in pictures.values()], "label": [0, 1] * 3}
    datasets.Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / "i.parquet")
    x, y = opened(tmp_path / "i.parquet", COLOUR).batch([0, 3])
    assert (x.shape, y.tolist()) == ((2, 3, 6, 4), [0, 1])
    (tmp_path / "i.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"i.parquet is not readable by datasets"):
        opened(tmp_path / "i.parquet", COLOUR)


@pytest.mark.filterwarnings("ignore")
def test_rows_that_cannot_be_read_are_named_and_language_models_need_no_labels(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": b"text", "path": None}], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "images")
    with pytest.raises(ValueError, match=r"the image in row 0 of .*images cannot be read"):
        opened(str(tmp_path / "images"), COLOUR).batch([0])
    datasets.Dataset.from_dict({"text": ["a bc", "d"], "other": [1, 2]}).save_to_disk(tmp_path / "texts")

    def tokenizer(texts, **_):
        ids = Words()(texts, truncation=True, max_length=9, padding=True, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    batch = opened(str(tmp_path / "texts"), tokenizer=tokenizer, predicts=True).batch([0, 1])
    assert batch["labels"].tolist() == [[1, 2], [1, -100]]


# -- texts -------------------------------------------------------------------------------------------------------------


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
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = ("0", "1", "2") if kind == "no header" else ("one", "two", "what")
    columns = {"text": names[0], "pair": names[1], "label": names[2], "header": kind != "no header"}
    found = opened(path, tokenizer=Words(), label_map={"no": 3, "yes": 5}, max_length=4, **columns)
    batch = found.batch([1, 0])
    assert batch["labels"].tolist() == [5, 3]
    assert batch["input_ids"].tolist() == [[3, 4, 0, 2], [1, 3, 0, 1]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_of_long_texts_are_cut_before_they_are_paired(tmp_path, side):
    """Their tokens are the same; all rests of one text with all of the other would take the memory of the machine."""
    rng, sent = np.random.default_rng(0), []
    vocabulary = ["a", "cat", "sat", "unbelievable", "on-the", "…", "x" * 120]
    sparse = "cat" + " " * 6000 + "sat on the mat"
    rows = [[" ".join(rng.choice(vocabulary, n)) for n in sizes] for sizes in ((3000, 3000), (2000, 3), (1, 2500))]
    rows.append([sparse, sparse])
    (tmp_path / "t.jsonl").write_text("".join(
        json.dumps({"one": one, "two": two, "label": 0}) + "\n" for one, two in rows
    ), encoding="utf-8")  # fmt: skip
    tokenizer = wordpiece(vocabulary, 60, length=512)
    tokenizer.truncation_side = side

    class Seen:
        is_fast, truncation_side, model_max_length = True, side, 512

        def __call__(self, *texts, **options):
            sent.append([len(text) for column in texts for text in column if isinstance(column, list)])
            return tokenizer(*texts, **options)

    columns = {"text": "one", "pair": "two", "max_length": 20}
    batch = opened(tmp_path / "t.jsonl", tokenizer=Seen(), labels={"0": 0}, **columns).batch([0, 1, 2, 3])
    pairs = ([texts[k] for texts in rows] for k in (0, 1))
    expected = tokenizer(*pairs, truncation=True, max_length=20, padding=True, return_tensors="pt")
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert (max(sent[-1][:3]) < 5000) == (side == "right")


def test_labels_by_number_and_by_the_models_names(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\na\t1\nb\tEntailment\n", encoding="utf-8")
    found = opened(str(path), tokenizer=Words(), labels={"entailment": 2})
    assert found.batch([0, 1])["labels"].tolist() == [1, 2]


def test_labels_that_differ_in_case(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\na\tx\nb\tX\n", encoding="utf-8")
    for columns, known in (({}, {"X": 0, "x": 1}), ({"label_map": {"X": 0, "x": 1}}, {})):
        found = opened(str(path), tokenizer=Words(), labels=known, **columns)
        assert found.batch([0, 1])["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.csv",
            "label,text\n1,good, really good\n",
            "row 1 of .*a.csv has 3 columns, not 2: they are separated by ','",
        ),
        (
            "a.csv",
            "label;text\n1;good; really\n",
            "row 1 of .*a.csv has 3 columns, not 2: they are separated by ';'",
        ),
        ("a.tsv", "label\ttext\n²\tgood\n", "a.tsv has the label '²', which is not the name of a class"),
        ("a.tsv", "label\ttext\n1\tgood\t0\n", "row 1 of .*a.tsv has 3 columns, not 2: they are separated by"),
        ("a.csv", "label,text,label\n1,good,0\n", r"has two columns of one name \(label, text, label\); rename one"),
        ("a.csv", 'text,label\n"bad,0\n"nice,1\ngood,1\n', "a.csv is not a readable table"),
        ("a.jsonl", '{"label": 1, "text": null}\n', "row 1 of .*a.jsonl has no column 'text'"),
        (
            "a.txt",
            "label\ttext\n1\tgood\n",
            "a.txt is not data by its name: no folder, nor one of  .bin .ckpt .csv",
        ),
    ],
)
def test_tables_with_cells_of_no_column_are_refused(tmp_path, name, text, said):
    """The first was measured as the text "good"; the second took the wrong column where there was no header."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        opened(str(tmp_path / name), tokenizer=Words())


def test_tables_of_spreadsheets_and_long_texts(tmp_path):
    """Semicolons and texts of more than 131,072 characters were refused; the module's own limit stays."""
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"label;text\n1;{'ab ' * 60000}\n0;short, too\n", encoding="utf-8")
    (batch,) = (opened(str(tmp_path / "a.csv"), tokenizer=Words()).batch([1, 0]),)
    assert batch["labels"].tolist() == [0, 1]
    assert batch["input_ids"].shape == (2, 128)
    assert csv.field_size_limit() == limit


TEXTS = ["good film", "bad", "a good day and a bad film", "a bad day", "so good a film", "day"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "bos_token_id": 2, "eos_token_id": 2}
LANGUAGE = {
    "next": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "masked": ("BertForMaskedLM", "BertConfig", SMALL),
    "text": ("T5ForConditionalGeneration", "T5Config",
             {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}),
    None: ("GPT2ForSequenceClassification", "GPT2Config", GPT2),
    "number": ("GPT2ForSequenceClassification", "GPT2Config", {**GPT2, "num_labels": 1}),
}  # fmt: skip


def language_model(kind, folder, *, padding):
    import transformers

    from tests.support.texts import wordpiece

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    tokenizer = wordpiece(TEXTS, 60, length=24)
    if not padding:
        tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    name, config, options = LANGUAGE[kind]
    options = {**options, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = networks.shake(getattr(transformers, name)(getattr(transformers, config)(**options)).float())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder.parent / "data.tsv").write_text(
        "text\tlabel\n" + "".join(f"{t}\t{len(t) % 2}\n" for t in TEXTS), encoding="utf-8"
    )
    return load(str(folder))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("kind", ["next", None])
def test_language_models_on_a_table(kind, padding, tmp_path, capsys):
    """The loss is that of texts one at a time, which need no padding; it was an error about batch sizes."""
    loaded = language_model(kind, tmp_path / "model", padding=padding)
    assert loaded.predicts_tokens == (kind == "next")
    total = count = 0.0
    for text in TEXTS:
        inputs = loaded.tokenizer(text, return_tensors="pt")
        labels = inputs["input_ids"] if kind == "next" else torch.tensor([len(text) % 2])
        size = labels.numel() - (kind == "next")
        if size:  # a text of one token predicts none
            total, count = total + size * float(loaded.model(**inputs, labels=labels).loss), count + size
    command = ["run", str(tmp_path / "model"), str(tmp_path / "data.tsv"), "--measure", "adaptive", "--rho", "0.05"]
    for more in ([], ["--micro-batch", "2"]):
        assert cli.main([*command, "--steps", "2", "--quiet", "--out", str(tmp_path / "out.json"), *more]) == 0
        found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"][0]["batches"][0]
        assert found["base_loss"] == pytest.approx(total / count, rel=1e-5)
        assert found["value"] > 0


DECODERS = ["gpt2", "llama", "gemma", "cohere", "qwen2", "mistral", "phi", "opt", "gpt_neox", "bloom", "falcon"]


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Folders of a tokenizer that pads at the left and of one that pads at the right, and texts one at a time."""
    from tests.support.texts import wordpiece

    tokenizer, folders, texts = wordpiece(TEXTS, 60, length=24), [], [f"{text} [SEP]" for text in TEXTS[:3]]
    for tokenizer.padding_side in ("right", "left"):
        folders.append(tmp_path_factory.mktemp(tokenizer.padding_side))
        tokenizer.save_pretrained(folders[-1])
        (folders[-1] / "data.tsv").write_text(
            "text\tlabel\n" + "".join(f"{text}\t0\n" for text in texts), encoding="utf-8"
        )
    return (
        folders,
        tokenizer(texts, padding=True, return_tensors="pt"),
        [tokenizer(t, return_tensors="pt") for t in texts],
    )


def tiny_model(kind, task, **options):
    """A model of a type of transformers in double precision, which pads by another token than the tokenizer."""
    from transformers.models.auto import modeling_auto as auto

    config = tiny.configuration(kind)
    for name, value in {"pad_token_id": 7, "num_labels": 3, "_attn_implementation": "eager", **options}.items():
        setattr(config, name, value)
    name = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[kind]
    torch.manual_seed(0)
    return networks.shake(getattr(transformers, name)(config).double(), 0.05)


def by_itself(model, texts):
    """The mean loss of all tokens but the first, each predicted from those before it in its text."""
    losses = [(len(t["input_ids"][0]) - 1, model(**t, labels=t["input_ids"]).loss) for t in texts]
    return sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", DECODERS)
def test_the_side_of_the_padding_does_not_matter(kind, padded):
    """At the left it moved positions, and the first token of a text was predicted from padding."""
    model, (folders, at_left, texts) = tiny_model(kind, "CAUSAL_LM"), padded
    (batch,), (other,) = (DataChoice(str(f / "data.tsv")).load(LoadedModel(model, folder=f)) for f in folders)
    assert all(torch.equal(batch[name], other[name]) for name in batch)
    options = {"measure": "adaptive", "rho": 0.1, "steps": 2, "progress": False}
    found = sharpness.evaluate(model, [batch], **options)
    expected = sharpness.evaluate(model, [texts], by_itself, **options)
    # Transformers computes the loss in single precision, of which 1e-5 is 20 units at a loss of 4.
    assert found.batches[0].base_loss == pytest.approx(expected.batches[0].base_loss, abs=1e-5)
    assert float(found) == pytest.approx(float(expected), abs=1e-5)
    assert float(found) > 1e-3
    labels = at_left["input_ids"].masked_fill(at_left["attention_mask"] == 0, -100)
    right = sum(len(t["input_ids"][0]) - 1 for t in texts)
    assert int((labels[:, 1:] != -100).sum()) > right == int((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "roberta", "xlnet", "bart"])
def test_classifiers_see_no_padding(kind, padded):
    """Some read a text's class at its last token, which was padding if the tokenizer had another token for that."""
    folders, _, texts = padded
    model = tiny_model(kind, "SEQUENCE_CLASSIFICATION", eos_token_id=int(texts[0]["input_ids"][0, -1]))
    expected = torch.cat([model(**text).logits for text in texts])
    for folder in folders:
        (batch,) = DataChoice(str(folder / "data.tsv")).load(LoadedModel(model, folder=folder))
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bart", "trocr", "xlm", "xlnet"])
def test_models_whose_tokens_predict_themselves_are_refused(kind, padded):
    """Their loss shifts no labels, so that of a text's own tokens, which they saw, was measured."""
    model = tiny_model(kind, "CAUSAL_LM")
    with pytest.raises(ValueError, match=f"{type(model).__name__} predicts other tokens of a text than the next ones"):
        DataChoice(str(padded[0][0] / "data.tsv")).load(LoadedModel(model, folder=padded[0][0]))


@pytest.mark.filterwarnings("ignore")
def test_inputs_are_cut_or_refused(tmp_path):
    """A tokenizer does not cut to fewer tokens than its special ones, and did not say so."""
    from tokenizers.processors import BertProcessing

    from tests.support.texts import wordpiece

    tokenizer = wordpiece(TEXTS, 60, length=24)
    ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.backend_tokenizer.post_processor = BertProcessing(*ends)
    (tmp_path / "data.tsv").write_text("text\tlabel\na good day\t0\n", encoding="utf-8")
    for length in (2, 3):
        batch = opened(tmp_path / "data.tsv", tokenizer=tokenizer, max_length=length).batch([0])
        assert batch["input_ids"].shape == (1, length)
    with pytest.raises(ValueError, match=r"it does not cut \d tokens to 1; choose a larger --max-length"):
        opened(tmp_path / "data.tsv", tokenizer=tokenizer, max_length=1).batch([0])


@pytest.mark.filterwarnings("ignore")
def test_a_regression_on_a_table(tmp_path):
    """Its labels were refused, since they are no classes."""
    loaded, scores = language_model("number", tmp_path / "model", padding=True), [2.5, -1.0, 0.0, 4.75, 3.0, 0.125]
    table = tmp_path / "data.tsv"
    table.write_text(
        "text\tlabel\n" + "".join(f"{t}\t{s}\n" for t, s in zip(TEXTS, scores, strict=True)), encoding="utf-8"
    )
    (batch,) = DataChoice(str(table)).load(loaded)
    assert batch["labels"].tolist() == scores
    guess = [float(loaded.model(**loaded.tokenizer(text, return_tensors="pt")).logits) for text in TEXTS]
    expected = sum((g - s) ** 2 for g, s in zip(guess, scores, strict=True)) / len(scores)
    result = sharpness.evaluate(loaded.model, [batch], measure="adaptive", rho=0.05, steps=1, progress=False)
    assert result.batches[0].base_loss == pytest.approx(expected, rel=1e-5)  # in float32
    table.write_text("text\tlabel\nday\tlong\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has the label 'long', but the model predicts a number: could not convert"):
        DataChoice(str(table)).load(loaded)
    (batch,) = DataChoice(str(table), label_map={"long": 3}).load(loaded)
    assert batch["labels"].tolist() == [3.0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["masked", "text"])
def test_other_language_models_on_a_table_are_refused(kind, tmp_path):
    """Their labels are no column: masked tokens, or another text."""
    loaded = language_model(kind, tmp_path / "model", padding=True)
    with pytest.raises(ValueError, match=f"{LANGUAGE[kind][0]} predicts other tokens of a text than the next ones"):
        DataChoice(str(tmp_path / "data.tsv")).load(loaded)


@pytest.mark.filterwarnings("ignore")
def test_texts_are_not_longer_than_the_models_positions(tmp_path):
    """The tokenizer's own limit may be larger."""
    loaded = language_model("next", tmp_path / "model", padding=True)
    assert loaded.tokenizer.model_max_length == 24
    loaded.model.config.max_position_embeddings = 5
    assert loaded.tokenizer.model_max_length == 5
    (tmp_path / "data.tsv").write_text("text\n" + "a good day and a bad film " * 20 + "\n", encoding="utf-8")
    (batch,) = DataChoice(str(tmp_path / "data.tsv")).load(loaded)
    assert batch["input_ids"].shape == (1, 5)


@pytest.mark.filterwarnings("ignore")
def test_run_on_a_table(tmp_path, capsys):
    from tests.support.texts import wordpiece

    torch.set_default_dtype(torch.float32)
    table = tmp_path / "data.tsv"
    words = ["good film", "bad film", "a good day", "a bad day"] * 3
    table.write_text(
        "sentence\tclass\n" + "".join(f"{w}\t{'pos' if 'good' in w else 'neg'}\n" for w in words), encoding="utf-8"
    )
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
    assert " (geodesic-inv):\n    loss " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main([*command, "--label-map", "pos=1,neg=0,pos=2"])
    assert "labels are mapped by NAME=NUMBER,…, each once" in capsys.readouterr().err
    assert cli.main([*command, "--label-map", "pos=7,neg=0"]) == 2
    err = capsys.readouterr().err
    assert "has the label 'pos', which is class 7, but the classes of the model are 0 to 2" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 2.5},
        {"batch_size": True},
        {"batches": True},
        {"num_examples": 1.5},
        {"subset_seed": -1},
        {"max_length": 0},
    ],
)
def test_counts_are_whole_numbers(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a whole number of at least"):
        DataChoice("module:function", **wrong)
