"""Pictures and words in files."""

import io
from types import SimpleNamespace

import torch
from PIL import Image
from torchvision.transforms import Compose, Grayscale, Normalize, Resize, ToTensor

from sharpness.data import DataChoice, load_examples


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def transform(size, mean, std, mode="RGB"):
    steps = [Resize(size), ToTensor(), Normalize(mean, std)]
    return Compose([Grayscale(), *steps] if mode == "L" else steps)


MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
COLOUR = transform((6, 4), MEAN, STD)
GREY = transform((8, 8), (0.25,), (0.5,), "L")


def opened(source, transform=None, *, tokenizer=None, labels=None, predicts=False, num_classes=None, **columns):
    """The examples of a source, for a model of which this is known."""
    known = {"labels": labels or {}, "num_classes": num_classes, "predicts_tokens": predicts}
    loaded = SimpleNamespace(transform=transform, tokenizer=tokenizer, **known)
    return load_examples(DataChoice(str(source), **columns), loaded)


def flat():
    """A classifier of images of 4 × 4 pixels."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).float()


class Words:
    """A tokenizer: a token a word, numbered by its length."""

    def __call__(self, texts, pairs=None, *, truncation, max_length, padding, return_tensors):
        rows = [[len(w) for w in t.split()] for t in texts]
        if pairs is not None:
            rows = [row + [0] + [len(w) for w in t.split()] for row, t in zip(rows, pairs, strict=True)]
        rows = [row[:max_length] for row in rows]
        wide = max(map(len, rows))
        return {"input_ids": torch.tensor([row + [0] * (wide - len(row)) for row in rows])}


def picture_network():
    """A classifier of images of 8 × 8 pixels that says how to prepare them."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)).float()
    network.image_transform, network.num_classes = transform((8, 8), (0.5,) * 3, (1.0,) * 3), 2
    return network
