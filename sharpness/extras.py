"""Messages for missing optional libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["require_extra"]


@contextmanager
def require_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failing import in the block into one line: the feature, the library, and the extra that installs it.

    For example ``figures need matplotlib: pip install 'quotient-manifolds[plot]'``.
    """
    try:
        yield
    except ImportError as error:
        # A library that is installed but lacks something is too old or broken.
        why = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise ImportError(f"{what}: pip install 'quotient-manifolds[{extra}]'{why}") from error
