import copy

import pandas as pd
import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import ALL, find, move_
from quotient_manifolds.weights import weights_of
from sharpness import cli
from sharpness.models import LoadedModel
from sharpness.sameness import _reordered, judge
from tests.support.extent import share
from tests.support.whole_networks import FAMILIES, build, inputs, random_element


def moved(model):
    """A copy that every kind of symmetry has moved."""
    twin = random_element(model).of(model)
    move_(twin, find(twin, scope=ALL))
    return twin


def loaded(family, model=None):
    return LoadedModel(build(family) if model is None else model, next(inputs(family)))


def evidence(found, word):
    (line,) = (line for line in found.evidence if line.startswith(word))
    return line


@pytest.mark.parametrize("family", share(FAMILIES, 2, 1))
def test_copies_of_every_family_are_one_function(family):
    """In float32, as they are stored. Copies of the other families meet in test_align."""
    one = loaded(family, build(family).float())
    found = judge(one, loaded(family, moved(one.model)))
    assert found.verdict.value == "one function"
    assert found.distances.loc["all", "after"] < 1e-3 < 0.1 < found.distances.loc["all", "before"]


@pytest.mark.parametrize(
    ("family", "spoil"),
    share(zip(["deit", "beit", "bert", "llama", "t5", "timm"], ["a weight", "a permutation"] * 3, strict=True), 3),
)
def test_wrong_copies_are_not_one_function(family, spoil):
    """One number is larger by a tenth; two of a head's values have changed places, but not what reads them."""
    one = loaded(family, build(family).float())
    twin = moved(one.model)
    slots, weights = next(p for p in find(twin).pairs if p.kind == "vo").G, weights_of(twin)
    for s in slots if spoil == "a permutation" else slots[:1]:
        rows = s.of(weights[s.name].data)
        if spoil == "a permutation":
            rows[:, [0, 1]] = rows[:, [1, 0]]
        else:
            rows[rows.abs() == rows.abs().max()] *= 1.1
    assert judge(one, loaded(family, twin)).verdict.value == "fine-tunes of one another, or of one model"


@pytest.mark.parametrize("family", ["gpt2-untied", "qwen2"])
def test_a_function_is_known_in_other_weights_and_what_lies_between(family):
    one = loaded(family)
    found = judge(one, loaded(family, moved(one.model)))
    assert found.verdict.value == "one function"
    assert len(found.evidence) < 10
    assert found.distances.loc["all", "after"] < 1e-8 < 1e-2 < found.distances.loc["all", "before"]
    between = evidence(found, "between them")
    for kind in ("gain", "rotation of the stream", "group elements of heads", "permutation of neurons"):
        assert kind in between
    assert evidence(judge(one, one), "between them") == "between them: nothing"


def test_a_fine_tune_and_an_unrelated_network():
    one = loaded("bert")
    other = copy.deepcopy(one.model)
    with torch.no_grad():
        other.bert.encoder.layer[1].output.dense.weight *= 1.01
    assert judge(one, loaded("bert", moved(other))).verdict.value == "fine-tunes of one another, or of one model"
    assert judge(one, loaded("bert", build("bert", seed=2))).verdict.value == "unrelated"


def test_formats_are_named():
    one = loaded("llama")
    (twin, _), _ = _reordered(one.model, one.model)
    found = judge(one, loaded("llama", twin))
    assert found.verdict.value == "one function in two formats"
    assert evidence(found, "formats") == "formats: RoPE's planes in halves and interleaved"
    tied, untied = loaded("llama-tied"), loaded("llama-tied")
    untied.model.lm_head.weight = nn.Parameter(tied.model.lm_head.weight.clone())
    found = judge(tied, untied)
    assert found.verdict.value == "one function in two formats"
    assert "lm_head.weight" in evidence(found, "formats")
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    phi, llama = loaded("phi3"), loaded("llama")
    split = dict(phi.model.state_dict())
    for name, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for key in [k for k in split if name in k]:
            fused, names = split.pop(key), [key.replace(name, part) for part in parts]
            split |= dict(zip(names, fused.split([len(llama.model.state_dict()[n]) for n in names]), strict=True))
    llama.model.load_state_dict(split)
    found = judge(phi, llama)
    assert found.verdict.value == "one function in two formats"
    assert evidence(found, "formats") == "formats: Phi3ForCausalLM and LlamaForCausalLM"


def test_networks_without_wide_layers_have_no_p_value():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    one = LoadedModel(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 3, 8))
    other = copy.deepcopy(one)
    move_(other.model)
    found = judge(one, other)
    assert found.verdict.value == "one function"
    assert "no layers of more neurons than the stream is wide" in evidence(found, "no p-value")
    other.model.layers[0].linear1.weight.data[0, 0] += 1
    assert judge(one, other).verdict.value == "not one function"


def test_networks_that_are_not_wired_are_compared_by_their_outputs():
    one = LoadedModel(nn.Linear(3, 3), torch.randn(2, 3))
    found = judge(one, copy.deepcopy(one))
    assert found.verdict.value == "one function"
    assert found.distances.empty
    with pytest.raises(ValueError, match="no layers of more neurons than the stream is wide are known of a Linear"):
        judge(one, LoadedModel(nn.Linear(3, 3), one.example))
    broken = copy.deepcopy(one)
    nn.init.constant_(broken.model.weight, torch.nan)
    for pair in ((broken, broken), (one, broken), (broken, one)):
        with pytest.raises(ValueError, match=r"NaN or infinite|no layers"):
            judge(*pair)


def test_networks_with_other_inputs_are_not_run():
    with pytest.raises(ValueError, match="the networks differ in their layers or embeddings"):
        judge(loaded("vit"), loaded("bert"))


def test_the_command(tmp_path, capsys):
    model = build("vit").float()
    model.save_pretrained(tmp_path / "one")
    moved(model).save_pretrained(tmp_path / "other")
    table = tmp_path / "distances.csv"
    assert cli.main(["same", *(str(tmp_path / name) for name in ("one", "other")), "--out", str(table)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "one function"
    assert list(pd.read_csv(table, index_col="kind").columns) == ["before", "after"]
    build("vit", seed=2).float().save_pretrained(tmp_path / "unrelated")
    assert cli.main(["same", *(str(tmp_path / name) for name in ("one", "unrelated"))]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "unrelated"
    build("bert").float().save_pretrained(tmp_path / "bert")
    assert cli.main(["same", *(str(tmp_path / name) for name in ("one", "bert"))]) == 2
    assert "the networks differ in their layers or embeddings" in capsys.readouterr().err


def test_the_command_writes_no_table_of_weights_that_cannot_be_aligned(tmp_path, capsys):
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.AlbertConfig(**sizes, embedding_size=8, vocab_size=11)
    transformers.AlbertModel(config).save_pretrained(tmp_path / "one")  # its wiring is not known
    assert cli.main(["same", str(tmp_path / "one"), str(tmp_path / "one"), "--out", str(tmp_path / "table.csv")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "one function"
    assert "there are no distances to write" in said[-1]
    assert not (tmp_path / "table.csv").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_inputs_are_passed_in_the_precision_that_the_weights_are_compared_in(dtype):
    network, x = build("torch-post").float(), torch.randn(4, 5, 8)
    one, other = LoadedModel(copy.deepcopy(network).to(dtype), x.to(dtype)), LoadedModel(network, x)
    for found in (judge(one, other), judge(other, one)):
        assert found.verdict.value == "one function"
        assert "largest relative change" in evidence(found, "outputs")
