import copy
from itertools import permutations, product

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import ALL, GL, canonicalize_, find, move_
from quotient_manifolds.symmetries.whole import (
    align_models,
)
from quotient_manifolds.symmetries.whole.align import MOVES
from quotient_manifolds.symmetries.whole.fits import fitted, matched, permutation, polar, rotation
from quotient_manifolds.symmetries.whole.units import Cell, Part, acted
from tests.support import networks
from tests.support.extent import EXHAUSTIVE, share
from tests.support.whole_networks import (
    BACKBONES,
    FAMILIES,
    build,
    forward,
    headed,
    inputs,
    random_element,
    random_move,
)

#: Units that may be permuted, layer by layer: of attention and of neurons.
UNITS = {"t5": [2, 2, 2, 12, 12], "dinov2": [2, 2, 16, 16]}
UNITS |= {family: [2, 2, 8, 12, 12] for family in ("bert", "roberta", "electra", "distilbert")}
QUERIES = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma", "phi3")
#: Their stream has another basis or, for the last ones, another order.
TURNED = {"vit", "deit", "dinov2", "beit", "gpt2-untied", *QUERIES, "timm", "timm-no-bias"} - {"llama-tied"}
ORDERED = {"bert", "roberta", "electra", "distilbert", "gpt2", "opt", "llama-tied", "t5"}


def difference(a, b):
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def moved(model, seed):
    """A copy after random moves of all kinds."""
    copied = random_element(model, seed).of(model)
    move_(copied, find(copied, scope=ALL), seed=seed)
    return copied


@pytest.mark.parametrize("family", share(FAMILIES, 2))
def test_copies_meet(family):
    """Those of the other families meet in test_sameness."""
    model = build(family)
    (batch,) = inputs(family)
    element = random_element(model, seed=3)
    units = [(len(m.order), m.queries.shape[1]) for m in element.cells.values()]
    grouped = family in QUERIES
    assert units == [(n, 1) for n in UNITS.get(family, [1 + (not grouped), 1 + (not grouped), 12, 12])] or (
        grouped and units == [(1, 2), (1, 2), (12, 1), (12, 1)]
    )
    assert (element.stream is not None) == (family in TURNED | ORDERED)
    copied = moved(model, seed=3)
    before = forward(model, batch)
    assert difference(forward(copied, batch), before) < 1e-11
    given = [[p.clone() for p in m.parameters()] for m in (model, copied)]
    aligned, found = align_models(model, copied)
    for m, values in zip((model, copied), given, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(m.parameters(), values, strict=True))
    assert found.distance < 1e-10 * found.size
    assert difference(forward(aligned, batch), before) < 1e-10
    assert difference(forward(found.reference, batch), before) < 1e-10
    for p, q in zip(found.element.of(copied).parameters(), aligned.parameters(), strict=True):
        assert torch.equal(p, q)
    _, plain = align_models(model, copied, by=())
    assert plain.distance > 0.3 * plain.size  # the moves were some


@pytest.mark.parametrize("family", ["bert", "bert-pretraining", "distilbert", "gpt_neox", "siglip"])
def test_copies_of_headed_networks_meet(family):
    """A tied decoder reads what has the order of the stream's entries; of others only a part of a head is rotated."""
    model, batch = headed(family, BACKBONES[family][3])
    with torch.no_grad():
        before = next(iter(model(**{k: v for k, v in batch.items() if k != "labels"}).values()))
        copied = moved(model, seed=2)
        after = next(iter(copied(**{k: v for k, v in batch.items() if k != "labels"}).values()))
    assert difference(after, before) < 1e-10
    assert (random_element(model).stream is None) == (family == "siglip")  # whose outputs are raw
    _, found = align_models(model, copied)
    assert found.distance < 1e-10 * found.size
    assert align_models(model, copied, by=())[1].distance > 0.1 * found.size


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_units_of_a_pooler_may_change_their_signs(family):
    model = build(family)
    copied = copy.deepcopy(model)
    head = copied.classifier
    up, down = (copied.bert.pooler.dense, head) if family == "bert" else (head.dense, head.out_proj)
    order, sign = torch.randperm(8), torch.tensor([1.0, -1.0] * 4).double()
    for rows in (up.weight, up.bias.unsqueeze(1), down.weight.T):
        rows.data.copy_((sign[:, None] * rows.data)[order])
    (batch,) = inputs(family)
    assert difference(forward(copied, batch), forward(model, batch)) < 1e-12
    _, found = align_models(model, copied)
    assert found.distance < 1e-10 * found.size
    assert align_models(model, copied, by=MOVES[:2])[1].distance > 0.01 * found.size


@pytest.mark.parametrize("family", share(["vit", "bert", "qwen3", "opt", "t5"], 2))
def test_networks_of_their_own_come_nearer(family):
    (batch,) = inputs(family)
    for seed in (2, 3) if EXHAUSTIVE else (2,):
        model, other = build(family), build(family, seed)
        expected = forward(other, batch)
        distances = []
        for by in ((), MOVES[:1], MOVES[:2], MOVES):
            aligned, found = align_models(model, other, by=by)
            assert difference(forward(aligned, batch), expected) < 1e-10
            assert list(found.history) == sorted(found.history, reverse=True)
            between = zip(found.reference.parameters(), aligned.parameters(), strict=True)
            assert found.distance == pytest.approx(
                sum(float((p - q).detach().square().sum()) for p, q in between) ** 0.5, rel=1e-10
            )
            assert sum(d**2 for d in found.before.values()) == pytest.approx(found.history[0])
            distances.append(found.distance)
        assert distances[3] <= distances[1] <= distances[0]
        assert distances[3] < 0.98 * distances[0]


def test_the_canonical_form_alone_is_the_start():
    model, other = build("vit"), build("vit", seed=2)
    aligned, _ = align_models(model, other, by=())
    canonicalize_(other)
    heads = {name for pair in find(other).pairs for name in pair.names}
    for (name, p), q in zip(other.named_parameters(), aligned.parameters(), strict=True):
        assert name in heads or torch.allclose(p, q, atol=1e-14)


class TestTables:
    """Rows that are added to the scores of the heads go where their heads go."""

    @staticmethod
    def network(kind):
        import transformers

        torch.manual_seed(0)
        if kind == "t5":  # all layers use the table of the first
            sizes = {"vocab_size": 11, "d_model": 12, "d_kv": 4, "d_ff": 8, "num_layers": 3, "num_heads": 3}
            model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
            batch = {"input_ids": torch.randint(11, (2, 5)), "decoder_input_ids": torch.randint(11, (2, 5))}
        else:  # each has one, or all use one beside them
            sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 8}
            sizes["num_hidden_layers"] = 11 if kind == "own" else 2
            shared = {f"use_{'shared_' * (kind == 'shared')}relative_position_bias": True}
            config = transformers.BeitConfig(
                **sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3, **shared
            )
            model = transformers.BeitForImageClassification(config)
            batch = {"pixel_values": torch.randn(2, 1, 8, 8, dtype=torch.float64)}
        model = model.double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        return model, batch

    @pytest.mark.parametrize(("kind", "cells"), [("t5", 1 + 1 + 3), ("own", 11), ("shared", 1)])
    def test_copies_meet(self, kind, cells):
        model, batch = self.network(kind)
        element = random_element(model, seed=2)
        assert sum(len(m.order) == 3 for m in element.cells.values()) == cells
        copied = element.of(model)
        assert difference(forward(copied, batch), forward(model, batch)) < 1e-6  # T5's norms compute in float32
        found = align_models(model, copied)[1]
        assert found.distance < 1e-10 * found.size
        assert found.before["scores"] > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_group_elements_are_best(dtype):
    """L-BFGS from there finds nothing lower; what it starts from is higher."""
    torch.manual_seed(1)
    x, A, noise = (torch.randn(3, 1, rows, 3, dtype=dtype) for rows in (11, 3, 11))
    y = acted(x, 6, torch.eye(3) + 0.3 * A) + 0.3 * noise

    def cost(A):
        moved = torch.cat([y[..., :6, :] @ torch.linalg.inv(A), y[..., 6:, :] @ A.mH], -2)
        return (x - moved).abs().square().sum((-2, -1))

    start = polar(x.mH @ y)
    found = fitted(x, y, 6, start, positive=False)
    torch.testing.assert_close(cost(found), (x - acted(y, 6, found)).abs().square().sum((-2, -1)))
    assert bool((cost(found) < 0.999 * cost(start)).all())
    for _ in range(3):
        found = fitted(x, y, 6, found, positive=False)
    best = found.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([best], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure():
        optimiser.zero_grad()
        value = cost(best).sum()
        value.backward()
        return value

    optimiser.step(closure)
    torch.testing.assert_close(cost(found), cost(best.detach()), rtol=1e-5, atol=0)


def test_scales_of_rectified_neurons_stay_positive():
    torch.manual_seed(0)
    x = torch.randn(50, 1, 7, 1, dtype=torch.float64)
    one = torch.ones(50, 1, 1, 1, dtype=torch.float64)
    assert bool((fitted(x, -x, 4, one, positive=True) > 0).all())
    c = torch.rand(50, 1, 1, 1, dtype=torch.float64) * 3 + 0.2
    y = torch.cat([x[:, :, :4] * c, x[:, :, 4:] / c], -2)
    torch.testing.assert_close(fitted(x, y, 4, one, positive=True), c, rtol=1e-6, atol=0)


@pytest.mark.parametrize("acts", [True, False])
def test_units_and_queries_are_matched_best(acts):
    """Against all orders of two groups of three queries, these by their products with the keys."""
    torch.manual_seed(2)
    queries = torch.arange(6).view(3, 2)
    cell = Cell("", (Part("qk", [], GL(4), 6 if acts else 0, queries=queries),), 2, 3)
    x, y = (torch.randn(2, 1, 9, 4, dtype=torch.float64) for _ in range(2))
    found = matched(cell, [x], [y])
    order, chosen = found.order, found.queries

    def score(i, j, q):
        rows = torch.cat([queries[list(q)].flatten(), torch.arange(6, 9)])
        C = x[i, 0].T @ y[j, 0][rows]
        return float(torch.linalg.matrix_norm(C, "nuc") if acts else C.trace())

    def products(i, j, q):
        a, b = x[i, 0], y[j, 0]
        return sum(
            float(((a[2 * k : 2 * k + 2] @ a[6:].T) * (b[2 * n : 2 * n + 2] @ b[6:].T)).sum()) for k, n in enumerate(q)
        )

    best = {}
    for i, j in product(range(2), repeat=2):
        best[i, j] = max(permutations(range(3)), key=lambda q, at=(i, j): products(*at, q))
    total = {o: sum(score(i, o[i], best[i, o[i]]) for i in range(2)) for o in permutations(range(2))}
    expected = max(total, key=total.get)
    assert tuple(order.tolist()) == expected
    assert [tuple(q) for q in chosen.tolist()] == [best[i, expected[i]] for i in range(2)]
    assert total[expected] > min(total.values())


def test_bases_of_the_stream_are_best():
    torch.manual_seed(3)
    M, N = torch.randn(2, 4, 4, dtype=torch.float64)

    def fits(Q):
        return float((M * Q).sum())

    for centring in (False, True):
        Q = rotation(M, centring)
        torch.testing.assert_close(Q @ Q.T, torch.eye(4, dtype=torch.float64))
        assert not centring or torch.allclose(Q.sum(1), torch.ones(4, dtype=torch.float64))
        for _ in range(200):
            skew = torch.randn(4, 4, dtype=torch.float64)
            skew = skew - skew.T
            if centring:
                keep = torch.eye(4, dtype=torch.float64) - 0.25
                skew = keep @ skew @ keep
            assert fits(torch.linalg.matrix_exp(0.3 * skew) @ Q) <= fits(Q)
    for signs in (False, True):
        Q = permutation(M, N, signs=signs)
        of_all = (
            sum(s * float(M[i, j]) + float(N[i, j]) for i, (j, s) in enumerate(zip(p, each, strict=True)))
            for p in permutations(range(4))
            for each in product((1, -1) if signs else (1,), repeat=4)
        )
        assert fits(Q) + float((N * Q.abs()).sum()) == pytest.approx(max(of_all), rel=1e-12)


def test_a_head_without_rank_is_left_as_it_is():
    model = build("vit")
    with torch.no_grad():
        query = networks.projections(networks.vit_layers(model)[0].attention)[0]
        query.weight[:4] = query.bias[:4] = 0
    copied = moved(model, seed=1)
    aligned, found = align_models(model, copied)
    (batch,) = inputs("vit")
    assert difference(forward(aligned, batch), forward(model, batch)) < 1e-10
    assert all(bool(p.isfinite().all()) for p in aligned.parameters())
    assert found.distance < 0.2 * found.size  # the keys of this head can be anything


def test_what_cannot_be_aligned():
    model = build("vit")
    other = build("deit")
    with pytest.raises(ValueError, match=r"the networks differ in the parameter .vit"):
        align_models(model, other)
    with pytest.raises(ValueError, match="the networks differ in the parameter"):
        align_models(model, copy.deepcopy(model).float())
    with pytest.raises(ValueError, match=r"no wiring is known of a Linear"):
        align_models(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"has dtype torch\.float16"):
        align_models(copy.deepcopy(model).half(), copy.deepcopy(model).half())
    with pytest.raises(ValueError, match="by is a collection of"):
        align_models(model, model, by="heads")
    with torch.no_grad():
        other = copy.deepcopy(model)
        other.classifier.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"classifier.weight has dtype torch.float64 or is not finite"):
        align_models(model, other)


def test_identity_and_random_moves():
    cell = Cell("", (Part("neurons", [], GL(5, diagonal=True), columns=True),), 5)
    x = torch.randn(5, 1, 3, 1)
    assert torch.equal(cell.moved([x], cell.identity())[0], x)
    drawn = random_move(cell, torch.Generator().manual_seed(0))
    assert sorted(drawn.order.tolist()) == list(range(5))
    assert torch.equal(cell.moved([x], drawn)[0], x[drawn.order])
