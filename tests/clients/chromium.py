"""A headless Chromium that a test drives: the devtools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium")
HEADLESS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip

STARTS = 3


class Page:
    """One page; every call waits for its answer."""

    def __init__(self, asked: IO[bytes], answered: IO[bytes]) -> None:
        self._asked, self._answered = asked, answered
        self._calls = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the protocol; exceptions and errors of the page on the way are kept in `errors`."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": arguments}
        session = {} if self._session is None else {"sessionId": self._session}
        self._asked.write(json.dumps(message | session).encode() + b"\0")
        self._asked.flush()
        while True:
            answer = json.loads(self._next())
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _next(self) -> bytes:
        found = bytearray()
        while (byte := self._answered.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            found += byte
        return bytes(found)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, of a promise what it resolves to."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float) -> None:
        """Waits until JavaScript is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            shown = self.evaluate("document.body?.innerText")
            assert time.monotonic() < end, f"{expression} is not true; {self.errors}; {shown}"
            time.sleep(0.1)

    def click(self, selector: str) -> None:
        """Clicks into the middle of an element, as a person would."""
        x, y = self.evaluate(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'center'});"
            " const { x, y, width, height } = one.getBoundingClientRect();"
            " return [x + width / 2, y + height / 2]; })()"
        )
        self.draw([(x, y)])

    def draw(self, points: list[tuple[float, float]]) -> None:
        """Presses the pointer at the first point, moves it over the others, and releases it at the last."""
        (x, y), *others = points
        pointer = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, buttons=1, **pointer)
        for x, y in others:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=1, **pointer)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, buttons=0, **pointer)

    def screenshot(self, path: Path) -> None:
        """The visible part of the page as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def open_page(
    url: str, folder: Path, *, size: tuple[int, int] = (1200, 1000), options: Sequence[str] = ()
) -> Iterator[Page]:
    """A page in a Chromium of its own, whose profile, log and downloads are in a folder.

    Args:
        url: of the page.
        folder: what the browser writes goes there.
        size: of the window in pixels.
        options: of Chromium in addition to `HEADLESS`; with any, its GPU process may start.
    """
    headless = [one for one in HEADLESS if not options or one != "--disable-gpu"]
    with contextlib.ExitStack() as stack:
        page = _start(stack, folder, [*headless, f"--window-size={size[0]},{size[1]}", *options])
        page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        page.call("Page.navigate", url=url)
        yield page


def _start(stack: contextlib.ExitStack, folder: Path, options: Sequence[str]) -> Page:
    """A blank page; a browser that ends before it has one, as it may on a busy machine, is started again."""
    for attempt in range(1, STARTS + 1):
        with contextlib.ExitStack() as own:
            try:
                page = own.enter_context(_browser(folder / f"profile{attempt}", folder / "chromium.log", options))
            except (AssertionError, OSError) as error:
                log = (folder / "chromium.log").read_text(errors="replace")[-1500:]
                if attempt == STARTS:
                    raise AssertionError(
                        f"Chromium did not start {STARTS} times: {error}; it printed: {log}"
                    ) from error
                time.sleep(attempt)
                continue
            stack.push(own.pop_all())
            return page
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _browser(profile: Path, log: Path, options: Sequence[str]) -> Iterator[Page]:
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    # The protocol is spoken over descriptors 3 and 4, which others must not have before they are set.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, to_us)]
    given = [*options, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}', str(CHROMIUM), *given]
    with log.open("ab") as errors, subprocess.Popen(command, pass_fds=ends, stderr=errors) as browser:
        for end in (to_browser, to_us, *ends):
            os.close(end)
        try:
            with open(from_us, "wb") as asked, open(from_browser, "rb") as answered:
                yield Page(asked, answered)
        finally:
            browser.terminate()
