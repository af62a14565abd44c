import pytest

from quotient_manifolds.symmetries.whole import wiring_of
from tests.whole_networks import TRANSFORMERS, build


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


def test_options_without_an_adapter_are_left_to_the_heads():
    from transformers import ElectraConfig, ElectraForSequenceClassification, OPTConfig, OPTForCausalLM

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ElectraForSequenceClassification(ElectraConfig(**small, intermediate_size=12, embedding_size=4))
    assert not wiring_of(model).sites
    assert not wiring_of(OPTForCausalLM(OPTConfig(**small, ffn_dim=12, word_embed_proj_dim=4))).sites
