import json

import pytest
import torch

from sharpness.data.examples import Examples, is_sorted
from sharpness.data.loading import load_examples
from tests.pictures import COLOUR, png


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
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    torch.save({"x": torch.zeros(12, 3), "y": torch.tensor(labels)}, tmp_path / "tensors.pt")
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])}
    datasets.Dataset.from_list(texts, features=datasets.Features(kinds)).save_to_disk(tmp_path / "texts")
    image = {"bytes": png(next(iter(pictures.values()))), "path": None}
    rows = [{"image": image, "label": label} for label in labels]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    datasets.Dataset.from_list(rows, features=datasets.Features(kinds)).save_to_disk(tmp_path / "images")
    for name in ("table.jsonl", "tensors.pt", "texts", "images"):
        found = load_examples(str(tmp_path / name), images=COLOUR, tokenizer=tokenizer)
        assert found.sorted == by_class, name
