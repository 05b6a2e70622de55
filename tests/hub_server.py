"""A small Hugging Face Hub on this machine: as much of its HTTP interface as `huggingface_hub` needs to create a repository,
upload to it, and download from it. Everything is kept in memory.

The client is the installed one, told by HF_ENDPOINT where the Hub is. HF_HUB_DISABLE_XET makes it upload over LFS: with hf_xet
installed it would speak Xet's own protocol to a storage service, whatever the Hub answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub.utils import close_session

TOKEN, READ_TOKEN = "hf_writes", "hf_reads"
LICENCES = ("apache-2.0", "mit", "llama3.1", "other")
"""The real Hub knows more."""


@dataclass(frozen=True)
class File:
    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """As the Hub names its content: git's hash, or SHA-256 where it is in LFS."""
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """One for each commit that a client made."""

    def commit(self, branch: str, files: dict[str, File]) -> str:
        state = json.dumps([branch, len(self.commits), sorted((name, file.oid) for name, file in files.items())])
        commit = hashlib.sha1(state.encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def files(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.branches.get(revision, revision)]


class Hub:
    """The server's state, and what shall go wrong."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        """LFS objects by SHA-256."""
        self.requests: list[str] = []
        """`METHOD /path` of each, in order."""
        self.uploads_to_cut = 0
        """So many uploads lose their connection in the middle."""
        self.uploads_refused = False
        self.commits_to_cut = 0
        self.downloads_to_cut = 0
        self.upload_begun = threading.Event()
        self.hold_uploads = threading.Event()
        """While it is clear uploads get no answer."""
        self.hold_uploads.set()
        self.url = ""

    def add(self, repo_id: str, files: dict[str, bytes], *, private: bool = False) -> Repo:
        """A repository, as if it had been published before."""
        repo = self.repos[repo_id] = Repo(private)
        repo.commit("main", {name: File(data, name.endswith(".safetensors")) for name, data in files.items()})
        return repo

    def requested(self, start: str) -> int:
        return sum(request.startswith(start) for request in self.requests)


def card_errors(content: str) -> list[str]:
    """What the Hub's check of a card's metadata finds, for the fields that we write."""
    found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    data = yaml.safe_load(found[1]) if found else {}
    wrong = []
    if "license" in data and data["license"] not in LICENCES:
        wrong.append(f'"license" must be one of [{", ".join(LICENCES)}]')
    if "base_model" in data and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(data["base_model"])):
        wrong.append('"base_model" with value is not valid. Use a model id from https://hf.co/models.')
    for key in ("tags", "datasets"):
        if not all(isinstance(tag, str) for tag in data.get(key, [])):
            wrong.append(f'"{key}" must be a list of strings')
    for entry in data.get("model-index", []):
        for result in entry["results"]:
            if not (result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"]):
                wrong.append('"model-index[0].results[0]" is incomplete')
            if not all(metric["type"] and isinstance(metric["value"], int | float) for metric in result["metrics"]):
                wrong.append('"model-index[0].results[0].metrics" is incomplete')
    return wrong


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def log_message(self, *arguments: Any) -> None:
        """Say nothing: tests read what the program says."""

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        try:
            for pattern, answer in _ROUTES:
                if found := re.fullmatch(pattern, f"{self.command} {path}"):
                    answer(self, **found.groupdict())
                    return
            raise _Refused(404, f"nothing at {path}")
        except _Refused as refused:
            self._read()
            headers = {"X-Error-Code": refused.code} if refused.code else {}
            self._send(refused.status, {"error": refused.message}, {**headers, "X-Error-Message": refused.message})

    # ---- reading and answering ----

    def _read(self) -> bytes:
        """The body, once; a second time it is empty."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            del self.headers["Transfer-Encoding"]
            return b"".join(parts)
        size = int(self.headers.get("Content-Length") or 0)
        del self.headers["Content-Length"]
        return self.rfile.read(size)

    def _send(
        self, status: int, value: Any = None, headers: dict[str, str] | None = None, *, data: bytes = b""
    ) -> None:
        data = data if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(2)

    def _token(self) -> str:
        return str(self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _may_write(self) -> None:
        if self._token() not in (TOKEN, READ_TOKEN):
            raise _Refused(401, "Invalid username or password.")
        if self._token() != TOKEN:
            raise _Refused(403, "You don't have the rights to write here")

    def _repo(self, repo: str, revision: str = "main") -> tuple[Repo, str]:
        """A repository and the commit of a revision."""
        found = self.hub.repos.get(repo)
        if found is None or (found.private and self._token() not in (TOKEN, READ_TOKEN)):
            raise _Refused(401 if not self._token() else 404, "Repository not found", "RepoNotFound")
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found, commit

    # ---- uploading ----

    def validate_card(self) -> None:
        wrong = card_errors(json.loads(self._read())["content"])
        if wrong and self.headers.get("Accept") == "text/plain":
            self._send(400, data="\n".join(wrong).encode())
        else:
            self._send(400 if wrong else 200, {"errors": [{"message": text} for text in wrong], "warnings": []})

    def create(self) -> None:
        asked = json.loads(self._read())
        self._may_write()
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repos:
            self._send(409, {"error": "You already created this model repo", **url})
            return
        self.hub.add(
            name, {".gitattributes": b""}, private=asked.get("visibility") == "private" or asked.get("private", False)
        )
        self._send(200, url)

    def create_branch(self, repo: str, branch: str) -> None:
        self._read()
        self._may_write()
        found, commit = self._repo(repo)
        if branch in found.branches:
            raise _Refused(409, "Reference already exists")
        found.branches[branch] = commit
        self._send(200, {})

    def preupload(self, repo: str, revision: str) -> None:
        asked = json.loads(self._read())["files"]
        self._may_write()
        files = self._repo(repo, revision)[0].files(revision)
        answer = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": files[file["path"]].oid if file["path"] in files else None,
            }
            for file in asked
        ]
        self._send(200, {"files": answer})

    def lfs_batch(self, repo: str) -> None:
        asked = json.loads(self._read())["objects"]
        self._may_write()
        answer = []
        for wanted in asked:
            upload = {
                "upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"},
                "verify": {"href": f"{self.hub.url}/lfs/verify"},
            }
            answer.append(wanted | ({} if wanted["oid"] in self.hub.objects else {"actions": upload}))
        self._send(200, {"transfer": "basic", "objects": answer})

    def lfs_put(self, oid: str) -> None:
        self.hub.upload_begun.set()
        if self.hub.uploads_to_cut:
            self.hub.uploads_to_cut -= 1
            self.rfile.read(1000)
            self._cut()
            return
        self.hub.hold_uploads.wait()
        if self.hub.uploads_refused:
            raise _Refused(403, "The link has expired")
        data = self._read()
        if hashlib.sha256(data).hexdigest() != oid:
            raise _Refused(400, "Another content than was announced")
        self.hub.objects[oid] = data
        self._send(200)

    def lfs_verify(self) -> None:
        asked = json.loads(self._read())
        known = len(self.hub.objects.get(asked["oid"], b"")) == asked["size"]
        self._send(200 if known else 404, {})

    def make_commit(self, repo: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._read().splitlines()]
        if self.hub.commits_to_cut:
            self.hub.commits_to_cut -= 1
            self._cut()
            return
        self._may_write()
        found, _ = self._repo(repo, revision)
        files = dict(found.files(revision))
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                found.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
            elif line["key"] == "lfsFile":
                files[value["path"]] = File(self.hub.objects[value["oid"]], lfs=True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = found.commit(revision, files)
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{commit}", "commitOid": commit})

    # ---- downloading ----

    def info(self, repo: str, revision: str = "main") -> None:
        found, commit = self._repo(repo, revision)
        files = found.commits[commit]
        card = (
            re.match(r"---\n(.*?)\n---\n", files["README.md"].data.decode(), re.DOTALL)
            if "README.md" in files
            else None
        )
        data = yaml.safe_load(card[1]) if card else {}
        self._send(
            200,
            {
                "id": repo,
                "modelId": repo,
                "sha": commit,
                "private": found.private,
                "tags": data.get("tags", []),
                "cardData": data,
                "siblings": [{"rfilename": name} for name in files],
            },
        )

    def refs(self, repo: str) -> None:
        found, _ = self._repo(repo)
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": c} for name, c in found.branches.items()
        ]
        self._send(200, {"branches": branches, "converts": [], "tags": []})

    def tree(self, repo: str, revision: str, folder: str | None = None) -> None:
        found, commit = self._repo(repo, revision)
        files = {
            name: file
            for name, file in found.commits[commit].items()
            if name.startswith(f"{folder}/" if folder else "")
        }
        if not files:
            raise _Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        self._send(200, [_entry(name, file) for name, file in files.items()])

    def paths_info(self, repo: str, revision: str) -> None:
        asked = parse_qs(self._read().decode())["paths"]
        found, commit = self._repo(repo, revision)
        self._send(200, [_entry(name, file) for name, file in found.commits[commit].items() if name in asked])

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found, commit = self._repo(repo, revision)
        file = found.commits[commit].get(name)
        if file is None:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        headers = {
            "X-Repo-Commit": commit, "ETag": f'"{file.oid}"', "X-Linked-Etag": f'"{file.oid}"',
            "X-Linked-Size": str(len(file.data)), "Accept-Ranges": "bytes",
        }  # fmt: skip
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, end = int(asked[1]), int(asked[2] or len(file.data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(file.data)}"
            self._send(206, headers=headers, data=file.data[start : end + 1])
        elif self.command == "GET" and file.lfs and self.hub.downloads_to_cut:
            self.hub.downloads_to_cut -= 1
            self._send(
                200, headers={**headers, "Content-Length": str(len(file.data))}, data=file.data[: len(file.data) // 2]
            )
            self._cut()
        else:
            self._send(200, headers={**headers, "Content-Length": str(len(file.data))}, data=file.data)


def _entry(name: str, file: File) -> dict[str, Any]:
    lfs = {"lfs": {"oid": file.oid, "size": len(file.data), "pointerSize": 134}} if file.lfs else {}
    return {"type": "file", "path": name, "size": len(file.data), "oid": file.oid[:40], **lfs}


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES = [
    (r"POST /api/validate-yaml", _Handler.validate_card),
    (r"POST /api/repos/create", _Handler.create),
    (rf"POST /api/models/{_REPO}/branch/(?P<branch>.+)", _Handler.create_branch),
    (rf"POST /api/models/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /lfs/(?P<oid>\w+)", _Handler.lfs_put),
    (r"POST /lfs/verify", _Handler.lfs_verify),
    (rf"POST /api/models/{_REPO}/commit/(?P<revision>.+)", _Handler.make_commit),
    (rf"GET /api/models/{_REPO}", _Handler.info),
    (rf"GET /api/models/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    (rf"GET /api/models/{_REPO}/refs", _Handler.refs),
    (rf"GET /api/models/{_REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    (rf"POST /api/models/{_REPO}/paths-info/(?P<revision>.+)", _Handler.paths_info),
    (rf"(GET|HEAD) /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that we cut, or that a killed client left, are meant."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A Hub at `url` while the block runs."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with _Server(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield hub
        finally:
            hub.hold_uploads.set()
            server.shutdown()


@contextmanager
def use_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    """A server that this process and its children use as the Hub, logged in.

    Args:
        home: folder for the client's cache.
    """
    with serve_hub() as hub:
        values = {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        # huggingface_hub reads the environment on import, so this process needs patches.
        constants = "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.ENDPOINT", hub.url)
        monkeypatch.setattr(
            f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(home / "hub"))
        close_session()
        yield hub
        close_session()
