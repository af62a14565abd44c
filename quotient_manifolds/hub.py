"""Names of the Hugging Face Hub in place of folders: what is read of a repository is fetched into the Hub's cache."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Kind = Literal["model", "dataset"]
PREFIXES = ("hf-hub:", "hf_hub:")
#: Owner and name; of a data set also configuration and split; behind an @ a branch, a tag or a commit.
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})((?:/{_PART}){{0,2}})(?:@(\S+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Endings of files; a path with one of them is no name.
_FILES = (".bin", ".ckpt", ".csv", ".json", ".jsonl", ".parquet", ".pt", ".pth", ".safetensors", ".tsv")
_PICKLES = (".bin", ".ckpt", ".h5", ".msgpack", ".pkl", ".pt", ".pth")
#: Configuration, tokenizer and preprocessing of a model; and its weights, in the order of preference.
_SETTINGS = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja")
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
#: What open_clip and PEFT read of a repository.
CLIP, _CLIP_WEIGHTS = "open_clip_config.json", ("open_clip_model.safetensors",)
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, or its copy in the cache if the Hub is not reached.

    ``files`` are its files, with the bytes that the cache has not got, ``place`` is where the cache keeps this commit,
    and ``absence`` says why the Hub was not reached; it is empty if it was.
    """

    name: str
    kind: Kind
    revision: str
    commit: str
    place: Path
    files: dict[str, int] = field(repr=False)
    absence: str = ""

    def __str__(self) -> str:
        return f"the copy of {self.name} in the cache ({self.absence})" if self.absence else f"{self.name} on the Hub"

    def fetch(self, files: Collection[str]) -> Path:
        """Fetch files that are not in the cache yet, after a line about them; return the folder of the commit.

        Weights come last, so that a copy with weights has all else.
        """
        from huggingface_hub import constants, snapshot_download

        absent = [] if self.absence else self._absent(files)
        if sizes := [size for name in absent if (size := self.files.get(name))]:
            what = f"{len(sizes)} file{'s' * (len(sizes) > 1)}, {sum(sizes) / 1e6:.3g} MB"
            said = f"fetching {what}, of {self.name} at {self.commit[:12]} from {constants.ENDPOINT}"
            if os.environ.get("RANK", "0") == "0":  # of the processes of torchrun the first one
                print(said, file=sys.stderr, flush=True)
        weights = {name for name in files if name.endswith(".safetensors")}
        noted = self.revision == self.commit or _read(self.place.parents[1] / "refs" / self.revision) == self.commit
        parts = ({*files} - weights, weights) if absent or not (noted or self.absence) else ()
        for part in filter(None, parts):
            patterns = [glob.escape(name) for name in part]
            with _in_words(self.name, self.kind, self.revision):
                # By the revision that was asked for, which the cache notes for times without a network.
                folder = snapshot_download(
                    self.name, repo_type=self.kind, revision=self.revision, allow_patterns=patterns
                )
            if Path(folder).name != self.commit:
                raise OSError(f"{self.name} was changed while it was fetched; try again")
        if absent := self._absent(files):
            raise OSError(f"{self} lacks {min(absent)}; fetch it again with a network, by the same command")
        return self.place

    def _absent(self, files: Collection[str]) -> list[str]:
        return [name for name in files if not (self.place / name).exists()]


def is_name(name: str, parts: int = 2) -> bool:
    """Return whether this may be a name of the Hub of at most so many parts; what is here is none, nor is a file.

    >>> is_name("owner/name@main"), is_name("bert-base-uncased"), is_name("./runs/one"), is_name("runs/dev.tsv")
    (True, False, False, False)
    """
    if name.startswith(PREFIXES):
        return True
    plain = name.partition("@")[0]
    return (
        bool(_NAME.fullmatch(name))
        and plain.count("/") < parts
        and not (Path(name).exists() or plain.lower().endswith(_FILES))
    )


def split_name(name: str) -> tuple[str, tuple[str, ...], str]:
    """Split a name into that of a repository, the configuration or split behind it, and the revision.

    >>> split_name("owner/name/split@v1.0")
    ('owner/name', ('split',), 'v1.0')
    """
    plain = next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name)
    found = _NAME.fullmatch(plain)
    if found is None or ".." in found[1] or "--" in found[1]:
        raise ValueError(f"{name!r} is no name of the Hugging Face Hub: these are owner/name, or owner/name@revision")
    return found[1], tuple(found[2].split("/")[1:]), found[3] or "main"


#: What was looked up since :func:`one_look` began, by kind, name and revision.
_LOOKS: ContextVar[dict[tuple[str, str, str], Repository] | None] = ContextVar("looks", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Ask the Hub for each name once: within a command a name means one commit."""
    token = _LOOKS.set({})
    try:
        yield
    finally:
        _LOOKS.reset(token)


def repository(name: str, kind: Kind, extra: str) -> Repository:
    """Look a repository up; if the Hub is not reached, look at its copy in the cache."""
    own, _, revision = split_name(name)
    looks = _LOOKS.get()
    known = {} if looks is None else looks
    if (kind, own, revision) not in known:
        found = known[kind, own, revision] = _looked_up(name, kind, extra)
        known[kind, own, found.commit] = replace(found, revision=found.commit)
    return known[kind, own, revision]


def _looked_up(name: str, kind: Kind, extra: str) -> Repository:
    own, _, revision = split_name(name)
    try:
        from huggingface_hub import HfApi, constants
    except ImportError as error:
        raise ImportError(
            f"{name} is not here; to look for it on the Hugging Face Hub, install the extra {extra}, "
            f"pip install '.[{extra}]' in the checkout of quotient-manifolds ({error})"
        ) from error
    place = Path(constants.HF_HUB_CACHE, f"{kind}s--{own.replace('/', '--')}")
    try:
        with _in_words(own, kind, revision):
            found: Any = HfApi().repo_info(own, repo_type=kind, revision=revision, files_metadata=True, timeout=10)
    except ConnectionError as error:
        commit = revision if _COMMIT.fullmatch(revision) else _read(place / "refs" / revision)
        folder = place / "snapshots" / commit
        if not (commit and folder.is_dir()):
            raise ConnectionError(
                f"there is no folder {name!r}, and no copy of {own} in the cache {constants.HF_HUB_CACHE}; {error}"
            ) from error
        if commit != revision and not constants.HF_HUB_OFFLINE:
            print(f"{error}; reading the copy of {own} at {commit[:12]} in the cache", file=sys.stderr, flush=True)
        return Repository(own, kind, revision, commit, folder, _in_cache(own, kind, commit, folder), str(error))
    sizes = dict[str, int]()
    for file in found.siblings:
        blob = place / "blobs" / str(file.lfs.sha256 if file.lfs else file.blob_id)
        sizes[file.rfilename] = 0 if blob.is_file() else file.size or 0
    return Repository(own, kind, revision, found.sha, place / "snapshots" / found.sha, sizes)


def look_up(kind: Kind, extra: str, *names: str) -> None:
    """Raise for names of the Hub that cannot be read, before libraries are imported that take seconds."""
    refuse(absence(name, kind, extra) for name in names)


def absence(name: str, kind: Kind, extra: str) -> Exception | None:
    """Return what is wrong with a name of the Hub that cannot be read."""
    try:
        if is_name(name, 4 if kind == "dataset" else 2):
            repository(name, kind, extra)
    except (ValueError, OSError, ImportError) as error:
        return error
    return None


def refuse(errors: Iterable[Exception | None]) -> None:
    """Raise the only error, or one of the first one's class that says them all."""
    found = [error for error in errors if error is not None]
    if len(found) == 1:
        raise found[0]
    if found:
        raise type(found[0])("; and ".join(dict.fromkeys(map(str, found)))) from found[0]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _in_cache(name: str, kind: Kind, commit: str, folder: Path) -> dict[str, int]:
    """List the files of a commit that the cache knows: those that it noted, or else those that are there."""
    try:
        from huggingface_hub import get_cached_repo_tree  # not before 2.0

        return dict.fromkeys((f.path for f in get_cached_repo_tree(name, repo_type=kind, revision=commit)), 0)
    except Exception:  # nothing was noted, or is readable
        return {p.relative_to(folder).as_posix(): 0 for p in folder.rglob("*") if p.is_file()}


@contextmanager
def _in_words(name: str, kind: Kind, revision: str) -> Iterator[None]:
    """Turn what the Hub answers into sentences; a ConnectionError says that it does not answer."""
    from huggingface_hub import constants, errors

    what = "model" if kind == "model" else "data set"
    try:
        yield
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{name} is gated: ask for access on {constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{name}, "
            "then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"there is no folder {name}, and no {what} of this name on {constants.ENDPOINT}; correct the name or, if "
            "it is private, log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{name} has no revision {revision!r}; name a branch, a tag or a commit") from error
    except errors.OfflineModeIsEnabled as error:
        raise ConnectionError("HF_HUB_OFFLINE forbids to fetch it: fetch it once without that") from error
    except errors.HfHubHTTPError as error:
        why = " ".join(str(error).split())[:200]
        raise ConnectionError(f"{constants.ENDPOINT} answers with an error ({why}): try again later") from error
    except Exception as error:  # of sockets, of the library for HTTP
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({why}): try again with a network") from error


# -- models and adapters -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """What was fetched by a name: the name with the commit, which fetches the same again, and where it is."""

    pinned: str
    place: Path


def fetch_model(name: str) -> Fetched:
    """Fetch configuration, tokenizer and safetensors weights of a model; no pickles, and no code.

    Behind ``hf-hub:`` a repository that open_clip and another library read is one of open_clip.
    """
    found, prefix = repository(name, "model", "transformers"), PREFIXES[0] * name.startswith(PREFIXES)
    top = [file for file in found.files if "/" not in file]
    if _ADAPTER[0] in top:
        raise ValueError(
            f"{found} is a PEFT adapter; merge it into its model by merge_and_unload(), save that by save_pretrained, "
            "and pass the folder"
        )
    for_clip = CLIP in top and (prefix or "config.json" not in top)
    groups = (fnmatch.filter(top, pattern) for pattern in (_CLIP_WEIGHTS if for_clip else _WEIGHTS))
    weights = next(filter(None, groups), [])
    _check_weights(found, weights)
    settings = [file for file in top if any(fnmatch.fnmatch(file, pattern) for pattern in _SETTINGS)]
    return Fetched(f"{prefix}{found.name}@{found.commit}", found.fetch([*settings, *weights]))


def fetch_adapter(name: str) -> Fetched:
    """Fetch the config and the safetensors weights of an adapter, or the only file of one."""
    found = repository(name, "model", "lora")
    single = [file for file in found.files if file.endswith(".safetensors")]
    whole = _ADAPTER[0] in found.files
    if not whole and len(single) > 1:
        raise ValueError(
            f"{found} has no {_ADAPTER[0]}, but {len(single)} files such as {min(single)}; fetch one by `hf download`, "
            "and pass it"
        )
    weights = [file for file in single if file == _ADAPTER[1] or not whole]
    _check_weights(found, weights)
    folder = found.fetch([_ADAPTER[0], *weights] if whole else weights)
    return Fetched(f"{found.name}@{found.commit}", folder if whole else folder / weights[0])


def _check_weights(found: Repository, weights: Collection[str]) -> None:
    """Raise unless there are weights, and all their parts."""
    counts = {int(n[1]) for file in weights if (n := re.search(r"-of-(\d+)\.safetensors$", file))}
    if counts and {len(weights)} != counts:
        raise OSError(f"{found} has {len(weights)} of {max(counts)} parts of the weights; fetch it with a network")
    if not weights:
        pickles = [file for file in found.files if file.endswith(_PICKLES)]
        but = f", only pickles such as {min(pickles)}, which are not fetched" if pickles else ""
        raise ValueError(
            f"{found} has no safetensors weights at its top{but}; load it by its library, save it by save_pretrained, "
            "and pass the folder"
        )
