"""Attention of open_clip and timm."""

import inspect

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import (
    GL,
    check_coverage,
    find_symmetric_pairs,
    verify,
)

from ... import architectures, networks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "none"),
    [({}, set()), ({"block_type": "custom"}, set()), ({"qk_norm": True}, {"qk"}), ({"scale_attn_inner": True}, {"vo"}),
     ({"scale_heads": True}, set())],
    ids=str,
)  # fmt: skip
def test_open_clip(options, none):
    model, batch = architectures.open_clip_model(**options)
    visual = [p for p in find_symmetric_pairs(model) if p.name.startswith("visual")]
    assert len(visual) == 8
    assert {p.kind for p in visual if p.group is None} == none
    check_coverage(model, lambda: model(**batch))
    report = verify(model, batch)
    assert len(report.changes) == 8 - 4 * len(none) + 4
    assert max(report.changes.values()) < 1e-9


TIMM = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "embed_dim": 24, "num_heads": 2, "depth": 2}),
    "deit": ("deit_tiny_distilled_patch16_224", {"img_size": 32, "embed_dim": 24, "num_heads": 2, "depth": 2}),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 32, "embed_dim": 8, "depths": (1, 2), "num_heads": (2, 2),
                                              "window_size": 4}),
    "beit": ("beit_base_patch16_224", {"img_size": 32, "embed_dim": 24, "num_heads": 2, "depth": 2}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", TIMM)
def test_timm(name, fused):
    model = architectures.timm_model(TIMM[name][0], **TIMM[name][1])
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    x = architectures.pixels(32)["pixel_values"].double()
    assert len(find_symmetric_pairs(model)) == (12 if name == "swin" else 8)
    check_coverage(model, lambda: model(x))
    report = verify(model, x)
    assert max(report.changes.values()) < 1e-9, str(report)


@pytest.mark.parametrize(
    ("options", "groups"),
    [({"qk_norm": True}, (None, GL(6))), ({"scale_norm": True}, (GL(6), None)),
     ({"gated": True}, (GL(6), GL(6, diagonal=True)))],
    ids=str,
)  # fmt: skip
def test_options_of_timm_attention(options, groups):
    from timm.layers.attention import Attention

    if "gated" in options and "gated" not in inspect.signature(Attention).parameters:
        pytest.skip("gates came with timm 1.0.28")
    layer = networks.shake(Attention(12, 2, qkv_bias=True, norm_layer=nn.LayerNorm, **options), 0.4)
    pairs = find_symmetric_pairs(layer)
    assert (pairs[0].group, pairs[1].group) == groups
    report = verify(layer, torch.randn(2, 5, 12))
    assert len(report.changes) == 2 * sum(g is not None for g in groups)
    assert max(report.changes.values()) < 1e-9
