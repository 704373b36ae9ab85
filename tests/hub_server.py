"""A server on loopback that speaks the part of the Hugging Face hub's API that downloads use.

Answers, headers and error codes as huggingface_hub 2.4 reads them (hf_api.py, file_download.py,
utils/_http.py): a revision's commit, a commit's files, and each file by HEAD and GET with ranges.
Weights are redirected to a second path with X-Linked-Etag and X-Linked-Size, as the hub redirects
large files to its storage.
"""

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    sent: int | None = None  # bytes of the body after which the connection is cut


def error(status: int, code: str = "", message: str = "") -> Answer:
    """An answer with the hub's error headers."""
    named = {"X-Error-Code": code, "X-Error-Message": message}
    return Answer(status, b"{}", {name: text for name, text in named.items() if text})


@dataclasses.dataclass(frozen=True)
class Repo:
    """One commit and the names that lead to it."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, data in sorted(self.files.items()):
            digest.update(name.encode() + b"\0" + data)
        return digest.hexdigest()


class Hub:
    """What the server has, and what it was asked for.

    Attributes:
      requests: (method, path) of every request.
      fault: called with method and path before a request is answered; its answer goes first.
    """

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, Repo] = {}
        self.former: dict[str, Repo] = {}  # by commit: no longer what a branch leads to
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Answer | None] = lambda method, path: None

    def files_sent(self) -> set[str]:
        """Names of the files whose bytes were asked for since the last `forget`."""
        paths = [path.split("/", 5) for method, path in self.requests if method == "GET"]
        return {parts[5] for parts in paths if parts[3:4] in (["resolve"], ["storage"])}

    def forget(self) -> None:
        self.requests.clear()

    def move(self, name: str, repo: Repo) -> None:
        """A new commit, which the revisions of `repo` lead to."""
        old = self.repos[name]
        kept = tuple(each for each in old.revisions if each not in repo.revisions)
        self.former[old.commit] = Repo(old.files, kept)
        self.repos[name] = repo

    def answer(self, method: str, path: str) -> Answer:
        fault = self.fault(method, path)
        if fault is not None:
            return fault
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            owner, name, question, revision = parts[2:6]
        elif parts[2:3] in (["resolve"], ["storage"]):
            owner, name, question, revision = parts[:4]
        else:
            return error(404)
        repo = self.repos.get(f"{owner}/{name}")
        if repo is None:  # what an anonymous client is told
            return error(401, message="Invalid username or password.")
        commits = [repo, *self.former.values()]
        repo = next((c for c in commits if revision in (c.commit, *c.revisions)), None)
        if repo is None:
            return error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if question == "revision":
            siblings = [{"rfilename": file} for file in repo.files]
            return _json({"id": f"{owner}/{name}", "sha": repo.commit, "siblings": siblings})
        if question == "tree":
            return _json([_entry(file, data) for file, data in repo.files.items()])
        file = "/".join(parts[4:])
        if file not in repo.files:
            return error(404, "EntryNotFound", "Entry not found")
        data = repo.files[file]
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        sha256 = hashlib.sha256(data).hexdigest()
        if question == "storage":
            return Answer(200, data, {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"})
        if file.endswith(".safetensors"):
            headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
            storage = self.url.replace("127.0.0.1", "localhost")  # another origin, as of a CDN
            location = f"{storage}/{owner}/{name}/storage/{repo.commit}/{file}"
            return Answer(302, b"", headers | {"Location": location})
        return Answer(200, data, headers | {"ETag": f'"{_blob_id(data)}"'})


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(file: str, data: bytes) -> dict[str, object]:
    entry = {"type": "file", "path": file, "size": len(data), "oid": _blob_id(data)}
    if file.endswith(".safetensors"):
        oid = hashlib.sha256(data).hexdigest()
        return {**entry, "lfs": {"oid": oid, "size": len(data), "pointerSize": 134}}
    return entry


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append((self.command, path))
            answer = hub.answer(self.command, path)
            status, body, headers = answer.status, answer.body, dict(answer.headers)
            asked = self.headers.get("Range", "")
            if status == 200 and asked.startswith("bytes="):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                status, body = 206, body[start:]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: answer.sent])
            if answer.sent is not None:
                self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub without models on a port of its own."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
