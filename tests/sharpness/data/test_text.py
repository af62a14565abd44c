import csv
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from sharpness import cli
from sharpness.data import DataChoice, TextColumns
from sharpness.data.loading import load_examples
from sharpness.models import load
from tests import networks
from tests.pictures import Words


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "no header"])
def test_tables(tmp_path, kind):
    rows = [('a "bc', "x", "no"), ("def ghij", "yy zz", "YES")]
    path = tmp_path / f"data.{'tsv' if kind == 'no header' else kind}"
    if kind == "jsonl":
        lines = [json.dumps({"one": a, "two": b, "what": c}) for a, b, c in rows]
    elif kind == "csv":
        lines = ["one,two,what", *(f'"{a.replace(chr(34), chr(34) * 2)}",{b},{c}' for a, b, c in rows)]
    else:
        lines = ["one\ttwo\twhat"] * (kind == "tsv") + ["\t".join(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    names = ("0", "1", "2") if kind == "no header" else ("one", "two", "what")
    columns = TextColumns(names[0], names[1], names[2], {"no": 3, "yes": 5}, header=kind != "no header", max_length=4)
    batch = load_examples(str(path), text=columns, tokenizer=Words()).batch([1, 0])
    assert batch["labels"].tolist() == [5, 3]
    assert batch["input_ids"].tolist() == [[3, 4, 0, 2], [1, 3, 0, 1]]


def test_labels_by_number_and_by_the_models_names(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\na\t1\nb\tEntailment\n")
    found = load_examples(str(path), tokenizer=Words(), labels={"entailment": 2})
    assert found.batch([0, 1])["labels"].tolist() == [1, 2]


def test_labels_that_differ_in_case(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("text\tlabel\na\tx\nb\tX\n")
    for columns, known in ((TextColumns(), {"X": 0, "x": 1}), (TextColumns(label_map={"X": 0, "x": 1}), {})):
        found = load_examples(str(path), text=columns, tokenizer=Words(), labels=known)
        assert found.batch([0, 1])["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.csv",
            "label,text\n1,good, really good\n",
            "row 1 of .*a.csv has 3 columns, not 2; quote values that contain ','",
        ),
        (
            "a.csv",
            "label;text\n1;good; really\n",
            "row 1 of .*a.csv has 3 columns, not 2; quote values that contain ';'",
        ),
        ("a.tsv", "label\ttext\n²\tgood\n", "a.tsv has the label '²', which is not the name of a class"),
        ("a.tsv", "label\ttext\n1\tgood\t0\n", "row 1 of .*a.tsv has 3 columns, not 2$"),
        ("a.csv", "label,text,label\n1,good,0\n", "has two columns 'label'; rename one"),
        ("a.csv", 'text,label\n"bad,0\n"nice,1\ngood,1\n', "a.csv is not a readable table"),
        ("a.jsonl", '{"label": 1, "text": null}\n', "row 1 of .*a.jsonl has no column 'text'"),
        ("a.txt", "label\ttext\n1\tgood\n", "a.txt is not data by its name: tables end in .csv, .jsonl, .tsv"),
    ],
)
def test_tables_with_cells_of_no_column_are_refused(tmp_path, name, text, said):
    """The first was measured as the text "good"; the second took the wrong column where there was no header."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        load_examples(str(tmp_path / name), tokenizer=Words())


def test_tables_of_spreadsheets_and_long_texts(tmp_path):
    """Semicolons and texts of more than 131,072 characters were refused; the module's own limit stays."""
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"label;text\n1;{'ab ' * 60000}\n0;short, too\n")
    (batch,) = (load_examples(str(tmp_path / "a.csv"), tokenizer=Words()).batch([1, 0]),)
    assert batch["labels"].tolist() == [0, 1]
    assert batch["input_ids"].shape == (2, 128)
    assert csv.field_size_limit() == limit


TEXTS = ["good film", "bad", "a good day and a bad film", "a bad day", "so good a film", "day"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "bos_token_id": 2, "eos_token_id": 2}
LANGUAGE = {
    "next": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "masked": ("BertForMaskedLM", "BertConfig", SMALL),
    "text": ("T5ForConditionalGeneration", "T5Config",
             {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}),
    None: ("GPT2ForSequenceClassification", "GPT2Config", GPT2),
}  # fmt: skip


def language_model(kind, folder, *, padding):
    import transformers

    from tests.texts import wordpiece

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    tokenizer = wordpiece(TEXTS, 60, length=24)
    if kind == "masked":
        ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer._tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    if not padding:
        tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    name, config, options = LANGUAGE[kind]
    options = {**options, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = networks.shake(getattr(transformers, name)(getattr(transformers, config)(**options)).float())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder.parent / "data.tsv").write_text("text\tlabel\n" + "".join(f"{t}\t{len(t) % 2}\n" for t in TEXTS))
    return load(str(folder))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("kind", ["next", "text", None])
def test_language_models_on_a_table(kind, padding, tmp_path, capsys):
    """The loss is that of texts one at a time, which need no padding; it was an error about batch sizes."""
    loaded = language_model(kind, tmp_path / "model", padding=padding)
    assert loaded.predicts == kind
    total = count = 0.0
    for text in TEXTS:
        inputs = loaded.tokenizer(text, return_tensors="pt")
        label = loaded.tokenizer(str(len(text) % 2), return_tensors="pt")["input_ids"]
        labels = {"next": inputs["input_ids"], "text": label, None: torch.tensor([len(text) % 2])}[kind]
        size = labels.numel() - (kind == "next")
        if size:  # a text of one token predicts none
            total, count = total + size * float(loaded.model(**inputs, labels=labels).loss), count + size
    command = ["run", str(tmp_path / "model"), str(tmp_path / "data.tsv"), "--measure", "adaptive", "--rho", "0.05"]
    for more in ([], ["--micro-batch", "2"]):
        assert cli.main([*command, "--steps", "2", "--quiet", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)["results"][0]["batches"][0]
        assert found["base_loss"] == pytest.approx(total / count, rel=1e-5)
        assert found["value"] > 0


@pytest.mark.filterwarnings("ignore")
def test_masked_language_models_on_a_table(tmp_path, capsys):
    loaded = language_model("masked", tmp_path / "model", padding=True)
    assert loaded.predicts == "masked"
    (tmp_path / "texts.tsv").write_text("text\n" + "".join(f"{text}\n" for text in TEXTS))  # no labels
    tokenizer = loaded.tokenizer
    assert tokenizer("a day")["input_ids"][0] == tokenizer.cls_token_id
    whole, parts = ([b for b in DataChoice(str(tmp_path / "texts.tsv"), size).load(loaded)] for size in (6, 2))
    rows = [row for b in parts for row in zip(b["input_ids"], b["labels"], b["attention_mask"], strict=True)]
    for text, ids, labels, (own, own_labels, mask) in zip(
        TEXTS, whole[0]["input_ids"], whole[0]["labels"], rows, strict=True
    ):
        tokens = tokenizer(text)["input_ids"]
        size = len(tokens)
        assert int(mask.sum()) == size
        assert torch.equal(ids[:size], own[:size])  # whatever the batch
        assert torch.equal(labels[:size], own_labels[:size])
        hidden = (labels != -100).nonzero()[:, 0].tolist()
        assert len(hidden) == max(1, round(0.15 * (size - 2)))
        assert all(0 < i < size - 1 for i in hidden)  # never a special token
        assert [tokens[i] for i in hidden] == labels[hidden].tolist()
        assert [tokenizer.mask_token_id if i in hidden else t for i, t in enumerate(tokens)] == ids[:size].tolist()
    assert len({tuple((row[1] != -100).nonzero()[:, 0].tolist()) for row in rows}) > 1
    command = ["run", str(tmp_path / "model"), str(tmp_path / "texts.tsv"), "--rho", "0.05", "--steps", "2", "--quiet"]
    for more in ([], ["--micro-batch", "2"]):
        assert cli.main([*command, "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)["results"][0]["batches"][0]
        assert found["base_loss"] == pytest.approx(float(loaded.model(**whole[0]).loss), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_texts_are_not_longer_than_the_models_positions(tmp_path):
    """The tokenizer's own limit may be larger."""
    loaded = language_model("next", tmp_path / "model", padding=True)
    assert loaded.tokenizer.model_max_length == 24
    loaded.model.config.max_position_embeddings = 5
    assert loaded.tokenizer.model_max_length == 5
    (tmp_path / "data.tsv").write_text("text\n" + "a good day and a bad film " * 20 + "\n")
    (batch,) = DataChoice(str(tmp_path / "data.tsv")).load(loaded)
    assert batch["input_ids"].shape == (1, 5)


@pytest.mark.filterwarnings("ignore")
def test_run_on_a_table(tmp_path, capsys):
    from tests.texts import wordpiece

    torch.set_default_dtype(torch.float32)
    table = tmp_path / "data.tsv"
    words = ["good film", "bad film", "a good day", "a bad day"] * 3
    table.write_text("sentence\tclass\n" + "".join(f"{w}\t{'pos' if 'good' in w else 'neg'}\n" for w in words))
    model = networks.bert(layers=1)
    model.config.label2id = {"neg": 0, "pos": 1, "none": 2}
    folder = tmp_path / "bert"
    model.save_pretrained(folder)
    command = ["run", str(folder), str(table), "--text", "sentence", "--label", "class", "--rho", "0.05"]
    command += ["--steps", "2", "--quiet", "--batch-size", "6", "--num-examples", "6", "--subset-seed", "1"]
    assert cli.main(command) == 2
    assert "the model has no tokenizer" in capsys.readouterr().err
    wordpiece([*words, "and some other words"], 100, length=16).save_pretrained(folder)
    assert cli.main(command) == 2
    assert "use its own tokenizer" in capsys.readouterr().err
    wordpiece(["a", "b", "c"], 20, length=16).save_pretrained(folder)
    assert cli.main(command) == 0
    assert "geodesic-inv sharpness of BertForSequenceClassification: 1 batch" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main([*command, "--label-map", "pos=1,neg=0,pos=2"])
    assert "the label 'pos' is mapped twice" in capsys.readouterr().err
    assert cli.main([*command, "--label-map", "pos=7,neg=0"]) == 2
    err = capsys.readouterr().err
    assert "the labels go from 0 to 7, but BertForSequenceClassification has 3 classes" in err
    assert err.count("\n") == 1
