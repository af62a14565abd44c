"""CLIP as open_clip builds ViT-B-32, but small."""

import json

SMALL = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 60, "width": 16, "heads": 2, "layers": 1},
}


def name_small_models(folder, monkeypatch):
    """Let open_clip know the models "small" and "small-quickgelu" for one test."""
    import open_clip

    for name in ("_MODEL_CONFIGS", "_MODEL_CONFIG_PATHS"):
        monkeypatch.setattr(open_clip.factory, name, getattr(open_clip.factory, name).copy())
    folder.mkdir()
    for name, kind in (("small", {}), ("small-quickgelu", {"quick_gelu": True})):
        (folder / f"{name}.json").write_text(json.dumps(SMALL | kind))
    open_clip.add_model_config(folder)
