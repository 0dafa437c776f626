"""A browser that tests drive: Chromium without a window, over its debugging pipe (the DevTools protocol)."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update "
    "disable-sync disable-dev-shm-usage hide-scrollbars force-device-scale-factor=1"
)
KEYS = {"Tab": 9, "Enter": 13, "Space": 32, "Home": 36}
KEYS |= {f"Arrow{where}": 37 + number for number, where in enumerate(("Left", "Up", "Right", "Down"))}
"""Codes of the keys that are more than a letter."""
PATIENCE_S = 90


class Browser:
    """One page in a browser with a profile of its own; a context manager that ends it."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        orders, self._orders = os.pipe()
        self._replies, replies = os.pipe()
        # Chromium reads its orders from descriptor 3 and writes replies to 4.
        pipe = f"exec 8<&{orders} 9>&{replies} 3<&8 4>&9"
        command = [CHROMIUM, *(f"--{flag}" for flag in QUIET.split()), "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'{pipe}; exec "$@"', "bash", *command, f"--user-data-dir={self._profile.name}"],
            pass_fds=(orders, replies),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders)
        os.close(replies)
        self._numbers, self._rest, self._session = itertools.count(1), b"", {}
        page = self.order("Target.createTarget", url="about:blank")["targetId"]
        session = self.order("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self.order("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._orders)
        os.close(self._replies)
        self._profile.cleanup()

    def order(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends an order and waits for its reply."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._orders, json.dumps(message).encode() + b"\0")
        return self._message(lambda one: one.get("id") == number)["result"]

    def _message(self, is_it) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while True:
            while b"\0" in self._rest:
                text, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(text)
                if is_it(message):
                    assert "error" not in message, message["error"]
                    return message
            ready, _, _ = select.select([self._replies], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            self._rest += os.read(self._replies, 1 << 16)

    def open(self, path, width: int = 1400, height: int = 900, scheme: str = "light") -> None:
        """Loads a file in a window of a size, in the colours that a reader prefers."""
        self.resize(width, height)
        self.order("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.order("Page.navigate", url=path.as_uri())
        while self.tell("document.readyState") != "complete" or self.tell("location.href") == "about:blank":
            time.sleep(0.02)

    def tell(self, expression: str) -> Any:
        """Evaluates an expression in the page."""
        found = self.order("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses and releases a key as a person does, with its default action."""
        code = {"key": " " if key == "Space" else key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0]))}
        text = {"Space": {"text": " "}, "Enter": {"text": "\r"}}.get(key, {"text": key} if len(key) == 1 else {})
        for kind in ({"type": "keyDown", **text}, {"type": "keyUp"}):
            self.order("Input.dispatchKeyEvent", **kind, **code, modifiers=8 * shift)

    def resize(self, width: int, height: int) -> None:
        """Changes the size of the window."""
        self.order("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, box: Sequence[float] = ()) -> bytes:
        """Takes a PNG of the window, or of a box (left, top, width, height) in it."""
        left, top = self.tell("[scrollX, scrollY]")
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) if box else {}
        clip = {"clip": {**clip, "x": clip["x"] + left, "y": clip["y"] + top, "scale": 1}} if box else {}
        return base64.b64decode(self.order("Page.captureScreenshot", **clip)["data"])
