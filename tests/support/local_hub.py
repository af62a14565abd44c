"""A Hub on this machine, in memory, for tests of its names; whatever contacts another address fails."""

import hashlib
import http.server
import json
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlparse


@dataclass
class Hub:
    """Repositories by kind and name: their commits in order, and other names of these."""

    commits: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    gated: set = field(default_factory=set)
    requests: list = field(default_factory=list)
    port: int = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def push(self, name, folder, kind="models"):
        """Make the files of a folder the last commit of a repository, and return its hash."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        commit = _hash(repr([kind, name, files]).encode())
        self.commits.setdefault((kind, name), {})[commit] = files
        return commit

    def answer(self, path):
        """Return the status, the headers and the body of an answer."""
        parts = [unquote(part) for part in urlparse(path).path.strip("/").split("/")]
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        if parts[0] == "api" and len(parts) > 3:
            kind, parts = parts[1], parts[2:]
        name, verb, revision, file = "/".join(parts[:2]), *(parts[2:4] or ["info", "main"]), "/".join(parts[4:])
        if (commits := self.commits.get((kind, name))) is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        revision = [*commits][-1] if revision == "main" else self.tags.get(revision, revision)
        if (files := commits.get(revision)) is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if verb == "tree":
            listed = [{"type": "file", "path": f, "size": len(files[f]), "oid": _hash(files[f])} for f in files]
            return 200, {}, json.dumps(listed).encode()
        if verb != "resolve":
            siblings = [{"rfilename": f, "size": len(files[f]), "blobId": _hash(files[f])} for f in files]
            info = {"id": name, "sha": revision, "siblings": siblings, "private": False, "tags": []}
            return 200, {}, json.dumps(info).encode()
        if (kind, name) in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_hash(files[file])}"', "X-Repo-Commit": revision}, files[file]


def _hash(body):
    return hashlib.sha1(body).hexdigest()


@contextmanager
def serving():
    """Serve an empty Hub at 127.0.0.1."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            hub.requests.append(self.path)
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


def connect_to(hub, cache, monkeypatch):
    """Let huggingface_hub take this Hub for the Hub, and an empty folder for its cache; nothing else can be reached."""
    import huggingface_hub

    constants, template = huggingface_hub.constants, "/{repo_id}/resolve/{revision}/{filename}"
    settings = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + template, "HF_HUB_OFFLINE": False}
    for name, value in {**settings, "HF_HUB_CACHE": str(cache)}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()  # one that was opened under other settings
    connect = socket.socket.connect

    def to_us(self, address):
        assert address == ("127.0.0.1", hub.port), f"{address} is contacted"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", to_us)
