"""Files in object stores: looked for, read by byte ranges, and written whole. One class for each kind of client."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

from massmerge.errors import InputError, MassError
from massmerge.io.addresses import is_inner_name, join, patiently, split_address
from massmerge.io.hub import first_line

AHEAD = 1 << 16
"""Bytes that are asked for at once where little is wanted: headers lie at the start of files."""
_MOST = 1 << 25  # bytes of one request; one that breaks off is repeated
_VERSIONS = (
    "ETag", "etag", "e_tag", "generation", "md5Hash", "content_md5", "blob_id", "LastModified", "last_modified", "mtime",
    "created",
)  # fmt: skip
"""What listings tell as well as look-ups: a version id of S3 stands in look-ups alone."""
_EXTRAS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store as it was when it was looked up."""

    address: str
    size: int
    version: str
    """What the store says changes when the file does."""

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """The last part of its address."""
        return PurePosixPath(self.address).name

    @property
    def suffix(self) -> str:
        """The ending of its name."""
        return PurePosixPath(self.address).suffix

    def open(self, mode: str = "rb", buffering: int = AHEAD) -> BinaryIO:
        """The file for reading; what is read is fetched."""
        raw = _Ranges(self)
        return cast(BinaryIO, io.BufferedReader(raw, max(buffering, AHEAD)) if buffering else raw)

    def changed(self) -> bool:
        """Whether it is another file now, or gone."""
        return look_up(self.address) != self


class _Ranges(io.RawIOBase):
    """A remote file as Python reads files."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._store, self._at = file, store_of(file.address), 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; nothing is fetched."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fetch what comes next."""
        view = memoryview(buffer).cast("B")
        stop = min(self._at + min(len(view), _MOST), self._file.size)
        if stop <= self._at:
            return 0
        data = patiently(self._file.address, lambda: _whole_range(self._store, self._file, self._at, stop))
        view[: len(data)] = data
        self._at = stop
        return len(data)


def _whole_range(store: RemoteStore, file: RemoteFile, start: int, stop: int) -> bytes:
    data = store.read(file.address, start, stop)
    if len(data) > stop - start:
        raise InputError(
            f"{file}: its server sends whole files instead of byte ranges. Download it, and name the copy."
        )
    if len(data) < stop - start:
        raise OSError(f"{len(data)} bytes arrived of {stop - start}")
    return data


class RemoteStore(Protocol):
    """What is asked of a store. Faults are raised as the client raises them."""

    def look_up(self, address: str) -> RemoteFile | None:
        """A file; none if it is not there."""
        ...

    def read(self, address: str, start: int, stop: int) -> bytes:
        """A range of a file's bytes."""
        ...

    def list(self, address: str, known: Iterable[str]) -> dict[str, RemoteFile]:
        """The files below an address and one folder deeper, by their names from there.

        Args:
            address: the folder.
            known: names that are tried where a store gives no listing.
        """
        ...

    def put(self, path: Path, address: str) -> None:
        """Write a file whole; readers see the old one or the new one."""
        ...

    def remove(self, address: str) -> None:
        """Delete a file, if it is there."""
        ...


class FsspecStore:
    """What fsspec has a file system for."""

    def __init__(self, protocol: str) -> None:
        import fsspec

        self._protocol = protocol
        try:
            self._fs: Any = fsspec.filesystem(protocol, use_listings_cache=False)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            todo = f"pip install {extra}" if extra else first_line(error)
            raise MassError(f"{protocol}://: needs a package that is not installed. {todo}") from None
        except ValueError:
            raise InputError(f"{protocol}://: fsspec knows no such protocol. Check the address.") from None

    def look_up(self, address: str) -> RemoteFile | None:
        """A file; none if it is not there."""
        try:
            info = self._fs.info(_path(address))
        except FileNotFoundError:
            return None
        return None if info["type"] == "directory" else _remote(address, info)

    def read(self, address: str, start: int, stop: int) -> bytes:
        """A range of a file's bytes."""
        return bytes(self._fs.cat_file(_path(address), start=start, end=stop))

    def list(self, address: str, known: Iterable[str]) -> dict[str, RemoteFile]:
        """The files below an address and one folder deeper, by their names from there."""
        root = self._fs._strip_protocol(_path(address)).rstrip("/")
        found = self._fs.find(root, maxdepth=2, detail=True)
        names = {path.removeprefix(root).lstrip("/"): info for path, info in found.items() if path.startswith(root)}
        return {name: _remote(join(address, name), info) for name, info in names.items() if is_inner_name(name)}

    def put(self, path: Path, address: str) -> None:
        """Write a file whole: object stores show it when its upload is complete."""
        place = _path(address)
        # In object stores a folder is a part of names, and buckets are not ours to make.
        if self._protocol not in _EXTRAS:
            self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), place)

    def remove(self, address: str) -> None:
        """Delete a file, if it is there."""
        if self._fs.exists(_path(address)):
            self._fs.rm_file(_path(address))


class HttpStore:
    """A web server. It has no listing, and nothing is written to it."""

    def __init__(self) -> None:
        import httpx

        self._client = httpx.Client(follow_redirects=True, timeout=30.0, headers={"Accept-Encoding": "identity"})

    def look_up(self, address: str) -> RemoteFile | None:
        """A file; none if it is not there."""
        answer = self._client.head(address)
        if answer.status_code in (404, 410):
            return None
        self._refuse(answer)
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        if version is None or "Content-Length" not in answer.headers:
            missing = "size" if version else "version (ETag or Last-Modified)"
            raise InputError(f"{address}: its server does not tell the {missing}. Download it, and name the copy.")
        return RemoteFile(address, int(answer.headers["Content-Length"]), version)

    def read(self, address: str, start: int, stop: int) -> bytes:
        """A range of a file's bytes; a server that would send the whole file is not listened to."""
        with self._client.stream("GET", address, headers={"Range": f"bytes={start}-{stop - 1}"}) as answer:
            self._refuse(answer)
            found, whole = bytearray(), answer.status_code == 200 and start == 0
            if answer.status_code != 206 and not whole:
                return bytes(stop - start + 1)
            for piece in answer.iter_raw():
                found += piece
                if len(found) > stop - start:
                    break
        return bytes(found)

    @staticmethod
    def _refuse(answer: Any) -> None:
        if answer.status_code in (404, 410):
            raise FileNotFoundError(str(answer.url))
        if answer.status_code in (401, 403):
            raise PermissionError(f"status {answer.status_code}")
        if answer.status_code >= 400:
            raise OSError(f"status {answer.status_code}")

    def list(self, address: str, known: Iterable[str]) -> dict[str, RemoteFile]:
        """Those of the known names that are there."""
        found = {name: look_up(join(address, name)) for name in known}  # each with its own attempts
        return {name: file for name, file in found.items() if file is not None}

    def put(self, path: Path, address: str) -> None:
        """Not possible."""
        self.remove(address)

    def remove(self, address: str) -> None:
        """Not possible."""
        raise InputError(f"{address}: nothing can be written to a web server. Name a folder or an object store.")


@lru_cache
def _opened(protocol: str) -> RemoteStore:
    return HttpStore() if protocol in ("http", "https") else FsspecStore(protocol)


def store_of(address: str) -> RemoteStore:
    """The store that an address lies in.

    Raises:
        MassError: its client is not installed.
        InputError: there is no such protocol.
    """
    return _opened(split_address(address)[0])


def _path(address: str) -> str:
    """An address as its file system takes it; the protocol is the one that the store was opened for."""
    return split_address(address)[1]


def _remote(address: str, info: Mapping[str, Any]) -> RemoteFile:
    found = next((info[key] for key in _VERSIONS if info.get(key)), None)
    # Some listings have a time as a number, where look-ups of the same store have an object.
    version = str(found.timestamp() if isinstance(found, datetime) else found)
    if found is None or info.get("size") is None:
        raise InputError(f"{address}: its store tells no size or no version. Download it, and name the copy.")
    return RemoteFile(address, int(info["size"]), version)


def look_up(address: str) -> RemoteFile | None:
    """A file of a store; none if there is no such file."""
    return patiently(address, lambda: store_of(address).look_up(address))


def list_files(address: str, known: Iterable[str] = ()) -> dict[str, RemoteFile]:
    """The files below an address and one folder deeper, by name; of web servers those of the known names."""
    return patiently(address, lambda: store_of(address).list(address, known))


def download(file: RemoteFile, target: Path) -> None:
    """Copy a whole file to this machine."""
    with file.open() as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 22)


def put(path: Path, address: str) -> None:
    """Copy a file of this machine to a store."""
    patiently(address, lambda: store_of(address).put(path, address))


def remove(address: str) -> None:
    """Delete a file of a store, if it is there."""
    patiently(address, lambda: store_of(address).remove(address))
