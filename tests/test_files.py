"""Files that are replaced whole, or stay as they were."""

from __future__ import annotations

import os
import stat

import pytest

from gradstats.files import replace_file, replacing, write_file, write_link


def names(folder):
    return [p.name for p in folder.iterdir()]


def test_a_file_is_replaced_whole_and_keeps_its_permissions(tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("old")
    note.chmod(0o640)
    replace_file(note, "η ≥ 0")
    assert note.read_text(encoding="utf-8") == "η ≥ 0"
    assert stat.S_IMODE(note.stat().st_mode) == 0o640
    with pytest.raises(KeyboardInterrupt), replacing(note) as partial:  # noqa: PT012
        partial.write_text("half")
        raise KeyboardInterrupt
    assert note.read_text(encoding="utf-8") == "η ≥ 0"
    assert names(tmp_path) == ["note.txt"]


def test_a_file_and_its_name_are_on_the_disk(tmp_path, monkeypatch):
    note, synced = tmp_path / "note.txt", []
    monkeypatch.setattr(
        os, "fsync", lambda at: synced.append((os.fstat(at).st_ino, names(tmp_path)))
    )
    replace_file(note, "whole")
    inodes = [inode for inode, _ in synced]
    assert inodes == [note.stat().st_ino, tmp_path.stat().st_ino]
    assert synced[1][1] == ["note.txt"]


def test_what_a_link_leads_to_is_replaced_and_what_is_no_file_is_written_to(tmp_path):
    note, link = tmp_path / "note.txt", tmp_path / "link"
    link.symlink_to(note)
    replace_file(link, b"whole")
    assert link.is_symlink()
    assert note.read_bytes() == b"whole"
    replace_file("/dev/null", "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize("vectors", [True, False])
def test_files_are_whole_however_little_goes_in_one_call(tmp_path, monkeypatch, most, vectors):
    write_some = os.write
    if vectors:
        monkeypatch.setattr(os, "writev", lambda at, parts: write_some(at, b"".join(parts)[:most]))
    else:
        monkeypatch.delattr(os, "writev")
        monkeypatch.setattr(os, "write", lambda at, data: write_some(at, data[:most]))
    write_file(tmp_path / "file", b"first ", b"", memoryview(b"second"))
    assert (tmp_path / "file").read_bytes() == b"first second"
    assert names(tmp_path) == ["file"]


def test_a_file_that_is_written_again_is_its_last_version(tmp_path):
    file = tmp_path / "file"
    (tmp_path / "file.partial").write_bytes(b"left by a process that was killed, and longer")
    for i in range(5):
        if i == 3:  # of a link that was to replace the file: what it leads to is not written
            (tmp_path.parent / "needed").write_text("needed")
            (tmp_path / "file.partial").symlink_to("../needed")
        with open(file, "a+b") as reader:  # who has it open keeps what there was
            reader.seek(0)
            write_file(file, b"%d" % i, b" whole")
            assert reader.read() == (b"%d whole" % (i - 1) if i else b"")
        assert file.read_bytes() == b"%d whole" % i
        assert names(tmp_path) == ["file"]
    assert (tmp_path.parent / "needed").read_text() == "needed"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    write_file(file, b"old")
    for name in ("writev", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="No space"):
                write_file(file, b"new")
        assert file.read_bytes() == b"old"
        assert names(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "nowhere" / "file", b"new")


def test_a_link_takes_the_place_of_a_file_and_of_a_link(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.write_text("a file")
    (tmp_path / "place.partial").symlink_to("left by a process that was killed")
    for target in ("one", "two"):
        write_link(target, place)
        assert os.readlink(place) == target
    assert names(tmp_path) == ["place"]

    def refused(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(type(place), "replace", refused)
    with pytest.raises(OSError, match="not permitted"):
        write_link("three", place)
    assert os.readlink(place) == "two"
    assert names(tmp_path) == ["place"]
