import gzip
import io
import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from sharpness import cli
from sharpness.data.images import image_examples, pixels
from sharpness.data.loading import load_examples
from sharpness.models import ImageFormat
from tests.pictures import COLOUR, FORMAT, png


def test_class_folders(folder, pictures):
    found = load_examples(str(folder), images=COLOUR)
    assert (len(found), found.classes) == (6, ("cat", "dog"))
    x, y = found.batch([0, 4])
    assert y.tolist() == [0, 1]
    for got, name in zip(x, ("cat/0.png", "dog/1.png"), strict=True):
        expected = (pictures[name] / 255 - np.array(COLOUR.mean)) / np.array(COLOUR.std)
        assert np.allclose(got.permute(1, 2, 0).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_listing_leaves_out_is_counted(folder, tmp_path, packed, capsys, monkeypatch):
    """Half of the images were left out in silence, and a hidden folder became class 0, which moved all labels."""
    assert load_examples(str(folder), images=COLOUR).remarks == ()
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
    source = tmp_path / "images.zip" if packed else folder
    if packed:
        with zipfile.ZipFile(source, "w") as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(folder))
    found = load_examples(str(source), images=COLOUR)
    assert (len(found), found.classes) == (7, ("cat", "dog"))
    assert torch.equal(found.batch([6])[0], found.batch([6])[0])
    (remark,) = found.remarks
    assert f"6 of the 13 files of {source} are left out, such as .ipynb_checkpoints/0.png: they are hidden" in remark
    (tmp_path / "a_network.py").write_text("from tests.pictures import flat as model\n")
    monkeypatch.syspath_prepend(tmp_path)
    torch.set_default_dtype(torch.float32)
    command = [
        "run",
        "a_network:model",
        str(source),
        "--measure",
        "adaptive",
        "--rho",
        "0.1",
        "--steps",
        "1",
        "--quiet",
    ]
    command += ["--image-size", "4", "--mean", "0.5", "0.5", "0.5", "--std", "1"]
    assert cli.main(command) == 0
    assert remark in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == [remark]


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    """The label of folder 10 was 2."""
    for name in map(str, range(12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(np.full((8, 8), int(name), dtype=np.uint8)))
    found = load_examples(str(tmp_path), images=ImageFormat((8, 8), (0.0,), (1 / 255,), channels=1))
    assert found.classes == tuple(map(str, range(12)))
    x, y = found.batch(range(12))
    assert x[:, 0, 0, 0].round().tolist() == y.tolist() == list(range(12))


def test_images_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"the image a/x.png cannot be read \(it is no image that Pillow knows\)"):
        load_examples(str(tmp_path), images=FORMAT).batch([0])
    (tmp_path / "a" / "x.png").write_bytes(png(np.zeros((40, 40), dtype=np.uint8)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"the image a/x.png cannot be read \(Image size \(1600 pixels\) exceeds"):
        load_examples(str(tmp_path), images=FORMAT).batch([0])
    path = tmp_path / "locked.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/x.png", b"image")
    for place, change, words in ((6, 1, "password required"), (8, 9, "compression method")):
        raw = bytearray(path.read_bytes())
        at = raw.index(b"PK\x01\x02")
        raw[place] |= change  # in the file's own header, and in the directory
        raw[at + place + 2] |= change
        (tmp_path / "b.zip").write_bytes(bytes(raw))
        with pytest.raises(ValueError, match=rf"a/x.png in .*b.zip cannot be read \(.*{words}.*\); create the archive"):
            load_examples(str(tmp_path / "b.zip"), images=FORMAT).batch([0])


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


def test_the_models_own_numbers_of_classes(folder):
    plain = load_examples(str(folder), images=COLOUR)
    found = load_examples(str(folder), images=COLOUR, labels={"Dog": 0, "bird": 1, "Cat": 2})
    assert plain.batch(range(6))[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert found.batch(range(6))[1].tolist() == [2, 2, 2, 0, 0, 0]
    assert found.classes == ("Dog", "bird", "Cat")
    other = load_examples(str(folder), images=COLOUR, labels={"LABEL_0": 0, "LABEL_1": 1})
    assert other.batch(range(6))[1].tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="has the class 'dog', which is none of the model's"):
        load_examples(str(folder), images=COLOUR, labels={"cat": 0, "bird": 1})


@pytest.mark.parametrize("shape", [(30, 41), (64, 30), (20, 20), (9, 31)])
def test_the_shorter_side_before_the_crop_is_that_of_transformers(shape):
    transformers, image = pytest.importorskip("transformers"), pytest.importorskip("PIL.Image")
    made = image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    processor = transformers.BitImageProcessor(
        size={"shortest_edge": 24}, crop_size=16, resample=3, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = torch.as_tensor(np.asarray(processor(made, return_tensors="np")["pixel_values"][0]))
    how = ImageFormat((16, 16), (0.5,), (0.5,), 3, True, "bicubic", 24)
    assert float((pixels(made, how) - expected).abs().mean()) < 5e-3  # transformers rounds grey values otherwise
    assert float((pixels(made, replace(how, resize=None)) - expected).abs().mean()) > 0.1


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
    with pytest.raises(ValueError, match="is not a readable idx file"):
        load_examples(str(path), images=FORMAT)


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
    assert "pass size, mean and std" in capsys.readouterr().err
    assert cli.main([*command, "--image-size", "8", "--mean", "0.5", "0.5", "0.5", "--std", "1"]) == 0
    assert "adaptive sharpness of Sequential" in capsys.readouterr().out


def test_names_that_differ_in_case_and_labels_that_are_none(tmp_path):
    for name in "aA":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(np.zeros((8, 8), dtype=np.uint8)))
    found = load_examples(str(tmp_path), images=FORMAT, labels={"a": 0, "A": 1})
    assert found.classes == ("a", "A")
    assert found.batch([0, 1])[1].tolist() == [1, 0]  # A comes before a
    with pytest.raises(ValueError, match="has the label -1, which is no class"):
        image_examples("a split", lambda i: torch.zeros(1), [0, 1, -1], ["a", "b"], {"a": 0, "b": 1})


def test_pictures_of_16_bits():
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    made = pytest.importorskip("PIL.Image").fromarray(ramp)
    found = pixels(made, ImageFormat((8, 8), (0.0,), (1.0,), channels=1))
    assert np.allclose(found[0].numpy(), ramp / 65535, atol=3e-3)
