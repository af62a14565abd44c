"""A tokenizer and a BERT small enough for tests."""

import transformers
from tokenizers import BertWordPieceTokenizer

from tests.support.networks import shake


def wordpiece(texts, size, *, length):
    """An uncased WordPiece vocabulary of so many entries; inputs of up to ``length`` tokens."""
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=size, show_progress=False)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, model_max_length=length, **special, model_input_names=inputs
    )


def bert_folder(texts, folder):
    """A BERT with random weights and no head, with its tokenizer, in single precision."""
    tokenizer = wordpiece(texts, 60, length=12)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=12, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    shake(transformers.BertModel(config).float()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
