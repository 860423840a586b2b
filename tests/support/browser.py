"""A headless Chromium that tests drive by its own protocol (CDP), through a WebSocket."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NO_BROWSER = "chromium is not installed; .ci/run installs it"
_SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--in-process-gpu", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*", "--hide-scrollbars"),
)


class Browser:
    """A browser of its own, with an empty profile; a context manager."""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self._profile.name)
        self._process = subprocess.Popen(
            [CHROMIUM, *_SWITCHES, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        file = folder / "DevToolsActivePort"
        _until(lambda: file.exists() and "\n" in file.read_text(), 60)
        self._port = int(file.read_text().split()[0])
        self._free = []
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(20)
        self._profile.cleanup()

    def open(self, address="about:blank", *, new=False, **options):
        """Return a tab at an address: one that was left, whose process is there, or a new one.

        One that is asked for is for itself: of a page that wants to be asked before it is left, or is timed.
        """
        if not self._free or new:
            url = f"http://127.0.0.1:{self._port}/json/new?about:blank"
            with urlopen(Request(url, method="PUT"), timeout=20) as answer:
                self._free.append(json.load(answer)["webSocketDebuggerUrl"])
        return Tab(self._free.pop(), address, left=None if new else self._free.append, **options)


class Tab:
    """A tab: `eval`, `key`, `drag`, `picture`, and what it asked for, in `requests`."""

    def __init__(
        self, socket, address, *, left, width=1280, height=900, dark=False, downloads=None
    ):
        import websocket

        self._address, self._left = socket, left
        self._socket = websocket.create_connection(socket, timeout=60)
        self._number = 0
        self.requests, self.errors, self._events = [], [], []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")
        self.resize(width, height)
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.call("Emulation.setEmulatedMedia", features=features)
        if downloads is not None:
            self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        if not address.startswith("http"):  # refuse the network: a page is to need none
            self.call(
                "Network.emulateNetworkConditions",
                offline=True,
                latency=0,
                downloadThroughput=0,
                uploadThroughput=0,
            )
        self.go(address)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        again = kind is None and self._left is not None
        if again:
            self.go("about:blank")  # nothing of the page is left; what was set ends with the socket
        self._socket.close()
        if again:
            self._left(self._address)

    def call(self, method, **params):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _note(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._events.append(method)

    def go(self, address):
        self._events.clear()
        self.call("Page.navigate", url=address)
        self.until(lambda: self._events or self.eval("document.readyState === 'complete'"))

    def eval(self, expression):
        """Return the value of an expression, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def until(self, holds, seconds=60):
        """Wait until a function, or an expression of the page, is true; return its value."""
        plain = f"((found) => (found instanceof Node ? true : found))({holds})"
        return _until(holds if callable(holds) else lambda: self.eval(plain), seconds)

    def resize(self, width, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def drag(self, x1, y1, x2=None, y2=None):
        """Press at a place, and let go at another."""
        x2, y2 = x1 if x2 is None else x2, y1 if y2 is None else y2
        mouse = {"button": "left", "clickCount": 1, "buttons": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x1, y=y1, **mouse)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=(x1 + x2) / 2, y=y2, **mouse)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x2, y=y2, **mouse)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x2, y=y2, **mouse)

    def key(self, name, times=1, modifiers=0, text=""):
        codes = {
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Tab": 9,
            "Enter": 13,
        }
        code = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        code["modifiers"] = modifiers
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **code)
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def box(self, selector):
        """Return x, y, width and height of an element, scrolled into view."""
        return self.eval(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
        )

    def cpu_ms(self):
        """Return the time that the main thread has worked so far."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return 1e3 * next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    def picture(self, path, *selectors):
        """Take a PNG of the page, or of some elements and what is between them."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        if selectors:
            top, bottom = (
                self.eval(f"document.querySelector({s!r}).getBoundingClientRect().{side} + scrollY")
                for s, side in ((selectors[0], "top"), (selectors[-1], "bottom"))
            )
            clip |= {"y": top, "height": bottom - top}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(shot["data"]))


def _until(holds, seconds):
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value
