"""The served page over HTTP: made again when a run has written more, and for this machine only."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swift.errors import SettingError
from swift.watch.serve import LivePage, serve
from tests.report.browser import CHROMIUM, Browser
from tests.watch.conftest import record


class Served:
    """A command that serves the page of runs."""

    def __init__(self, *paths):
        words = [sys.executable, "-m", "swift", "watch", *map(str, paths), "--serve", "--refresh", "0.1"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.line = self.process.stdout.readline()
        self.port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", self.line)[1])

    def ask(self, path="/", method="GET", host="", **headers) -> tuple[int, str]:
        """Sends a request; returns the status and the content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": host or f"127.0.0.1:{self.port}"} | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        self.headers = answer.headers
        content = answer.read().decode()
        connection.close()
        return answer.status, content

    def newer(self, version: str) -> str:
        """Waits for another version than this one."""
        deadline = time.monotonic() + 120
        while (found := self.ask("/version")[1]) == version:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found


@contextmanager
def serving(*paths) -> Iterator[Served]:
    """Serves for the block, and ends the command as Ctrl-C does."""
    server = Served(*paths)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGINT)
        out, err = server.process.communicate(timeout=60)
    assert (server.process.returncode, out, err) == (0, "", "")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """A page of a run that has not begun."""
    with serving(tmp_path_factory.mktemp("runs") / "mine") as server:
        yield server


def test_a_page_follows_its_run(path, write):
    with serving(path) as server:
        status, page = server.ask()
        assert (status, "waiting for a run in" in page) == (200, True)
        directory = write()
        directory.log_step(record(1))
        first = server.newer(kept(page))
        page = server.ask()[1]
        assert "1 steps, not ended" in page
        assert kept(page) == server.ask("/version")[1] == first
        assert server.ask()[1] == page
        for step in range(2, 6):
            directory.log_step(record(step))
        server.newer(first)
        assert "5 steps, not ended" in server.ask()[1]
        with (path / "metrics.jsonl").open("ab") as file:
            file.write(b"damage\n")
        server.newer(kept(server.ask()[1]))
        assert "is damaged: not a JSON object" in server.ask()[1]


def kept(page: str) -> str:
    """The version that a page compares."""
    return re.search(r'keepNew\("(\w*)"', page)[1]


def test_the_page_is_made_only_if_a_file_has_changed(path, write, monkeypatch):
    now, made = [0.0], []
    monkeypatch.setattr("swift.watch.serve.report_page", lambda *words: made.append(words) or f"page {len(made)}")
    page = LivePage([path], 5.0, lambda: now[0])
    directory = write()
    directory.log_step(record(1))
    assert page.content() == page.content() == b"page 1"
    directory.log_step(record(2))
    assert page.content() == b"page 1"  # not so soon after the last one
    now[0] += 6
    version = page.version()
    assert page.content() == b"page 2"
    assert page.version() == version
    now[0] += 100
    assert page.content() == b"page 2"


def test_a_page_that_cannot_be_made_says_so_and_is_not_made_again_at_once(path, write, monkeypatch):
    now, asked = [0.0], []

    def fail(*words):
        asked.append(words)
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr("swift.watch.serve.report_page", fail)
    page, directory = LivePage([path], 5.0, lambda: now[0]), write()
    directory.log_step(record(1))
    content = page.content().decode()
    assert "the report cannot be made: OverflowError: int too large to convert to float" in content
    assert kept(content) == page.version()
    directory.log_step(record(2))
    page.content()
    assert len(asked) == 1


def test_a_page_that_takes_long_is_made_seldom(path, write, monkeypatch):
    """A run keeps its cores: there are four times as long between two pages as one takes."""
    now, made = [0.0], []

    def slowly(runs, script):
        now[0] += 20
        made.append((runs, script))
        return ""

    monkeypatch.setattr("swift.watch.serve.report_page", slowly)
    page, directory = LivePage([path], 5.0, lambda: now[0]), write()
    for step in range(1, 100):
        directory.log_step(record(step))
        page.content()
        now[0] += 10
    assert len(made) == pytest.approx(now[0] / 100, abs=1)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "localhost.evil:1"])
def test_another_host_is_refused(served, host):
    status, content = served.ask(host=host or " ")
    assert (status, content) == (403, "only for this machine\n")


def test_a_tunnel_with_a_port_of_its_own_is_this_machine(served):
    for host in ("localhost:9999", "LOCALHOST", "127.0.0.1:1", "127.0.0.1"):
        assert served.ask(host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "//etc/passwd", "/../../etc/passwd", "/%2e%2e/", "/config.gin", "/mine/metrics.jsonl", "/?a"],
)
def test_nothing_else_can_be_reached(served, path):
    assert served.ask(path) == (404, "there is only /\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT"])
def test_pages_are_only_read(served, method):
    assert served.ask(method=method)[0] == 501


def test_it_listens_on_loopback_only(served, listening_at):
    assert listening_at(served.process.pid) == {"127.0.0.1"}


def test_no_other_site_can_frame_it_or_keep_it(served):
    served.ask()
    assert served.headers["X-Frame-Options"] == "DENY"
    assert served.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in served.headers


def test_a_client_that_leaves_or_says_nonsense_ends_nothing(served):
    for words in (b"", b"GET", b"\x00\xff\r\n\r\n", b"GET / HTTP/1.1\r\nHost: " + b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(words)
    assert served.ask()[0] == 200


def test_a_port_that_is_taken_costs_a_line(path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"--serve = {port}: cannot be listened on: "):
            serve([path], port, 1.0)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_reader_keeps_the_place_and_the_choices(path, write):
    directory = write()
    for step in range(1, 30):
        directory.log_step(record(step))
    with serving(path) as server, Browser() as browser:
        browser.resize(1000, 600)
        browser.order("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        wait(lambda: browser.tell("document.readyState === 'complete' && typeof keepNew === 'function'"))
        time.sleep(0.3)  # for a page that was restored at once, which there is none of
        browser.tell(
            "const range = document.querySelector('[name=smoothing]'); range.value = 20;"
            "range.dispatchEvent(new Event('input')); document.querySelectorAll('details')[0].open = true;"
            "scrollTo(0, 700); window.first = true;"
        )
        place = "document.getElementById('run1.0').getBoundingClientRect().top"
        before = browser.tell(place)
        for step in range(30, 60):
            directory.log_step(record(step))
        wait(lambda: browser.tell("document.readyState === 'complete' && !window.first"))
        wait(lambda: browser.tell("scrollY > 0"))
        assert "59 steps" in browser.tell("document.body.innerText")
        assert browser.tell(place) == pytest.approx(before, abs=2)
        assert browser.tell("document.querySelector('[name=smoothing]').value") == "20"
        assert browser.tell("document.querySelectorAll('details')[0].open")


def wait(is_so) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
