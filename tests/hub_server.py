"""A stand-in of the Hub's HTTP API on this machine, for the real client: repositories of models with commits, branches and large files.

It answers what `huggingface_hub` asks for transfers without Xet: model information, file trees, references, files with ranges, and for
uploads create, preupload, LFS batches and commits. `cut_after` breaks each answer of a large file after so many bytes; `delay_s` waits
between blocks, so that a process can be killed within a transfer.
"""

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

from argosy.core.hub import download

LARGE = (".safetensors", ".gguf", ".bin", ".png")
BLOCK = 1 << 16


@dataclass
class Repository:
    """A model: commits, each with all its files, and the branches that name them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        text = json.dumps([sorted((n, hashlib.sha256(b).hexdigest()) for n, b in files.items()), len(self.commits)])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        self.messages.append(message)
        return sha

    def sha_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class HubServer:
    """The server: `url`, its repositories, and what it was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        self.token = "hf_stand_in"
        self.cut_after: int | None = None
        self.fail_puts_after: int | None = None
        self.delay_s = 0.0
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], **about: Any) -> str:
        """Adds a repository, or a commit to one. Returns the commit."""
        return self.repositories.setdefault(name, Repository(**about)).commit(files)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[name]
        return repository.commits[str(repository.sha_of(revision))]

    def asked(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path in self.requests)


@contextmanager
def hub_server():
    """A running server, which ends with the block."""
    hub = HubServer()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


@contextmanager
def asked_by_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server, and the settings of the client in this process for it: an empty cache, no token."""
    from huggingface_hub import constants

    with hub_server() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        settings |= {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(tmp_path / "token")}
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(download, "_SNAPSHOTS", {})
        yield server


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    # ---- answers

    def _bytes(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._bytes(json.dumps(value).encode(), status, Content_Type="application/json", **headers)

    def _error(self, status: int, code: str) -> None:
        self._json({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _repository(self, name: str) -> Repository | None:
        """The repository, or an answer that it is not there, as for private ones."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._is_known()):
            self._error(401 if not self._is_known() else 404, "RepoNotFound")
            return None
        return repository

    # ---- requests

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path))
        if match := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)??)(?:/(refs|revision|tree)(?:/(.+))?)?", path):
            return self._model(match[1], match[2], unquote(match[3] or "main"))
        if match := re.fullmatch(r"/([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", path):
            return self._file(match[1], unquote(match[2]), unquote(match[3]))
        if path == "/api/whoami-v2":
            return self._json({"name": "me", "type": "user"}) if self._is_known() else self._error(401, "")
        return self._error(404, "NotFound")

    def _model(self, name: str, kind: str | None, revision: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        if kind == "refs":
            rows = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": sha} for b, sha in repository.branches.items()]
            return self._json({"branches": rows, "tags": [], "converts": []})
        if kind == "tree":
            revision = revision.partition("/")[0]
        if (sha := repository.sha_of(revision)) is None:
            return self._error(404, "RevisionNotFound")
        files = repository.commits[sha]
        if kind == "tree":
            return self._json([_entry(file, data) for file, data in sorted(files.items())])
        siblings = [{"rfilename": file} for file in sorted(files)]
        self._json({"id": name, "modelId": name, "sha": sha, "private": repository.private, "siblings": siblings})

    def _file(self, name: str, revision: str, file: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        if repository.gated and not self._is_known():
            return self._error(403, "GatedRepo")
        if (sha := repository.sha_of(revision)) is None:
            return self._error(404, "RevisionNotFound")
        if (data := repository.commits[sha].get(file)) is None:
            return self._error(404, "EntryNotFound")
        headers = {"X_Repo_Commit": sha, "ETag": f'"{_etag(file, data)}"', "Accept_Ranges": "bytes"}
        if file.endswith(LARGE):
            headers |= {"X_Linked_Size": str(len(data)), "X_Linked_ETag": f'"{_etag(file, data)}"'}
        start = 0
        if self.command == "GET" and (byte_range := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")):
            self.hub.ranges.append(byte_range[0])
            start = int(byte_range[1])
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "HEAD" or not file.endswith(LARGE):
            return self._bytes(data[start:], 206 if start else 200, **headers)
        self._large(data[start:], 206 if start else 200, headers)

    def _large(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        end = len(data) if self.hub.cut_after is None else min(len(data), self.hub.cut_after)
        try:
            for at in range(0, end, BLOCK):
                self.wfile.write(data[at : min(at + BLOCK, end)])
                if self.hub.delay_s:
                    time.sleep(self.hub.delay_s)
        except (BrokenPipeError, ConnectionResetError):
            pass
        if end < len(data):
            self.close_connection = True
            self.connection.close()

    def do_POST(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        self.hub.requests.append(("POST", path))
        body = self._body()
        if path == "/api/validate-yaml":
            front = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
            good = front is None or isinstance(yaml.safe_load(front[1]), dict)
            return self._json({"errors": [] if good else [{"message": "no mapping"}], "warnings": []})
        if not self._is_known():
            return self._error(401, "Unauthorized")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", path):
            if (repository := self._repository(match[1])) is not None:
                getattr(self, f"_{match[2]}")(repository, match[1], unquote(match[3]), body, query)
            return None
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._json({"transfer": "basic", "objects": [self._object(entry) for entry in json.loads(body)["objects"]]})
        return self._error(404, "NotFound")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        out = b""
        while size := int(self.rfile.readline().strip(), 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out

    def _create(self, about: dict[str, Any]) -> None:
        name = f"{about.get('organization') or 'me'}/{about['name']}"
        url = {"url": f"{self.hub.url}/{name}", "id": name, "name": name}
        if name in self.hub.repositories:
            return self._json(url | {"error": "exists"}, 409)
        self.hub.repositories[name] = Repository(private=bool(about.get("private") or about.get("visibility") == "private"))
        self.hub.repositories[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return self._json(url)

    def _preupload(self, repository: Repository, name: str, branch: str, body: bytes, query: Any) -> None:
        if (sha := repository.sha_of(branch)) is None:
            return self._error(404, "RevisionNotFound")
        files = repository.commits[sha]
        self._json(
            {
                "files": [
                    {
                        "path": entry["path"],
                        "uploadMode": "lfs" if entry["path"].endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                        "oid": _etag(entry["path"], files[entry["path"]]) if entry["path"] in files else None,
                    }
                    for entry in json.loads(body)["files"]
                ]
            }
        )

    def _branch(self, repository: Repository, name: str, branch: str, body: bytes, query: Any) -> None:
        if branch in repository.branches:
            return self._json({"error": "exists"}, 409)
        repository.branches[branch] = repository.branches["main"]
        return self._json({})

    def _object(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["oid"] in self.hub.objects:
            return entry
        return entry | {"actions": {"upload": {"href": f"{self.hub.url}/objects/{entry['oid']}", "header": {}}}}

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path
        limit = self.hub.fail_puts_after
        if limit is not None and self.hub.asked("PUT", "/objects/") >= limit:
            # The connection breaks, as where a process is killed.
            self.close_connection = True
            self.connection.close()
            return
        data = self._body()
        oid = path.rpartition("/")[2]
        if hashlib.sha256(data).hexdigest() != oid:
            return self._error(400, "BadRequest")
        self.hub.objects[oid] = data
        self.hub.requests.append(("PUT", path))
        return self._bytes(b"", ETag=f'"{oid}"')

    def _commit(self, repository: Repository, name: str, branch: str, body: bytes, query: Any) -> None:
        if (sha := repository.branches.get(branch)) is None:
            return self._error(404, "RevisionNotFound")
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, sha):
            return self._error(412, "PreconditionFailed")
        files = dict(repository.commits[sha])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self._error(400, "BadRequest")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        new = repository.commit(files, branch, header["summary"])
        url = f"{self.hub.url}/{name}/commit/{new}"
        return self._json({"success": True, "commitOid": new, "commitUrl": url, "hookOutput": ""})


def _etag(file: str, data: bytes) -> str:
    if file.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(file: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if file.endswith(LARGE):
        entry["lfs"] = {"oid": _etag(file, data), "size": len(data), "pointerSize": 134}
    return entry
