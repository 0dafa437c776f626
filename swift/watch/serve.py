"""Serves the report of runs to browsers of this machine, and makes it again when the runs have written more.

There are two addresses: ``/`` is the page, ``/version`` a word that changes with it. The page asks for that word, and
loads itself again (``assets/keep_new.js``). Nothing else can be reached, whatever the path; the server listens on the
loopback interface only and answers requests for that interface only: a page of another site could otherwise point a
name of its own at it (DNS rebinding).
"""

import html
import json
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from swift.errors import SettingError, printable
from swift.evaluate.results import DIRECTORY
from swift.report.page import report_page, script_source
from swift.runlog.expert_counts import CLASS_COUNTS
from swift.runlog.files import EVENTS, METRICS
from swift.runlog.reading import CONFIG, SUMMARY, is_run, read_run

_ADDRESS = "127.0.0.1"
_HOSTS = (_ADDRESS, "localhost")
_PAUSE = 4
"""Least pause between two pages, in multiples of the time that the last one took: a run keeps most of its cores."""
_IDLE_S = 30
_NOTE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {source}; connect-src 'self'">
<title>Swift</title>
</head>
<body><p>{text}</p>
<script>{script}</script>
</body>
</html>
"""


class LivePage:
    """The report of runs as a page that is made again, on request, if the files of a run have changed.

    Args:
        paths: run directories; those without a run are left out.
        refresh_s: least seconds between two pages, and between two questions of a page for a newer one.
        clock: returns the time in seconds, on a clock that is never set.
    """

    def __init__(self, paths: Sequence[Path], refresh_s: float, clock: Callable[[], float] = time.monotonic):
        self._paths, self._refresh_s, self._clock = paths, refresh_s, clock
        self._lock = threading.Lock()
        self._version, self._content, self._due = "", b"", -float("inf")

    def version(self) -> str:
        """Returns the version of the page that a request would get now; waits for no page that is being made."""
        return self._version if self._clock() < self._due else self._newest_version()

    def content(self) -> bytes:
        """Returns the page, which is made first if its version has changed."""
        with self._lock:
            if (version := self.version()) != self._version:
                begun = self._clock()
                self._content = self._page(version).encode()
                now = self._clock()
                self._version, self._due = version, now + max(self._refresh_s, _PAUSE * (now - begun))
            return self._content

    def _newest_version(self) -> str:
        """Returns a digest of the files' identities, sizes and times."""
        names = (CONFIG, METRICS, EVENTS, CLASS_COUNTS, SUMMARY)
        paths = [path / name for path in self._paths for name in names]
        paths += [found for path in self._paths for found in sorted((path / DIRECTORY).glob("*.json"))]
        return sha256(repr([(str(path), _identity(path)) for path in paths]).encode()).hexdigest()[:16]

    def _page(self, version: str) -> str:
        keep_new = (files(__package__) / "assets" / "keep_new.js").read_text(encoding="utf-8")
        script = f"{keep_new}keepNew({json.dumps(version)}, {1000 * self._refresh_s:.0f});"
        present = [path for path in self._paths if is_run(path)]
        if not present:
            return _note(f"waiting for a run in {', '.join(map(str, self._paths))}", script)
        try:
            return report_page([read_run(path) for path in present], script)
        except SettingError as error:
            return _note(str(error), script)
        except OSError as error:
            return _note(f"{error.filename} cannot be read: {error.strerror}", script)
        except Exception as error:  # whatever is in the files: the page goes on asking for a newer one
            return _note(f"the report cannot be made: {type(error).__name__}: {error}", script)


def serve(paths: Sequence[Path], port: int, refresh_s: float) -> None:
    """Serves the report of runs until the process is interrupted; prints its address.

    Args:
        paths: run directories.
        port: port to listen on; 0 for any free one.
        refresh_s: see ``LivePage``.

    Raises:
        SettingError: the port is not free.
    """
    page = LivePage(paths, refresh_s)
    try:
        server = _Server((_ADDRESS, port), lambda *arguments: _Handler(page, *arguments))
    except OSError as error:
        raise SettingError("--serve", port, f"cannot be listened on: {error.strerror}") from error
    with server:
        print(f"http://{_ADDRESS}:{server.server_address[1]}/ has the report of the runs; Ctrl-C ends it", flush=True)
        server.serve_forever()


class _Server(ThreadingHTTPServer):
    """A server whose threads end with the process."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Binds without asking the name service for the machine's name, which may take long."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that the browser has closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    server_version, sys_version = "swift", ""
    timeout = _IDLE_S

    def __init__(self, page: LivePage, *arguments: Any):
        self._page = page
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Sends the page or its version; any other method has no such function, and is refused by the base class."""
        # The port may differ: a tunnel to another machine has a port of its own.
        if self.headers.get("Host", "").partition(":")[0].lower() not in _HOSTS:
            self._send(HTTPStatus.FORBIDDEN, b"only for this machine\n")
        elif self.path == "/":
            self._send(HTTPStatus.OK, self._page.content(), "text/html")
        elif self.path == "/version":
            self._send(HTTPStatus.OK, self._page.version().encode())
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is only /\n")

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def _identity(path: Path) -> tuple[int, ...] | None:
    """Returns what changes with a file; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _note(text: str, script: str) -> str:
    """Returns a page with a text only."""
    return _NOTE.format(text=html.escape(printable(text)), source=script_source(script), script=script)
