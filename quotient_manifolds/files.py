"""Files that are not what their names say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming_pointers(paths: Iterable[Path]) -> Iterator[None]:
    """Let an error in the block say that one of the files is a pointer of Git LFS, if one is: its contents are missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.safetensors")
    ...     _ = file.write_text("version https://git-lfs.github.com/spec/v1", encoding="utf-8")
    ...     with naming_pointers([file]):
    ...         raise ValueError("header too large")
    Traceback (most recent call last):
    ValueError: ...model.safetensors is a pointer of Git LFS, not the file itself: type `git lfs pull`, or download it
    """
    try:
        yield
    except Exception as error:
        for path in filter(Path.is_file, paths):
            with path.open("rb") as file:
                is_pointer = file.read(23) == b"version https://git-lfs"
            if is_pointer:
                raise ValueError(
                    f"{path} is a pointer of Git LFS, not the file itself: type `git lfs pull`, or download it"
                ) from error
        raise
