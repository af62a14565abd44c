"""What processes of this machine do with models that FSDP2 shards over them."""

import json
import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import sharpness
from quotient_manifolds.weights import check_whole, preserve_model_state
from sharpness.ascent import gram_matrix
from sharpness.losses import BatchLoss, Objective
from sharpness.measuring import attached_space
from tests.support import networks
from tests.support.extent import EXHAUSTIVE

MEASURES = ("adaptive", "euclidean", "geodesic-inv", "geodesic-mix", "complete-inv", "complete-mix")


def llama():
    """A Llama with grouped queries and tied embeddings, whose sizes no number of processes divides."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13, hidden_size=12, intermediate_size=14, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=4, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = networks.shake(LlamaForCausalLM(config).eval())
    model.loss_function = next_word  # that of transformers is taken in float32
    return model


def next_word(logits, labels, **_):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def words(count=5, seed=1):
    ids = torch.randint(13, (count, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def seeded(build):
    def make():
        torch.manual_seed(0)
        return build()

    return make


MODELS = {
    "llama": (llama, words), "vit": (seeded(networks.vit), networks.images),
    "bert": (seeded(lambda: networks.bert(hidden_act="relu")), networks.text),
}  # fmt: skip


def layers(model):
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)


def sharded(model):
    for layer in layers(model):
        fully_shard(layer)
    return fully_shard(model)


#: Every measure for every model if exhaustive; else the models take turns.
OF_MODEL = dict.fromkeys(MODELS, MEASURES)
if not EXHAUSTIVE:
    OF_MODEL = {"vit": MEASURES[1:5], "llama": MEASURES[:3:2], "bert": MEASURES[5:]}
#: Measures by which pairs are certified.
CERTIFIED = dict.fromkeys(MODELS, ("geodesic-inv", "complete-mix"))
if not EXHAUSTIVE:
    CERTIFIED |= {"llama": ("geodesic-inv",), "bert": ("complete-mix",)}
#: Other motions, balls and statistics, and averages, for all models or for one.
VARIED = tuple(MODELS) if EXHAUSTIVE else ("vit",)


def rms_norm(self, x):
    """In the dtype of x; that of transformers is taken in float32."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@patch.object(LlamaRMSNorm, "forward", rms_norm)
def results(which, model, batches):
    """Everything that is to be the same however the weights lie."""
    found = {"residuals": {name: residuals(model, batches, name) for name in CERTIFIED[which]}}
    for name in OF_MODEL[which]:
        worst = sharpness.evaluate(model, batches, measure=name, steps=3, progress=False)
        found[name] = {
            "batches": [(b.value, b.history, b.base_error, b.worst_error) for b in worst.batches],
            "spectrum": (worst.min_singular_value, worst.num_null),
        }
        if name in OF_MODEL[which][-2:]:  # in all measures it is the first gradient of the ascent
            found[name]["gradient"] = float(sharpness.gradient_norm(model, batches, measure=name))
    if which not in VARIED:
        return found
    exact = sharpness.get_measure("geodesic-mix", geodesic="exact")
    worst = sharpness.evaluate(model, batches, measure=exact, rho=0.02, steps=2, micro_batch=2, progress=False)
    found["exact"] = worst.batches[0].history
    started = sharpness.evaluate(model, batches, ascent="apgd", steps=4, progress=False)
    found["apgd"] = [b.history for b in started.batches]
    return found


def random_vectors(which, model, batches):
    """Random vectors of every process, their lengths with all, and for one model an average over them."""
    measure, state = sharpness.get_measure("geodesic-inv"), preserve_model_state(model)
    rows = check_whole(model, or_rows=True)
    with state, state, attached_space(model, batches, measure, Objective(), sharded=rows) as (space, _):
        one, two, again = (space.random(torch.Generator().manual_seed(seed)) for seed in (0, 1, 0))
        vectors = {"part": one, "same": torch.equal(one, again), "square": space.norm(one) ** 2, "dim": space.dim}
        vectors["horizontal"] = float((space.project(one) - one).norm() / one.norm())
        vectors["products"] = gram_matrix(one, two, world=space.world)[0, 1]
    if which not in VARIED:
        return vectors
    mean = sharpness.average(model, batches, num_samples=50, rho=0.003, progress=False)
    return vectors | {"mean": float(mean), "std_error": mean.std_error}


def residuals(model, batches, measure):
    """The residuals of all pairs at the gradient that is computed anyway, by name."""
    found, objective, measure = {}, Objective(), sharpness.get_measure(measure)
    state, rows = preserve_model_state(model), check_whole(model, or_rows=True)
    with state, state, attached_space(model, batches, measure, objective, sharded=rows) as (space, each):
        for index, batch in each:
            BatchLoss(space, objective, batch, index)
            found.update({pair.name: residual for pair, residual in space.residuals.items()})
    return found


def rows_of(model):
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def same(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


def measure(rank, size, out, name):
    build, batch = MODELS[name]
    model, batches = sharded(build()), [batch()]
    before = rows_of(model)
    found = {"results": results(name, model, batches), "random": random_vectors(name, model, batches)}
    torch.save(found | {"untouched": same(before, rows_of(model))}, f"{out}/{name}-{size}-{rank}.pt")


def fail(rank, size, out, how):
    """Let the last process fail in its tenth pass, and note what every other says, and of its weights."""
    model, calls, begin = sharded(networks.vit()), [], time.monotonic()
    before = rows_of(model)

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 10 and rank == size - 1:
            if how == "error":
                raise RuntimeError("no more")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[how])
        return torch.nn.functional.cross_entropy(model(batch[0]).logits, batch[1])

    try:
        sharpness.evaluate(model, [networks.images()], loss_fn, progress=False, relative_tol=0.0)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        found = [said, same(before, rows_of(model)), time.monotonic() - begin]
        Path(f"{out}/{how}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # as a process ends that nobody tells to leave its group


def work_sharded(work, *arguments):
    """Do one of the above as a process of a group."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    work(dist.get_rank(), dist.get_world_size(), *arguments)
    dist.destroy_process_group()
