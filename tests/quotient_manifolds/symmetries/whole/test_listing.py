from collections import Counter

from quotient_manifolds.symmetries import find_symmetric_pairs
from quotient_manifolds.symmetries.whole import wiring_of
from quotient_manifolds.symmetries.whole.listing import symmetries_of
from tests.whole_networks import build


def listed(model, **options):
    found, refused = symmetries_of(wiring_of(model), find_symmetric_pairs(model), **{"classes": False, **options})
    return Counter(s.kind for s in found), refused


def test_ties_close_doors():
    """A tied unembedding keeps the last norm, and the stream's frame."""
    tied, refused = listed(build("gpt2"))
    untied, none = listed(build("gpt2-untied"))
    assert untied["gain"] - tied["gain"] == 1
    assert (untied["rotation"], tied["rotation"]) == (1, 0)
    assert not none
    assert {"gain: ln_f", "shift: ln_f", "writer: wte", "embeddings: wpe"} <= set(refused)


def test_rms_norms_see_the_mean():
    found, _ = listed(build("llama"))
    assert found == {"gain": 5, "rotation": 1}


def test_post_norm_keeps_its_gains():
    found, _ = listed(build("bert"))
    assert found["gain"] == 1  # the last, which the pooler alone reads
    assert found["shift"] == 5
    assert "rotation" not in found


def test_logits_of_a_softmax():
    without, _ = listed(build("vit"))
    found, _ = listed(build("vit"), classes=True)
    assert found["classes"] == 1
    assert without["classes"] == 0
    assert symmetries_of(None, [], classes=True) == ([], {})
