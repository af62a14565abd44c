"""Data sets of the Hugging Face Hub: the tables of one split, fetched into the Hub's cache; no script is run."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quotient_manifolds.hub import Repository, absence, is_name, refuse, repository, split_name

from .errors import naming, require_extra

#: Endings of tables; what else a repository holds is not read.
TABLES = (".csv", ".jsonl", ".parquet", ".tsv")
_CARD = "README.md"


@dataclass(frozen=True)
class FetchedData:
    """The tables of a split, and its name with the commit, which fetches the same again; what the card says of it."""

    pinned: str
    files: tuple[Path, ...]
    info: Mapping[str, Any] = field(repr=False)

    def class_names(self, column: str) -> list[str] | None:
        """Return the names of the classes in a column in their order, if the card names them."""
        kinds = {entry.get("name"): entry.get("dtype") for entry in self.info.get("features") or ()}
        kind = kinds.get(column)
        names = kind.get("class_label", {}).get("names") if isinstance(kind, dict) else None
        return [str(name) for _, name in sorted((int(k), v) for k, v in names.items())] if names else None


def is_function(source: str, base: Path = Path()) -> bool:
    """Return whether a source is ``module:function`` rather than a file below ``base``."""
    return ":" in source and not (base / source).exists()


def check_source(source: str) -> None:
    """Raise unless there may be something to read at a source; call it before the work that needs it."""
    if is_function(source) or Path(source).exists():
        return
    if not is_name(source, 4):
        raise FileNotFoundError(f"there is no data at {source}")
    if not split_name(source)[1]:
        raise FileNotFoundError(
            f"there is no data at {source}; a data set on the Hub is named with its split, as OWNER/NAME/SPLIT or "
            "OWNER/NAME/CONFIGURATION/SPLIT"
        )


def look_up_both(model: str, data: str) -> None:
    """Raise for names of the Hub that cannot be read, and for a model and data that are both absent, in one sentence.

    That is before libraries are imported; a file that is absent alone may wait until the other arguments are checked.
    """
    path = "/" in model and not set(":*?[") & set(model) and not is_name(model)
    absent = FileNotFoundError(f"there is no folder {model!r}") if path and not Path(model).exists() else None
    found = [absent or absence(model, "model", "transformers"), _absent_data(data)]
    if all(found) or is_name(model) or is_name(data, 4):
        refuse(found)


def _absent_data(data: str) -> Exception | None:
    try:
        check_source(data)
    except (ValueError, OSError) as error:
        return error
    return absence(data, "dataset", "datasets")


def pinned_data(source: str) -> str:
    """Return the name of a data set of the Hub with the commit that it has now; other sources as they are."""
    return fetch_data(source).pinned if is_name(source, 4) else source


def fetch_data(source: str) -> FetchedData:
    """Fetch the tables of ``owner/name/split``, or ``owner/name/configuration/split``, at a revision behind an @."""
    check_source(source)
    found, (_, parts, _) = repository(source, "dataset", "datasets"), split_name(source)
    if f"{found.name.partition('/')[2]}.py" in found.files:
        raise ValueError(
            f"{found} is a script, which is not run; name the tables that the Hub made of it, as "
            f"{found.name}/{'/'.join(parts) or 'CONFIGURATION/SPLIT'}@refs/convert/parquet"
        )
    tables = [name for name in found.files if name.lower().endswith(TABLES)]
    if not tables:
        raise ValueError(
            f"{found} has no tables ({' '.join(TABLES)}); name those that the Hub made of it, as "
            f"{found.name}/{'/'.join(parts) or 'SPLIT'}@refs/convert/parquet"
        )
    card = _card(found)
    configs = {str(entry.get("config_name", "default")): entry for entry in card.get("configs") or ()}
    config, split = _chosen(found, parts, configs, tables)
    entry = configs.get(config, {})
    splits = _by_split(entry.get("data_files"))
    folder = entry.get("data_dir") or (config if config not in configs and config else None)
    with naming(f"{found} is not readable by datasets"):
        files = _files(tables, {split: splits[split]} if split in splits else splits or None, folder)
    if split not in files:
        listed = ", ".join(splits or files)
        above = "/".join([found.name, *(part for part in parts if part == config)])
        raise ValueError(f"{found} has the splits {listed}; name one as {above}/{next(iter(splits or files))}")
    place, pinned = found.fetch(files[split]), f"{found.name}/{'/'.join(parts)}@{found.commit}"
    return FetchedData(pinned, tuple(place / name for name in files[split]), _info(card, config, len(configs)))


def _info(card: Mapping[str, Any], config: str, count: int) -> Mapping[str, Any]:
    """Return what the card says of a configuration, which it need not name if there are no others."""
    given = card.get("dataset_info") or ()
    infos = {str(info.get("config_name")): info for info in ([given] if isinstance(given, dict) else given)}
    own: Mapping[str, Any] = infos.get(config, {})
    return next(iter(infos.values())) if count <= 1 and len(infos) == 1 else own


def _card(found: Repository) -> dict[str, Any]:
    """Read what the card of a data set says at its head."""
    if _CARD not in found.files:
        return {}
    from huggingface_hub import DatasetCard

    with naming(f"the card {_CARD} of {found} is not readable"):
        return dict(DatasetCard.load(found.fetch([_CARD]) / _CARD, ignore_metadata_errors=True).data.to_dict())


def _chosen(
    found: Repository, parts: tuple[str, ...], configs: Mapping[str, Any], tables: Collection[str]
) -> tuple[str, str]:
    """Tell the configuration and the split from the parts of a name, either of which may be empty.

    A configuration is one of the card, or else a folder of the repository.
    """
    folders = {name.partition("/")[0] for name in tables if "/" in name} - configs.keys()
    if len(parts) == 2:
        config, split = parts
        if config not in {*configs, *folders}:
            raise ValueError(f"{found} has no configuration {config!r}; it has {', '.join(configs) or 'but one'}")
        return config, split
    if parts and parts[0] in configs and len(configs) > 1:
        return parts[0], ""
    marked = [name for name, entry in configs.items() if entry.get("default") or name == "default"]
    default = [*configs] if len(configs) == 1 else marked
    if configs and not default:
        raise ValueError(
            f"{found} has the configurations {', '.join(configs)}; name one and a split of it, as "
            f"{found.name}/{next(iter(configs))}/SPLIT"
        )
    return next(iter(default), ""), "".join(parts)


def _by_split(patterns: Any) -> dict[str, list[str]]:
    """Return the patterns of files by split, in whichever of its ways the card gives them."""
    if isinstance(patterns, dict):
        patterns = [{"split": split, "path": path} for split, path in patterns.items()]
    elif isinstance(patterns, str):
        patterns = [patterns]
    found = dict[str, list[str]]()
    for entry in patterns or ():
        split, path = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        found.setdefault(str(split), []).extend([path] if isinstance(path, str) else path)
    return found


def _files(tables: Collection[str], patterns: Any, folder: str | None) -> dict[str, list[str]]:
    """Let datasets say which tables belong to which split, by their names: those of empty files."""
    with require_extra("reading data sets of the Hub needs datasets", "datasets"):
        import datasets
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve() / "tables"
        for table in tables:
            (root / table).parent.mkdir(parents=True, exist_ok=True)
            (root / table).touch()
        options: dict[str, Any] = {"data_dir": folder, "data_files": patterns, "cache_dir": name}
        chosen: Any = datasets.load_dataset_builder(str(root), **options).config.data_files
        return {str(s): [Path(f).relative_to(root).as_posix() for f in files] for s, files in chosen.items()}
