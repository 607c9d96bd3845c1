"""A model hub on loopback: the part of the hub's HTTP API that huggingface_hub, transformers and datasets use.

Repositories are kept in memory. Every request is recorded with its bytes. Transfers are the plain ones (LFS), so
clients must set HF_HUB_DISABLE_XET; `Hub.environment` has that and everything else that a client needs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WRITER, READER = "hf_writer", "hf_reader"
"""Tokens: one that may read gated repositories and write, and one that may do neither."""
_CHUNK_BYTES = 64 * 2**10
_LFS_SUFFIXES = (".safetensors", ".bin", ".parquet")


@dataclass
class Repository:
    """One repository: a directory of files by commit, and names of commits."""

    kind: str
    name: str
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Replace the files of a revision. Returns the commit's hash."""
        digest = hashlib.sha1(f"{self.kind} {self.name} {len(self.commits)}".encode())
        for path, data in sorted(files.items()):
            digest.update(path.encode() + data)
        self.commits[digest.hexdigest()] = dict(files)
        self.refs[revision] = digest.hexdigest()
        return digest.hexdigest()

    def find(self, revision: str) -> str | None:
        """Return the commit that a branch, tag or hash names; None if there is none."""
        return self.refs.get(revision) or (revision if revision in self.commits else None)


@dataclass(frozen=True)
class Request:
    """A request that was answered, or cut."""

    method: str
    path: str
    status: int
    sent_bytes: int
    """Bytes of the response's body."""
    received_bytes: int
    """Bytes of the request's body."""


class Hub(ThreadingHTTPServer):
    """The server. Use `running`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.uploaded: dict[str, bytes] = {}
        """LFS objects by their sha256."""
        self.requests: list[Request] = []
        self.cut: dict[str, int] = {}
        """By file name: the next response with the file's bytes ends after so many, and the connection is closed."""
        self.status: dict[str, int] = {}
        """By beginning of a request's path: the status with which it is refused."""
        self.offers_xet = False
        """Whether answers say that large files are in Xet's storage too (which is not served)."""
        self.bytes_per_s: float | None = None
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about clients that were killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(
        self, name: str, files: Mapping[str, bytes] | Path, kind: str = "model", gated: bool = False,
        private: bool = False,
    ) -> Repository:  # fmt: skip
        """Add a repository with these files, or those of a directory, at `main`."""
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        repository = self.repositories[kind, name] = Repository(kind, name, gated, private)
        repository.commit(files)
        return repository

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the variables of a client whose cache is below `home`."""
        variables = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return variables | ({"HF_TOKEN": token} if token else {})

    def recorded(self, ending: str = "") -> list[Request]:
        """Return the requests whose path ends so."""
        return [request for request in self.requests if request.path.endswith(ending)]

    @property
    def sent_bytes(self) -> int:
        """Bytes of all bodies that were sent."""
        return sum(request.sent_bytes for request in self.requests)


@contextmanager
def running() -> Iterator[Hub]:
    """Run a hub without repositories."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    @property
    def token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def _answer(self) -> None:
        split = urlsplit(self.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.query = parse_qs(split.query)
        parts = [unquote(part) for part in split.path.strip("/").split("/")]
        try:
            for beginning, status in self.server.status.items():
                if split.path.startswith(beginning):
                    return self._refuse(status, None, "refused")
            self._route(parts)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, parts: list[str]) -> None:
        if parts[0] == "lfs" and self.command == "PUT":
            self.server.uploaded[parts[1]] = self.body
            return self._send_json({})
        if parts[0] == "cdn":
            return self._send_file(self.server.uploaded[parts[1]], "/".join(parts[2:]), {"ETag": f'"{parts[1]}"'})
        if parts[0] == "api":
            return self._route_api(parts[1:])
        if parts[-4:] == ["info", "lfs", "objects", "batch"]:
            return self._batch()
        kind = "dataset" if parts[0] == "datasets" else "model"
        org, name, verb, revision, *path = parts[kind == "dataset" :]
        assert verb == "resolve", self.path
        return self._resolve(kind, f"{org}/{name}", revision, "/".join(path))

    def _route_api(self, parts: list[str]) -> None:  # noqa: C901, PLR0911 - one for each route
        if parts == ["whoami-v2"]:
            return self._send_json({"name": "tester", "type": "user", "auth": {}}) if self.token else self._refuse(401)
        if parts == ["validate-yaml"]:
            return self._send_json({"warnings": [], "errors": []})
        if parts == ["repos", "create"]:
            return self._create()
        kind, name, verb = parts[0].removesuffix("s"), "/".join(parts[1:3]), parts[3] if len(parts) > 3 else "info"
        repository = self._repository(kind, name)
        if repository is None:
            return None
        if verb == "preupload":
            return self._preupload(repository)
        if verb == "commit":
            return self._commit(repository, parts[4])
        if verb == "refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in repository.refs.items()]
            return self._send_json({"branches": branches, "converts": [], "tags": []})
        revision = parts[4] if len(parts) > 4 else "main"
        commit = repository.find(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if verb in {"info", "revision"}:
            return self._send_json(self._info(repository, commit, files))
        if verb == "tree":
            under = "/".join(parts[5:])
            if under and not any(path.startswith(f"{under}/") for path in files):
                return self._refuse(404, "EntryNotFound", f"{under} does not exist")
            return self._send_json(self._tree(files, under))
        if verb == "paths-info":
            asked = json.loads(self.body)["paths"]
            return self._send_json([_entry(path, files[path]) for path in asked if path in files])
        return self._refuse(404)

    def _repository(self, kind: str, name: str) -> Repository | None:
        """Return a repository that the token may see, or refuse the request."""
        found = self.server.repositories.get((kind, name))
        if found is None or (found.private and self.token != WRITER):
            # As on the hub, whoever is not logged in cannot tell a private repository from none.
            self._refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
            return None
        return found

    def _info(self, repository: Repository, commit: str, files: Mapping[str, bytes]) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in files]
        if "blobs" in self.query:
            for sibling in siblings:
                entry = _entry(sibling["rfilename"], files[sibling["rfilename"]])
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    sibling["lfs"] = {"sha256": entry["lfs"]["oid"], **entry["lfs"]}
        return {
            "_id": commit[:24],
            "id": repository.name,
            "modelId": repository.name,
            "sha": commit,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }

    def _tree(self, files: Mapping[str, bytes], under: str) -> list[dict[str, Any]]:
        inside = [path for path in files if not under or path.startswith(f"{under}/")]
        found = {}
        for path in inside:
            inner = path[len(under) + 1 :] if under else path
            folder, slash, _ = inner.partition("/")
            if slash:
                at = f"{under}/{folder}" if under else folder
                found[at] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": at}
            if not slash or self.query.get("recursive", [""])[0].lower() == "true":
                found[path] = _entry(path, files[path])
        return list(found.values())

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self._repository(kind, name)
        if repository is None:
            return None
        if repository.gated and self.token != WRITER:
            return self._refuse(403 if self.token else 401, "GatedRepo", f"Access to {kind} {name} is restricted")
        commit = repository.find(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = repository.commits[commit].get(path)
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        entry = _entry(path, data)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if "lfs" not in entry:
            return self._send_file(data, path, {**headers, "ETag": f'"{entry["oid"]}"'})
        oid = entry["lfs"]["oid"]
        self.server.uploaded[oid] = data
        # Clients follow redirects to the same host themselves; the hub's go to another one.
        where = f"http://localhost:{self.server.server_address[1]}/cdn/{oid}/{path}"
        offer = {"X-Xet-Hash": oid, "X-Xet-Refresh-Route": f"{self.server.url}/api/xet"}
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{oid}"', "Location": where}
        linked |= offer if self.server.offers_xet else {}
        return self._send(302, b"", {**headers, **linked, "ETag": f'"{entry["oid"]}"'})

    def _create(self) -> None:
        asked = json.loads(self.body)
        if self.token != WRITER:
            return self._refuse(401 if self.token is None else 403, None, "You don't have the rights to create this")
        kind, name = asked.get("type") or "model", f"{asked['organization'] or 'tester'}/{asked['name']}"
        if (kind, name) in self.server.repositories:
            return self._send_json({"url": f"{self.server.url}/{name}"}, 409)
        repository = self.server.add(name, {".gitattributes": b""}, kind)
        repository.private = asked.get("visibility") == "private" or bool(asked.get("private"))
        return self._send_json({"url": f"{self.server.url}/{name}", "id": name})

    def _preupload(self, repository: Repository) -> None:
        if self.token != WRITER:
            return self._refuse(401 if self.token is None else 403, None, "write access is needed")
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(_LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(self.body)["files"]
        ]
        return self._send_json({"files": files})

    def _batch(self) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}}
            for one in json.loads(self.body)["objects"]
        ]
        return self._send_json({"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, revision: str) -> None:
        files = dict(repository.commits[repository.refs[revision]])
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.uploaded[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files, revision)
        url = f"{self.server.url}/{repository.name}/commit/{commit}"
        return self._send_json({"commitUrl": url, "commitOid": commit, "success": True})

    # Bytes ------------------------------------------------------------------------------------------------------------

    def _send_file(self, data: bytes, path: str, headers: Mapping[str, str]) -> None:
        asked = self.headers.get("Range", "")
        if not asked:
            return self._send(200, data, headers, path)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= len(data):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return self._send(206, data[start:stop], {**headers, **place}, path)

    def _send_json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(
        self, status: int, code: str | None = None, message: str = "refused", headers: Mapping[str, str] | None = None
    ) -> None:
        told = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self._send(status, json.dumps({"error": message}).encode(), told)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], path: str = "") -> None:
        """Send a response; `path`, of a file's bytes, says whether to cut it."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        sent = 0
        cut = None
        if self.command != "HEAD":
            cut = self.server.cut.pop(path, None) if path else None
            part = data if cut is None else data[:cut]
            try:
                for start in range(0, len(part), _CHUNK_BYTES):
                    chunk = part[start : start + _CHUNK_BYTES]
                    self.wfile.write(chunk)
                    sent += len(chunk)
                    if path and self.server.bytes_per_s:
                        time.sleep(len(chunk) / self.server.bytes_per_s)
            finally:
                self._record(status, sent)
        else:
            self._record(status, 0)
        if cut is not None:
            self.close_connection = True
            self.connection.close()

    def _record(self, status: int, sent: int) -> None:
        with self.server.lock:
            path = urlsplit(self.path).path
            self.server.requests.append(Request(self.command, path, status, sent, len(self.body)))


def _entry(path: str, data: bytes) -> dict[str, Any]:
    """Return a file's entry in a tree."""
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(data), "path": path}
    if path.endswith(_LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
