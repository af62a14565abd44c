"""Folders are written as a whole or not at all, and replaced only if they are ours."""

import errno
import os
from pathlib import Path

import pytest

from reproduction.folders import atomic_write_folder


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def half(own):
        own.mkdir()
        (own / "b").write_text("ne", encoding="utf-8")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(own))

    with pytest.raises(OSError, match=r"No space left on device: '.*folder'"):
        atomic_write_folder(tmp_path / "folder", half)
    assert tree(tmp_path) == {}


def test_folders_are_replaced_only_if_they_are_ours(tmp_path):
    def write(text):
        return lambda own: (own.mkdir(), (own / "weights").write_text(text, encoding="utf-8"))

    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="contains files that this program did not write"):
        atomic_write_folder(target, write("new"))
    assert tree(tmp_path) == {"model": None, "model/notes.txt": b"mine"}
    (target / "notes.txt").unlink()
    atomic_write_folder(target, write("new"))
    atomic_write_folder(target, write("newer"))
    assert (target / "weights").read_text(encoding="utf-8") == "newer"
    (target / "notes.txt").write_text("mine again", encoding="utf-8")
    with pytest.raises(ValueError, match="contains files that this program did not write"):
        atomic_write_folder(target, write("newest"))
    assert (target / "weights").read_text(encoding="utf-8") == "newer"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; name a folder"):
        atomic_write_folder(tmp_path / "file", write("new"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model"]


def test_a_file_that_was_changed_is_not_ours_any_more(tmp_path):
    """A model that somebody trained further in the folder it was written to."""
    target = tmp_path / "model"
    atomic_write_folder(target, lambda own: (own.mkdir(), (own / "weights").write_text("first", encoding="utf-8")))
    (target / "weights").write_text("trained for a week", encoding="utf-8")
    with pytest.raises(ValueError, match="contains files that this program did not write"):
        atomic_write_folder(target, lambda own: (own.mkdir(), (own / "weights").write_text("new", encoding="utf-8")))
    assert (target / "weights").read_text(encoding="utf-8") == "trained for a week"


def test_the_current_folder_if_it_is_empty(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    atomic_write_folder(".", lambda own: (own.mkdir(), (own / "weights").write_text("new", encoding="utf-8")))
    assert (tmp_path / "here" / "weights").read_text(encoding="utf-8") == "new"


def test_an_interrupt_between_the_moves_loses_nothing(tmp_path, monkeypatch):
    target = tmp_path / "model"
    atomic_write_folder(target, lambda own: (own.mkdir(), (own / "weights").write_text("first", encoding="utf-8")))
    rename, moves = Path.rename, []

    def interrupted(path, to):
        moves.append(path)
        if len(moves) == 2:  # the old one has another name, the new one is not yet in place
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_write_folder(target, lambda own: (own.mkdir(), (own / "weights").write_text("new", encoding="utf-8")))
    monkeypatch.undo()
    assert (target / "weights").read_text(encoding="utf-8") == "first"
