import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import sharpness
from quotient_manifolds.symmetries import move_
from sharpness.losses import Objective
from sharpness.study.run import _loss_and_error
from tests.support import networks
from tests.support.extent import share


def masked_language_model():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12,
    )  # fmt: skip
    ids = torch.randint(1, 20, (7, 9))
    labels = torch.where(torch.rand(7, 9) < 0.4, ids, -100)
    labels[2] = -100  # an example without any label
    return BertForMaskedLM(config), {"input_ids": ids, "labels": labels}


def causal_language_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12,
    )  # fmt: skip
    ids = torch.randint(1, 20, (7, 9))
    labels = torch.where(torch.rand(7, 9) < 0.6, ids, -100)
    labels[:4, 0] = ids[:4, 0]  # never predicted: a count of all labels would be wrong
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": labels}


def encoder_decoder():
    """Its loss has the name of a causal one, and every label counts."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    ids = torch.randint(1, 20, (7, 6))
    labels = torch.randint(1, 20, (7, 4))
    labels[2:5, 2:] = -100
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}


def padded():
    batch = networks.text()
    ids = batch["input_ids"]
    lengths = torch.arange(len(ids)) % ids.shape[1] + 1
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return networks.bert(), {**batch, "input_ids": ids * mask, "attention_mask": mask}


CASES = {
    "padded": padded,
    "vit": lambda: (networks.vit(), networks.images()),
    "bert": lambda: (networks.bert(), networks.text()),
    "masked": masked_language_model,
    "causal": causal_language_model,
    "encoder-decoder": encoder_decoder,
}


@pytest.mark.parametrize("case", share(CASES, 2))
def test_micro_batches_in_float64(case):
    model, batch = CASES[case]()
    networks.shake(model)
    options = {"rho": 0.1, "steps": 2, "relative_tol": 0}
    rel = 1e-6 if case == "causal" else 1e-12  # transformers computes that loss in float32
    whole = sharpness.evaluate(model, [batch], **options)
    for size in (1, 4, 1000):
        pieces = sharpness.evaluate(model, [batch], micro_batch=size, **options)
        assert float(pieces) == pytest.approx(float(whole), rel=10 * rel if case == "causal" else rel)
        assert pieces.batches[0].worst_error == whole.batches[0].worst_error
        assert pieces.batches[0].base_loss == pytest.approx(whole.batches[0].base_loss, rel=rel)


def test_the_weights_matter():
    """Equal weights for all pieces would give another loss, for both language models."""
    for case in ("masked", "causal"):
        model, batch = CASES[case]()
        model.eval()
        # The last piece has the fewest labels, and those which the model finds least likely: its loss is the largest.
        unlikely = model(batch["input_ids"]).logits[-1].argmin(-1).roll(1 if case == "causal" else 0)
        batch["labels"][-1] = torch.where(torch.arange(9).ge(3) & torch.arange(9).lt(6), unlikely, -100)
        objective = Objective(micro_batch=3)
        pieces = objective.pieces(model, batch)
        losses = [float(objective(model, part).loss.detach()) for _, part in pieces]
        whole = float(objective(model, batch).loss.detach())
        assert sum(w for w, _ in pieces) == pytest.approx(1)
        assert sum(w * v for (w, _), v in zip(pieces, losses, strict=True)) == pytest.approx(whole, rel=1e-6)
        assert abs(sum(losses) / len(losses) - whole) > 1e-3 * whole


@pytest.mark.parametrize("case", CASES)
def test_losses_and_errors_of_a_sweep_do_not_depend_on_micro_batches(case):
    """Pieces of a language model's batch, which count no errors, had equal weights whatever their size."""
    model, batch = CASES[case]()
    model.eval()
    whole, pieces = (_loss_and_error(model, [batch, batch], Objective(micro_batch=m)) for m in (None, 3))
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert pieces["error"] == whole["error"]


def test_the_loss_of_a_regression_is_a_mean_over_examples():
    """Batches without labels that are counted had equal weights, whatever their size."""
    x, model = torch.arange(10.0)[:, None], nn.Identity()

    def function(m, batch):
        return m(batch).square().mean()

    whole, parts = (_loss_and_error(model, b, Objective(function)) for b in ([x], [x[:9], x[9:]]))
    assert parts["loss"] == pytest.approx(whole["loss"])
    assert parts["error"] is whole["error"] is None


def test_micro_batches_in_float32():
    torch.set_default_dtype(torch.float32)
    batch = networks.images()
    model = networks.trained_vit()
    space = sharpness.WeightSpace(model, sharpness.MEASURES["geodesic-inv"])
    gradients = []
    with space.attached():
        for size in (None, 1, 4):
            objective = Objective(micro_batch=size)
            losses = (w * objective(model, part).loss for w, part in objective.pieces(model, batch))
            gradients.append(space.gradient(losses))
    for g in gradients[1:]:
        assert float((g - gradients[0]).norm()) < 1e-5 * float(gradients[0].norm())
    whole, pieces = (float(sharpness.evaluate(model, [batch], rho=0.1, micro_batch=size)) for size in (None, 4))
    assert pieces == pytest.approx(whole, rel=1e-3)


def test_micro_batches_of_a_loss_of_ones_own():
    model, batch = networks.vit(), networks.images()

    def mean(model, batch):
        return F.cross_entropy(model(batch["pixels"]).logits, batch["classes"][0])

    def total(model, batch):
        return F.cross_entropy(model(batch["pixels"]).logits, batch["classes"][0], reduction="sum")

    own = {"pixels": batch[0], "classes": [batch[1]], "temperature": torch.tensor(1.0), "name": "digits"}
    whole, pieces = (
        float(sharpness.evaluate(model, [own], mean, rho=0.1, steps=3, micro_batch=size)) for size in (None, 5)
    )
    assert pieces == pytest.approx(whole, rel=1e-12)
    with pytest.raises(ValueError, match=r"micro_batch changes the loss: 5 examples give .* together"):
        sharpness.evaluate(model, [own], total, rho=0.1, steps=3, micro_batch=5)
    own["odd"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"cannot split a batch of 12 examples that has a tensor of shape \(3,\)"):
        sharpness.evaluate(model, [own], mean, rho=0.1, steps=3, micro_batch=5)


class WithBatchNorm(nn.Module):
    def __init__(self, track):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4, track_running_stats=track), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.norm(x))


def test_layers_that_mix_examples():
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    options = {"measure": "adaptive", "rho": 0.1, "steps": 2}
    for size, words in (
        (2, "makes pieces that the model does not take; .*more than 1 value"),
        (4, "changes the loss: 4 "),
    ):
        with pytest.raises(ValueError, match=f"micro_batch {words}"):
            sharpness.evaluate(WithBatchNorm(False), [batch], micro_batch=size, **options)
    assert float(sharpness.evaluate(WithBatchNorm(False), [batch], **options)) > 0
    model = WithBatchNorm(True).train()  # running statistics are used while measuring
    whole, pieces = (float(sharpness.evaluate(model, [batch], micro_batch=m, **options)) for m in (None, 2))
    assert pieces == pytest.approx(whole, rel=1e-12)
    with pytest.raises(ValueError, match="micro_batch must be a whole number of at least 1"):
        sharpness.evaluate(model, [batch], micro_batch=0, **options)
    with pytest.raises(ValueError, match="micro_batch needs batches of tensors"):
        sharpness.evaluate(model, ["text"], lambda m, b: m.out.weight.sum(), micro_batch=2, **options)


def test_a_model_without_a_head_is_named():
    class Headless(nn.Module):
        def forward(self, x, labels=None):
            return SimpleNamespace(last_hidden_state=x)

    with pytest.raises(
        ValueError, match=r"Headless returned no loss .*; load a class with a head .*ForSequenceClassification"
    ):
        Objective()(Headless(), {"x": torch.ones(2, 3), "labels": torch.zeros(2)})
    with pytest.raises(ValueError, match="add the labels"):
        Objective()(Headless(), {"x": torch.ones(2, 3)})


def test_tuples_are_named():
    model, batch = masked_language_model()
    model.config.return_dict = False
    with pytest.raises(ValueError, match=r"BertForMaskedLM returned no loss .*; set model\.config\.return_dict = True"):
        Objective()(model, batch)
    model.config.return_dict = True
    assert Objective()(model, batch).loss.isfinite()


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[0], [1]]), torch.tensor([0.0, 1.0]),
        torch.tensor([0, 2]), [0, 1],
    ],
)  # fmt: skip
def test_labels_that_do_not_fit_are_named(labels):
    with pytest.raises(ValueError, match="the labels do not fit the scores of Linear: "):
        Objective()(nn.Linear(3, 2), (torch.randn(2, 3), labels))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # torch's own, of another cause
        Objective()(nn.Linear(4, 2), (torch.randn(2, 3), labels))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_labels_beyond_the_classes_are_named(dtype):
    """Torch says "Target 3 is out of bounds.", and a model of transformers passed that on."""
    model, x = classifier().to(dtype), IDS[:, :3].to(dtype)
    for labels, said in (([3, -100, 1, 0], "from 0 to 3"), ([0, -1, 1, 0], "from -1 to 1")):
        y, words = torch.tensor(labels), f"the labels go {said}, but the classes of .* from 0 to 2; number them so"
        with pytest.raises(ValueError, match=words):
            Objective()(model, {"input_ids": IDS, "labels": y})
        with pytest.raises(ValueError, match=words):
            Objective()(nn.Identity(), (x, y))


def classifier(**options):
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12, num_labels=3, **options,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


IDS = torch.arange(3, 27).reshape(4, 6)
CLASSES = torch.tensor([0, 1, 2, 0])
HINTS = {
    "ids": ({"input_ids": IDS + 9, "labels": CLASSES}, "rows 12 to 35 of bert.embeddings.word_embeddings.* has 30 "),
    "types": (
        {"input_ids": IDS, "token_type_ids": IDS, "labels": CLASSES},
        "token_type_embeddings.* has 2 of them",
    ),
}


@pytest.mark.parametrize("case", HINTS)
def test_hints_say_what_is_wrong(case):
    batch, words = HINTS[case]
    with pytest.raises(ValueError, match=words):
        Objective()(classifier(), batch)


@pytest.mark.parametrize("kind", [IndexError, RuntimeError, ValueError])
@pytest.mark.parametrize(
    "words", ["index out of range in self", "Target 7 is out of bounds.", "expected Long", "24 12"]
)
def test_an_error_of_the_models_own_is_not_explained(kind, words):
    """Each was said to come from ids or labels, which are as they should be; the length is beyond a table not used."""

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier()

        def forward(self, **batch):
            self.inner(**batch)
            raise kind(words)

    with pytest.raises(kind) as raised:
        Objective()(Broken(), {"input_ids": IDS, "labels": CLASSES})
    assert str(raised.value) == words


def test_outputs_that_are_dicts():
    class Plain(nn.Module):
        def __init__(self, loss):
            super().__init__()
            self.out, self.loss = nn.Linear(3, 2), loss

        def forward(self, x, labels=None):
            scores = self.out(x)
            return {"logits": scores, **({"loss": F.cross_entropy(scores, labels)} if self.loss else {})}

    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    model = Plain(True)
    for found, batch in ((Plain(False), (x, y)), (model, {"x": x, "labels": y})):
        outcome = Objective()(found, batch)
        torch.testing.assert_close(outcome.loss, F.cross_entropy(found.out(x), y))
        assert outcome.counted == 4
    with pytest.raises(ValueError, match=r"returned no loss for a dict with the keys \['labels', 'x'\]; load"):
        Objective()(Plain(False), {"x": x, "labels": y})


# -- half precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("measure", ["geodesic-inv", "adaptive"])
def test_half_precision_is_measured_in_float32(dtype, measure):
    """A small step next to w is rounded away in half precision: the plain way sees almost nothing of it."""
    torch.set_default_dtype(torch.float32)
    x, y = networks.images()
    half = networks.trained_vit().to(dtype)
    exact = networks.vit()
    exact.load_state_dict(half.state_dict())  # the same numbers in float32
    before = {n: (p.dtype, p.data_ptr(), p.detach().clone()) for n, p in half.named_parameters()}
    options = {"measure": measure, "rho": 0.02, "steps": 5, "relative_tol": 0}
    expected = sharpness.evaluate(exact, [(x, y)], **options)
    found = sharpness.evaluate(half, [(x.to(dtype), y)], **options)
    rounded = sharpness.evaluate(exact, [(x.to(dtype).float(), y)], **options)
    assert float(found) == pytest.approx(float(rounded), rel=1e-5)
    for n, p in half.named_parameters():
        assert (p.dtype, p.data_ptr()) == before[n][:2]
        assert torch.equal(p, before[n][2])
    direction = found.direction(0)
    with torch.no_grad():
        with sharpness.perturbed(half, direction) as moved:
            loss = float(F.cross_entropy(moved(x.to(dtype).float()).logits, y))
        assert loss == pytest.approx(found.batches[0].worst_loss, rel=1e-5)
        # The same step taken in half precision, and in float32 weights below autocast.
        naive = networks.vit()
        naive.load_state_dict(exact.state_dict())
        names = dict(naive.named_parameters())
        swallowed = total = 0
        for n, v in direction.tensors.items():
            w = names[n].to(dtype)
            swallowed += int(((w + v.to(dtype)) == w)[v != 0].sum())
            total += int((v != 0).sum())
        assert swallowed > 0.5 * total
    assert float(expected) == pytest.approx(float(found), rel=0.05)


def test_half_precision_moves_along_orbits_as_float32_does():
    torch.set_default_dtype(torch.float32)
    x, y = networks.images()
    model = networks.trained_vit()
    twin = networks.vit()
    twin.load_state_dict(model.state_dict())
    move_(twin, condition=3.0, seed=1)
    values = [float(sharpness.evaluate(m.bfloat16(), [(x.bfloat16(), y)], rho=0.1)) for m in (model, twin)]
    assert values[0] == pytest.approx(values[1], rel=0.05)  # the weights themselves were rounded to 8 bits


def test_a_loss_with_weights_of_classes_is_refused_in_micro_batches():
    """The first two examples share a class, as in the case that was measured wrongly: .0365 for .0636."""
    x = torch.randn(12, 4)
    y = torch.tensor([0, 0, 1, 2, 0, 1, 2, 2, 1, 0, 2, 1])
    model, weights = nn.Linear(4, 3), torch.tensor([1.0, 5.0, 0.2])
    losses = {
        "weighted": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weights),
        "mean": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    }
    options = {"measure": "adaptive", "rho": 0.1, "steps": 2}
    for size in (1, 2, 4, 5):
        with pytest.raises(ValueError, match="micro_batch changes the loss"):
            sharpness.evaluate(model, [(x, y)], losses["weighted"], micro_batch=size, **options)
        first = (torch.randn(4, 4), torch.zeros(4, dtype=torch.long))
        with pytest.raises(ValueError, match="micro_batch changes the loss"):  # and in a later batch
            sharpness.evaluate(model, [first, (x, y)], losses["weighted"], micro_batch=max(size, 4), **options)
        assert float(sharpness.evaluate(model, [(x, y)], losses["mean"], micro_batch=size, **options)) > 0


def test_a_loss_that_is_random_from_the_second_batch_on():
    def loss(model, batch):
        noise = torch.rand(()) if batch[1][0] else 0.0
        return F.cross_entropy(model(batch[0]), batch[1]) + noise

    batches = [(torch.randn(4, 4), torch.full((4,), i)) for i in range(2)]
    with pytest.raises(ValueError, match="two identical passes through batch 1 gave different losses"):
        sharpness.evaluate(nn.Linear(4, 3), batches, loss, measure="adaptive", rho=0.1, steps=2)
    options = {"measure": "adaptive", "rho": 0.1, "steps": 2, "micro_batch": 2}
    with pytest.raises(ValueError, match="two identical passes through batch 1 gave different losses"):
        sharpness.evaluate(nn.Linear(4, 3), batches, loss, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", ["8 bit", "4 bit"])
def test_adapters_on_a_quantised_base(bits):
    """bitsandbytes packs no 4-bit weights meanwhile, which could not be differentiated nor restored."""
    peft = pytest.importorskip("peft")
    model, batch = networks.quantised_bert(bits)
    options = {"target_modules": ["query", "value"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, **options)).eval()
    before = copy.deepcopy(model)(**batch).loss  # a pass changes how some of the weights are stored
    result = sharpness.evaluate(model, [batch], rho=[0.01, 0.1], steps=3, progress=False)
    average = sharpness.average(model, [batch], rho=0.1, num_samples=2, progress=False)
    assert 0 < float(result[0.01]) < float(result[0.1])
    assert abs(float(average)) < float(result[0.1])
    after = model(**batch).loss
    after.backward()
    assert torch.equal(before, after)


def test_labels_that_do_not_count_are_no_errors():
    scores, y = torch.eye(3).repeat(2, 1), torch.tensor([0, -100, 1, 0, -100, -100])
    found = Objective()(nn.Identity(), (scores, y))
    assert (found.wrong, found.counted) == (1, 3)
    parts = [
        Objective()(nn.Identity(), part) for _, part in Objective(micro_batch=3).pieces(nn.Identity(), (scores, y))
    ]
    assert (sum(p.wrong for p in parts), sum(p.counted for p in parts)) == (1, 3)
