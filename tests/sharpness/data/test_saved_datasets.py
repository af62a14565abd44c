import numpy as np
import pytest
import torch

from sharpness.data import DataChoice, TextColumns
from sharpness.data.loading import load_examples
from tests.pictures import COLOUR, Words, png


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
    with pytest.raises(ValueError, match="has the splits train, test; name one"):
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
    with pytest.raises(ValueError, match="has the label -1, which is not among its classes"):
        load_examples(str(tmp_path / "unlabelled"), tokenizer=tokenizer)


@pytest.mark.filterwarnings("ignore")
def test_rows_that_cannot_be_read_are_named_and_language_models_need_no_labels(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": b"text", "path": None}], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "images")
    with pytest.raises(ValueError, match=r"the image in row 0 of .*images cannot be read"):
        load_examples(str(tmp_path / "images"), images=COLOUR).batch([0])
    datasets.Dataset.from_dict({"text": ["a bc", "d"], "other": [1, 2]}).save_to_disk(tmp_path / "texts")

    def tokenizer(texts, **_):
        ids = Words()(texts, truncation=True, max_length=9, padding=True, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    batch = load_examples(str(tmp_path / "texts"), tokenizer=tokenizer, predicts="next").batch([0, 1])
    assert batch["labels"].tolist() == [[1, 2], [1, -100]]
