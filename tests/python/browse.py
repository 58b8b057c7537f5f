"""Opens a page in a headless Chromium and prints, as JSON, what the page shows and what goes wrong in it.

    python3 tests/python/browse.py http://127.0.0.1:8088/ --until 'page.lines.length > 0' --value 'title=document.title'
    python3 tests/python/browse.py report.html --width 390 --mobile --shot phone.png

Talks to the browser through a pipe, with nothing but Python's own library. `--do EXPRESSION` is evaluated after the
wait, in order, and must not fail. `--find` only prints the path of the browser; it fails without one.
"""

import argparse
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]


def browser():
    """Path of a browser: ANYROLL_TEST_BROWSER, or the first that is installed."""
    named = os.environ.get("ANYROLL_TEST_BROWSER")
    return named or next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """A browser with one page. Messages end with a zero byte."""

    def __init__(self, program, profile, deadline):
        self.deadline = deadline
        to_browser, self.input = os.pipe()
        self.output, from_browser = os.pipe()
        # A container has no user namespaces for the browser's sandbox; the pages are this project's own.
        flags = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --remote-debugging-pipe"
        script = f'exec "$0" {flags} --user-data-dir="$1" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["sh", "-c", script, program, profile],
            pass_fds=[to_browser, from_browser],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number = 0
        self.bytes = b""
        self.events = []
        self.session = None

    def receive(self):
        while b"\0" not in self.bytes:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self.output], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            more = os.read(self.output, 1 << 16)
            if not more:
                raise RuntimeError("the browser ended")
            self.bytes += more
        message, self.bytes = self.bytes.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.input, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") != self.number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def evaluate(self, expression):
        """Value of an expression; None for one that fails, with the reason."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **asked)
        failed = answer.get("exceptionDetails")
        if failed:
            return None, failed.get("exception", {}).get("description", failed["text"])
        return answer["result"].get("value"), None

    def open(self, url, args):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        size = {"width": args.width, "height": args.height, "deviceScaleFactor": args.scale, "mobile": args.mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        if args.mobile:
            self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        problem = self.call("Page.navigate", url=url).get("errorText")
        if problem:
            raise RuntimeError(f"{url}: {problem}")

    def found(self):
        """Errors and requests so far."""
        errors, requests = [], []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                errors.append(details.get("exception", {}).get("description", details["text"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                errors.append(" ".join(str(it.get("value", it.get("description"))) for it in params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                errors.append(params["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                requests.append(params["request"]["url"][:200])
        return errors, requests

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def look(page, args):
    """What the page shows, once it is as it should be."""
    while True:
        reached, problem = page.evaluate(args.until)
        if reached:
            break
        if time.monotonic() > page.deadline:
            raise TimeoutError(f"{args.until} is {reached} ({problem})")
        time.sleep(0.1)
    for expression in args.do:
        _, problem = page.evaluate(expression)
        if problem:
            raise RuntimeError(f"{expression}: {problem}")
    values = {}
    for named in args.value:
        name, expression = named.split("=", 1)
        values[name], problem = page.evaluate(expression)
        if problem:
            raise RuntimeError(f"{name}: {problem}")
    if args.shot:
        shot = page.call("Page.captureScreenshot", captureBeyondViewport=args.whole)
        Path(args.shot).write_bytes(base64.b64decode(shot["data"]))
    errors, requests = page.found()
    return {"values": values, "errors": errors, "requests": requests}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", help="an address, or a file")
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--mobile", action="store_true")
    parser.add_argument("--do", action="append", default=[], metavar="EXPRESSION")
    parser.add_argument("--until", default="document.readyState === 'complete'", metavar="EXPRESSION")
    parser.add_argument("--value", action="append", default=[], metavar="NAME=EXPRESSION")
    parser.add_argument("--shot", metavar="FILE", help="where to write a picture of the page")
    parser.add_argument("--whole", action="store_true", help="of the whole page")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS")
    args = parser.parse_args()
    program = browser()
    if program is None:
        sys.exit(f"none of {', '.join(NAMES)} is installed")
    if args.find:
        print(program)
        return
    url = args.page if "://" in args.page else Path(args.page).resolve().as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Browser(program, profile, time.monotonic() + args.timeout)
        try:
            page.open(url, args)
            print(json.dumps(look(page, args)))
        finally:
            page.end()


if __name__ == "__main__":
    main()
