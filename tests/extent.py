"""How much the tests do: what every run needs, or everything (``make exhaustive``)."""

import os

EXHAUSTIVE = "EXHAUSTIVE" in os.environ
