"""Google's BERT checkpoints to transformers folders."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from reproduction import cli
from reproduction.convert import bert_from_tensorflow
from sharpness.models import load

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "film", "bad", "##ly"]
CONFIG = {
    "vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16, "type_vocab_size": 2, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02,
}  # fmt: skip


def variables():
    """Variables as run_classifier.py writes them, made here by name and shape."""
    rng = np.random.default_rng(0)

    def value(*shape):
        return rng.normal(size=shape).astype(np.float32)

    h, m = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    found = {
        "bert/embeddings/word_embeddings": value(len(WORDS), h),
        "bert/embeddings/position_embeddings": value(16, h),
        "bert/embeddings/token_type_embeddings": value(2, h),
        "output_weights": value(3, h), "output_bias": value(3), "global_step": np.array(7),
        "output_weights/adam_m": value(3, h), "cls/predictions/output_bias": value(len(WORDS)),
    }  # fmt: skip
    dense, norms = {"bert/pooler/dense": (h, h)}, ["bert/embeddings/LayerNorm"]
    for i in range(2):
        at = f"bert/encoder/layer_{i}"
        dense |= {f"{at}/attention/self/{k}": (h, h) for k in ("query", "key", "value")}
        dense |= {
            f"{at}/attention/output/dense": (h, h), f"{at}/intermediate/dense": (h, m), f"{at}/output/dense": (m, h)
        }  # fmt: skip
        norms += [f"{at}/attention/output/LayerNorm", f"{at}/output/LayerNorm"]
    for name, shape in dense.items():
        found |= {f"{name}/kernel": value(*shape), f"{name}/bias": value(shape[1])}
    for name in norms:
        found |= {f"{name}/gamma": value(h), f"{name}/beta": value(h)}
    return found


@pytest.fixture
def place(tmp_path):
    (tmp_path / "tf").mkdir()
    (tmp_path / "tf" / "bert_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tf" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    torch.set_default_dtype(torch.float32)
    return tmp_path


def by_hand(found, ids):
    """BERT's forward pass written out in NumPy from Google's variables."""

    def norm(x, at):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * found[f"{at}/gamma"] + found[f"{at}/beta"]

    def dense(x, at):
        return x @ found[f"{at}/kernel"] + found[f"{at}/bias"]

    e = "bert/embeddings"
    x = found[f"{e}/word_embeddings"][ids] + found[f"{e}/position_embeddings"][: len(ids)]
    x = norm(x + found[f"{e}/token_type_embeddings"][0], f"{e}/LayerNorm")
    for i in range(2):
        at = f"bert/encoder/layer_{i}"
        q, k, v = (dense(x, f"{at}/attention/self/{n}").reshape(-1, 2, 4) for n in ("query", "key", "value"))
        scores = np.einsum("ihd,jhd->hij", q, k) / 2
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads = np.einsum("hij,jhd->ihd", weights, v).reshape(len(ids), 8)
        x = norm(x + dense(heads, f"{at}/attention/output/dense"), f"{at}/attention/output/LayerNorm")
        hidden = torch.nn.functional.gelu(torch.tensor(dense(x, f"{at}/intermediate/dense"))).numpy()
        x = norm(x + dense(hidden, f"{at}/output/dense"), f"{at}/output/LayerNorm")
    pooled = np.tanh(dense(x[0], "bert/pooler/dense"))
    return pooled @ found["output_weights"].T + found["output_bias"]


def test_the_converted_model_computes_the_same(place):
    found = variables()
    folder = bert_from_tensorflow(place / "tf" / "model.ckpt-5", place / "bert", variables=found)
    loaded = load(str(folder))
    assert loaded.labels == {"contradiction": 0, "entailment": 1, "neutral": 2}
    ids = loaded.tokenizer("a GOODly film")["input_ids"]
    assert ids == [2, 5, 6, 9, 7, 3]
    with torch.no_grad():
        scores = loaded.model(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert np.allclose(scores, by_hand(found, ids), atol=1e-5)
    turned = {k: v.T if k.endswith("/kernel") and v.shape[0] == v.shape[1] else v for k, v in found.items()}
    assert not np.allclose(scores, by_hand(turned, ids), atol=1e-2)


def test_mistakes(place, capsys):
    with pytest.raises(FileNotFoundError, match="no TensorFlow checkpoint"):
        bert_from_tensorflow(place / "tf" / "model.ckpt-5", place / "b")
    with pytest.raises(ValueError, match="3 classes, but 2 labels"):
        bert_from_tensorflow(place / "tf" / "m", place / "b", labels=("no", "yes"), variables=variables())
    fewer = variables()
    del fewer["output_weights"]
    with pytest.raises(ValueError, match="not a classifier"):
        bert_from_tensorflow(place / "tf" / "m", place / "b", variables=fewer)
    fewer = variables()
    del fewer["bert/pooler/dense/kernel"]
    with pytest.raises(ValueError, match="do not fit"):
        bert_from_tensorflow(place / "tf" / "m", place / "b", variables=fewer)
    (place / "exists").mkdir()
    with pytest.raises(ValueError, match="exists; use a new folder"):
        bert_from_tensorflow(place / "tf" / "m", place / "exists", variables=variables())
    (place / "tf" / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match="--vocab"):
        bert_from_tensorflow(place / "tf" / "m", place / "b", variables=variables())
    assert not (place / "b").exists()
    assert cli.main(["convert", "bert-tf", str(place / "none"), str(place / "b")]) == 2
    assert capsys.readouterr().err.startswith("reproduction: ")


SCRIPT = """
import sys
import numpy
import tensorflow as tf
found = numpy.load(sys.argv[2])
tf.raw_ops.SaveV2(prefix=sys.argv[1], tensor_names=found.files, shape_and_slices=[""] * len(found.files),
                  tensors=[tf.constant(found[n]) for n in found.files])
"""


def test_tensorflows_own_reader(place, capsys):
    if importlib.util.find_spec("tensorflow") is None:  # not imported: torch and it may not share a process
        pytest.skip("tensorflow is not installed: make exhaustive does that")
    np.savez(place / "v.npz", **variables())
    arguments = [sys.executable, "-c", SCRIPT, place / "tf" / "model.ckpt-5", place / "v.npz"]
    subprocess.run([str(a) for a in arguments], check=True, capture_output=True)
    labels = ("no", "maybe", "yes")
    arguments = ["convert", "bert-tf", place / "tf", place / "bert", "--labels", ",".join(labels)]
    assert cli.main([str(a) for a in arguments]) == 0
    bert_from_tensorflow(place / "tf", place / "twin", labels=labels, variables=variables())
    one, two = load(str(place / "bert")), load(str(place / "twin"))
    assert one.labels == {"no": 0, "maybe": 1, "yes": 2}
    assert all(torch.equal(v, two.model.state_dict()[k]) for k, v in one.model.state_dict().items())
    (place / "tf" / "model.ckpt-5.index").write_bytes(b"no index")
    with pytest.raises(ValueError, match="not a readable TensorFlow checkpoint"):
        bert_from_tensorflow(place / "tf", place / "other", labels=labels)
