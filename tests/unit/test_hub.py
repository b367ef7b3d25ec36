"""Models of the hub, through the real client, from a server that speaks the hub's endpoints."""

import functools
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub  # noqa: F401  # before an engine sets the process offline
import pytest
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not listed

from headrace import hub
from headrace.cli.main import main
from headrace.config import load
from headrace.errors import ConfigError
from headrace.models import base_model, preparing_model

WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
LEFT_OUT = {"pytorch_model.bin", "model.onnx", "code.py", "consolidated.safetensors"}
ANSWER_S = 5.0
"""Within which even a slow machine gives an answer that does come."""


class Hub(ThreadingHTTPServer):
    """One model, `org/name`, whose main branch may move; `v1` is its first commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits = {"main": "a" * 40, "v1": "a" * 40}
        self.files = WANTED | LEFT_OUT
        self.asked: list[str] = []
        self.silent_from, self.silent_times = "/", 0
        """Beginning of the paths that get no answer, so many times after the first request."""
        self.released = threading.Event()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def content(self, name: str, commit: str) -> bytes:
        return f"{name} of {commit}".encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        path, hub_ = self.path.partition("?")[0], self.server
        assert isinstance(hub_, Hub)
        hub_.asked.append(path)
        if len(hub_.asked) > 1 and path.startswith(hub_.silent_from) and hub_.silent_times:
            hub_.silent_times -= 1
            hub_.released.wait(60)
            self.close_connection = True
            return
        if path == "/api/models/org/name":
            path += "/revision/main"
        if path.startswith("/api/models/org/name/revision/"):
            revision = path.rpartition("/")[2]
            commit = hub_.commits.get(revision)
            if revision in hub_.commits.values():
                commit = revision
            if commit is None:
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                self.send(200, json.dumps({"id": "org/name", "sha": commit}).encode(), {})
        elif path.startswith("/api/models/org/name/tree/"):
            entries = [
                {"type": "file", "path": name, "size": 1, "oid": hashlib.sha1(b"").hexdigest()}
                for name in sorted(hub_.files)
            ]
            self.send(200, json.dumps(entries).encode(), {})
        elif path.startswith("/org/name/resolve/"):
            commit, name = path.split("/")[4:]
            body = hub_.content(name, commit)
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            self.send(200, body, {"X-Repo-Commit": commit, "ETag": etag})
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.released.set()
        made.shutdown()
        thread.join(10)


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_download_is_whole_leaves_out_what_is_not_needed_and_serves_without_a_connection(
    server: Hub, tmp_path: Path
) -> None:
    assert hub.cached("org/name", cache=tmp_path) is None
    folder = hub.fetch("org/name", endpoint=server.endpoint, cache=tmp_path)
    assert hub.cached("org/name", cache=tmp_path) == folder
    assert folder.name == "a" * 40
    assert {path.name for path in folder.iterdir()} == WANTED
    for name in WANTED:
        assert (folder / name).read_bytes() == server.content(name, "a" * 40)
    server.asked.clear()
    assert hub.fetch("org/name@v1", endpoint=server.endpoint, cache=tmp_path) == folder
    assert not [path for path in server.asked if "/resolve/" in path], "nothing is fetched twice"
    assert hub.fetch("org/name", endpoint=nobody(), cache=tmp_path) == folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/absent", r"'org/absent' is no folder here.*shows no such model.*hf auth login"),
        ("org/name@v9", r"'org/name' has no revision 'v9'"),
    ],
)
def test_what_the_hub_does_not_have_is_named(
    name: str, said: str, server: Hub, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said + r".*give the folder of a Hugging Face model"):
        hub.fetch(name, endpoint=server.endpoint, cache=tmp_path)


def test_an_unreachable_hub_is_named_with_the_way_out(tmp_path: Path) -> None:
    said = r"'org/name' is no folder here, the hub cannot be reached \(.+\).*give the folder"
    with pytest.raises(ConfigError, match=said):
        hub.fetch("org/name", endpoint=nobody(), cache=tmp_path)


def test_a_hub_that_takes_connections_and_is_silent_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot be reached \(.*timed out.*\)"):
            hub.fetch("org/name", endpoint=endpoint, cache=tmp_path, answer_s=0.2)


@pytest.mark.slow
def test_a_hub_that_falls_silent_after_its_first_answer_is_given_up(
    server: Hub, tmp_path: Path
) -> None:
    server.silent_from, server.silent_times = "/", 9
    with pytest.raises(ConfigError, match=r"'org/name' is no folder here, and its download failed"):
        hub.fetch("org/name", endpoint=server.endpoint, cache=tmp_path, answer_s=ANSWER_S)
    assert len(server.asked) == 2


@pytest.mark.slow
def test_a_list_of_files_that_does_not_come_is_asked_for_again(server: Hub, tmp_path: Path) -> None:
    server.silent_from, server.silent_times = "/api/models/org/name/tree/", 1
    folder = hub.fetch("org/name", endpoint=server.endpoint, cache=tmp_path, answer_s=ANSWER_S)
    assert {path.name for path in folder.iterdir()} == WANTED


@pytest.mark.parametrize(
    ("absent", "lacks"),
    [
        ({"model.safetensors"}, "weights in safetensors"),
        ({"config.json"}, "config.json"),
        ({"config.json", "model.safetensors"}, "config.json and no weights in safetensors"),
    ],
)
def test_a_repository_that_holds_no_model_is_refused(
    absent: set[str], lacks: str, server: Hub, tmp_path: Path
) -> None:
    server.files -= absent
    with pytest.raises(ConfigError, match=f"^'org/name' of the hub has no {lacks}: name a model"):
        hub.fetch("org/name", endpoint=server.endpoint, cache=tmp_path)


def test_a_run_keeps_the_commit_that_it_began_with(server: Hub, tmp_path: Path) -> None:
    config = load([], [f"run.dir={tmp_path}/run", "model.path=org/name"])
    (tmp_path / "run").mkdir()

    def fetch(name: str) -> Path:
        return hub.fetch(name, endpoint=server.endpoint, cache=tmp_path / "cache")

    assert preparing_model(config) == ["model", "fetch", "org/name"]
    first = base_model(config, fetch)
    server.commits["main"] = "b" * 40
    assert base_model(config, fetch) == first
    assert preparing_model(config) == ["model", "fetch", f"org/name@{'a' * 40}"]
    assert hub.fetch("org/name", endpoint=server.endpoint, cache=tmp_path / "cache") != first


def test_a_folder_that_exists_is_preferred_to_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    config = load([], ["model.path=org/name"])
    assert base_model(config) == Path("org/name")
    assert preparing_model(config) == []


@pytest.mark.parametrize("text", ["/models/name", "name", "./org/name", "a/b/c", "org/name@", ""])
def test_a_path_is_not_taken_for_a_name_on_the_hub(text: str) -> None:
    assert not hub.is_name(text)


@pytest.mark.parametrize(
    "text", ["a/b--c", "a/b..c", "a/b.git", "a/b.", "é/b", "a/" + 97 * "b", "a/b@x/../y"]
)
def test_a_name_that_the_client_would_refuse_is_none(text: str) -> None:
    assert not hub.is_name(text)


@pytest.mark.parametrize("text", ["a/b", "Org-1/Name_2.5-B", "a/" + 96 * "b", "a/b@refs/pr/1--x"])
def test_a_name_that_the_client_takes_is_one(text: str) -> None:
    assert hub.is_name(text)
    validate_repo_id(text.partition("@")[0])


def test_the_command_downloads_a_model_and_prints_its_folder(
    server: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fetch = functools.partial(hub.fetch, endpoint=server.endpoint, cache=tmp_path)
    monkeypatch.setattr(hub, "fetch", fetch)
    assert main(["model", "fetch", "org/name@v1"]) == 0
    folder = Path(capsys.readouterr().out.removesuffix("\n"))
    assert {path.name for path in folder.iterdir()} == WANTED


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./models/x", "'./models/x' is not of the form org/name"),
        ("org/absent", "shows no such model"),
        ("org/name@v9", "has no revision 'v9'"),
    ],
)
def test_the_command_refuses_what_there_is_not_in_one_line(
    name: str,
    said: str,
    server: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fetch = functools.partial(hub.fetch, endpoint=server.endpoint, cache=tmp_path)
    monkeypatch.setattr(hub, "fetch", fetch)
    assert main(["model", "fetch", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_command_says_so_where_the_hub_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch = functools.partial(hub.fetch, endpoint=nobody(), cache=tmp_path)
    monkeypatch.setattr(hub, "fetch", fetch)
    assert main(["model", "fetch", "org/name"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the hub cannot be reached" in line
