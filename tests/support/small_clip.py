"""CLIP as open_clip builds ViT-B-32, but small."""

import json

import torch
from torch import nn

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
        (folder / f"{name}.json").write_text(json.dumps(SMALL | kind), encoding="utf-8")
    open_clip.add_model_config(folder)


class FineTuned(nn.Module):
    """CLIP's image tower with a linear head on its normalised features, named as in the public "model soups"."""

    def __init__(self, name, width, classes):
        import open_clip

        super().__init__()
        self.model, _, self.image_transform = open_clip.create_model_and_transforms(name)
        self.model.transformer = nn.Identity()
        self.classification_head = nn.Linear(width, classes)
        for name, p in self.named_parameters():
            p.requires_grad_("visual" in name or "head" in name)

    def forward(self, images):
        return self.classification_head(self.model.encode_image(images, normalize=True))


def fine_tuned():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    return FineTuned("small-quickgelu", 24, 2)
