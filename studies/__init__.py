"""Questions that took experiments, one script each; ``python -m studies.NAME`` records the answer in ``results/``."""
