"""A headless Chromium over its debugging pipe: opens a page and tells what happened in it."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    "no Chromium for the browser tests: `apt-get install chromium`, or leave them out with "
    'pytest -m "not gpu and not browser"'
)
_DEADLINE_S = 60.0


def program() -> str | None:
    """Path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Page:
    """What a page did since it was opened."""

    session: str
    console: list[str] = field(default_factory=list)
    """Messages, warnings, violations of the policy and uncaught errors."""
    requests: list[str] = field(default_factory=list)
    """Addresses that were asked for."""
    loaded: bool = False


class Browser:
    """Use as a context manager. Every wait ends after a minute with a `TimeoutError`."""

    def __init__(self) -> None:
        found = program()
        if found is None:
            raise FileNotFoundError(MISSING)
        self._program = found
        self._number = 0
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> "Browser":
        self._profile = tempfile.mkdtemp(prefix="headrace-browser-")
        read_commands, self._commands = os.pipe()
        self._events, write_events = os.pipe()
        # the browser talks on descriptors 3 and 4, which the shell may only set from higher ones
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (read_commands, write_events)]
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        arguments = [
            self._program, "--headless=new", "--remote-debugging-pipe", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", f"--user-data-dir={self._profile}", *root, "about:blank",
        ]  # fmt: skip
        redirected = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "browser", *arguments],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (read_commands, write_events, *theirs):
            os.close(fd)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send("Browser.close")
            self._process.wait(_DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._commands)
            os.close(self._events)
            shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, address: str, *, width: int, height: int = 900, scheme: str = "light") -> Page:
        """Open an address in a window of that size, and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self.call(
            "Emulation.setDeviceMetricsOverride", session,
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", session, features=media)
        page.loaded = False
        self.call("Page.navigate", session, url=address)
        self._until(lambda: page.loaded, f"{address} to load")
        return page

    def evaluate(self, page: Page, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        done = self.call(
            "Runtime.evaluate", page.session,
            expression=expression, returnByValue=True, awaitPromise=True,
        )  # fmt: skip
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        number = self._send(method, session, **params)
        self._until(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result

    def _send(self, method: str, session: str = "", **params: Any) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._number

    def _until(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not done():
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._events], [], [], max(left, 0))
            data = os.read(self._events, 1 << 16) if ready else b""
            if not data:
                raise TimeoutError(f"the browser did not answer: waiting for {what}")
            *messages, self._rest = (self._rest + data).split(b"\0")
            for message in messages:
                self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        page, params = self._pages.get(message.get("sessionId", "")), message["params"]
        if page is None:
            return
        match message["method"]:
            case "Page.loadEventFired":
                page.loaded = True
            case "Network.requestWillBeSent":
                page.requests.append(params["request"]["url"])
            case "Log.entryAdded":
                page.console.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled":
                page.console.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                page.console.append(str(params["exceptionDetails"]))
