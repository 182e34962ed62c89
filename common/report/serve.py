"""Serve the pages of running runs: python -m common.report RUN... --serve.

It serves only this machine (127.0.0.1). The page polls every two seconds and gets new data when a
file of a run has changed; the curves of several runs share the panels.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from common.config import ConfigError
from common.report import web
from common.report.page import check_folder

log = logging.getLogger("clutch")

HOST = "127.0.0.1"
REST = 9  # seconds of pause per second of reading files
# The files of a run folder that its page is made of.
FILES = ("run.yaml", "result.json", "metrics.jsonl", "evaluations.jsonl", "run.log")
FILES += ("completions/*.jsonl", "shard-*/completions/*.jsonl")


class Board:
    """The data of some runs, read again when their files have changed, but rarely enough not to
    slow down training.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders, self.lock, self.rested = folders, threading.Lock(), 0.0
        self.made: dict[Path, tuple[str, dict[str, Any]]] = {}  # by folder: the mark, the data

    def data(self) -> dict[str, Any]:
        """Return the page's data. A run with a file that is being written keeps its
        previous data.
        """
        with self.lock:
            if (began := time.monotonic()) >= self.rested:
                for folder in self.folders:
                    self._look(folder)
                self.rested = time.monotonic() + REST * (time.monotonic() - began)
            marks, runs = zip(*(self.made[folder] for folder in self.folders), strict=True)
            runs = _named(list(runs), self.folders)
            return {"live": True, "mark": "-".join(marks), "runs": runs}

    def _look(self, folder: Path) -> None:
        mark, last = _mark(folder), self.made.get(folder)
        if last and last[0] == mark:
            return
        try:
            self.made[folder] = mark, web.read_data(folder)
        except Exception as error:  # whatever a file that is being written lets a reader meet
            if not last:
                raise
            log.warning("%s is shown as it was: %s", folder, error)
            self.made[folder] = mark, last[1]


def _mark(folder: Path) -> str:
    stamps = []
    for path in (path for pattern in FILES for path in sorted(folder.glob(pattern))):
        with suppress(FileNotFoundError):  # a file that is just being replaced
            stamps.append((path.stat().st_size, path.stat().st_mtime_ns))
    return f"{hash(tuple(stamps)) & (1 << 64) - 1:x}"


def _named(runs: list[dict[str, Any]], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Add the parent folder to the names of runs if two run folders have the same name."""
    names = [run["name"] for run in runs]
    if len(set(names)) < len(names):
        names = [str(Path(*folder.resolve().parts[-2:])) for folder in folders]
    return [{**run, "name": name} for run, name in zip(runs, names, strict=True)]


class Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with its data if they have changed."""

    board: Board

    def do_GET(self) -> None:
        """Answer / and /data?since=MARK; other paths are not found."""
        asked, port = urlsplit(self.path), self.connection.getsockname()[1]
        # a page of another site that names itself as this machine has its own name here
        if urlsplit(f"//{self.headers.get('Host')}").hostname not in (HOST, "localhost"):
            return self._answer(403, "text/plain", f"The page is at http://{HOST}:{port}/.")
        if asked.path not in ("/", "/data"):
            return self._answer(404, "text/plain", "There is nothing here. The page is at /.")
        data = self.board.data()
        if asked.path == "/data" and parse_qs(asked.query).get("since") == [data["mark"]]:
            return self._answer(204, "application/json", "")
        if asked.path == "/":
            return self._answer(200, "text/html", web.render("page", data))
        return self._answer(200, "application/json", web.encode(data))

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError):  # the page was closed meanwhile
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing per request."""


def open_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Return a server that is bound but not yet serving.

    Args: port: the port; 0 = any free one.
    Raises: ConfigError if the port is taken, or a folder is no run folder.
    """
    for folder in folders:
        check_folder(folder)
    handler = type("Bound", (Handler,), {"board": Board(list(dict.fromkeys(folders)))})
    handler.board.data()
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise ConfigError(
            f"--port {port} cannot be used: {error.strerror}. Give another one, or --port 0 for"
            " one that is free."
        ) from None


def serve(folders: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C."""
    with open_server(folders, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
