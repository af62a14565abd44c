"""A BERT checkpoint of Google's (TensorFlow 1) to a transformers folder."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpness.extras import require_extra
from sharpness.models.loaded import quiet

from .folders import atomic_write_folder

__all__ = ["bert_from_tensorflow", "read_tensorflow"]

#: Order of the classes in Google's run_classifier for MNLI.
MNLI_LABELS = ("contradiction", "entailment", "neutral")
#: Variables that are not weights of the classifier: the optimiser's state, the step, the heads of pre-training.
_SKIPPED = re.compile(r"adam_[mv]|global_step|beta[12]_power|^cls/|/adam|^signal_early_stopping|_power$")


#: Run in a separate Python process, because libraries of tensorflow and torch may conflict in one.
_READER = """
import sys
import numpy
import tensorflow
reader = tensorflow.train.load_checkpoint(sys.argv[1])
types = reader.get_variable_to_dtype_map()
numpy.savez(sys.argv[2], **{name: reader.get_tensor(name) for name, kind in types.items() if kind.is_floating})
"""


def read_tensorflow(prefix: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read all floating-point variables of a TensorFlow checkpoint by name, through tensorflow's own reader.

    Parameters
    ----------
    prefix
        ``…/model.ckpt-N``, beside which are ``.index`` and ``.data-…``.

    Returns
    -------
    dict of str to array
        By the names that TensorFlow gave them.

    Raises
    ------
    FileNotFoundError, ImportError, ValueError
        The checkpoint does not exist, tensorflow is not installed, or it cannot read the checkpoint.

    Notes
    -----
    It needs the extra ``convert``. A separate process reads the checkpoint.

    Examples
    --------
    >>> read_tensorflow("bert_0/model.ckpt-36815")["output_weights"].shape  # doctest: +SKIP
    (3, 768)
    """
    prefix = Path(prefix)
    if not prefix.with_name(prefix.name + ".index").is_file():
        raise FileNotFoundError(
            f"there is no TensorFlow checkpoint {prefix} (no {prefix.name}.index); name it without .index or .data-…"
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError("reading a TensorFlow checkpoint needs tensorflow: pip install 'quotient-manifolds[convert]'")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "variables.npz"
        done = subprocess.run([sys.executable, "-c", _READER, str(prefix), str(out)], capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"{prefix} is not a readable TensorFlow checkpoint ({last})")
        with np.load(out, allow_pickle=False) as found:
            return dict(found)


def _prefix(checkpoint: Path) -> Path:
    """Return the prefix of the last checkpoint in a folder, or the given prefix, also if one of its files was named."""
    if checkpoint.is_dir():
        found = [p.with_suffix("") for p in checkpoint.glob("*.ckpt*.index")]
        if not found:
            raise FileNotFoundError(f"{checkpoint} holds no TensorFlow checkpoint (*.ckpt*.index)")
        return max(found, key=lambda p: int((re.findall(r"\d+", p.name) or ["0"])[-1]))
    return checkpoint.with_name(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", checkpoint.name))


def _name(variable: str) -> str:
    """Translate a parameter name of Google's to that of transformers."""
    if variable == "output_weights":
        return "classifier.weight"
    if variable == "output_bias":
        return "classifier.bias"
    name = re.sub(r"layer_(\d+)", r"layer.\1", variable).replace("/", ".")
    if name.endswith("_embeddings"):
        return name + ".weight"
    stem, _, last = name.rpartition(".")
    return f"{stem}.{({'kernel': 'weight', 'gamma': 'weight', 'beta': 'bias'}).get(last, last)}"


def _settings(config: Path, vocab: Path) -> dict[str, Any]:
    for path, option in ((config, "--config"), (vocab, "--vocab")):
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}; name it with {option}")
    try:
        found: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not JSON ({error})") from error
    return {k: v for k, v in found.items() if k != "num_labels"}


def _vocabulary(path: Path) -> dict[str, int]:
    words = path.read_text(encoding="utf-8").split("\n")
    return {word.strip(): i for i, word in enumerate(words) if word.strip()}


def _state_dict(variables: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """Translate names, and transpose inputs × outputs to outputs × inputs."""
    state = {}
    for variable, numbers in variables.items():
        if not _SKIPPED.search(variable) and np.issubdtype(numbers.dtype, np.floating):
            value = torch.tensor(numbers).float()
            state[_name(variable)] = value.T.contiguous() if variable.endswith("/kernel") else value
    return state


def bert_from_tensorflow(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    vocab: str | os.PathLike[str] | None = None,
    labels: Sequence[str] = MNLI_LABELS,
    cased: bool = False,
    variables: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a ``BertForSequenceClassification`` and its tokenizer as a transformers folder.

    Parameters
    ----------
    checkpoint
        Folder with ``model.ckpt-N.index`` and ``.data-…``, or the prefix ``…/model.ckpt-N``. Variables as Google's
        ``run_classifier.py`` writes them: the classifier is ``output_weights`` (classes × width) and ``output_bias``;
        kernels are inputs × outputs and are transposed.
    folder
        The transformers folder to write; it must not exist yet.
    config, vocab
        ``bert_config.json`` and ``vocab.txt``; by default beside the checkpoint.
    labels : sequence of str
        Names of the classes in their order; by default MNLI's in ``run_classifier.py``.
    cased : bool
        The vocabulary distinguishes upper and lower case.
    variables : mapping of str to array, optional
        By name; by default those that :func:`read_tensorflow` finds in the checkpoint.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError, OSError, ImportError
        Files are missing, weights do not fit the configuration, or tensorflow is not installed.

    Notes
    -----
    Needs the extra ``convert``. For checkpoints such as the BERTs fine-tuned on MNLI of McCoy et al., *BERTs of a
    feather*, 2020, some of which the paper measures.

    Examples
    --------
    >>> bert_from_tensorflow("bert_0", "converted/bert_00", vocab="uncased/vocab.txt")  # doctest: +SKIP
    PosixPath('converted/bert_00')
    """
    with require_extra("converting a BERT needs transformers", "convert"):
        from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists; use a new folder")
    prefix = _prefix(Path(checkpoint))
    paths = [Path(config or prefix.parent / "bert_config.json"), Path(vocab or prefix.parent / "vocab.txt")]
    settings = _settings(*paths)
    state = _state_dict(read_tensorflow(prefix) if variables is None else variables)
    head = state.get("classifier.weight")
    if head is None:
        raise ValueError(f"{prefix} has no output_weights, so it is not a classifier of Google's run_classifier.py")
    if len(head) != len(labels):
        raise ValueError(f"{prefix} has {len(head)} classes, but {len(labels)} labels are named ({', '.join(labels)})")
    settings |= {"label2id": {label: i for i, label in enumerate(labels)}, "id2label": dict(enumerate(labels))}
    model = BertForSequenceClassification(BertConfig(**settings))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"the weights in {prefix} do not fit {paths[0]}: {why}") from error
    length = int(settings.get("max_position_embeddings", 512))
    tokenizer = BertTokenizer(_vocabulary(paths[1]), do_lower_case=not cased, model_max_length=length)

    def write(own: Path) -> None:
        with quiet():
            model.eval().save_pretrained(own)
        tokenizer.save_pretrained(own)

    atomic_write_folder(folder, write)
    return folder
