"""A headless Chromium driven over its debugging pipe: open pages, evaluate JavaScript, send input, take pictures."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    return os.environ.get("OUTCORE_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One browser tab. It records console messages and network requests."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._ids, self._unread, self._session = itertools.count(1), b"", None
        self.said: list[str] = []
        self.requested: list[str] = []
        self._is_loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._from, 2**20)
            assert more, "the browser has gone"
            self._unread += more
        text, self._unread = self._unread.split(b"\0", 1)
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: Mapping[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.said.append(str([each.get("value") for each in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._is_loaded = True

    def open(self, path: Path, *, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Open a file and show it."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._is_loaded = False
        self.ask("Page.navigate", url=path.as_uri())
        while not self._is_loaded:
            self._read()
        self.settle()

    def settle(self) -> None:
        """Wait until the next frame is drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        found = self.ask("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def turn(self, x: float, y: float, by: float) -> None:
        """Turn the mouse wheel above a point of the window."""
        self.ask("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)
        self.settle()

    def drag(self, x: float, y: float, by: float) -> None:
        """Drag to the right with the left button pressed."""
        button = {"y": y, "button": "left", "buttons": 1, "clickCount": 1}
        self.ask("Input.dispatchMouseEvent", type="mousePressed", x=x, **button)
        for i in range(1, 5):
            self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + by * i / 4, **button)
        self.ask("Input.dispatchMouseEvent", type="mouseReleased", x=x + by, **button)
        self.settle()

    def pinch(self, x: float, y: float, *, before: float, after: float) -> None:
        """Pinch with two fingers. Args: before, after: Distance between the fingers."""

        def fingers(apart: float) -> list[dict[str, float]]:
            return [{"x": x - apart / 2, "y": y, "id": 0}, {"x": x + apart / 2, "y": y, "id": 1}]

        self.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=fingers(before))
        for i in range(1, 5):
            apart = before + (after - before) * i / 4
            self.ask("Input.dispatchTouchEvent", type="touchMove", touchPoints=fingers(apart))
        self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def press(self, key: str, text: str = "") -> None:
        """Press a key."""
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png", clip=self._all())
        path.write_bytes(base64.b64decode(taken["data"]))

    def _all(self) -> dict[str, float]:
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}


@contextlib.contextmanager
def browsing(browser: str, folder: Path) -> Iterator[Page]:
    """Start the browser and yield a tab. Args: folder: For the browser's own files."""
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()

    # The browser reads requests from descriptor 3 and answers on descriptor 4.
    script = f'exec "$0" "$@" 3<&{read_there} 4>&{write_there}'
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
    command = ["bash", "-c", script, browser, *options, "--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Page(write_here, read_here)
    finally:
        os.close(write_here)
        os.close(read_here)
        process.terminate()
        process.wait(20)
