"""As in the packages' own tests: float64 by default, fixed seeds."""

from tests.conftest import _float64_and_seed  # noqa: F401
