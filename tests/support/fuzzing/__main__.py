"""``python -m tests.support.fuzzing [CASES [SURFACE [NUMBER]]]`` runs cases and counts what failed."""

import collections
import hashlib
import sys
import tempfile
import time
from pathlib import Path

from tests.support.fuzzing.cases import chunks, run
from tests.support.fuzzing.world import build


def main(cases=1000, only=None, number=None):
    """Print what failed, counted."""
    failures, ends, seconds, groups = [], [], collections.Counter(), collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        build(base := Path(place).resolve() / "base")
        for surface, numbers in chunks(int(cases)):
            if only in (None, surface) and (number is None or numbers.start == 0):
                start = time.process_time()
                found, ended = run(surface, numbers if number is None else [int(number)], base)
                failures, ends = failures + found, ends + ended
                seconds[surface] += round(time.process_time() - start, 1)
    for f in failures:
        groups[f.kind, f.surface, f.place, f.words.split(":")[0] if f.kind == "traceback" else f.words[:30]].append(f)
    for (kind, surface, where, _), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        first = found[0]
        print(f"{len(found):4d} {kind:14} {where:45} {surface} {first.number}: {first.words}\n{'':9}{first.what[:300]}")
    print(
        f"{len(ends)} cases, {len(failures)} failures of {len(groups)} sorts:",
        dict(collections.Counter(f.kind for f in failures)),
    )
    print("ends:", dict(collections.Counter(e[2] for e in ends)), "\nseconds of the processor:", dict(seconds))
    print("digest:", hashlib.blake2b(repr(ends).encode(), digest_size=8).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
