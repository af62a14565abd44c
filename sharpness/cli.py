"""Measure the sharpness of transformers: by how much the loss can rise within a ball around the weights.

geodesic-inv, the default measure, does not depend on the factors of attention heads;
complete-inv does not depend on any known symmetry of the weights.

in a shell:
  sharpness demo
  sharpness run path/to/bert dev.tsv --text sentence --label label --num-examples 512
  sharpness sweep path/to/bert berts/one --data dev.tsv --text sentence --out results

exit codes:
  0    everything was done
  1    a checkpoint of a sweep failed, --verify found a pair that is no symmetry, or two models are not one function
  2    the command was refused; one line on standard error says why
  130  interrupted
"""

from __future__ import annotations

import argparse
import inspect
import io
import re
import shlex
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn

from . import commands, spectrum_command, sweeps, symmetry_commands
from .errors import painted, words_of
from .measures import Search
from .options import DataChoice, RunOptions


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages, which know similar words, and texts that are shown as they are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left over by the command that was given it, not by the one above."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            many = self.prog == "sharpness run" and not any(word.startswith("-") for word in left)
            self.error(f"unrecognized arguments: {' '.join(left)}{' (sharpness sweep measures many models)' * many}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message and exit code 2."""
        known = [*self._option_string_actions, *(str(c) for a in self._actions for c in a.choices or ())]
        wrong = re.search(r"(?:invalid choice|unrecognized arguments): '?([^'\s=]+)", message)
        close = get_close_matches(wrong[1], known, 1) if wrong else []
        tip = f" (did you mean {close[0]}?)" if close else ""
        self.exit(
            2,
            painted(f"{self.prog}: {' '.join(message.split())}{tip}; see {self.prog} --help", "31", sys.stderr) + "\n",
        )


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    description, _, epilog = __doc__.partition("\n\nin a shell:")
    top = Parser(
        "sharpness", description=description, epilog=f"in a shell:{epilog}", usage="%(prog)s COMMAND [OPTIONS]"
    )
    top.add_argument("--version", action="version", version=f"sharpness {version('quotient-manifolds')}")
    added = top.add_subparsers(title="commands", metavar="COMMAND", prog=top.prog)
    data: dict[str, Any] = {"data": DataChoice}
    first = {
        commands.run: {**data, "measurement": RunOptions},
        sweeps.sweep: {"without a configuration": sweeps.plan_of, **data},
        symmetry_commands.symmetries: data,
        spectrum_command.spectrum: data,
    }
    last = {commands.run: {"search": Search}, sweeps.sweep: {"search": Search}}
    one, many = (
        (
            spectrum_command.spectrum,
            commands.compare,
            symmetry_commands.same,
            symmetry_commands.symmetries,
            symmetry_commands.canonicalize,
            commands.env,
        ),
        (sweeps.table, sweeps.plot),
    )
    for function in (commands.demo, commands.run, sweeps.sweep, *many, *one):
        add_command(added, function, {**first.get(function, {}), "options": function, **last.get(function, {})})
    return top


def main(arguments: Sequence[str] | None = None, top: argparse.ArgumentParser | None = None) -> int:
    """Run the command line, by default that of the process; an error is one line, with exit code 2.

    Above the line of a defect of ours its traceback is printed.
    """
    top = parser() if top is None else top
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a result is not lost because a terminal lacks a letter
    try:
        try:
            code = _run(top, arguments)
        except SystemExit:  # of the parser, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        said, code = "interrupted", 130
    except BrokenPipeError:
        _close_output()
        return 141  # as programs end that SIGPIPE ends: whoever read has seen enough
    except Exception as error:
        from quotient_manifolds.errors import is_mendable  # which nothing needs that succeeds

        if not is_mendable(error):
            traceback.print_exc()
        said, code = painted(words_of(error), "31", sys.stderr), 2
    try:
        sys.stdout.flush()
    except OSError:
        _close_output()
    print(f"{top.prog}: {said}", file=sys.stderr)
    return code


def _run(top: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    options = top.parse_args(arguments)
    if not hasattr(options, "run"):
        top.print_help()
        return 0
    options.command = shlex.join([top.prog, *(sys.argv[1:] if arguments is None else arguments)])
    from quotient_manifolds.hub import one_look

    with one_look(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries; the commands themselves report what matters to users
        code: int = options.run(options)
    return code


def _close_output() -> None:
    """Give up what cannot be written, or Python would try again when it ends, and fail."""
    with suppress(OSError):
        sys.stdout.close()


# -- arguments ---------------------------------------------------------------------------------------------------------


def add_command(commands: Any, function: Callable[..., int], groups: Mapping[str, Callable[..., Any]]) -> None:
    """Add a command: a function, in groups with titles among those of the classes whose options it takes as ``**``.

    Its help is the docstring: a line, a paragraph, how to type it, and the parameters.
    """
    words, text, shown = str(inspect.getdoc(function)).partition("\n\nParameters\n")[0].split("\n\n")
    needed = [
        p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD
    ]
    usage = [p.name.upper() if p.kind != p.KEYWORD_ONLY else f"--{p.name} {p.name.upper()}" for p in needed]
    command = commands.add_parser(
        function.__name__,
        help=words[0].lower() + words[1:-1],
        description=text,
        epilog=shown,
        add_help=False,
        usage=" ".join(["%(prog)s", *usage, "[OPTIONS]"]),
    )
    taken: set[str] = set()
    for title, described in groups.items():
        group = add_arguments(command, described, title, skip=("source", "paths", "command", *taken))
        taken |= inspect.signature(described).parameters.keys()
        if described is function:
            group.add_argument("-h", "--help", action="help", help="Show this text.")
    command.set_defaults(run=lambda options: function(**{k: v for k, v in vars(options).items() if k in taken}))


def add_arguments(
    command: argparse.ArgumentParser, described: Callable[..., Any], title: str, skip: Collection[str] = ()
) -> Any:
    """Add a group of an argument for each parameter of a function or class: its type, its default, and its docstring.

    Parameters without a default are positional, unless the function takes them by keyword only.
    """
    entries = re.findall(r"^(\w[\w, ]*?)(?: : .*)?\n((?: {4}.*\n?)+)", inspect.getdoc(described) or "", re.MULTILINE)
    helps = {
        name: re.sub(r":\w+:`(.*?)`", r"\1", " ".join(text.split())).replace("%", "%%")
        for names, text in entries
        for name in names.split(", ")
    }
    kinds, group = typing.get_type_hints(described), command.add_argument_group(title)
    for name, parameter in inspect.signature(described).parameters.items():
        if name in skip or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        shown = parameter.default
        if isinstance(shown, (int, float, str, Path, tuple)) and not isinstance(shown, bool) and shown != ():
            helps[name] += f" (default: {' '.join(shown) if isinstance(shown, tuple) else shown})"
        options = {"default": argparse.SUPPRESS, "help": helps[name], **_reading(kinds[name], parameter.default)}
        if "action" not in options and len(options.get("choices", range(9))) > 5:
            options["metavar"] = name.upper()
        required = parameter.default is inspect.Parameter.empty
        if required and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            command.add_argument(name, **options)
        else:
            flag = "no-" * (options.get("action") == "store_false") + name.replace("_", "-")
            group.add_argument(f"--{flag}", dest=name, required=required, **options)
    return group


def _reading(kind: Any, default: Any) -> dict[str, Any]:
    """Return how argparse reads a parameter of this type and default, which its function fills in by itself."""
    if typing.get_origin(kind) in (UnionType, typing.Union):  # what may be None besides
        kind = typing.get_args(kind)[0]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return {"action": "store_false" if default else "store_true"}
    if origin is Literal:
        return {"choices": inner}
    if origin is tuple:
        return {"nargs": "+", **_reading(inner[0], default)}
    return {"type": _label_map if origin is Mapping else place if kind is Path else kind}


def _label_map(text: str) -> dict[str, int | str]:
    entries = [entry.rpartition("=") for entry in text.split(",")]
    names = {name: int(of) if of.isdecimal() else of for name, _, of in entries if name and of}
    if len(names) < len(entries):
        raise argparse.ArgumentTypeError(f"labels are mapped by NAME=NUMBER,…, each once, but not {text!r}")
    return names


def place(text: str) -> Path:
    """Read a path. An empty one is refused, because usually a shell variable was not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)
