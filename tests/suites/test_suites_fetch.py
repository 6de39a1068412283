"""Fetching for the suites: what is downloaded is checked, unpacked once and never half there."""

import io
import json
import tarfile
import zipfile

import pytest

from benchmarks.suites import fetch
from massmerge.errors import MassError


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry that hands out the archive put into it, and counts how often it is asked."""
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))

    class Registry:
        calls = 0
        name = "thing-1.0-py3-none-any.whl"
        content = b""

        def run(self, command, folder):
            self.calls += 1
            (folder / self.name).write_bytes(self.content)

    registry = Registry()
    registry.content = _wheel({"thing/data.txt": "rows"})
    monkeypatch.setattr(fetch, "_run", registry.run)
    return registry


def _wheel(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            # One date for all, so that the archive's digest is always the same.
            archive.writestr(zipfile.ZipInfo(name), text)
    return buffer.getvalue()


def _tarball(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _digest(content, tmp_path):
    path = tmp_path / "content"
    path.write_bytes(content)
    return fetch.file_sha256(path)


def test_an_archive_is_unpacked_and_its_source_noted(registry, tmp_path):
    folder = fetch.pip_archive("thing", "1.0", _digest(registry.content, tmp_path))
    assert (folder / "data.txt").read_text() == "rows"
    assert fetch.archive_source(folder) == {
        "registry": "pypi", "name": "thing", "version": "1.0", "archive": registry.name,
        "sha256": _digest(registry.content, tmp_path),
    }  # fmt: skip


def test_an_archive_is_fetched_once(registry):
    assert fetch.pip_archive("thing", "1.0") == fetch.pip_archive("thing", "1.0")
    assert registry.calls == 1


def test_an_archive_with_another_checksum_is_refused_and_leaves_nothing_to_use(registry, tmp_path):
    with pytest.raises(MassError, match=r"pypi thing 1\.0: SHA-256 is .* expected 0000"):
        fetch.pip_archive("thing", "1.0", "0" * 64)
    assert not (tmp_path / "suites" / "downloads" / "pypi-thing-1.0").exists()


def test_a_kept_archive_with_another_checksum_is_refused(registry):
    fetch.pip_archive("thing", "1.0")
    with pytest.raises(MassError, match="delete"):
        fetch.pip_archive("thing", "1.0", "0" * 64)


def test_a_download_that_broke_off_is_started_again(registry, tmp_path, monkeypatch):
    def broken(command, folder):
        (folder / "half").write_bytes(b"PK")
        raise MassError("connection lost")

    monkeypatch.setattr(fetch, "_run", broken)
    with pytest.raises(MassError, match="connection lost"):
        fetch.pip_archive("thing", "1.0")
    monkeypatch.setattr(fetch, "_run", registry.run)
    assert (fetch.pip_archive("thing", "1.0") / "data.txt").is_file()


def test_a_damaged_archive_is_told(registry):
    registry.content = registry.content[:40]
    with pytest.raises(MassError, match="cannot be unpacked"):
        fetch.pip_archive("thing", "1.0")


def test_the_folder_that_npm_puts_around_a_package_is_entered(registry):
    registry.name, registry.content = "thing-1.0.tgz", _tarball({"package/data.json": "[]", "package/readme.md": ""})
    assert json.loads((fetch.npm_archive("thing", "1.0") / "data.json").read_text()) == []


def test_an_archive_cannot_write_outside_of_its_folder(registry, tmp_path):
    registry.name, registry.content = "thing-1.0.tgz", _tarball({"../../../outside": "bad"})
    with pytest.raises(MassError, match="cannot be unpacked"):
        fetch.npm_archive("thing", "1.0")
    assert not list(tmp_path.rglob("outside"))


def test_pip_is_told_the_checksum_so_that_it_opens_no_other_file(registry, monkeypatch):
    seen = []

    def run(command, folder):
        seen.append((folder.parent / "requirement.txt").read_text())
        registry.run(command, folder)

    monkeypatch.setattr(fetch, "_run", run)
    with pytest.raises(MassError):
        fetch.pip_archive("thing", "1.0", "0" * 64)
    assert seen == [f"thing==1.0 --hash=sha256:{'0' * 64}\n"]


def test_a_tool_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(MassError, match="`no-such-tool` is needed"):
        fetch._run(["no-such-tool"], tmp_path)


def test_what_a_failing_tool_says_is_shown(tmp_path):
    with pytest.raises(MassError, match="no such package"):
        fetch._run(["sh", "-c", "echo no such package >&2; exit 3"], tmp_path)


def test_without_a_network_the_hub_gives_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.constants, "HF_HUB_CACHE", str(tmp_path))
    assert fetch.hub_model("nobody/nothing") is None


def test_an_unreachable_hub_is_asked_once(monkeypatch):
    calls = []

    def head(*_, **__):
        calls.append(1)
        raise OSError("no route")

    monkeypatch.setattr(fetch.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch.urllib.request, "urlopen", head)
    fetch._hub_answers.cache_clear()
    assert [fetch.hub_model("nobody/nothing"), fetch.hub_model("nobody/other")] == [None, None]
    fetch._hub_answers.cache_clear()
    assert len(calls) == 1


def test_a_folder_that_was_not_fetched_has_no_source(tmp_path):
    with pytest.raises(MassError, match=r"no source\.json"):
        fetch.archive_source(tmp_path)
