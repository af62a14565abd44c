"""The reference of the command line, from its parser; ``python -m tests.command_line`` writes it to docs/cli.md."""

from pathlib import Path

from sharpness import cli

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"


def commands(parser, *names):
    """Every command below a parser with its name, and the parser itself."""
    yield names, parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, command in action.choices.items():
                yield from commands(command, *names, name)


def option(action):
    """A line of a list: how it is typed, and what it does."""
    name = ", ".join(action.option_strings) or action.metavar
    values = "|".join(action.choices) if action.choices else action.metavar
    typed = f"{name} {values}" if action.option_strings and action.nargs != 0 else name
    return f"- `{typed}{' ...' * (action.nargs == '+')}`: {action.help.replace('%%', '%')}"


def section(parser):
    """A command: its usage, text and examples, and its options in their groups."""
    yield f"## {parser.prog}\n\n`{parser.format_usage().removeprefix('usage: ').strip()}`\n\n{parser.description}\n"
    yield "\n".join(f"    {line.strip()}" for line in parser.epilog.splitlines()[1:]) + "\n"
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.dest != "help"]
        if shown:
            yield f"*{group.title}*\n\n" + "\n".join(map(option, shown)) + "\n"


def reference():
    top = cli.parser()
    yield f"# Command line\n\n{top.description}\n\n`--version` prints the version, `--help` this text. Exit codes:\n"
    codes = top.epilog.partition("exit codes:\n")[2].splitlines()
    yield "\n".join("- " + " ".join(line.split()).replace(" ", ": ", 1) for line in codes) + "\n"
    for _, parser in list(commands(top))[1:]:
        yield from section(parser)


if __name__ == "__main__":
    PAGE.write_text("\n".join(reference()), encoding="utf-8")
