"""Newcomers who read README alone, with small models and texts of their own, paste its code; each has a result."""

import configparser
import csv
import json
import re
import runpy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import sharpness
from quotient_manifolds import GLQuotientInv
from quotient_manifolds.optim import create_quotient_lora_optimizer
from quotient_manifolds.symmetries import adapter_pairs
from quotient_manifolds.symmetries.attention import KNOWN
from sharpness import demo
from tests.support import docs_world
from tests.support.networks import bert, quantised_bert, text
from tests.test_docs import README, ROOT, blocks, play

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that play calls as their users do
TEXT = README.read_text(encoding="utf-8")


def section(title):
    """The first and the last line of a section."""
    start = TEXT.index(f"\n## {title}\n")
    end = TEXT.find("\n## ", start + 1)
    return range(TEXT[:start].count("\n") + 2, TEXT[: end if end > 0 else len(TEXT)].count("\n") + 2)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """What a newcomer has: a folder of a BERT with a classifier, two tables, and two adapters from elsewhere."""
    folder = tmp_path_factory.mktemp("newcomer")
    torch.set_default_dtype(torch.float32)
    docs_world.small_bert(folder / "path" / "to" / "bert")
    docs_world.table(folder / "train.tsv", 1920)
    docs_world.table(folder / "dev.tsv", 256, seed=1)
    for seed, name in enumerate(("adapter_a", "adapter_b")):
        docs_world.adapter(folder / name, folder / "path" / "to" / "bert", seed)
    return folder


@pytest.fixture
def follow(own, monkeypatch, capsys):
    """Paste the code of a section of README; give the names that it leaves, and what it printed at the end."""

    def paste(title):
        monkeypatch.chdir(own)
        namespace = {"__name__": "readme"}
        play(README, namespace, capsys, chosen=lambda line: line in section(title))
        return namespace

    return paste


def falls(losses):
    return np.mean(losses[-20:]) < 0.8 * np.mean(losses[:20])


def test_the_student_measures_a_checkpoint(follow):
    follow("Measure a checkpoint")


def test_the_user_of_peft_sees_the_loss_fall(follow):
    """And compares ranks, by a shorter run of the script that README names."""
    losses = follow("Fine-tune LoRA")["losses"]
    assert len(losses) == 120
    assert falls(losses)
    assert not falls(np.full(120, np.log(2)))


def test_losses_at_two_ranks_are_those_that_were_recorded():
    """README shows the first seed, the tutorial the range of all."""
    text = (ROOT / "results" / "lora_rank.json").read_text(encoding="utf-8")
    tutorial = (ROOT / "docs" / "tutorials" / "lora.md").read_text(encoding="utf-8")
    found = {}
    for row in json.loads(text)["rows"]:
        found.setdefault(row["optimiser"], {}).setdefault(row["rank"], []).append(row["loss"])
    assert len(found) == 4
    for name, of in found.items():
        shown = [float(v) for v in re.search(rf"^{name} +(\d.*)$", TEXT, re.MULTILINE)[1].split()]
        assert shown == [of[4][0], of[64][0]]
        ranges = " | ".join(f"{min(losses):.2f} to {max(losses):.2f}" for losses in (of[4], of[64]))
        assert re.search(rf"^\| `?{name}`? \| {ranges} \|$", tutorial, re.MULTILINE), (name, ranges)


def test_ranks_are_compared_for_a_model_without_a_classifier(own, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    for kind in (AutoModel, AutoTokenizer):
        kind.from_pretrained(own / "path" / "to" / "bert").save_pretrained(tmp_path)
    found = runpy.run_path(str(ROOT / "examples" / "lora_rank.py"))["main"](
        [str(tmp_path), str(own / "train.tsv"), "--steps", "3"]
    )
    losses = [loss for of in found.values() for loss in of]
    assert len(losses) == 8
    assert np.isfinite(losses).all()


def test_the_user_of_peft_merges_adapters(follow, own):
    """The products of the result, as peft computes them, are the means of those of the two."""
    import peft
    from transformers import AutoModelForSequenceClassification

    def products(name):
        base = AutoModelForSequenceClassification.from_pretrained(own / "path" / "to" / "bert")
        model = peft.PeftModel.from_pretrained(base, own / name)
        return [m.get_delta_weight("default") for m in model.modules() if hasattr(m, "get_delta_weight")]

    follow("Merge adapters")
    found = [products(name) for name in ("adapter_a", "adapter_b", "merged")]
    assert len(found[0]) == 2
    for a, b, merged in zip(*found, strict=True):
        torch.testing.assert_close(merged, (a + b) / 2, rtol=1e-4, atol=1e-3)


def test_the_user_of_geoopt_factorises_a_matrix(follow):
    assert follow("Optimise a low-rank product with geoopt")["loss"] < 1e-8


def test_the_engineer_calls_make():
    """Both commands exist, and what README shows is what the recorded demo printed."""
    (commands, shown) = [body for _, _, body, line in blocks(README) if line in section("Try it")]
    assert re.findall(r"^make (\w+)", commands, re.MULTILINE) == ["demo", "test"]
    found = json.loads((ROOT / "results" / "demo.json").read_text(encoding="utf-8"))
    first, *others = found["rows"]
    measures = list(demo.RADII)
    assert f"{found['train_accuracy']:.1%} right, {found['test_accuracy']:.1%} of 360 test digits" in shown
    table = {
        demo.MOVES[row["move"]][1]: [demo.times(row[m] / first[m]) for m in measures] for row in others
    }  # fmt: skip
    rows = [line for line in shown.splitlines() if "×" in line]
    assert len(rows) > 1
    for line in rows:
        label, *cells = re.split(r"\s{2,}", line)
        assert table[label] == cells


# -- what README promises of itself ------------------------------------------------------------------------------------


def prose(text):
    """What is read: without blocks of code, and of links and pictures the words alone."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for _ in range(2):  # a picture in a link
        text = re.sub(r"!?\[([^\[\]]*)\]\([^)]*\)", r"\1", text)
    return text


def words_of(text):
    """Whatever is separated by blanks and has a letter or a digit, in prose and tables."""
    return [word for word in prose(text).split() if re.search(r"\w", word)]


def numbers_of(text):
    """Figures in prose and tables; such as 3.10 is one, and the 4 of ``rank 4``, but not that of a name such as fp4."""
    return re.findall(r"(?<![\w.])\d+(?:[.,]\d+)*", prose(text))


def test_readme_is_short():
    assert len(words_of(TEXT)) <= 800
    assert len(numbers_of(TEXT)) <= 30
    assert words_of("a [b c](d e) ![f](g)\n```\nh\n```\n| i | 1 |") == ["a", "b", "c", "f", "i", "1"]
    assert numbers_of("3.10, 1,797, rank 4 of fp4 ```") == ["3.10", "1,797", "4"]


def test_links_within_readme_lead_to_its_sections():
    known = {title.lower().replace(",", "").replace(" ", "-") for title in re.findall(r"^## (.*)$", TEXT, re.MULTILINE)}
    named = re.findall(r"\]\(#([^)]*)\)", TEXT)
    assert len(named) > 3
    assert set(named) <= known


def test_badges_are_true():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    python = re.search(r"python_requires = >=(\S+)", setup)[1]
    assert f"![Python {python} or later](https://img.shields.io/badge/python-%E2%89%A5%20{python}-blue)" in TEXT
    licence = re.search(r"^license = (\S+)", setup, re.MULTILINE)[1]
    assert f"![License {licence}](https://img.shields.io/badge/license-{licence.replace('-', '--')}-blue)" in TEXT
    paper = re.search(r"arXiv:([\d.]+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))[1]
    assert f"[![Paper: arXiv {paper}](https://img.shields.io/badge/paper-arXiv%20{paper}-b31b1b)]" in TEXT


def test_extras_are_those_of_setup():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    known = set(setup["options.extras_require"]) - {"studies", "docs", "test"}  # of the laboratory and of make
    for page in (README, ROOT / "docs" / "install.md"):
        table = page.read_text(encoding="utf-8").partition("| extra | for |")[2].partition("\n\n")[0]
        first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
        assert set(re.findall(r"`(\w+)`", " ".join(first))) == known


def test_oldest_versions_are_those_of_setup():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("oldest that is tested")[2]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert len(rows) == 5
    for name, version in rows:
        required = "python_requires = " if name == "Python" else name.lower()
        assert re.search(rf"^ *{required}>={re.escape(version)}$", setup, re.MULTILINE), name


def test_a_package_index_is_given_no_dead_link():
    """The address of the repository is not known, so the long description is a text without relative links."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    text = setup["metadata"]["long_description"]
    assert not text.startswith("file:")
    assert re.findall(r"\]\((?!https://)", text) == []
    assert "https://arxiv.org/abs/2505.05409" in text


# -- what is supported -------------------------------------------------------------------------------------------------


def adapted(name="LoraConfig", **options):
    import peft

    torch.set_default_dtype(torch.float32)
    return peft.get_peft_model(bert(layers=1), getattr(peft, name)(target_modules=["query"], **options))


def cell(row, column):
    (line,) = re.findall(rf"^\| {row} \|.*", TEXT, re.MULTILINE)
    return line.split("|")[column + 1]


def test_numbers_of_architectures():
    tried = list(csv.DictReader((ROOT / "docs" / "tables" / "architectures.csv").open(encoding="utf-8")))
    assert re.findall(r"\d+", cell("models", 1)) == [str(len(KNOWN)), str(len(tried))]
    assert {row["library"] for row in tried} == {"transformers", "timm", "open_clip", "torch"}


def works(model, pairs=1):
    """Two steps of an optimiser change the adapter, and its sharpness is measured."""
    assert len(adapter_pairs(model).pairs) == pairs
    optimizer, batch = create_quotient_lora_optimizer(model, lr=1e-2), text()
    factors = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in factors]
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, factors, strict=True))
    assert float(sharpness.evaluate(model, [batch], rho=0.1, steps=2, progress=False)) > 0


def narrow(model):
    """The frozen base in bfloat16."""
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    return model


def measured_in_half():
    """The sharpness of a model in bfloat16 is that of its copy in float32, and the model stays as it was."""
    model, copy = bert().bfloat16(), bert().bfloat16().float()
    copy.load_state_dict(model.state_dict())
    found, expected = (float(sharpness.evaluate(m, [text()], rho=0.1, steps=2, progress=False)) for m in (model, copy))
    assert found == expected > 0
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def in_bits(bits):
    import peft

    works(peft.get_peft_model(quantised_bert(bits)[0], peft.LoraConfig(r=2, target_modules=["query"])), pairs=2)


def is_no_lora(name, **options):
    """Another tuner of peft is not taken for LoRA."""
    with pytest.raises(ValueError, match="has no LoRA adapter of peft"):
        create_quotient_lora_optimizer(adapted(name, **options), lr=1e-3)


def refused(mark):
    """Optimisers and measures refuse a parameter as FSDP1 or ZeRO leaves it."""
    model = adapted()
    setattr(next(p for p in model.parameters() if p.requires_grad), mark, 1)
    with pytest.raises(ValueError, match="ZeRO-3"):
        create_quotient_lora_optimizer(model, lr=1e-3)
    with pytest.raises(ValueError, match="ZeRO-3"):
        sharpness.evaluate(model, [text()], progress=False)


def on_one_process(wrap):
    """What wraps a model for several processes, with one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        works(wrap(adapted()))
    finally:
        dist.destroy_process_group()


def in_half_precision():
    manifold = GLQuotientInv(n=3, m=2)
    with pytest.raises((TypeError, ValueError), match="bfloat16"):
        manifold.norm(manifold.random(5, 2).bfloat16(), torch.ones(5, 2, dtype=torch.bfloat16))


def timed_on_a_gpu():
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "results").glob("gpu_*.json")]
    assert found
    assert all(run["environment"]["gpu"] for run in found)


#: What README calls supported or not, and what shows it.
CHECKS = {
    "LoRA": lambda: works(adapted()),
    "rsLoRA": lambda: works(adapted(use_rslora=True)),
    "DoRA": lambda: works(adapted(use_dora=True)),
    "IA³": lambda: is_no_lora("IA3Config", feedforward_modules=[]),
    "LoHa": lambda: is_no_lora("LoHaConfig", r=2),
    "VeRA": lambda: is_no_lora("VeraConfig", r=2),
    "float32": lambda: works(adapted()),
    "float64": lambda: works(adapted().double()),
    "half (measured in float32)": measured_in_half,
    "LoRA on bfloat16": lambda: works(narrow(adapted())),
    "8 bit": lambda: in_bits("8 bit"),
    "4 bit": lambda: in_bits("4 bit"),
    "points of manifolds in bfloat16": in_half_precision,
    "CPU": lambda: works(adapted()),
    "CUDA": timed_on_a_gpu,
    "DDP": lambda: on_one_process(torch.nn.parallel.DistributedDataParallel),
    "FSDP2": lambda: on_one_process(fully_shard),
    "FSDP1": lambda: refused("_is_flat_param"),
    "ZeRO": lambda: refused("ds_id"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_called_supported_is(name):
    CHECKS[name]()


def test_nothing_else_is_called_supported():
    rows = ("adapters", "precision", "devices")
    named = [item.strip() for row in rows for column in (1, 2) for item in cell(row, column).split(",")]
    assert sorted(filter(None, named)) == sorted(CHECKS)
