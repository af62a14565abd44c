"""Adapters of rewritten models, against the outputs of PEFT on the model as it was."""

import copy
import json
import shutil
from functools import reduce
from itertools import product

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quotient_manifolds import lora_command
from quotient_manifolds.adapters import Adapter, carry
from quotient_manifolds.symmetries import ALL, canonicalize_, find, move_
from quotient_manifolds.symmetries.whole import rewriting
from quotient_manifolds.weights import first_names
from sharpness import cli
from tests.support import networks
from tests.support.extent import share
from tests.support.whole_networks import FAMILIES, build, forward, inputs, random_element

#: Of peft: where a layer has no bias it cannot be merged, what is tied stays so only when it is not merged, and others.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore::RuntimeWarning:peft", "ignore:.is_gradient_checkpointing:FutureWarning"
)


def canonical(model):
    canonicalize_(model)
    return model


def moved(model, **options):
    move_(model, find(model, scope=ALL), seed=1, **options)
    return model


def permuted(model):
    """Other orders of heads, neurons and entries of the stream, and random moves of all kinds."""
    return moved(random_element(model, seed=3).of(model))


#: Of a vision transformer.
KINDS = ("qk", "vo", "gain", "shift", "reader", "key bias", "value bias", "embeddings", "writer", "rotation")
REWRITINGS = {"canonical": canonical, "moved": moved, "permuted": permuted}


def difference(a, b):
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def targets(model, embeddings):
    """All layers that peft adapts; of tied weights one."""
    inside = [f"{path}." for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    plain = (nn.Linear, nn.Conv2d, *[nn.Embedding] * embeddings)
    kinds = [(path, m) for path, m in model.named_modules() if isinstance(m, plain) or type(m).__name__ == "Conv1D"]
    kinds = [(path, m) for path, m in kinds if type(m).__name__ != "OPTLearnedPositionalEmbedding"]  # of its own inputs
    tied = first_names(model)
    return [path for path, _ in kinds if f"{path}.weight" not in tied and not path.startswith(tuple(inside))]


def adapted(model, modules, **options):
    """A copy of a model with a random adapter of no small size, on all modules but of different ranks."""
    options = {"r": 2, "lora_alpha": 3, "rank_pattern": {modules[-1]: 3}, "use_rslora": True, **options}
    config = peft.LoraConfig(target_modules=modules, init_lora_weights=False, **options)
    torch.manual_seed(0)
    found = peft.get_peft_model(copy.deepcopy(model), config).double().eval()
    for p in found.parameters():
        if p.requires_grad:
            p.data += 0.3 * torch.randn_like(p)
    return found


def using(adapter, model, modules):
    """A copy of a model with an adapter."""
    found = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=1, target_modules=modules))
    adapter.add_to(found, "carried")
    found.set_adapter("carried")
    return found.double().eval()


def without_biases(adapter):
    biases = [key for key in adapter.state if key.endswith("bias")]
    state = {key: 0 * t if key in biases else t for key, t in adapter.state.items()}
    return bool(biases), Adapter.from_state(state, adapter.config)


@pytest.fixture(autouse=True)
def _no_shortcuts():
    """Torch's fast path of encoder layers knows nothing of adapters."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize(("family", "how", "embeddings"), share(product(FAMILIES, REWRITINGS, (False, True)), 29))
def test_a_carried_adapter_does_the_same(family, how, embeddings):
    model, (batch,) = build(family), inputs(family)
    if embeddings and not any(isinstance(m, nn.Embedding) for m in model.modules()):
        pytest.skip("a network without embeddings")
    modules = targets(model, embeddings)
    one, other = adapted(model, modules), REWRITINGS[how](copy.deepcopy(model))
    adapter, expected, given = Adapter.from_model(one), forward(one, batch), [p.clone() for p in model.parameters()]
    found = carry(adapter, model, other)
    bound = 1e-6 if family == "t5" else 1e-10  # whose norms take their variance in float32
    assert difference(forward(using(found, other, modules), batch), expected) < bound
    assert all(found.rank_and_scale(at)[0] == adapter.rank_and_scale(at)[0] for at in adapter.layers)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), given, strict=True))
    copied = difference(forward(using(adapter, other, modules), batch), expected)
    print(f"{family} {how}: the adapter as it was changes outputs by {copied:.0%}")
    assert copied > 0.1
    biased, lacking = without_biases(found)
    assert biased == any(isinstance(m, nn.LayerNorm) for m in model.modules())
    assert not biased or difference(forward(using(lacking, other, modules), batch), expected) > 1e-3


@pytest.mark.parametrize("kind", share(KINDS, 4))
def test_moves_of_one_kind(kind):
    """They start at the canonical form, which alone breaks an adapter."""
    model, (batch,) = build("vit"), inputs("vit")
    assert set(KINDS) == set(find(model, scope=ALL).dimensions)
    modules = targets(model, embeddings=False)
    one, other = adapted(model, modules), moved(copy.deepcopy(model), kinds={kind})
    found = carry(Adapter.from_model(one), model, other)
    assert difference(forward(using(found, other, modules), batch), forward(one, batch)) < 1e-10


def saved_bert(folder, dtype=torch.float32, **options):
    """A classifier and an adapter of it in folders."""
    model = networks.shake(networks.bert()).to(dtype)
    model.save_pretrained(folder / "base")
    one = adapted(model.float(), ["query", "output.dense"], **options).float()
    one.save_pretrained(folder / "adapter")
    return one


def logits(model):
    with torch.no_grad():
        return model.double().eval()(input_ids=torch.arange(12).view(2, 6)).logits


def with_adapter(base, adapter):
    from transformers import AutoModelForSequenceClassification

    return logits(peft.PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), adapter))


OPTIONS = {
    "a classifier": {"task_type": "SEQ_CLS"},
    "biases of B": {"lora_bias": True},
    "biases of the model": {"bias": "all"},
    "neither": {"alpha_pattern": {"query": 7}, "use_rslora": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_canonical_folder_with_its_adapter(tmp_path, options, capsys):
    expected = logits(saved_bert(tmp_path, **options))
    base, adapter, out = (str(tmp_path / name) for name in ("base", "adapter", "out"))
    assert cli.main(["canonicalize", base, "--adapter", adapter, "--out", out]) == 0
    assert f"adapter: {out}/adapter" in capsys.readouterr().out
    assert difference(with_adapter(out, f"{out}/adapter"), expected) < 1e-4
    assert difference(with_adapter(out, adapter), expected) > 1e-2
    assert json.loads((tmp_path / "out/adapter/adapter_config.json").read_bytes())["base_model_name_or_path"] == out
    assert (
        load_file(f"{out}/adapter/adapter_model.safetensors").keys()
        >= load_file(f"{adapter}/adapter_model.safetensors").keys()
    )
    new = str(tmp_path / "new")
    assert lora_command.main(["carry", adapter, "--from", base, "--to", out, "--out", new]) == 0
    assert difference(with_adapter(out, new), expected) < 1e-3
    back = str(tmp_path / "back")  # and back to where it came from
    assert lora_command.main(["carry", new, "--from", out, "--to", base, "--out", back]) == 0
    assert difference(with_adapter(base, back), expected) < 1e-3
    assert json.loads((tmp_path / "back/adapter_config.json").read_bytes())["base_model_name_or_path"] == base
    assert cli.main(["canonicalize", base, "--out", str(tmp_path / "other")]) == 0
    assert "quotient-lora carry ADAPTER" in capsys.readouterr().out


def refused(capsys, *words):
    """The only line of a command that fails."""
    capsys.readouterr()  # of what was saved before
    assert lora_command.main(list(map(str, words))) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_what_cannot_be_carried_is_said(tmp_path, capsys):
    saved_bert(tmp_path, task_type="SEQ_CLS")
    base, out = tmp_path / "base", tmp_path / "out"
    assert cli.main(["canonicalize", str(base), "--out", str(out)]) == 0
    networks.bert(layers=1).save_pretrained(tmp_path / "one layer")
    networks.shake(networks.bert(), seed=5).save_pretrained(tmp_path / "unrelated")
    capsys.readouterr()  # with bars

    def carrying(adapter, other=out, target="new", source=base):
        return refused(capsys, "carry", adapter, "--from", source, "--to", other, "--out", tmp_path / target)

    def edited(name, options=(), tensors=lambda state: state):
        shutil.copytree(tmp_path / "adapter", tmp_path / name)
        config, weights = (tmp_path / name / f"adapter_{part}" for part in ("config.json", "model.safetensors"))
        config.write_text(json.dumps({**json.loads(config.read_bytes()), **dict(options)}), encoding="utf-8")
        save_file(tensors(load_file(weights)), weights)
        return tmp_path / name

    assert "new folder" in carrying(tmp_path / "adapter", target="base")
    assert "has use_dora, so it cannot be carried" in carrying(edited("dora", {"use_dora": True}))
    assert "has alora_invocation_tokens" in carrying(edited("alora", {"alora_invocation_tokens": [1]}))
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    kohya = {"base_model.model.": "", "lora_A": "lora_down", "lora_B": "lora_up"}
    names = {
        key: reduce(lambda name, old: name.replace(old, kohya[old]), kohya, key) for key in factors if "lora" in key
    }
    save_file({name: factors[key] for key, name in names.items()}, tmp_path / "kohya.safetensors")
    assert "has not the names of PEFT" in carrying(tmp_path / "kohya.safetensors")
    of_others = edited("others", {}, lambda s: {k.replace("bert.", "vit."): t for k, t in s.items()})
    assert "vit.encoder.layer.0.attention.output.dense is no layer of Bert" in carrying(of_others)
    extra = edited("extra", {}, lambda s: {**s, "base_model.model.more.weight": torch.ones(2)})
    assert "holds base_model.model.more.weight, which is no weight of this Bert" in carrying(extra)
    wide = edited("wide", {}, lambda s: {k: t[:1] if k.endswith("classifier.bias") else t for k, t in s.items()})
    assert "classifier.bias of shape [1], not [" in carrying(wide)
    assert "no config.json" in carrying(tmp_path / "adapter", other=tmp_path)
    assert "the networks differ in the parameter" in carrying(tmp_path / "adapter", other=tmp_path / "one layer")
    line = carrying(tmp_path / "adapter", other=tmp_path / "unrelated")
    assert "no symmetries are found that lead from one network to the other" in line
    assert not (tmp_path / "new").exists()
    assert (
        cli.main(["canonicalize", str(base), "--adapter", str(tmp_path / "dora"), "--out", str(tmp_path / "new")]) == 2
    )
    assert "has use_dora" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_trained_tokens_stay_where_embeddings_do():
    model = build("llama")
    one = adapted(model, ["q_proj"], rank_pattern={}, trainable_token_indices={"embed_tokens": [1, 4]})
    adapter, (batch,) = Adapter.from_model(one), inputs("llama")
    heads = copy.deepcopy(model)
    move_(heads, seed=1)
    found = carry(adapter, model, heads)
    assert difference(forward(using(found, heads, ["q_proj"]), batch), forward(one, batch)) < 1e-10
    with pytest.raises(ValueError, match=r"tokens_delta, but the rewriting changes its trained tokens; merge"):
        carry(adapter, model, permuted(model))


def test_gains_of_an_adapter_stay_where_the_basis_does():
    model, (batch,) = build("llama"), inputs("llama")
    one = adapted(model, ["q_proj"], rank_pattern={}, modules_to_save=["norm"])
    adapter, folded = Adapter.from_model(one), canonical(copy.deepcopy(model))
    found = carry(adapter, model, folded)
    assert difference(forward(using(found, folded, ["q_proj"]), batch), forward(one, batch)) < 1e-10
    with pytest.raises(ValueError, match=r"norm.weight, but the rewriting has moved the basis of what it scales"):
        carry(adapter, model, moved(copy.deepcopy(model)))


def test_an_adapter_that_adds_nothing_yet():
    model = build("llama")
    one = adapted(model, ["q_proj"], rank_pattern={})
    with torch.no_grad():
        for name, p in one.named_parameters():
            if "lora_B" in name:
                p.zero_()
    state = carry(Adapter.from_model(one), model, moved(copy.deepcopy(model))).state
    assert all(bool(t.any()) == ("lora_A" in key) for key, t in state.items())


def test_a_base_with_adapters_and_shared_weights_are_refused():
    model = build("llama-tied")
    one = adapted(model, ["q_proj"])
    with pytest.raises(ValueError, match=r"this PeftModel has adapters; pass the model without them"):
        carry(Adapter.from_model(one), one, model)
    shared = adapted(model, ["embed_tokens", "lm_head"], rank_pattern={})
    encoder = build("torch-post")
    with pytest.raises(ValueError, match=r"adapts layers.0.self_attn, torch's MultiheadAttention, to which PEFT adds"):
        carry(Adapter.from_model(adapted(encoder, ["self_attn"], rank_pattern={})), encoder, encoder)
    with pytest.raises(ValueError, match=r"has two adapters of model.embed_tokens.weight, which layers share"):
        carry(Adapter.from_model(shared), model, model)


def test_a_fine_tune_is_no_rewriting():
    model = build("vit")
    other = permuted(model)
    with torch.no_grad():
        inner = next(m for m in networks.vit_layers(other)[0].modules() if getattr(m, "out_features", 8) != 8)
        inner.weight[0] += 0.1
    with pytest.raises(ValueError, match=r"differ by 0\.0\d* of the norm of all weights, most in \S+$"):
        rewriting(model, other)


def test_a_gain_of_zero_is_refused():
    model = build("vit")
    with torch.no_grad():
        next(m for m in model.modules() if isinstance(m, nn.LayerNorm)).weight[2] = 0
    with pytest.raises(ValueError, match="has a 0, which hides"):
        rewriting(model, model)
