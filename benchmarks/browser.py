"""A headless Chromium without network, controlled through the pipe of its DevTools protocol, so
that no package is needed. Used by the tests and the benchmark of the pages of runs.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0  # that an answer may take


def find_browser() -> str | None:
    """Return the command of the browser; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab.

    Attributes:
        requests: the requests to places other than this machine's files and 127.0.0.1.
        errors: the messages of the console.
    """

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        command = find_browser()
        assert command is not None, "there is no Chromium"
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe"
        options += " --no-first-run --disable-background-networking"
        options += " --host-resolver-rules='MAP * ~NOTFOUND, EXCLUDE 127.0.0.1'"
        shell = f"exec {command} {options} --user-data-dir={self.folder.name} about:blank"
        self.process = subprocess.Popen(
            ["bash", "-c", f"{shell} 3<&{theirs_read} 4>&{theirs_write}"],
            pass_fds=(theirs_read, theirs_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self.reading, self.writing, self.held, self.sent = ours_read, ours_write, b"", 0
        self.events: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.show(width, height, dark)

    def show(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme of its pages."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        sizes: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.ask("Emulation.setDeviceMetricsOverride", **sizes, mobile=width < 600)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(OSError, TimeoutError, EOFError):
            self.session = None
            self.ask("Browser.close")
        os.close(self.reading)
        os.close(self.writing)
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def open(self, address: str) -> float:
        """Open a page. Returns the seconds until its load event ended."""
        self.events.clear()
        began = time.perf_counter()
        self.ask("Page.navigate", url=address)
        self._wait("Page.loadEventFired")
        self.run("0")  # the scripts have come to rest
        return time.perf_counter() - began

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; waits for a promise."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.ask("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def shoot(self, path: Path, whole: bool = True) -> None:
        """Save a picture of the page, or of the visible part."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its answer."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self.sent:
            self._note(found)
        assert "error" not in found, found["error"]
        return found["result"]

    def _wait(self, event: str) -> None:
        while not any(one["method"] == event for one in self.events):
            self._note(self._next())

    def _note(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            return
        self.events.append(message)
        method, found = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            url = found["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")):
                self.requests.append(url)
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.errors.append(json.dumps(found)[:2000])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.held:
            if not select.select([self.reading], [], [], SECONDS)[0]:
                raise TimeoutError(f"the browser has not answered in {SECONDS:.0f} s")
            part = os.read(self.reading, 1 << 20)
            if not part:
                raise EOFError("the browser has ended")
            self.held += part
        first, self.held = self.held.split(b"\0", 1)
        return json.loads(first)
