import numpy as np
import pytest
import torch
from PIL import Image

from sharpness.data import DataChoice, TextColumns
from sharpness.data.examples import Examples
from sharpness.data.images import pixels
from sharpness.data.loading import load_examples
from sharpness.models import ImageFormat, LoadedModel
from tests.pictures import COLOUR, FORMAT, Words


def test_batches(folder):
    mine = LoadedModel(torch.nn.Identity(), images=COLOUR)
    batches = DataChoice(str(folder), batch_size=2, num_examples=5, subset_seed=3).load(mine)
    order = Examples(6, list).choose(5, 3)
    assert [len(y) for _, y in batches] == [2, 2, 1]
    assert torch.cat([y for _, y in batches]).tolist() == [i // 3 for i in order]


def test_batches_are_equal_and_classes_are_mixed(folder, tmp_path):
    """A last batch of one example would count as much as the others, and the first images are all of one class."""
    torch.save({"x": torch.arange(40.0)[:, None], "y": torch.arange(40)}, tmp_path / "data.pt")
    mine, path = LoadedModel(torch.nn.Identity(), images=COLOUR), str(tmp_path / "data.pt")
    batches = DataChoice(path, batch_size=39).load(mine)
    assert [len(y) for _, y in batches] == [20, 20]
    assert torch.cat([y for _, y in batches]).tolist() == list(range(40))
    assert [len(y) for _, y in DataChoice(path, batch_size=16, batches=2).load(mine)] == [16, 16]
    ((_, found),) = DataChoice(str(folder), num_examples=4).load(mine)
    assert found.tolist() == [i // 3 for i in Examples(6, list).choose(4, 0)]
    assert set(found.tolist()) == {0, 1}


def test_the_top_of_a_zip_is_no_function(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is not a readable zip archive"):
        DataChoice(f"{tmp_path}/a.zip:").load(LoadedModel(torch.nn.Identity(), images=COLOUR))


@pytest.mark.parametrize("resize", [12, (12, 12), None])
def test_another_size_shows_the_same_part_of_the_image(resize):
    image = Image.fromarray(np.tile(np.linspace(0, 255, 60).astype(np.uint8), (60, 1)))
    known = ImageFormat((8, 8), (0.0,), (1.0,), channels=1, crop=True, resample="bilinear", resize=resize)
    ends = []
    for how in (known, DataChoice("x", image_size=32).image_format(known)):
        x = pixels(image, how)
        assert x.shape[1:] == how.size
        ends.append([float(x[..., 0].mean()), float(x[..., -1].mean())])
    assert ends[0] == pytest.approx(ends[1], abs=0.08)


def test_what_is_wrong_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no data at"):
        load_examples(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="does not say which format it expects; pass size, mean and std"):
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
    with pytest.raises(ValueError, match="is not a readable zip archive"):
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
        (
            b"text\tlabel\nfine\tmaybe\n",
            TextColumns(),
            r"the label 'maybe', which is not the name of a class .*--label-map",
        ),
        (
            b"text\tlabel\nfine\tmaybe\n",
            TextColumns(label_map={"yes": 1}),
            r"'maybe', which is not the name of a class \(yes\)",
        ),
    ):
        table.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_examples(str(table), text=columns, tokenizer=Words())
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        load_examples(str(table))
    lines = tmp_path / "t.jsonl"
    for content, message in ((b"{}\nno\n", "line 2 of .* is not JSON"), (b"3\n", "line 1 of .* is not a JSON object")):
        lines.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_examples(str(lines), tokenizer=Words())
    lines.write_text('{"text": "a\\u2028b", "label": 1}\n{"label": 0}\n'.replace("\\u2028", "\u2028"))
    with pytest.raises(ValueError, match=r"row 2 of .* has no column 'text'; it has label"):
        load_examples(str(lines), tokenizer=Words())
    with pytest.raises(ValueError, match="which chooses its examples itself"):
        DataChoice("module:function", num_examples=3).load(LoadedModel(torch.nn.Identity()))
