"""A small BERT of your own: WordPiece vocabulary and masked-language pre-training on given text.

Needs the extra ``transformers``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from sharpness.extras import require_extra
from sharpness.models.loaded import quiet
from sharpness.progress import bar

from .folders import atomic_write_folder, check_replaceable

__all__ = ["pretrain", "wordpiece"]


def wordpiece(texts: Sequence[str], size: int = 8000, *, length: int = 64) -> Any:
    """Train an uncased WordPiece vocabulary.

    Parameters
    ----------
    texts : sequence of str
        Texts from which the vocabulary is made.
    size : int
        Entries of the vocabulary, the special ones included.
    length : int
        Longest input in tokens.

    Returns
    -------
    transformers.PreTrainedTokenizerFast
        With BERT's special tokens.

    Notes
    -----
    WordPiece: Schuster and Nakajima 2012; the ``tokenizers`` library trains it by byte-pair merges. Needs the extra
    ``transformers``.

    Examples
    --------
    >>> tokenizer = wordpiece(["a good film", "a bad film"] * 2, 40)
    >>> tokenizer.tokenize("A good bad film")
    ['a', 'good', 'bad', 'film']
    """
    with require_extra("training a vocabulary needs transformers", "studies"):
        from tokenizers import BertWordPieceTokenizer
        from transformers import PreTrainedTokenizerFast

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=size, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        model_max_length=length,
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def pretrain(
    texts: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    vocabulary: int = 8000,
    length: int = 64,
    steps: int = 3000,
    batch: int = 64,
    lr: float = 1e-3,
    seed: int = 0,
    progress: bool = True,
) -> list[float]:
    """Pre-train a BERT by masked-language modelling and write it, with its tokenizer, as a transformers folder.

    Parameters
    ----------
    texts : sequence of str
        At least ``batch`` texts; the vocabulary is made from them too.
    folder
        Folder for model and tokenizer; it must not contain anything else.
    width, depth, heads, vocabulary, length : int
        Size of the network: hidden width, layers, heads, vocabulary, tokens of an input.
    steps, batch : int
        Steps, and texts a step.
    lr : float
        Peak of a one-cycle schedule of AdamW.
    seed : int
        Seed of the weights, the order of the texts and the masks.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of float
        The loss of every step, a cross-entropy over the masked tokens.

    Raises
    ------
    ValueError
        There are fewer than ``batch`` texts.

    Notes
    -----
    Devlin et al. 2019, without the prediction of the next sentence. Needs the extra ``transformers``.

    Examples
    --------
    >>> import tempfile
    >>> from sharpness.models import load
    >>> texts = ["a good film", "a bad film", "good and bad"] * 8
    >>> size = {"width": 16, "depth": 1, "heads": 2, "vocabulary": 40, "length": 8}
    >>> with tempfile.TemporaryDirectory() as place:
    ...     losses = pretrain(texts, place, **size, steps=20, batch=8, lr=1e-2, progress=False)
    ...     loaded = load(place)
    >>> losses[-1] < losses[0], loaded.model.config.hidden_size
    (True, 16)
    """
    with require_extra("pre-training a BERT needs transformers", "studies"):
        import transformers  # noqa: F401

    if not 0 < lr <= 1e3:
        raise ValueError(f"lr must lie between 0 and 1e3, got {lr}")
    if len(texts) < batch:
        raise ValueError(f"pre-training needs at least {batch} texts, got {len(texts)}")
    check_replaceable(folder)
    torch.manual_seed(seed)
    tokenizer = wordpiece(texts, vocabulary, length=length)
    coded = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    model = _small_bert(tokenizer, width, depth, heads, length)
    losses = _train(model, tokenizer, coded, steps, batch, lr, seed, progress)

    def write(own: Path) -> None:
        with quiet():
            model.eval().save_pretrained(own)
        tokenizer.save_pretrained(own)

    atomic_write_folder(folder, write)
    return losses


def _small_bert(tokenizer: Any, width: int, depth: int, heads: int, length: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=length, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _train(
    model: Any, tokenizer: Any, coded: Sequence[list[int]], steps: int, batch: int, lr: float, seed: int, progress: bool
) -> list[float]:
    from transformers import DataCollatorForLanguageModeling

    # Texts of similar length share a batch, so there is little padding.
    order = np.argsort([len(ids) for ids in coded], kind="stable")
    batches = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    collate = DataCollatorForLanguageModeling(tokenizer, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    rng = np.random.default_rng(seed)
    losses = []
    with bar(steps, "pre-training", "step", progress=progress) as shown:
        for _ in range(steps):
            chosen = batches[rng.integers(len(batches))]
            loss = _masked_loss(model, dict(collate([{"input_ids": coded[i]} for i in chosen])))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            shown.update()
    return losses


def _masked_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Compute the cross-entropy of the masked words, without scores of other words."""
    labels = batch.pop("labels")
    hidden = model.bert(**batch).last_hidden_state
    masked = labels != -100
    return F.cross_entropy(model.cls(hidden[masked]), labels[masked])
