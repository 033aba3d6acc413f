"""A headless Chromium, driven through its DevTools protocol over a pipe: no port, and no package but the standard library."""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


def path() -> str | None:
    """The browser of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. errors: exceptions, failed loads and violations of the content policy. requests: the URLs it asked for."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb", 0)
        self._replies: dict[int, Queue[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        self._number = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _read(self) -> None:
        rest = b""
        while data := self._answers.read(1 << 16):
            *whole, rest = (rest + data).split(b"\0")
            for message in map(json.loads, whole):
                if (reply := self._replies.pop(message.get("id", -1), None)) is not None:
                    reply.put(message)
                else:
                    self._happened(message.get("method"), message.get("params", {}))

    def _happened(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = self._number = self._number + 1
        reply = self._replies[number] = Queue()
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        try:
            answer = reply.get(timeout=60)
        except Empty:
            raise AssertionError(f"Chromium does not answer {method}") from None
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def close(self) -> None:
        """After the browser has ended."""
        self._reader.join(30)
        self._commands.close()
        self._answers.close()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        evaluation = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in evaluation, evaluation["exceptionDetails"]
        return evaluation["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}; errors: {self.errors}")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def type(self, selector: str, text: str) -> None:
        """Writes into a field, as the keyboard does."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.run("document.activeElement.select?.()")
        self.send("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses a key. modifiers: 8 for Shift."""
        codes = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowRight": (39, ""), "Tab": (9, "")}
        code, text = codes[key]
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", **key_event, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **key_event)

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into sight."""
        script = f"""(async () => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center"}});
            for (const _ of [1, 2]) await new Promise(requestAnimationFrame);
            const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""
        x, y = self.run(script)
        return x, y

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def looks(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """The size of the window, and the reader's choice of light or dark."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, kind: str = "png", **options: Any) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format=kind, **options)["data"])


@contextmanager
def opened() -> Iterator[Page]:
    """A fresh browser with one tab, until the block ends."""
    browser = path()
    assert browser is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
            f"--user-data-dir={profile}",
        ]
        if os.geteuid() == 0:
            # Chromium's sandbox refuses to run as root.
            flags.append("--no-sandbox")
        words = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), browser, *flags, "about:blank"]
        with open(os.path.join(profile, "log"), "wb") as log:
            process = subprocess.Popen(words, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log)
        os.close(theirs_in)
        os.close(theirs_out)
        page = Page(ours_out, ours_in)
        try:
            yield page
        finally:
            process.terminate()
            process.wait(30)
            page.close()
