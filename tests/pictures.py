"""Pictures and words in files."""

import io

import torch
from PIL import Image

from sharpness.models import ImageFormat


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


COLOUR = ImageFormat((6, 4), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


FORMAT = ImageFormat((8, 8), (0.25,), (0.5,), channels=1)


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
