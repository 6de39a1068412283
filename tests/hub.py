"""A hub on loopback that speaks the protocol of `huggingface_hub`: repositories, branches, commits, LFS uploads, downloads.

It keeps everything in memory and notes what it was asked, so that tests can tell what was sent twice. Written after the
calls that the client makes (`hf_api.py`, `_commit_api.py`, `lfs.py`, `file_download.py`).
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import yaml

TOKEN = "hf_of_the_owner"
_LARGE = 2000  # bytes; the real hub's limit is larger


@dataclass(frozen=True)
class Blob:
    """A file's content, by git or by LFS."""

    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The name that git has for it."""
        data = self._pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def _pointer(self) -> bytes:
        spec = "version https://git-lfs.github.com/spec/v1"
        return f"{spec}\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()


@dataclass
class Repository:
    """Commits with all of their files, and branches that point to them."""

    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        sha = hashlib.sha1(f"{branch} {message} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The contents of a branch."""
        return {name: blob.data for name, blob in self.commits[self.branches[revision]].items()}


def is_large(name: str, size: int) -> bool:
    """Whether a file goes by LFS."""
    return name.endswith(".safetensors") or size > _LARGE


class Refused(Exception):
    """An answer that is an error, as the hub gives it."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Hub:
    """The state of the hub, and what it was asked."""

    def __init__(self) -> None:
        self.url = self.storage = ""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.failing: list[tuple[str, int]] = []
        """What is refused once: a part of `METHOD /path`, and the status."""
        self.says = "refused for a test"
        """What such an answer says."""
        self.cut: dict[str, int] = {}
        """Downloads of LFS objects that break off once after so many bytes, by a part of the path."""

    def count(self, part: str) -> int:
        """How many requests had this in `METHOD /path`."""
        return sum(part in one for one in self.asked)

    def hold(self, name: str, folder: Path) -> None:
        """A repository with the files of a folder, as a push leaves it."""
        repo = self.repositories[name] = Repository(private=False)
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        blobs = {name: Blob(data, is_large(name, len(data))) for name, data in files.items()}
        self.objects |= {blob.sha256: blob.data for blob in blobs.values() if blob.lfs}
        repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", lfs=False), **blobs}, "a bundle")

    def repo(self, name: str, token: str | None) -> Repository:
        found = self.repositories.get(name)
        if found is None or (found.private and token != TOKEN):
            raise Refused(401 if token is None else 404, "RepoNotFound", "Repository not found")
        return found

    @staticmethod
    def commit_of(repo: Repository, revision: str) -> str:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    # Plumbing

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = f"{self.command} {path}"
        self.hub.asked.append(asked)
        self.body = self._read()
        try:
            for fault in list(self.hub.failing):
                if fault[0] in asked:
                    self.hub.failing.remove(fault)
                    raise Refused(fault[1], message=self.hub.says)
            for (method, pattern), answer in ROUTES.items():
                found = re.fullmatch(pattern, path)
                if found and self.command in method.split():
                    answer(self, **found.groupdict())
                    return
            raise Refused(404, message=f"no such endpoint: {asked}")
        except Refused as error:
            self._send(
                error.status, {"error": error.message}, {"X-Error-Code": error.code, "X-Error-Message": error.message}
            )

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def token(self) -> str | None:
        given = self.headers.get("Authorization")
        return given.removeprefix("Bearer ") if given else None

    def json(self) -> Any:
        return json.loads(self.body or b"null")

    def _send(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _owner(self) -> None:
        if self.token != TOKEN:
            raise Refused(401, message="Invalid username or password.")

    # Repositories

    def create(self) -> None:
        self._owner()
        said = self.json()
        name = f"{said['organization']}/{said['name']}"
        known = name in self.hub.repositories
        if not known:
            repo = self.hub.repositories[name] = Repository(
                said.get("visibility") == "private" or bool(said.get("private"))
            )
            repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", lfs=False)}, "initial commit")
        self._send(409 if known else 200, {"url": f"{self.hub.url}/{name}", "name": name})

    def info(self, repo: str, revision: str = "main") -> None:
        found = self.hub.repo(repo, self.token)
        sha = self.hub.commit_of(found, revision)
        files = [{"rfilename": name} for name in found.commits[sha]]
        self._send(
            200, {"id": repo, "modelId": repo, "sha": sha, "private": found.private, "tags": [], "siblings": files}
        )

    def tree(self, repo: str, revision: str) -> None:
        found = self.hub.repo(repo, self.token)
        rows = []
        for name, blob in found.commits[self.hub.commit_of(found, revision)].items():
            lfs = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
            rows.append(
                {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": name}
                | ({"lfs": lfs} if blob.lfs else {})
            )
        self._send(200, rows)

    def branch(self, repo: str, branch: str) -> None:
        self._owner()
        found = self.hub.repo(repo, self.token)
        if branch in found.branches:
            raise Refused(409, message="Reference already exists")
        found.branches[branch] = found.branches["main"]
        self._send(200, {})

    def validate(self) -> None:
        parts = self.json()["content"].split("---\n")
        data = yaml.safe_load(parts[1]) if len(parts) > 2 else None
        errors = [] if isinstance(data, dict) and data.get("library_name") else [{"message": "no metadata"}]
        self._send(400 if errors else 200, {"errors": errors, "warnings": []})

    # Uploads

    def preupload(self, repo: str, revision: str) -> None:
        self._owner()
        found = self.hub.repo(repo, self.token)
        held = found.commits[self.hub.commit_of(found, revision)]
        rows = []
        for file in self.json()["files"]:
            lfs = is_large(file["path"], file["size"])
            blob = held.get(file["path"])
            oid = None if blob is None else blob.sha256 if blob.lfs else blob.oid
            rows.append(
                {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}
            )
        self._send(200, {"files": rows})

    def batch(self, repo: str) -> None:
        self._owner()
        rows = []
        for wanted in self.json()["objects"]:
            place = {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}
            actions = {} if wanted["oid"] in self.hub.objects else {"actions": {"upload": place, "verify": place}}
            rows.append({"oid": wanted["oid"], "size": wanted["size"], **actions})
        self._send(200, {"transfer": "basic", "objects": rows})

    def put_object(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, message="checksum differs")
        self.hub.objects[oid] = self.body
        self._send(200, {})

    def verify(self, oid: str) -> None:
        said = self.json()
        if len(self.hub.objects.get(said["oid"], b"")) != said["size"]:
            raise Refused(404, message="no such object")
        self._send(200, {})

    def commit(self, repo: str, revision: str) -> None:
        self._owner()
        found = self.hub.repo(repo, self.token)
        parent = self.hub.commit_of(found, revision)
        files = dict(found.commits[parent])
        header: dict[str, Any] = {}
        for line in self.body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                header = value
                if value.get("parentCommit", parent) != parent:
                    raise Refused(412, message="A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refused(400, message=f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = Blob(self.hub.objects[value["oid"]], lfs=True)
            elif key == "deletedFile":
                del files[value["path"]]
        sha = found.commit(revision, files, header["summary"])
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    # Downloads

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self.hub.repo(repo, self.token)
        sha = self.hub.commit_of(found, revision)
        blob = found.commits[sha].get(name)
        if blob is None:
            raise Refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha}
        if blob.lfs:  # lies elsewhere, at an address that needs no token
            linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
            self._send(302, b"", {**headers, **linked, "Location": f"{self.hub.storage}/cdn/{blob.sha256}"})
        else:
            self._send(200, blob.data, {**headers, "ETag": f'"{blob.oid}"'})

    def stored(self, oid: str) -> None:
        data = self.hub.objects[oid]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            self.hub.asked.append(f"RANGE {start} {oid}")
        most = self.hub.cut.pop(oid, None)
        rest = data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("ETag", f'"{oid}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(rest[:most])
            if most is not None:
                self.close_connection = True


_REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = {
    ("POST", "/api/repos/create"): _Handler.create,
    ("POST", "/api/validate-yaml"): _Handler.validate,
    ("GET", f"/api/models/{_REPO}"): _Handler.info,
    ("GET", f"/api/models/{_REPO}/revision/(?P<revision>.+)"): _Handler.info,
    ("GET", f"/api/models/{_REPO}/tree/(?P<revision>[^/]+)"): _Handler.tree,
    ("POST", f"/api/models/{_REPO}/branch/(?P<branch>.+)"): _Handler.branch,
    ("POST", f"/api/models/{_REPO}/preupload/(?P<revision>.+)"): _Handler.preupload,
    ("POST", f"/api/models/{_REPO}/commit/(?P<revision>.+)"): _Handler.commit,
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch"): _Handler.batch,
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})"): _Handler.put_object,
    ("POST", "/lfs/(?P<oid>[0-9a-f]{64})"): _Handler.verify,
    ("GET HEAD", f"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)"): _Handler.resolve,
    ("GET HEAD", "/cdn/(?P<oid>[0-9a-f]{64})"): _Handler.stored,
}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub at a free port, until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub, "timeout": 20})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.storage = hub.url.replace("127.0.0.1", "localhost")  # another host to the client, as the real hub's storage is
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def use_hub(monkeypatch, hub: Hub, cache, token: str | None = TOKEN) -> None:
    """Point the real client at the hub, with an empty cache and this token; what the environment says is read on import."""
    constants = huggingface_hub.constants
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,  # whose servers speak a protocol of their own
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(cache / "no-token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
