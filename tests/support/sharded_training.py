"""What processes of this machine do with optimisers of models that FSDP2 shards over them."""

import accelerate
import bitsandbytes
import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from quotient_manifolds.optim import QuotientSGD, create_quotient_lora_optimizer, create_quotient_optimizer
from quotient_manifolds.optim.parameters import full
from quotient_manifolds.symmetries import adapter_pairs, find
from tests.support import training
from tests.support.extent import EXHAUSTIVE
from tests.support.training import X, Y, lora, loss_of

STEPS = 10 if EXHAUSTIVE else 6
KINDS = ("adam", "muon", "sgd")
#: How the model is sharded and what it is, the optimiser, and the dtype.
CASES = [
    *(("root", kind, dtype) for kind in KINDS for dtype in (torch.float64, torch.float32)),
    *((way, "adam", torch.float64) for way in ("each", "hybrid", "swapped", "attention")),
    ("each", "muon", torch.float32), ("attention", "muon", torch.float64), ("attention", "sgd", torch.float32),
    ("absent", "adam", torch.float64), ("absent hybrid", "muon", torch.float64), ("mixed", "adam", torch.float32),
    ("part", "adam", torch.float64), ("autocast", "adam", torch.float32), ("4 bit", "muon", torch.float32),
]  # fmt: skip


def network(way, dtype):
    """A model whose sizes four processes do not divide, with a classifier or with entries outside pairs."""
    if way == "attention":
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(12, 3, 7, dropout=0.0, batch_first=True).to(dtype)
    if way in ("part", "4 bit"):
        return of_one_shape(way, dtype)
    model = lora(full_rank=False, dtype=dtype, targets=("0",), modules_to_save=["2"])
    if way == "mixed":
        for p in (p for p in model.parameters() if not p.requires_grad):
            p.data = p.data.to(torch.bfloat16).to(dtype)
    return model


def of_one_shape(way, dtype):
    """Two adapters of one shape, on a base of four bits a weight or as it is."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit if way == "4 bit" else nn.Linear
    net = nn.Sequential(layer(12, 12), nn.Tanh(), layer(12, 12)).to(dtype).to("cpu")
    net.is_loaded_in_4bit = way == "4 bit"
    return peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0", "2"])).to(dtype)


def optimizer_of(model, way, kind):
    options = {"weight_decay": 0.1, "max_grad_norm": 0.3}
    if kind == "sgd":
        symmetries = find(model) if way == "attention" else adapter_pairs(model)
        return QuotientSGD(training.trained(model), symmetries, 0.05, 0.9, **options)
    lr = 1e-2 if kind == "adam" else 0.05
    if way == "attention":  # queries and keys lie in one parameter with the values
        return create_quotient_optimizer(
            model, lr=lr, optimizer=kind, symmetries=find(model).of_kind(["vo"]), **options
        )
    return create_quotient_lora_optimizer(model, lr=lr, optimizer=kind, **options)


def loss(model, way, x, y):
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    x, y = x.to(dtype), y.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        found = model(x.unsqueeze(1)).squeeze(1) if way == "attention" else model(x)
    return (found[:, :9] - y).square().mean()


def trained(model, optimizer, way, steps, rank=0, size=1, like=1):
    """Train on this process's examples, in two passes a step; one process may leave out what one of several does."""
    if way in ("part", "autocast", "4 bit"):  # all processes have all examples
        rank, size = 0, 1
    x, y = (t.chunk(size)[rank].chunk(2) for t in (X, Y))
    optimizer.certify = "absent" not in way  # 0 is not the gradient at these weights
    frozen = [(p, local(p).clone()) for p in model.parameters() if not p.requires_grad]
    for i in steps:
        optimizer.zero_grad()
        for half in range(2):
            (loss(model, way, x[half], y[half]) / 2).backward()
        if "absent" in way and i % 2:
            leave_out(model, rank, size, like // 2 if "hybrid" in way else like)
        optimizer.step()
    assert all(torch.equal(local(p), before) for p, before in frozen)


def local(p):
    """Give the rows that this process has of a frozen parameter."""
    return p.to_local() if isinstance(p, DTensor) else p


def leave_out(model, rank, size, parts):
    """The first process is without gradients, all are without that of the bias; one process has 0 for the former."""
    for name, p in model.named_parameters():
        if name.endswith("bias") or (rank == 0 and size > 1):
            p.grad = None
        elif p.grad is not None and size == 1:
            p.grad.chunk(parts)[0].zero_()


def shard(model, way, size):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("all", "part")) if "hybrid" in way else None
    if way == "mixed":  # the frozen base is of bfloat16, and computes in the precision of the adapters
        for p in (p for p in model.parameters() if not p.requires_grad):
            p.data = p.data.to(torch.bfloat16)
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    if way in ("part", "4 bit"):  # the base is not sharded, and of the adapters both or one
        factors = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
        for m in factors[: 2 if way == "part" else 4]:
            fully_shard(m)
        return model
    if way == "each":
        for m in model.modules():
            if not list(m.children()) and list(m.parameters()):
                fully_shard(m)
    return fully_shard(model, mesh=mesh)


def weights(model):
    with torch.no_grad():
        return {name: full(p).clone() for name, p in model.named_parameters() if p.requires_grad}


def made(way, dtype, kind, size):
    model = network(way, dtype)
    if way == "swapped":
        return prepared(model, optimizer_of(model, way, kind))
    shard(model, way, size)
    return model, optimizer_of(model, way, kind)


def prepared(model, optimizer):
    """Let accelerate shard the model and replace the optimiser's parameters, which on a CPU it does if told so late."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=True
    )
    accelerator.state._shared_state.update(distributed_type=accelerate.DistributedType.FSDP, fsdp_plugin=plugin)
    model, wrapped = accelerator.prepare(model, optimizer)
    assert wrapped.optimizer is optimizer
    return model, optimizer


class Training(transformers.Trainer):
    """As a user has to write it, for a Trainer takes no optimiser under FSDP."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = create_quotient_lora_optimizer(self.model, lr=1e-2, max_grad_norm=0.3)
        return self.optimizer

    def compute_loss(self, model, inputs, **_):
        return loss_of(model, inputs["x"], inputs["y"])


def trained_by_trainer(folder, size):
    """Train on all examples in every step, whichever process has which; return what was trained, and all weights."""
    # The last two are the defaults of newer versions of transformers.
    config = {"auto_wrap_policy": "NO_WRAP", "version": 2, "sync_module_states": False}
    sharding = {"fsdp": True, "fsdp_config": config} if size > 1 else {}
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=5, per_device_train_batch_size=len(X) // size, max_grad_norm=0,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        **sharding,
    )  # fmt: skip
    if size > 1:  # accelerate shards over several devices of one kind, of which processors are none (AcceleratorState)
        accelerate.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
    examples = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    trainer = Training(network("root", torch.float64), arguments, train_dataset=examples)
    trainer.train()
    assert size == 1 or all(isinstance(p, DTensor) for p in trainer.model.parameters())
    return trainer.model


def spoilt(rank, size):
    """What this process says of NaN in the last one's copy of a gradient that all have whole, and whether weights stay.

    It is that of a bias outside pairs, and of a factor of the adapter that is not sharded.
    """
    found = []
    for name in ("0.base_layer.bias", "2.lora_B.default.weight"):
        model = of_one_shape("part", torch.float64)
        whole = model.get_parameter(f"base_model.model.{name}").requires_grad_()
        shard(model, "part", size)
        optimizer = optimizer_of(model, "part", "adam")
        loss(model, "part", X, Y).backward()
        whole.grad.view(-1)[0] += torch.nan if rank == size - 1 else 0
        before, words = weights(model), ""
        try:
            optimizer.step()
        except ValueError as error:
            words = str(error)
        after = weights(model)
        found.append((words, all(torch.equal(before[name], after[name]) for name in before)))
    return found


def possible(way, dtype):
    """Return whether this torch shards so on a CPU: before 2.9 gloo adds means in single precision, and has no HSDP."""
    return torch.__version__ >= (2, 9) or (dtype == torch.float64 and "hybrid" not in way)


def halves(way, dtype, size):
    """In how many halves of the steps two processes train, or four.

    These go on with what two have trained anyway, and in single precision with other ways of sharding, of which
    they do not try all unless exhaustive.
    """
    if not possible(way, dtype):
        return 0
    if way == "root" and size == 4:
        return 2 if dtype == torch.float64 else 0
    if size == 4 and not EXHAUSTIVE and way in ("each", "mixed", "autocast", "absent"):
        return 0
    return 2 if size == 2 else 1


def work(folder):
    """Train in every way, and keep the ends; resume what two processes have saved."""
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = {}
    for way, kind, dtype in (case for case in CASES if halves(case[0], case[2], size)):
        model, optimizer = made(way, dtype, kind, size)
        trained(model, optimizer, way, range(STEPS // 2), rank, size)
        saved = {"model": weights(model), "optimizer": optimizer.state_dict()}
        numbers = sum(v.numel() for s in optimizer._stacks for v in s.state.values())
        if halves(way, dtype, size) == 2:
            trained(model, optimizer, way, range(STEPS // 2), rank, size)
        ends[way, kind, dtype] = weights(model), numbers
        file = f"{folder}/{way}-{kind}-{dtype}.pt"
        if size == 2:
            if rank == 0:
                torch.save(saved, file)
            if way == "swapped":
                checkpoint.save(saved, checkpoint_id=f"{folder}/checkpoint")
            continue
        if way == "swapped":  # what is loaded into what has the same entries
            checkpoint.load(saved, checkpoint_id=f"{folder}/checkpoint")
        else:
            saved = torch.load(file, weights_only=True)
        model = network(way, dtype)
        model.load_state_dict(saved["model"], strict=False)
        shard(model, way, size)
        optimizer = optimizer_of(model, way, kind)
        optimizer.load_state_dict(saved["optimizer"])
        trained(model, optimizer, way, range(STEPS // 2), rank, size)
        ends[way, kind, dtype, "resumed"] = weights(model), 0
    ends["spoilt"] = spoilt(rank, size)
    ends["trainer"] = weights(trained_by_trainer(folder, size))
    torch.save(ends, f"{folder}/{size}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
