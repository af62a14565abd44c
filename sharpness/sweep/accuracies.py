"""Known accuracies, from a table."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from ..texts import read_table

__all__ = ["Accuracies"]

#: Suffixes of checkpoint files.
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


class Accuracies(Struct, frozen=True, forbid_unknown_fields=True):
    r"""Known accuracies by model name, which replace a test set.

    Attributes
    ----------
    file : str
        ``.csv``, ``.tsv`` or ``.jsonl`` table.
    name : str
        Column of the models' names, which are those of the checkpoints with or without suffix.
    test, train : str or None
        Columns of accuracies, as fractions. Without ``train`` the training data are run through the model.
    match : {"name", "number"}
        Compare the names, or the only number in them (``Run 7`` matches ``bert_07``).

    Raises
    ------
    ValueError
        ``match`` has another value.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     table = pathlib.Path(place, "accuracies.csv")
    ...     _ = table.write_text("run,accuracy\nRun 0,0.84\nRun 1,0.83\n")
    ...     Accuracies(str(table), name="run", test="accuracy", match="number").of("bert_01")
    {'test': 0.83}
    """

    file: str
    name: str
    test: str
    train: str | None = None
    match: str = "name"

    def __post_init__(self) -> None:
        if self.match not in ("name", "number"):
            raise ValueError(f'accuracies are matched by "name" or "number", not {self.match!r}')

    def of(self, checkpoint: str) -> dict[str, float] | None:
        """Return the accuracies of one checkpoint, or None; see :meth:`read`."""
        return self.read().get(self._key(checkpoint))

    def read(self) -> dict[str, dict[str, float]]:
        """Return the accuracies (``test`` and possibly ``train``) by the compared name or number.

        Raises
        ------
        ValueError, OSError
            The file cannot be read, lacks a column, names a model twice, or holds values that are not fractions.
        """
        found: dict[str, dict[str, float]] = {}
        wanted = {"test": self.test, **({} if self.train is None else {"train": self.train})}
        for number, row in enumerate(read_table(self.file), 1):
            missing = [c for c in (self.name, *wanted.values()) if c not in row]
            if missing:
                raise ValueError(f"row {number} of {self.file} has no column {missing[0]!r}; it has {', '.join(row)}")
            key = self._key(row[self.name])
            try:
                values = {k: float(row[c]) for k, c in wanted.items()}
            except ValueError as error:
                raise ValueError(f"row {number} of {self.file} does not hold an accuracy ({error})") from error
            if not all(0 <= v <= 1 for v in values.values()):
                raise ValueError(f"row {number} of {self.file}: accuracies are fractions from 0 to 1, got {values}")
            if key in found:
                raise ValueError(f"row {number} of {self.file} names the model {row[self.name]!r} a second time")
            found[key] = values
        return found

    def _key(self, name: str) -> str:
        if self.match == "name":
            return Path(name).stem if Path(name).suffix in _SUFFIXES else name
        numbers = re.findall(r"\d+", name)
        if len(numbers) != 1:
            raise ValueError(f"{name!r} does not hold exactly one number to match it by")
        return str(int(numbers[0]))
