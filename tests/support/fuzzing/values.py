"""Wrong values, the commands that meet them, and what a case is."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from reproduction import cli as laboratory
from sharpness import cli, measures

# fmt: off
#: Wrong in most places; nothing that asks for work without end.
ODD = [None, True, False, -1, 0, 1, 2.5, math.inf, math.nan, -1e300, "", "x", "1", [], {}, [[]], [None], {"a": 1}]
ODD_PYTHON = [*ODD, 1j, b"x", object(), np.float64(0.5), np.arange(2), torch.tensor(math.nan), torch.ones(2), len, ()]
INT = ["-1", "0", "x", "1e3", "2.5", "", "1"]
FLOAT = ["nan", "inf", "-1", "0", "x", "", "1e300", "1e-300", "1e-40"]
PLACES = ["", ".", "nope", "bert", "vit", "file", "folder", "nope:model", "mine:nope", "mine:", ":", "mine:batches",
          "a b",
          "a\nb", "nul\0byte", "näh", "x" * 300, "missing/deep/out", "file/out", "/proc/none/out", "..", "../beside",
          "done", "bert/model.safetensors", "bert/config.json", "pics/cat/0.png", "done/results.jsonl",
          "collection/net0.pt", "dev.tsv", "pics:x", "/proc/self/mem", "label", "0", "-1"]
WORDS = {"device": ["cuda", "nope", "meta", "", "cpu:9"], "shard": ["0/0", "2/1", "x", "1/0", "-1/2", "/", "1/2"],
         "label_map": ["junk", "a=1", "a=x", "=", "0=0,0=1", "0=0,1=1", "0=5,1=-1"],
         "measure": ["junk", "", *measures.MEASURES]}
#: Small enough to be quick; a command that stands here twice comes twice as often.
COMMANDS = [line.split() for line in (7 * """
run bert dev.tsv --text sentence --measure adaptive --rho 0.1 --steps 2 --batch-size 8 --quiet
run vit pics --measure gradient-norm --quiet --out out.json
""" + 2 * """
sweep sweep.json --quiet --out out
spectrum bert dev.tsv --text sentence --num-examples 8 --measure adaptive --k 1 --quiet --out out.json
run bert dev.tsv --text sentence --measure gradient-norm --quiet --out bert/model.safetensors
symmetries bert
compare bert bert
same bert vit --out same.csv
same bert bert --out same.csv
same collection/net0.pt collection/net0.pt --model mine:model --out same.csv
sweep collection/net0.pt collection/net1.pt --model mine:model --data xy.pt --steps 2 --quiet --out out
table done
demo --quiet --out missing/out.png
finetune bert dev.tsv --text sentence --models 1 --epochs 1 --batch 8 --points 4 --num-examples 8 --out out
""" + """
plot done --out out.png
toy --quiet --out out
diagonal --n 4 --d 6 --models 3 --seeds 1 --rho 0.1 --workers 1 --quiet --out out
""").split("\n") if line]
#: Of quotient-lora, in the folder lora of the world.
ADAPTERS = [line.split() for line in """\
merge one two --weights 0.7 0.3 --rank 3 --out out
merge one two --method ties --out out
merge one two --method dare --space knots --out out
merge one three --method mix --out out
merge kohya.safetensors diffusers.safetensors --out out
merge old one --weights 2 -1 --out out
merge dora dora --out out
resize one --rank 2 --out out
resize diffusers.safetensors --energy 0.9 --out out
resize experts --rank 5 --out out
balance dora --out out
balance old --out out
balance experts --out out
balance saved --out out
carry berted --from ../bert --to moved --out out
convert one --to kohya --model unet --out out
convert dora --to diffusers --model unet --one-rank --out out
convert kohya.safetensors --to peft --base base.safetensors --out out
convert diffusers.safetensors --to diffsynth --out out
extract base.safetensors tuned.safetensors --rank 2 --out out
extract ../bert moved --energy 0.9 --modules-to-save classifier --out out
extract sharded tuned.safetensors --rank 2 --target-modules layer --out out
compare one two --json
compare dora experts
compare saved old
compare kohya.safetensors diffusers.safetensors
""".splitlines()]
#: Of adapter_config.json.
LORA_CONFIG = {"r": [0, -1, 2.0, "4", None, 10**30, True, [4]],
               "lora_alpha": [0, -2, math.nan, math.inf, "x", 1e300, None],
               "rank_pattern": [{"layer": 2}, {"layer": 0}, {"": 4}, {"(": 1}, {"layer": "x"}, [], {"head": 2.5}],
               "alpha_pattern": [{"layer": 2}, {"layer": None}, {"head": math.nan}, {"[": 1}, 3],
               "peft_type": ["LOHA", "", None, 3, "lora", ["LORA"]], "use_rslora": [True, "x", 1],
               "use_dora": [True], "lora_bias": [True, "x"],
               "bias": ["all", "lora_only", "x", 3, None], "fan_in_fan_out": [True, 3],
               "target_modules": [["layer"], "layer", "(", "*", [], None, [3], {"layer": 1}, "layer|head", [None]],
               "target_parameters": [["layer.up"], ["layer"], [3], "x", [""], [None]],
               "modules_to_save": [["head"], "head", [3], [[]], {}, [None]],
               "trainable_token_indices": [[1], {"x": [1]}, 3, {}, {"layer": "x"}],
               "layers_to_transform": [[0], 3], "init_lora_weights": ["pissa", True, 3, "eva"],
               "base_model_name_or_path": [None, 3, "näh", "\ud800", ["x"]], "revision": [3, "main"],
               "peft_version": [None, 3, "", "0.19.0", "9" * 5000, "x", "0.18.0.dev0"],
               "layer_replication": [[[0, 1]]], "alora_invocation_tokens": [[1]], "exclude_modules": ["(", ["head"]]}
SWEEP = {"checkpoints": [{"path": "collection/*.pt", "model": "mine:model"}],
         "data": {"source": "xy.pt", "batch_size": 4, "subset_seed": 3},
         "test": {"source": "xy.safetensors"}, "measures": ["adaptive", "gradient-norm"],
         "rho": {"adaptive": [0.1, 0.3]},
         "baselines": "mine:norms",
         "initial": "collection/net0.pt",
         "steps": 2, "relative_tol": 1e-3, "ascent": "power", "restarts": 0, "seed": 0, "micro_batch": 4,
         "device": "cpu"}
#: Of config.json; sizes may become 10¹³, which is refused at once, but the number of layers not.
CONFIG = {"architectures": [["BertModel"], ["ViTModel"], ["Nope"], [], ["PreTrainedModel"], "BertModel", [3],
                            ["pipeline"]],
          "num_hidden_layers": [0, 2, 40, -1], "num_labels": [0, 1, 3, -1], "dtype": ["float16", "int8", "x"],
          "model_type": ["vit", "bert", "gpt2", "nope", 3], "id2label": [{}, {"0": "a"}, {"x": "y"}, None],
          "label2id": [{"a": "b"}, {}, {"a": -1}, None, [1]], "auto_map": [{"AutoConfig": "mine.Config"}],
          "quantization_config": [{"bits": 4}], "problem_type": ["regression", "multi_label_classification", "x"]}
SIZES = ["hidden_size", "vocab_size", "intermediate_size", "max_position_embeddings", "image_size", "patch_size",
         "num_channels", "num_attention_heads", "type_vocab_size", "height", "width"]
KINDS = {"int": INT, "count": INT, "seed": INT, "float": FLOAT}
LABORATORY = ("finetune", "toy", "diagonal")
# fmt: on


def main_of(argv):
    """Give the command line that a command belongs to."""
    return (laboratory if argv[:1] and argv[0] in LABORATORY else cli).main


class HangError(BaseException):
    """The watchdog's: no handler of the package's catches it."""


@dataclass
class Job:
    """A command or a call; ``outs`` may be written, ``names`` are the arguments that were spoilt."""

    what: object
    argv: list | None = None
    call: object = None
    outs: tuple = ()
    names: tuple = ()
    allowed: tuple = ()
    main: object = None
