r"""
LoRA from equivalent starts
===========================

A vision transformer that was trained on digits is adapted by LoRA to digits turned by 90 degrees. Both optimisers
start twice: from PEFT's factors :math:`(B, A)` and from :math:`(BM, M^{-1}A)`, which give the same network. With AdamW
the two trainings differ; with ``QuotientAdam`` they coincide.

Needs ``pip install '.[demo,lora]'``.
"""

import copy

import matplotlib.pyplot as plt
import peft
import torch
from torch.nn.functional import cross_entropy

from quotient_manifolds.optim import create_quotient_lora_optimizer
from quotient_manifolds.symmetries import adapter_pairs
from sharpness.demo import digits, train, vision_transformer

torch.manual_seed(0)
images, labels, _, _ = digits()
base = vision_transformer()
train(base, images, labels, epochs=6, progress=False)
turned = images.rot90(dims=(2, 3))

# %%
# An adapter of rank 4, with factors as PEFT draws them or equivalent ones.


def adapted(condition):
    torch.manual_seed(1)
    modules = ["q_proj", "v_proj", "query", "value"]  # the latter two before transformers 5.9
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, modules_to_save=["classifier"])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    weights = dict(model.named_parameters())
    for pair in adapter_pairs(model).pairs:
        B, At = pair.gather(weights).detach().split([pair.n, pair.m])
        pair.scatter_(torch.cat([B, At / torch.logspace(0, -condition, At.shape[1])]), weights)  # B is zero
    return model


# %%
# Only the line that creates the optimizer differs.


def losses(model, optimizer, epochs=4):
    torch.manual_seed(2)
    found = []
    for _ in range(epochs):
        for part in torch.randperm(len(turned)).split(64):
            loss = cross_entropy(model(turned[part]).logits, labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return found


for condition, style in ((0.0, "-"), (1.5, ":")):
    model = adapted(condition)
    trainable = [p for p in model.parameters() if p.requires_grad]
    found = losses(model, torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0))
    plt.plot(found, "C1", linestyle=style, label=f"AdamW, condition {10**condition:.0f}")
    model = adapted(condition)
    found = losses(model, create_quotient_lora_optimizer(model, lr=5e-3))
    plt.plot(found, "C0", linestyle=style, label=f"QuotientAdam, condition {10**condition:.0f}")
plt.xlabel("step")
plt.ylabel("training loss (nats)")
plt.legend()
plt.show()
