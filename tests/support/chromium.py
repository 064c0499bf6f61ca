"""A headless Chromium, driven through its DevTools protocol over a pipe: no port, and no library.

with running_chromium(folder) as browser:
    page = browser.open(path, width=400, height=800, dark=False)
    page.click("#next")
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.limits import limit

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 20.0  # for an answer
KEYS = {
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "PageDown": 34,
    "PageUp": 33,
    "Tab": 9,
}


def why_not() -> str | None:
    """Return why there is no browser; None if there is one."""
    return None if _program() else f"none of {', '.join(PROGRAMS)} is installed: apt-get install chromium"


def _program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """A browser that has started."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers  # file descriptors
        self._received = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)  # what happened meanwhile
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for_events(self, *names: str, session: str, start: int) -> None:
        """Wait for events of a session in this order; those before the index `start` do not count."""
        awaited = list(names)
        for index in itertools.count(start):
            if index == len(self.events):
                self.events.append(self._next())
            event = self.events[index]
            if (event.get("method"), event.get("sessionId")) == (awaited[0], session):
                awaited.pop(0)
            if not awaited:
                return

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], limit(SECONDS))
            assert ready, f"Chromium has not answered in {limit(SECONDS):.0f} s"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has ended"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, path: Path, *, width: int, height: int, dark: bool = False) -> Page:
        """Return a page that has loaded a file."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.load("Page.navigate", url=path.as_uri())
        return page


class Page:
    """A page in a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def load(self, method: str, **params: Any) -> None:
        """Load another page or this one again; a value asked for before the new page is there would be an error."""
        start = len(self._browser.events)
        self.call(method, **params)
        self._browser.wait_for_events("Page.frameNavigated", "Page.loadEventFired", session=self._session, start=start)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + limit(SECONDS)
        while not self.value(expression):
            assert time.monotonic() < end, f"not true: {expression}"
            self.value("new Promise((done) => setTimeout(done, 20))")

    def click(self, selector: str) -> None:
        """Scroll to an element and click into the middle of its first line."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'center'}})")
        place = (
            f"(({{left, top, width, height}}) => [left + width / 2, top + height / 2])({element}.getClientRects()[0])"
        )
        x, y = self.value(place)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key, one of KEYS or a letter."""
        text = {} if key in KEYS else {"text": key}
        code = KEYS.get(key) or ord(key.upper())
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as a PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the console so far, and every request that is not the file's own."""
        self.value("0")  # receives what has been sent
        found = []
        for event in self._browser.events:
            params, name = event.get("params", {}), event.get("method")
            is_error = name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")
            if name in ("Runtime.exceptionThrown", "Log.entryAdded") or is_error:
                found.append(json.dumps(params))
            if name == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
                ("file:", "data:", "blob:")
            ):
                found.append(params["request"]["url"])
        return found


@contextmanager
def running_chromium(folder: Path) -> Iterator[Browser]:
    """Start a browser that keeps its files in a folder; end it after the block."""
    program = _program()
    assert program is not None, why_not()
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    given = (read_commands, write_answers)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
    # Chromium reads commands from descriptor 3 and answers on 4.
    script = 'exec "$@" 3<&{} 4>&{}'.format(*given)
    running = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *options, *quiet, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=given,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in given:
        os.close(descriptor)
    try:
        browser = Browser(commands, answers)
        yield browser
        browser.call("Browser.close")
    finally:
        os.close(commands)
        os.close(answers)
        try:
            running.wait(timeout=limit(SECONDS))
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
