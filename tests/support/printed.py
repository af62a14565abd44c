"""Whether a page shows what its code prints: words exactly, numbers as far as the page promises."""

import doctest
import re

NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
#: What is remarked on models that know nothing, as those with random weights that stand in for a page's own.
UNTRAINED = "this model knows little of these data"
SETTINGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def numbers(line):
    return [float(n.replace(",", "")) for n in NUMBER.findall(line)]


def masked(text):
    return NUMBER.sub("#", text)


def tolerance(options):
    """Read what stands behind the language of a block: nothing, ``words``, or such as ``within 20 %``."""
    found = re.fullmatch(r"within (\d+) %", options)
    assert found or options in ("", "words"), f"{options!r}: a block is text, text words, or text within N %"
    return float(found[1]) / 100 if found else None


def same(shown, printed, options=""):
    """Compare; ``...`` stands for anything. Where numbers are compared to a tolerance, all of them must be shown."""
    allowed = tolerance(options)
    if not options:
        return doctest.OutputChecker().check_output(shown, printed, SETTINGS)
    if options == "words" and UNTRAINED not in shown:
        printed = "".join(line for line in printed.splitlines(keepends=True) if UNTRAINED not in line)
    if not doctest.OutputChecker().check_output(masked(shown), masked(printed), SETTINGS):
        return False
    pairs = zip(numbers(shown), numbers(printed), strict=True) if allowed is not None else ()
    return all(abs(a - b) <= allowed * max(abs(a), abs(b)) for a, b in pairs)
