"""The commands' reference, from their parsers; ``python -m tests.support.command_line`` writes it to docs/cli.md."""

import re
from pathlib import Path

from quotient_manifolds import lora_command
from sharpness import cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
START = "`sharpness --version` prints the version, `sharpness COMMAND --help` the options of a command."
#: Groups of options that several commands have, which are described once.
SHARED = {"data": "Which data", "search": "How to search"}


def commands(parser, *names):
    """Every command below a parser with its name, and the parser itself."""
    yield names, parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, command in action.choices.items():
                yield from commands(command, *names, name)


def marked(text):
    """Options in text as code, in which two hyphens stay two; names of pages as links."""
    text = re.sub(r"docs/([\w/]+\.md)", r"[how](\1)", text)
    return re.sub(r"(?<![`\w-])--[a-z-]+(?![^`\n]*`)", r"`\g<0>`", text.replace("%%", "%"))


def option(action):
    """A line of a list: how it is typed, and what it does; a hyphen before it could begin MyST's front matter."""
    name = ", ".join(action.option_strings) or action.metavar or action.dest.upper()
    values = "|".join(action.choices) if action.choices else action.metavar or action.dest.upper()
    typed = f"{name} {values}" if action.option_strings and action.nargs != 0 else name
    return f"* `{typed}{' ...' * (action.nargs == '+')}`: {marked(action.help)}"


def options(group):
    shown = [action for action in group._group_actions if action.dest != "help"]
    return "\n".join(map(option, shown))


def summary(top):
    """Rows of a table: every command, with a link to its section, and its purpose."""
    (added,) = (action for action in top._actions if isinstance(action.choices, dict))
    for found in added._choices_actions:
        purpose = found.help.rstrip(".")
        yield f"| [`{top.prog} {found.dest}`](#{top.prog}-{found.dest}) | {purpose[0].lower()}{purpose[1:]} |"


def groups(parser):
    """The options of a parser by the title of their group."""
    return {group.title: text for group in parser._action_groups if (text := options(group))}


def examples(text):
    return "\n".join(f"    {line.strip()}" for line in text.splitlines()) + "\n"


def section(parser, level="##"):
    """A command: its usage, text and examples, and its options, folded; what others have too stands below."""
    usage = parser.format_usage().removeprefix("usage: ").replace("[-h] ", "")
    yield f"{level} {parser.prog}\n\n`{' '.join(usage.split())}`\n"
    if parser.description:
        yield f"{marked(parser.description)}\n"
    if parser.epilog:
        yield examples(parser.epilog.partition("\n")[2])
    found = groups(parser)
    also = ", ".join(f"[{SHARED[t].lower()}](#{SHARED[t].lower().replace(' ', '-')})" for t in found if t in SHARED)
    if found:
        yield f":::{{dropdown}} Options of {parser.prog}\n"
        yield "\n".join(text for title, text in found.items() if title not in SHARED)
        yield f"\nFurther options: {also}.\n:::\n" if also else ":::\n"


def reference():
    top, lora = cli.parser(), lora_command._parser()
    measuring, merging = ([parser for _, parser in list(commands(each))[1:]] for each in (top, lora))
    yield "# Command line: sharpness and quotient-lora\n\n| type | to |\n|---|---|"
    yield "\n".join([*summary(top), *summary(lora)])
    yield f"\n{marked(top.description)}\n\n{START}\n\n:::{{dropdown}} Exit codes\n| exit code | meaning |\n|---|---|"
    codes = (line.split(maxsplit=1) for line in top.epilog.partition("exit codes:\n")[2].splitlines())
    yield "\n".join(f"| {code} | {marked(text)} |" for code, text in codes) + "\n:::\n"
    for parser in measuring:
        yield from section(parser)
    for title, name in SHARED.items():
        of = [parser for parser in measuring if title in groups(parser)]
        yield f"## {name}\n\n:::{{dropdown}} Options of {', '.join(p.prog for p in of)}\n"
        yield f"{groups(of[0])[title]}\n:::\n"
    text, _, shown = lora.description.partition("\n\nin a shell:\n")
    yield f"## quotient-lora\n\n{text}\n\n{examples(shown)}"
    for parser in merging:
        yield from section(parser, "###")


if __name__ == "__main__":
    PAGE.write_text("\n".join(reference()), encoding="utf-8")
