import pytest
from torch import nn

from quotient_manifolds.symmetries.whole import canonical_form, count, verify_whole, wiring_of
from tests.extent import EXHAUSTIVE
from tests.whole_networks import BACKBONES, TRANSFORMERS, build, headed, heads

NETWORKS = [(f, n) for f, (*_, usual) in BACKBONES.items() for n in (heads(f) if EXHAUSTIVE else [usual])]


@pytest.mark.parametrize("family", [f for f in TRANSFORMERS if f not in ("vit", "deit", "dinov2", "beit", "clip")])
def test_every_parameter_has_a_place(family):
    """Nothing of a network is left out: each matrix reads, writes, or is a table or part of a head."""
    model = build(family)
    wiring = wiring_of(model)
    known = {p for s in wiring.sites for r in s.readers for p in (*s.norm.parameters, *r.parameters)}
    known |= {p for _, w in wiring.writers for p in w.parameters} | {t.parameter for _, t in wiring.tables}
    known |= {p for _, c in wiring.classifiers for p in c.parameters}
    known |= {t.parameter for _, tables in wiring.score_tables for t in tables}
    known |= {p for _, q, k in wiring.qk_norms for p in (*q.parameters, *k.parameters)}
    assert not [name for name, p in model.named_parameters() if p not in known]


@pytest.mark.parametrize(("family", "name"), NETWORKS)
def test_a_backbone_is_wired_under_every_head(family, name):
    """Each kind of symmetry, by gradient and by moves: of language models, and towers of images and text."""
    model, batch = headed(family, name)
    assert canonical_form(model).wired
    for classes in (False, *([True] if "labels" in batch else [])):
        report = verify_whole(model, batch, classes=classes)
        assert report.ok, report
        assert "vo" in report.changes
        assert max(report.changes.values()) < 1e-10


def test_what_reads_the_last_norm_is_folded():
    """A backbone alone hands its last norm's output to anybody; below a head gain and shift are found."""
    alone, below = (count(headed("bert", name)[0]) for name in ("BertModel", "BertForTokenClassification"))
    assert below["shift"] - alone["shift"] == below["gain"] == 8
    assert "gain" not in alone
    tied = count(headed("bert", "BertForMaskedLM")[0], classes=True)
    assert (tied["classes"], tied["embeddings"]) == (1, 7)  # the decoder's biases; positions against types


def test_strangers_around_a_backbone_are_left_to_their_heads():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = headed("bert", "BertModel")[0]

    assert wiring_of(Mine()) is None


def test_options_without_an_adapter_are_left_to_the_heads():
    from transformers import BertConfig, BertLMHeadModel, OPTConfig, OPTForCausalLM

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    crossed = BertConfig(**small, intermediate_size=12, is_decoder=True, add_cross_attention=True)
    assert not wiring_of(BertLMHeadModel(crossed)).sites
    config = OPTConfig(**small, ffn_dim=12, word_embed_proj_dim=8, _remove_final_layer_norm=True)
    assert not wiring_of(OPTForCausalLM(config)).sites
