"""Every continuous symmetry of tiny whole networks: counted from the list, against the outputs' null dimension."""

from __future__ import annotations

import argparse

from benchmarks._common import write
from reproduction.nullity import nullity
from tests.support.whole_networks import FAMILIES, build, count, forward, inputs


def main() -> None:
    """Count and measure family by family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES, help="which (default: all)")
    rows = []
    for family in parser.parse_args().families:
        model = build(family)
        numbers = sum(p.numel() for p in model.parameters())
        kinds = count(model)
        found = nullity(model, list(inputs(family, int(2.2 * numbers))), forward=forward)
        heads = sum(kinds.get(kind, 0) for kind in ("qk", "vo"))
        rows.append(
            {
                "family": family, "parameters": numbers, "never used": found.unused, "heads": heads,
                "counted": sum(kinds.values()), "nullity": found.dimension, "gap": found.gap, "kinds": kinds,
            }
        )  # fmt: skip
        print({key: value for key, value in rows[-1].items() if key != "kinds"})
    write("symmetry_counts", rows)


if __name__ == "__main__":
    main()
