"""Small vision transformers in plain torch: one whose weights are public, and one to be trained from scratch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.layout import affine, norm, wire
from quotient_manifolds.symmetries.notation import Layout
from quotient_manifolds.symmetries.whole import Site, Wiring, register_wiring

__all__ = ["ImageTransform", "SmallViT", "scratch_vit", "vit_cifar10"]


@dataclass(frozen=True)
class ImageTransform:
    """Resize an image of Pillow, and normalise its channels.

    Parameters
    ----------
    size : tuple of int
        Height and width; the interpolation is bicubic.
    mean, std : tuple of float
        One value per channel, for pixels in [0, 1]; a single one is for grey values.

    Examples
    --------
    >>> from PIL import Image
    >>> ImageTransform((2, 2), (0.5,), (0.5,))(Image.new("RGB", (8, 8), "white"))
    tensor([[[1., 1.],
             [1., 1.]]])
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Any) -> Tensor:
        """Return (channels, height, width), float32."""
        image = image.convert("L" if len(self.mean) == 1 else "RGB")
        if image.size != self.size[::-1]:
            image = image.resize(self.size[::-1])
        x = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
        mean, std = (torch.tensor(v, dtype=torch.float32) for v in (self.mean, self.std))
        return ((x.view(*self.size, -1) - mean) / std).permute(2, 0, 1)


class SmallViT(nn.Module):
    """Vision transformer of torch's encoder layers, which classifies its class token.

    Parameters
    ----------
    width, depth, heads, hidden : int
        Sizes of the encoder; ``hidden`` is the width inside its feed-forward layers.
    classes : int
    size, patch : int
        Sides of the images and of the patches, in pixels.
    norm_first : bool
        Pre-norm layers instead of post-norm ones.
    """

    def __init__(
        self, width: int = 128, depth: int = 6, heads: int = 8, hidden: int = 256, classes: int = 10, size: int = 32,
        patch: int = 4, norm_first: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        # Names and order of the parameters are those of the public state dict.
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True, norm_first=norm_first)
        self.transformer = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))
        #: CIFAR-10's.
        self.image_transform = ImageTransform((size, size), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

    def forward(self, images: Tensor) -> Tensor:
        """Return (examples, classes) scores of (examples, 3, size, size) images."""
        x = self.patch_embed["proj"](images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        scores: Tensor = self.mlp_head(self.transformer(x)[:, 0])
        return scores


_LAYOUT = Layout().read(
    layers="transformer.layers",
    attention="norm1; self_attn; self_attn.out_proj",
    mlp="norm2; linear1; linear2; transformer.layers.0.activation_relu_or_gelu",
    last="mlp_head.0",
    embeddings="pos_embed[:1] + cls_token, pos_embed[1:] + patch_embed.proj",
)


@register_wiring(SmallViT)
def _wiring(model: Any) -> Wiring:
    """Wire all of a pre-norm network; post-norm, the first layer reads the embeddings without a norm.

    There x → x + 1 aᵀx + v, which the first layer's readers undo, remains: 2 d directions.
    """
    head = affine(model, "mlp_head.1")
    w = Wiring(classifiers=[("mlp_head.1", head)])
    if model.transformer.layers[0].norm_first:
        return wire(w, model, _LAYOUT, [head])
    wire(w, model, replace(_LAYOUT, last=(), post_norm=True), [])
    w.writers = [(name, a) for name, a in w.writers if name != "patch_embed.proj"]
    w.tables = [("the last shift", b) for b in w.sites[-1].norm.slots[1:]]
    w.sites.append(Site("mlp_head.0", norm(model, "mlp_head.0"), (head,)))
    w.closed = False
    return w


def vit_cifar10() -> SmallViT:
    """Build the network of the public ``vit_cifar10.pth`` (811,146 parameters), with random weights."""
    return SmallViT()


def scratch_vit() -> SmallViT:
    """Build a pre-norm network of 4 layers of width 64 on patches of 8 pixels (148,170 parameters), untrained."""
    net = SmallViT(width=64, depth=4, heads=4, hidden=128, patch=8, norm_first=True)
    nn.init.normal_(net.cls_token, std=0.02)
    nn.init.normal_(net.pos_embed, std=0.02)
    return net
