"""Checksums that are worked out while libraries are imported."""

import subprocess
import sys

import pytest

from massmerge.bundle.watched_files import SourceFiles
from massmerge.engines.local import LocalEngine
from massmerge.io import sums_ahead as module
from massmerge.io.checksums import file_sha256
from massmerge.io.stamps import file_stamp, is_recent
from massmerge.io.sums_ahead import sum_ahead, sums_ahead


@pytest.fixture
def old(monkeypatch):
    """Files that a test has just written count as old."""
    monkeypatch.setattr(module, "is_recent", lambda stamp: False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 50_000)
    return path


def test_inside_a_file_s_checksum_is_there(file, old):
    with sums_ahead([file]):
        assert sum_ahead(file, file_stamp(file)) == file_sha256(file)
    assert sum_ahead(file, file_stamp(file)) is None


def test_a_file_that_was_written_since_has_none(file, old):
    with sums_ahead([file]):
        file.write_bytes(b"something else")
        assert sum_ahead(file, file_stamp(file)) is None


def test_a_file_that_was_just_written_has_none_for_another_write_could_have_the_same_time(file):
    with sums_ahead([file]):
        assert sum_ahead(file, file_stamp(file)) is None
    assert is_recent(file_stamp(file))


def test_a_file_that_cannot_be_read_is_left_to_who_reads_it_next(file, old, monkeypatch):
    def fails(*_, **__):
        raise OSError("a disk that fails")

    monkeypatch.setattr(module, "sha256_of", fails)
    with sums_ahead([file]):
        assert sum_ahead(file, file_stamp(file)) is None


def test_who_leaves_early_waits_for_no_file(tmp_path, old, monkeypatch):
    def endless(file, between):
        while True:
            between()

    monkeypatch.setattr(module, "sha256_of", endless)
    paths = [tmp_path / f"{i}" for i in range(10)]
    for path in paths:
        path.write_bytes(b"x")
    with sums_ahead(paths):
        assert sum_ahead(paths[-1], file_stamp(paths[-1])) is None  # no thread has come to it


def test_a_merge_takes_the_checksums_that_are_there_and_works_out_the_others(tmp_path, file, old, monkeypatch):
    other = tmp_path / "other"
    other.write_bytes(b"other")
    asked = []

    def checksums(paths, engine):
        asked.extend(paths)
        return [file_sha256(path) for path in paths]

    monkeypatch.setattr("massmerge.bundle.watched_files.checksums", checksums)
    with sums_ahead([file]):
        found = SourceFiles().sums([other, file, other], LocalEngine(1))
    assert found == [file_sha256(other), file_sha256(file), file_sha256(other)]
    assert asked == [other]


def test_mass_merge_imports_no_library_before_it_has_begun_with_them():
    script = "import sys, massmerge.cli.merge; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
