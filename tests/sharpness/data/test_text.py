import json

import pytest
import torch

from sharpness import cli
from sharpness.data import TextColumns
from sharpness.data.loading import load_examples
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
            "row 1 of .*a.csv has 3 columns, not 2; quote values that contain",
        ),
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
