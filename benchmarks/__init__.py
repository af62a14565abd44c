"""Speed and memory, each beside something else; ``python -m benchmarks.NAME`` records it in ``results/``."""
