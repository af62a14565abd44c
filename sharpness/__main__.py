"""``python -m sharpness``."""

import sys

from .cli import main

sys.exit(main())
