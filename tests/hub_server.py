"""
A Hub on this machine: the part of its HTTP API that `huggingface_hub` uses to create, commit, upload, resolve and list.

It follows what the client documents and what it checks: status codes, `X-Error-Code`, `X-Repo-Commit` and linked ETags,
redirects to a storage address, ranges. Large files arrive by Git LFS, which the client speaks when `HF_HUB_DISABLE_XET`
is set, or else by the Xet protocol; they are served by plain HTTP.
"""

import base64
import hashlib
import itertools
import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from .hub_xet import chunks_of, files_of


BRANCH, REQUEST = "refs/heads/", "refs/pr/"
XET_TOKEN = "for uploads alone"


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Blob:
    content: bytes
    sha256: str | None = None  # of a large file

    @property
    def etag(self):
        return self.sha256 or git_oid(self.content)


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    description: str
    files: dict


@dataclass
class User:
    name: str
    organisations: tuple = ()
    can_write: bool = True

    def owns(self, repo_id):
        return repo_id.split("/")[0] in (self.name, *self.organisations)


@dataclass
class Repository:
    name: str
    private: bool = False
    commits: dict = field(default_factory=dict)
    refs: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    pull_requests: int = 0

    def find(self, revision):
        for name in (revision, BRANCH + revision):
            if name in self.refs:
                return self.commits[self.refs[name]]
        return self.commits.get(self.tags.get(revision, revision))

    def add(self, parent, title, description, files):
        previous = parent.oid if parent else None
        text = f"{len(self.commits)} {self.name} {previous} {title} {sorted((p, b.etag) for p, b in files.items())}"
        commit = Commit(hashlib.sha1(text.encode()).hexdigest(), previous, title, description, files)
        self.commits[commit.oid] = commit
        return commit


@dataclass
class Faults:
    """What goes wrong: each is off by default, and `Hub.faults` is exchanged by a test."""

    break_uploads_after: int | None = None  # bytes of a large file, and then the connection is gone
    refuse_uploads: bool = False  # as storage answers an address that has expired
    break_commits: bool = False
    flip_a_bit_of: str | None = None  # a path whose content is served with one bit changed
    cut_short: str | None = None  # a path of which half is served
    stop_after: int | None = None  # bytes of one download of a large file, and then the connection is gone
    before_commit: object = None  # called once a commit has been received, before it is made


class Refusal(Exception):
    def __init__(self, status, message, code=None, commit=None, **content):
        self.status, self.message, self.code, self.commit, self.content = status, message, code, commit, content


class Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, *arguments):
        self.connections = set()
        super().__init__(*arguments)

    def process_request(self, request, client_address):
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.connections.discard(request)
        super().shutdown_request(request)


class Hub:
    """
    The server, as a context manager.

    `users` are known by their token; `repositories` and `requests` (method and path of each) are there to be looked at.
    Weights, figures and files above `large` bytes are kept as large files.
    """

    def __init__(self, users, large=100_000):
        self.users, self.large = users, large
        self.repositories, self.objects, self.xorbs, self.requests = {}, {}, {}, []
        self.faults, self.lock = Faults(), threading.RLock()

    def __enter__(self):
        self.server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        # Another host name, as for the Hub's own storage: the client must not send its token there.
        self.storage = f"http://localhost:{self.server.server_port}/storage"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.server.connections):
            with suppress(OSError):
                connection.shutdown(2)

    def files(self, repo_id, revision="main"):
        """The content of every file by path, without `.gitattributes`, which each repository begins with."""
        found = self.repositories[repo_id].find(revision).files
        return {path: blob.content for path, blob in found.items() if path != ".gitattributes"}

    def history(self, repo_id, revision="main"):
        """Commits from the newest to the first."""
        repository = self.repositories[repo_id]
        commit, found = repository.find(revision), []
        while commit is not None:
            found.append(commit)
            commit = repository.commits.get(commit.parent)
        return found

    def is_large(self, path, size):
        return size > self.large or path.endswith((".safetensors", ".bin", ".png"))


def route(method, pattern):
    def mark(function):
        function.route = (method, re.compile(pattern))
        return function

    return mark


REPO, REVISION = r"(?P<repo>[^/]+/[^/]+?)", r"(?P<revision>[^/]+|refs/pr/\d+)"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *_):
        pass

    # ------------------------------------------------------------------------------------------------ the plumbing

    def dispatch(self):
        address = urlsplit(self.path)
        self.query, path = parse_qs(address.query), address.path
        self.hub.requests.append((self.command, path))
        method = "GET" if self.command == "HEAD" else self.command
        for function in vars(Handler).values():
            expected, pattern = getattr(function, "route", (None, None))
            match = pattern.fullmatch(path) if expected == method else None
            if match:
                break
        else:
            self.body()
            return self.answer(404, {"error": f"no such address: {path}"})
        try:
            with suppress(ConnectionError):
                function(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
        except Refusal as refusal:
            self.body()
            headers = {"X-Error-Message": refusal.message}
            headers |= {"X-Error-Code": refusal.code} if refusal.code else {}
            headers |= {"X-Repo-Commit": refusal.commit} if refusal.commit else {}
            self.answer(refusal.status, {"error": refusal.message, **refusal.content}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = dispatch

    def body(self):
        """The whole body; what is left unread would be taken for the next request on this connection."""
        if not hasattr(self, "_body") or self._body[0] is not self.headers:
            self._body = (self.headers, self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        return self._body[1]

    def json(self):
        return json.loads(self.body() or b"{}")

    def answer(self, status, content=b"", headers=None, kind="application/json"):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": len(content), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):
                self.wfile.write(content)

    def hang_up(self):
        self.close_connection = True
        self._body = (self.headers, b"")
        self.connection.shutdown(2)

    # ---------------------------------------------------------------------------------------------- who may do what

    def user(self, required=False):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if required and not token:
            raise Refusal(401, "Invalid username or password.")
        return self.hub.users.get(token)

    def repository(self, repo, write=False):
        user, found = self.user(), self.hub.repositories.get(repo)
        if found is None or (found.private and not (user and user.owns(repo))):
            # A repository that is private is told from none only by those who may see it.
            # The client infers the code of the first from its address, but only of an https one.
            if user is None:
                raise Refusal(401, "Invalid username or password.", "RepoNotFound")
            raise Refusal(404, "Repository not found", "RepoNotFound")
        if write and not self.query.get("create_pr"):
            self.user(required=True)
            if not (user.can_write and user.owns(repo)):
                raise Refusal(403, f"Forbidden: pass `create_pr=1`, or a token that may write to {repo}")
        elif write:
            self.user(required=True)
        return found

    def commit_of(self, repository, revision):
        commit = repository.find(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # --------------------------------------------------------------------------------------------------- the routes

    @route("GET", "/api/whoami-v2")
    def whoami(self):
        user = self.user(required=True)
        self.answer(200, {"type": "user", "name": user.name, "orgs": [{"name": name} for name in user.organisations]})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        content = self.json()["content"]
        if not content.startswith("---\n"):
            return self.answer(200, {"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]})
        self.answer(200, {"errors": [], "warnings": []})

    @route("POST", "/api/repos/create")
    def create(self):
        user, wanted = self.user(required=True), self.json()
        repo = f"{wanted.get('organization') or user.name}/{wanted['name']}"
        if not (user.can_write and user.owns(repo)):
            raise Refusal(403, f"You don't have the rights to create a model under the namespace {repo.split('/')[0]}")
        with self.hub.lock:
            if repo in self.hub.repositories:
                raise Refusal(409, "You already created this model repo", url=f"{self.hub.url}/{repo}")
            private = wanted.get("private") or wanted.get("visibility") == "private"
            made = self.hub.repositories[repo] = Repository(repo, bool(private))
            first = made.add(None, "initial commit", "", {".gitattributes": Blob(b"*.safetensors filter=lfs\n")})
            made.refs[BRANCH + "main"] = first.oid
        self.answer(200, {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})

    @route("POST", f"/api/models/{REPO}/preupload/{REVISION}")
    def preupload(self, repo, revision):
        files = self.commit_of(self.repository(repo, write=True), revision).files
        answers = []
        for file in self.json()["files"]:
            path, there = file["path"], files.get(file["path"])
            mode = "lfs" if self.hub.is_large(path, file["size"]) else "regular"
            oid = there.etag if there else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": answers, "commitOid": self.commit_of(self.repository(repo), revision).oid})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/batch")
    def batch(self, repo):
        self.query = {"create_pr": ["1"]}  # whoever may open a pull request may send its files
        self.repository(repo, write=True)
        wanted, objects = self.json(), []
        for item in wanted["objects"]:
            known = item["oid"] in self.hub.objects
            href = f"{self.hub.storage}/{item['oid']}?X-Signature=x"
            verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
            objects.append(item if known else {**item, "actions": {"upload": {"href": href}, "verify": verify}})
        transfer = "xet" if "xet" in wanted["transfers"] else "basic"
        self.answer(200, {"transfer": transfer, "objects": objects})

    @route("PUT", r"/storage/(?P<oid>[0-9a-f]{64})")
    def store(self, oid):
        self.expect_no_token()
        if self.hub.faults.refuse_uploads:
            raise Refusal(403, "Request has expired")
        stop = self.hub.faults.break_uploads_after
        if stop is not None:
            self.rfile.read(min(stop, int(self.headers["Content-Length"])))
            # The client tries again after a pause; to a signed address that has expired by then.
            self.hub.faults.refuse_uploads = True
            return self.hang_up()
        content = self.body()
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, "The content doesn't match its digest")
        self.hub.objects[oid] = content
        self.answer(200, headers={"ETag": f'"{oid}"'})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/verify")
    def verify(self, repo):
        wanted = self.json()
        if len(self.hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refusal(404, "The object was not uploaded")
        self.answer(200, {})

    @route("GET", f"/api/models/{REPO}/xet-write-token/{REVISION}")
    def xet_token(self, repo, revision):
        self.query = {"create_pr": ["1"]}
        self.repository(repo, write=True)
        expires, address = int(time.time()) + 3600, f"{self.hub.url}/xet"
        headers = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": XET_TOKEN, "X-Xet-Token-Expiration": expires}
        self.answer(200, {"casUrl": address, "accessToken": XET_TOKEN, "exp": expires}, headers)

    @route("POST", r"/xet/v1/xorbs/default/(?P<name>[0-9a-f]{64})")
    def store_xorb(self, name):
        self.hub.xorbs[name] = chunks_of(self.body())
        self.answer(200, {"was_inserted": True})

    @route("POST", r"/xet/v1/shards")
    def store_shard(self):
        for oid, content in files_of(self.body(), self.hub.xorbs):
            if hashlib.sha256(content).hexdigest() != oid:
                raise Refusal(400, "The content doesn't match its digest")
            self.hub.objects[oid] = content
        self.answer(200, {"result": 1})

    @route("POST", f"/api/models/{REPO}/commit/{REVISION}")
    def commit(self, repo, revision):
        repository = self.repository(repo, write=True)
        lines = [json.loads(line) for line in self.body().splitlines() if line.strip()]
        if self.hub.faults.break_commits:
            return self.hang_up()
        if callable(self.hub.faults.before_commit):
            before, self.hub.faults.before_commit = self.hub.faults.before_commit, None
            before()
        with self.hub.lock:
            parent = self.commit_of(repository, revision)
            header = lines[0]["value"]
            if header.get("parentCommit") not in (None, parent.oid):
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            made = repository.add(parent, header["summary"], header["description"], self.changed(parent, lines[1:]))
            answer = {"success": True, "commitOid": made.oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{made.oid}"}
            if self.query.get("create_pr"):
                repository.pull_requests += 1
                revision = f"{REQUEST}{repository.pull_requests}"
                answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{repository.pull_requests}"
            reference = revision if revision.startswith(REQUEST) else BRANCH + revision
            if reference not in repository.refs and not self.query.get("create_pr"):
                raise Refusal(400, f"{revision} is no branch that a commit can be added to")
            repository.refs[reference] = made.oid
        self.answer(200, answer)

    def changed(self, parent, operations):
        files = dict(parent.files)
        for operation in operations:
            value = operation["value"]
            path = value["path"]
            if operation["key"] == "file":
                files[path] = Blob(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refusal(400, f"{path} points to a file that was not uploaded: {value['oid']}")
                files[path] = Blob(self.hub.objects[value["oid"]], value["oid"])
            elif files.pop(path, None) is None:
                raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
        return files

    @route("POST", f"/api/models/{REPO}/(?P<kind>branch|tag)/{REVISION}")
    def mark(self, repo, kind, revision):
        repository, wanted = self.repository(repo, write=True), self.json()
        name = revision if kind == "branch" else wanted["tag"]
        start = wanted.get("startingPoint", "main") if kind == "branch" else revision
        marks, key = (repository.refs, BRANCH + name) if kind == "branch" else (repository.tags, name)
        if name.startswith("refs/"):
            raise Refusal(400, "Invalid reference for a branch")
        if key in marks:
            raise Refusal(409, f"Reference {name} already exists")
        marks[key] = self.commit_of(repository, start).oid
        self.answer(200, {})

    @route("GET", f"/api/models/{REPO}")
    def info(self, repo):
        self.info_at(repo, "main")

    @route("GET", f"/api/models/{REPO}/revision/{REVISION}")
    def info_at(self, repo, revision):
        repository = self.repository(repo)
        commit = self.commit_of(repository, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        content = {"id": repo, "modelId": repo, "private": repository.private, "tags": [], "downloads": 0, "likes": 0}
        self.answer(200, {**content, "sha": commit.oid, "siblings": siblings})

    @route("GET", f"/api/models/{REPO}/refs")
    def refs(self, repo):
        repository, found = self.repository(repo), {"branches": [], "converts": [], "tags": [], "pullRequests": []}
        for ref, oid in repository.refs.items():
            kind = "branches" if ref.startswith(BRANCH) else "pullRequests"
            found[kind].append({"name": ref.removeprefix(BRANCH), "ref": ref, "targetCommit": oid})
        for name, oid in repository.tags.items():
            found["tags"].append({"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid})
        self.answer(200, found)

    @route("GET", f"/api/models/{REPO}/tree/{REVISION}(?:/(?P<folder>.+))?")
    def tree(self, repo, revision, folder):
        files, entries = self.commit_of(self.repository(repo), revision).files, {}
        recursive = self.query.get("recursive", [""])[0].lower() in ("true", "1")
        within = f"{folder}/" if folder else ""
        for path, blob in sorted(files.items()):
            if not path.startswith(within):
                continue
            names = path.removeprefix(within).split("/")
            for name in itertools.accumulate(names[:-1], "{}/{}".format):
                entries[within + name] = {"type": "directory", "path": within + name, "oid": "0" * 40, "size": 0}
            large = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 130}
            entry = {"type": "file", "path": path, "oid": git_oid(blob.content), "size": len(blob.content)}
            entries[path] = {**entry, **({"lfs": large} if blob.sha256 else {})}
        shown = [entry for path, entry in entries.items() if recursive or "/" not in path.removeprefix(within)]
        if within and not shown:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        self.answer(200, shown)

    @route("GET", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)")
    def resolve(self, repo, revision, path):
        commit = self.commit_of(self.repository(repo), revision)
        blob = commit.files.get(path)
        if blob is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", commit.oid)
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if blob.sha256 is None:
            return self.serve(self.spoilt(path, blob.content), {**headers, "ETag": f'"{blob.etag}"'})
        expires, address = int(time.time()) + 3600, f"{self.hub.storage}/{blob.sha256}"
        headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": len(blob.content), "ETag": f'"{commit.oid}"'}
        headers["Location"] = f"{address}?path={quote(path)}&Expires={expires}"
        self.answer(302, b"Found", headers, "text/plain")

    @route("GET", r"/storage/(?P<oid>[0-9a-f]{64})")
    def fetch(self, oid):
        self.expect_no_token()
        path, stop = self.query.get("path", [""])[0], self.hub.faults.stop_after
        if stop is not None:
            self.hub.faults.stop_after = None
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.hub.objects[oid])))
            self.end_headers()
            self.wfile.write(self.hub.objects[oid][:stop])
            return self.hang_up()
        self.serve(self.spoilt(path, self.hub.objects[oid]), {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def expect_no_token(self):
        if self.headers.get("Authorization"):
            raise Refusal(400, "Only one auth mechanism allowed: the address is signed")

    def spoilt(self, path, content):
        if path == self.hub.faults.flip_a_bit_of:
            return content[:-1] + bytes([content[-1] ^ 1])
        return content[: len(content) // 2] if path == self.hub.faults.cut_short else content

    def serve(self, content, headers):
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            return self.answer(200, content, headers, "application/octet-stream")
        first, size = int(asked[1]), len(content)
        last = min(int(asked[2] or size - 1), size - 1)
        if first > last:
            return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
        headers = {**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
        self.answer(206, content[first : last + 1], headers, "application/octet-stream")
