"""Which symmetries move fingerprints, and whether fine-tunes of a pre-trained network are told from unrelated networks.

``python -m studies.fingerprints`` moves a small GPT-2 with random gains and biases along one kind of symmetry after
another, and says how far the features of HuRef (Zeng et al. 2024) and of SELF (Zhang and Zheng 2025) move, written anew
from the papers, beside our distance modulo all symmetries. Everything is in float64.

``python -m studies.fingerprints --bert B --sst2 S --out O`` fine-tunes the BERT in the folder B three times on the
sentences of SST-2, trains two networks of its shape from random weights in the same way, and tests every pair for
independence. The networks are kept in the folder O, and those that are there are not trained again.

``python -m studies.fingerprints --apart N`` tests all pairs of the networks that ``barriers.py`` trained into the
folder N.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import RESULTS, environment
from quotient_manifolds.symmetries import ALL, Symmetries, canonicalize_, find, move_
from quotient_manifolds.symmetries.whole import align_models, independence_test
from tests.support.whole_networks import random_element

from ._apart import PAIRS, TASKS, WIDTHS, Trained, loaded
from .lora_text import sst2

STEPS, BATCH, LENGTH, RATE = 40, 16, 32, 5e-5
#: What is trained from the folder's weights, and what from random ones.
FINE_TUNES, UNRELATED = ("fine-tune 0", "fine-tune 1", "fine-tune 2"), ("unrelated 0", "unrelated 1")


def small_network(seed: int) -> nn.Module:
    """GPT-2 in float64, of which no gain is 1 and no bias is 0."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=3,
        n_head=4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def attention(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V (inputs, all heads) and W_O (all heads, outputs) of a layer of GPT-2, x ↦ x W."""
    Q, K, V = layer.attn.c_attn.weight.detach().chunk(3, dim=1)
    return Q, K, V, layer.attn.c_proj.weight.detach()


def huref(model: nn.Module) -> Tensor:
    """HuRef's invariant terms X W_Q W_Kᵀ Xᵀ, X W_V W_O Xᵀ and X W_1 W_2 Xᵀ of the last two layers; X are embeddings."""
    X = model.transformer.wte.weight.detach()
    terms = []
    for layer in model.transformer.h[-2:]:
        Q, K, V, out = attention(layer)
        inner = layer.mlp.c_fc.weight.detach() @ layer.mlp.c_proj.weight.detach()
        terms += [X @ product @ X.T for product in (Q @ K.T, V @ out, inner)]
    return torch.stack(terms).flatten()


def self_features(model: nn.Module) -> Tensor:
    """SELF's features: the singular values and the eigenvalues' sizes of W_Q W_Kᵀ and W_V W_O, layer by layer."""
    found = []
    for layer in model.transformer.h:
        Q, K, V, out = attention(layer)
        for product in (Q @ K.T, V @ out):
            found += [torch.linalg.svdvals(product), torch.linalg.eigvals(product).abs().sort(descending=True).values]
    return torch.cat(found)


def permuted(model: nn.Module, seed: int) -> None:
    """Permute the heads and the hidden neurons of every layer."""
    g = torch.Generator().manual_seed(seed)
    for layer in model.transformer.h:
        width, count = layer.attn.embed_dim, layer.attn.num_heads
        heads = torch.arange(width).view(count, -1)[torch.randperm(count, generator=g)].flatten()
        neurons = torch.randperm(layer.mlp.c_fc.nf, generator=g)
        columns = torch.cat([heads + i * width for i in range(3)])
        for conv, order in ((layer.attn.c_attn, columns), (layer.mlp.c_fc, neurons)):
            conv.weight.data, conv.bias.data = conv.weight.data[:, order], conv.bias.data[order]
        for conv, order in ((layer.attn.c_proj, heads), (layer.mlp.c_proj, neurons)):
            conv.weight.data = conv.weight.data[order]


def outside_pairs(model: nn.Module) -> Symmetries:
    """The symmetries outside heads and neurons."""
    return replace(find(model, scope=ALL), pairs=())


def moved(model: nn.Module, kind: str, seed: int) -> nn.Module:
    """A copy that computes the same function, moved along one kind of symmetry."""
    twin = copy.deepcopy(model)
    if kind == "permutations":
        permuted(twin, seed)
    else:
        move_(twin, find(twin, scope=("heads",) if kind in ("qk", "vo") else ALL), seed=seed, kinds=[kind])
    return twin


def similarity(one: Tensor, other: Tensor) -> float:
    """The cosine, by which HuRef compares."""
    return float(F.cosine_similarity(one, other, dim=0))


@torch.no_grad()
def features(seed: int) -> list[dict[str, Any]]:
    """Move a network along every kind of symmetry; say how similar its features stay, and how far it is by ours.

    Moves outside the pairs begin at the canonical form, so that is what all are compared with.
    """
    model, other = small_network(seed), small_network(seed + 1)
    move_(model, outside_pairs(model), seed=seed)
    words = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(seed))
    rows, folded = [], copy.deepcopy(model)
    canonicalize_(folded, outside_pairs(folded))
    kinds = dict.fromkeys(a.kind for a in find(model, scope=ALL).actions)
    twins = {kind: (folded, moved(folded, kind, seed)) for kind in (*kinds, "qk", "vo", "permutations")}
    for kind, (one, twin) in {**twins, "all folded": (model, folded), "another network": (model, other)}.items():
        change = (twin(words).logits - one(words).logits).abs().max() / one(words).logits.abs().max()
        found = align_models(one, twin)[1]
        rows.append(
            {
                "part": "features",
                "seed": seed,
                "kind": kind,
                "change of outputs": float(f"{change:.1e}"),
                "HuRef": round(similarity(huref(one), huref(twin)), 4),
                "SELF": round(similarity(self_features(one), self_features(twin)), 4),
                "ours": float(f"{found.distance / found.size:.1e}"),
            }
        )
    return rows


class Classifier(nn.Module):
    """A BERT with a linear layer on its first token."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert, self.head = bert, nn.Linear(bert.config.hidden_size, 2)

    def forward(self, words: dict[str, Tensor]) -> Tensor:
        """Return logits (texts, 2)."""
        found: Tensor = self.head(self.bert(**words).last_hidden_state[:, 0])
        return found


def trained(name: str, folder: Path, texts: Path, out: Path) -> nn.Module:
    """Train a network for a few steps, or read it; "unrelated" ones begin from random weights."""
    import transformers

    place = out / name.replace(" ", "-")
    if place.exists():
        return transformers.BertModel.from_pretrained(place).eval()
    number = int(name[-1])
    torch.manual_seed(100 * ("unrelated" in name) + number)
    config = transformers.BertConfig.from_pretrained(folder)
    bert = transformers.BertModel(config) if "unrelated" in name else transformers.BertModel.from_pretrained(folder)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), Classifier(bert).train()
    rows, drawn = sst2(texts)[0], torch.Generator().manual_seed(number)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for _ in range(STEPS):
        chosen = [rows[i] for i in torch.randint(len(rows), (BATCH,), generator=drawn)]
        words = tokenizer([t for t, _ in chosen], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        loss = F.cross_entropy(model(dict(words)), torch.tensor([label for _, label in chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bert.eval().save_pretrained(place)
    tokenizer.save_pretrained(place)
    return bert


def kinship(folder: Path, texts: Path, out: Path) -> list[dict[str, Any]]:
    """Test all pairs of the given network, its fine-tunes, one of them moved, and unrelated networks."""
    import transformers

    nets = {"given": transformers.BertModel.from_pretrained(folder).eval()}
    nets |= {name: trained(name, folder, texts, out) for name in (*FINE_TUNES, *UNRELATED)}
    twin = random_element(nets["fine-tune 2"], 0).of(nets["fine-tune 2"])
    move_(twin, find(twin, scope=ALL))
    nets["fine-tune 2, moved"] = twin
    rows = []
    for one, other in itertools.combinations(nets, 2):
        start = time.process_time()
        found = independence_test(nets[one], nets[other])
        rows.append(
            {
                "part": "kinship",
                "one": one,
                "other": other,
                "p": found.p_value,
                "agreeing": found.agreeing,
                "neurons": found.neurons,
                "by chance": found.layers,
                "seconds": round(time.process_time() - start, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


def apart(folder: Path) -> list[dict[str, Any]]:
    """Count the agreeing neurons of all pairs of networks trained apart on the same data, by task and width."""
    rows = []
    for task, width in itertools.product(TASKS, WIDTHS):
        chosen = [Trained(task, width, seed) for seed in range(2 * PAIRS)]
        nets = [loaded(one, folder) for one in chosen if (folder / f"{one}.safetensors").exists()]
        found = [independence_test(a, b) for a, b in itertools.combinations(nets, 2)]
        if found:
            counts = sorted(Counter(f.agreeing for f in found).items())
            least = round(min(f.p_value for f in found), 4)
            rows.append(
                {
                    "part": "apart",
                    "task": task,
                    "width": width,
                    "pairs": len(found),
                    "agreeing": counts,
                    "least p": least,
                    "by chance": found[0].layers,
                    "neurons": found[0].neurons,
                }
            )
    return rows


def main() -> None:
    """Run one part, and write its rows in the place of those that were there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bert", type=Path)
    parser.add_argument("--sst2", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--apart", type=Path)
    options = parser.parse_args()
    if options.apart is not None:
        part, rows = "apart", apart(options.apart)
    elif options.bert is not None:
        part, rows = "kinship", kinship(options.bert, options.sst2, options.out)
    else:
        part, rows = "features", features(0)
    path = RESULTS / "fingerprints.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "environment": {}}
    found["environment"][part] = environment()
    found["rows"] = [r for r in found["rows"] if r["part"] != part] + rows
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
