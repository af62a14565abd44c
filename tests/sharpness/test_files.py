"""Nothing of the user's is replaced: files are written as a whole or not at all."""

import errno
import os

import pytest

from sharpness import cli
from sharpness.files import atomic_write, check_apart, check_file, check_folder, write_json, write_text


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def place(tmp_path):
    """A folder of somebody's, with a link, a pipe and nothing of ours."""
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "deep" / "thesis.txt").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "mine" / "deep" / "thesis.txt")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_only_files_are_replaced(place):
    before = {k: v for k, v in tree(place).items() if k != "pipe"}
    for name, words in (
        ("mine", "'.*mine' is a folder; name a file"),
        ("link", "is a symbolic link"),
        ("pipe", "is a device, pipe or socket"),
        ("nowhere/out.json", "no folder '.*nowhere' for 'out.json'"),
        ("", "is a folder"),
    ):
        with pytest.raises((ValueError, OSError), match=words):
            write_json(place / name, {})
    with pytest.raises(ValueError, match="is a device"):
        check_file(os.devnull)
    assert {k: v for k, v in tree(place).items() if k != "pipe"} == before
    write_json(place / "out.json", {"a": 1})
    write_json(place / "out.json", {"a": 2})
    assert (place / "out.json").read_text() == '{\n  "a": 2\n}\n'
    assert check_folder(place / "new" / "deeper").is_dir()
    with pytest.raises(ValueError, match="is a file; name a folder"):
        check_folder(place / "out.json")


@pytest.mark.parametrize("out", ["mine", "..", ".", "link"])
def test_a_command_refuses_before_it_measures(place, capsys, monkeypatch, out):
    """The case that deleted folders: --out FOLDER."""
    monkeypatch.chdir(place / "mine")
    monkeypatch.setattr("sharpness.models.load", lambda *_, **__: pytest.fail("measured already"))
    before = {k: v for k, v in tree(place).items() if k != "pipe"}
    target = str(place / out) if out in ("mine", "link") else out
    assert cli.main(["run", "tests.spread:model", "tests.spread:batches", "--out", target, "--quiet"]) == 2
    assert "name a file" in capsys.readouterr().err
    assert {k: v for k, v in tree(place).items() if k != "pipe"} == before


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "a.txt", "old")

    def half():
        with atomic_write(tmp_path / "a.txt") as own:
            own.write_text("ne")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(own))

    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        half()
    assert tree(tmp_path) == {"a.txt": b"old"}


def test_nothing_that_is_read_is_written(place):
    """Files in folders that are read count, through links and other spellings; new ones where all files are data."""
    mine, thesis = place / "mine", place / "mine" / "deep" / "thesis.txt"
    for out in (thesis, place / "mine" / ".." / "mine" / "deep" / "thesis.txt", place / "link"):
        for read in (thesis, mine, place / "link"):
            with pytest.raises(
                ValueError, match=r"writing to .* would (replace|change) .*, which is read; choose another"
            ):
                check_apart(out, [None, read])
    check_apart(mine / "new.json", [mine, thesis])
    check_apart(place / "other", [mine, thesis], [mine])
    with pytest.raises(ValueError, match=r"would change .*mine, which is read"):
        check_apart(mine / "new.json", (), [mine])
