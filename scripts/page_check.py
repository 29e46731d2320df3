#!/usr/bin/env python3
"""Opens the page that scripts/page.sh has built in a headless Chromium, and uses it.

It fails if

 - the text that the page writes greedily is not that of the program performer-lm, to the character;
 - the weights of a head do not add up to 1, or lie on later tokens;
 - fewer than --floor tokens a second are written;
 - memory grows while a long text is written: the program's own, or that of the page around it;
 - the page does not work after its server is gone;
 - something that takes the focus has no name, or cannot be reached with the Tab key;
 - it cannot be stopped, or says that it is done where it was stopped;
 - a text's contrast is below 4.5, or the page is wider than a phone;
 - the browser reports an error, or a request for anything that is not the page's own.

Screenshots of both widths and colour schemes are left in --screenshots, to be looked at. Needs
Python 3.11, a Chromium (Debian: apt-get install chromium) and nothing else: the browser is spoken
to through two pipes, in the DevTools protocol.

Usage: scripts/page_check.py PAGE PROGRAM [--tokens N] [--floor N] [--screenshots FOLDER]
       PAGE is the folder of the page, PROGRAM the native performer-lm to compare with.
"""

import argparse
import base64
import functools
import http.server
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = "models/stories/performer"
PROMPT = "Once upon a time"
GREEDY_TOKENS = 200
RACE_TOKENS = 4000
SIZES = {"wide": (1280, 800), "phone": (360, 740)}
# What a page may hold more at the end of a long text than at its first tenth: bytes of JavaScript.
HEAP_SLACK = 4 << 20


class Failure(Exception):
    pass


class Browser:
    """A headless Chromium and its one page."""

    def __init__(self, profile):
        names = ["chromium", "chromium-browser", "google-chrome", "chrome"]
        command = next((found for name in names if (found := shutil.which(name))), None)
        if command is None:
            raise Failure("there is no Chromium: install it (Debian: apt-get install chromium)")
        read_by_browser, self.to = os.pipe()
        self.back, written_by_browser = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars",
                 "--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        # The browser takes commands at descriptor 3 and answers at 4.
        shell = f'exec "$0" "$@" 3<&{read_by_browser} 4>&{written_by_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, command, *flags, "about:blank"],
            pass_fds=(read_by_browser, written_by_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_browser)
        os.close(written_by_browser)
        self.count, self.buffer, self.session = 0, b"", None
        self.errors, self.requests, self.workers = [], [], 0
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.call(f"{domain}.enable")
        # Workers have sessions of their own, and wait at their beginning until somebody listens.
        self.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True)

    def message(self, until):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0, until - time.monotonic()))
            if not ready:
                raise Failure("the browser does not answer")
            part = os.read(self.back, 1 << 20)
            if not part:
                raise Failure("the browser has ended")
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def send(self, method, parameters, session):
        self.count += 1
        command = {"id": self.count, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self.to, json.dumps(command).encode() + b"\0")
        return self.count

    def call(self, method, **parameters):
        sent = self.send(method, parameters, self.session)
        until = time.monotonic() + 120
        while True:
            message = self.message(until)
            if message.get("id") == sent:
                if "error" in message:
                    raise Failure(f"{method}: {message['error']['message']}")
                return message["result"]
            self.note(message)

    def note(self, message):
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif message.get("method") == "Target.attachedToTarget" and parameters["targetInfo"]["type"] != "page":
            self.workers += 1
            for method in ["Runtime.enable", "Network.enable", "Runtime.runIfWaitingForDebugger"]:
                self.send(method, {}, parameters["sessionId"])

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise Failure(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'", 60)

    def until(self, expression, seconds, every=0.2, look=None):
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                state = self.evaluate("document.getElementById('state')?.textContent")
                raise Failure(f"after {seconds} s still not: {expression} (the page says: {state})")
            if look:
                look()
            time.sleep(every)

    def done(self, seconds, every=0.2, look=None):
        self.until("document.getElementById('main')?.dataset.done !== undefined", seconds, every, look)

    def data(self):
        return self.evaluate("({...document.getElementById('main').dataset})")

    def close(self):
        self.session = None
        try:
            self.call("Browser.close")
        except (Failure, OSError):
            pass
        self.process.wait(timeout=30)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def serve(folder):
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def require(condition, message):
    if not condition:
        raise Failure(message)


def native(program):
    command = [program, "generate", MODEL, "--prompt", PROMPT, "--temperature", "0", "--ignore-end"]
    command += ["--max-tokens", str(GREEDY_TOKENS), "--json"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise Failure(f"{program} cannot be started: {error.strerror}") from error
    require(done.returncode == 0, f"{program} generate failed:\n{done.stderr}")
    return json.loads(done.stdout)


# The page's own worker, asked for its text as it comes.
GREEDY = """new Promise((resolve, reject) => {
  const worker = new Worker("worker.js", { type: "module" });
  let text = "";
  worker.onmessage = ({ data }) => {
    if (data.type === "error") reject(new Error(data.message));
    if (data.type === "ready") worker.postMessage({ type: "write", id: 1, prompt: %s, temperature: 0, seed: 0, most: %d,
      pastEnds: true, pace: "full" });
    if (data.type === "piece" || data.type === "done") text += data.text;
    if (data.type === "done") {
      worker.terminate();
      resolve({ text, tokens: data.tokens, stateBytes: data.stateBytes });
    }
  };
  worker.postMessage({ type: "load", name: "performer", bytes: 1 });
})"""

# The rows of every head: how far their sums are from 1, and the largest weight of a later token.
WEIGHTS = """new Promise((resolve, reject) => {
  const worker = new Worker("worker.js", { type: "module" });
  let [asked, sums, later] = [[], 0, 0];
  const next = () => {
    if (asked.length) worker.postMessage({ type: "weights", text: %s, most: 24, ...asked.pop() });
    else { worker.terminate(); resolve([sums, later]); }
  };
  worker.onmessage = ({ data }) => {
    if (data.type === "error") reject(new Error(data.message));
    if (data.type === "ready") {
      for (let layer = 0; layer < data.layers; layer++)
        for (let head = 0; head < data.heads; head++) asked.push({ layer, head });
      next();
    }
    if (data.type === "weights") {
      const t = data.tokens.length;
      for (const weights of [data.favor, data.softmax])
        for (let i = 0; i < t; i++) {
          const row = weights.slice(i * t, (i + 1) * t);
          sums = Math.max(sums, Math.abs(row.reduce((a, b) => a + b) - 1));
          later = Math.max(later, ...row.slice(i + 1).map(Math.abs));
        }
      next();
    }
  };
  worker.postMessage({ type: "load", name: "performer", bytes: 1 });
})"""

# What is in the document, without what divides stories.
SHOWN = """[...document.querySelectorAll("#performer-text p:not(.gap)")].map((p) => p.textContent).join(" ")"""


def words(text):
    return " ".join(text.split())


def check_greedy(browser, url, program):
    expected = native(program)
    found = browser.evaluate(GREEDY % (json.dumps(PROMPT), GREEDY_TOKENS))
    require(found["tokens"] == GREEDY_TOKENS, f"{found['tokens']} tokens were written, not {GREEDY_TOKENS}")
    require(found["text"] == expected["text"], f"the page writes\n{found['text']}\nand the program\n{expected['text']}")
    require(found["stateBytes"] == expected["state_bytes"], "the states differ in size")
    browser.open(f"{url}?temperature=0&pace=full&length=1000")
    browser.done(120)
    shown = words(browser.evaluate(SHOWN))
    require(shown.startswith(words(PROMPT + expected["text"])), f"the page shows\n{shown[:1000]}")
    print(f"greedy: {GREEDY_TOKENS} tokens are those of the program")


def check_weights(browser):
    text = f"{PROMPT}, there was a little girl named Lily. She loved to play."
    sums, later = browser.evaluate(WEIGHTS % json.dumps(text))
    require(sums < 1e-5, f"the weights of a token add up to 1 but for {sums}")
    require(later == 0, f"a token looks at a later one, with weight {later}")
    print(f"weights: of every head, with sums within {sums:.0e} of 1, and none of a later token")


def check_speed(browser, url, floor):
    browser.open(f"{url}?pace=full&length={RACE_TOKENS}&seed=1")
    browser.done(300)
    rate = float(browser.data()["rate"])
    print(f"speed: {rate:.0f} tokens/s over {RACE_TOKENS} tokens")
    require(rate >= floor, f"{rate:.0f} tokens/s are fewer than {floor}")


def check_memory(browser, url, tokens):
    browser.open(f"{url}?pace=full&length={tokens}&seed=2")
    points = []

    def look():
        data = browser.data()
        if "tokens" in data:
            browser.call("HeapProfiler.collectGarbage")
            heap = browser.call("Runtime.getHeapUsage")["usedSize"]
            points.append((int(data["tokens"]), int(data["memoryBytes"]), int(data["stateBytes"]), round(heap)))

    # A short text is looked at more often, so that it is looked at several times.
    browser.done(3600, every=min(2, tokens / 20_000), look=look)
    look()
    settled = [point for point in points if point[0] >= tokens / 10]
    require(len(settled) > 2, "too few looks at the memory; give more tokens")
    print("memory: tokens, the program's bytes, the state's, JavaScript's")
    for point in settled[:: max(1, len(settled) // 8)] + settled[-1:]:
        print("   " + "  ".join(f"{number:>11,}" for number in point))
    first, last = settled[0], settled[-1]
    require(last[0] == tokens, f"the text ended after {last[0]} tokens")
    require(first[1] == last[1], f"the program's memory grew from {first[1]} to {last[1]} bytes")
    require(first[2] == last[2], "the state grew")
    require(last[3] - first[3] <= HEAP_SLACK, f"the page's memory grew from {first[3]} to {last[3]} bytes")
    print(f"   {browser.data()['rate']} tokens/s over all of them")


def luminance(colour):
    values = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Each element that has text of its own: its colour, and the first background behind it.
COLOURS = """[...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.disabled &&
    [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map((e) => {
  let behind = e;
  const isClear = () => getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)";
  while (behind.parentElement && isClear()) behind = behind.parentElement;
  const style = getComputedStyle(e);
  const colour = e instanceof SVGElement ? style.fill : style.color;
  return [e.tagName + "." + (e.className.baseVal ?? e.className), colour, getComputedStyle(behind).backgroundColor];
})"""


def check_contrast(browser, scheme):
    least = 21
    for name, colour, behind in browser.evaluate(COLOURS):
        low, high = sorted([luminance(colour), luminance(behind)])
        contrast = (high + 0.05) / (low + 0.05)
        require(contrast >= 4.5, f"{scheme}: {name} has a contrast of {contrast:.2f}: {colour} on {behind}")
        least = min(least, contrast)
    return least


def check_looks(browser, url, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for width, (across, down) in SIZES.items():
        browser.call("Emulation.setDeviceMetricsOverride", width=across, height=down, deviceScaleFactor=2,
                     mobile=width == "phone")
        for scheme in ["light", "dark"]:
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            for name, query in [("story", ""), ("race", "?beside=1&pace=full&length=4000")]:
                browser.open(f"{url}{query}")
                if name == "race":
                    browser.evaluate("document.getElementById('settings').open = true")
                browser.until("Number(document.getElementById('main').dataset.tokens) > 70", 120)
                screenshot(browser, folder / f"{name}-{width}-{scheme}-begun.png", False)
                browser.done(600)
                time.sleep(0.5)
                screenshot(browser, folder / f"{name}-{width}-{scheme}.png", True)
                wide = browser.evaluate("document.documentElement.scrollWidth")
                require(wide <= across, f"the page is {wide} pixels wide on a screen of {across}")
                least = check_contrast(browser, scheme)
            print(f"looks: {width}, {scheme}: least contrast {least:.1f}, screenshots in {folder}")
    browser.call("Emulation.clearDeviceMetricsOverride")


def screenshot(browser, path, whole):
    data = browser.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
    path.write_bytes(base64.b64decode(data))


def press(browser, key, code, text=None):
    for kind in ["keyDown", "keyUp"]:
        extra = {"text": text} if text and kind == "keyDown" else {}
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)


# What an element is called: links have no id.
CALLED = "({ id, href, tagName }) => id || href || tagName"


def check_access(browser, url):
    browser.open(f"{url}?pace=full&length=1000")
    browser.done(120)
    browser.evaluate("document.getElementById('settings').open = true; document.activeElement?.blur()")
    reached = []
    for _ in range(40):
        press(browser, "Tab", 9)
        at = browser.evaluate(f"({CALLED})(document.activeElement)")
        if at == "BODY":
            break
        reached.append(at)
    every = browser.evaluate(f"""[...document.querySelectorAll("input, select, button, summary, canvas, article, a")]
        .filter((e) => e.checkVisibility() && !e.disabled).map({CALLED})""")
    missing = set(every) - set(reached)
    require(not missing, f"the Tab key does not reach {', '.join(sorted(missing))}")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    for node in nodes:
        focusable = any(p["name"] == "focusable" and p["value"].get("value") for p in node.get("properties", []))
        role = node.get("role", {}).get("value")
        if focusable and role != "RootWebArea":
            require(node.get("name", {}).get("value"), f"a {role} that takes the focus has no name")
    # The story is begun, and a map read, without a mouse.
    browser.evaluate("document.getElementById('prompt').focus()")
    press(browser, "Enter", 13, "\r")
    browser.done(120)
    browser.until("document.getElementById('readout').textContent !== ''", 20)
    browser.evaluate("document.getElementById('favor-map').focus()")
    before = browser.evaluate("document.getElementById('readout').textContent")
    press(browser, "ArrowUp", 38)
    after = browser.evaluate("document.getElementById('readout').textContent")
    require(before != after and "looks at" in after, f"an arrow key moves nothing on the map: {before} {after}")
    print(f"access: {len(reached)} stops of the Tab key, all named; the map says: {after}")


def check_stops(browser, url):
    """What somebody does who does not wait: stops, begins anew, and gives a seed that is none."""
    state = "document.getElementById('state').textContent"
    writing = "Number(document.getElementById('main').dataset.tokens) > 20"
    click = "document.getElementById('%s').click()"

    def begun(query):
        browser.open(f"{url}?{query}")
        browser.until(writing, 120)

    begun("pace=full&length=100000&seed=-1")
    require(browser.evaluate("document.getElementById('seed').value") == "0", "the seed that is shown is not used")
    browser.evaluate("document.getElementById('seed').value = '-1'; " + click % "start")
    browser.done(10)
    require(browser.evaluate(state).startswith("Stopped after"), f"after a stop it says: {browser.evaluate(state)}")

    # Enter in another beginning begins it.
    begun("pace=full&length=100000&seed=1")
    browser.evaluate("const prompt = document.getElementById('prompt'); prompt.value = 'Ben was'; prompt.focus()")
    press(browser, "Enter", 13, "\r")
    browser.until(f"{SHOWN}.startsWith('Ben was') && {SHOWN}.length > 60", 30)
    browser.evaluate(click % "start")
    browser.done(10)

    # A race is stopped after one of the two has reached its end, and so is what it says.
    begun("pace=full&length=1000&beside=1&seed=1")
    browser.until(f"{state}.includes('still writing')", 120, every=0.02)
    browser.evaluate(click % "start")
    browser.done(10)
    require(browser.evaluate(state).startswith("Stopped after"), f"a stopped race says: {browser.evaluate(state)}")

    # Whoever listens is told the last sentence too, after which there is nothing.
    browser.open(url)
    browser.done(120)
    said = browser.evaluate("document.getElementById('announce').textContent")
    last = re.split(r"(?<=[.!?]) ", words(browser.evaluate(SHOWN)))[-1]
    require(words(said).startswith(last), f"the last sentence is {last!r}, and what is told last is {said!r}")
    print("stops: with a seed that is none, by another beginning, and in a race; the last sentence is told")


def check_offline(browser, url, server):
    browser.until("document.getElementById('main').dataset.offline === 'ready'", 60)
    server.shutdown()
    server.server_close()
    browser.open(f"{url}?pace=full&length=1000&beside=1&seed=9")
    browser.done(120)
    data = browser.data()
    require(data["tokens"] == "1000", f"without a server, {data['tokens']} tokens were written")
    print("offline: both models write without a server")


def check(page, program, tokens, floor, screenshots, profile):
    require((page / "performer_web_bg.wasm").exists(), f"{page} holds no page: build it with scripts/page.sh")
    server = serve(page)
    origin = f"http://127.0.0.1:{server.server_address[1]}"
    url = f"{origin}/"
    browser = Browser(profile)
    try:
        browser.open(url)
        check_greedy(browser, url, program)
        check_weights(browser)
        check_speed(browser, url, floor)
        check_access(browser, url)
        check_stops(browser, url)
        check_looks(browser, url, screenshots)
        check_memory(browser, url, tokens)
        check_offline(browser, url, server)
        require(not browser.errors, "the browser reports: " + "; ".join(browser.errors))
        elsewhere = {r for r in browser.requests if not r.startswith((origin, "data:", "blob:", "about:"))}
        require(not elsewhere, f"the page asks for {', '.join(sorted(elsewhere))}")
        heard = any(".safetensors" in r for r in browser.requests)
        require(browser.workers and heard, "the requests of the workers were not heard")
    finally:
        browser.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--tokens", type=int, default=100_000, choices=[1000, 4000, 10_000, 100_000])
    parser.add_argument("--floor", type=float, default=300)
    parser.add_argument("--screenshots", type=pathlib.Path, default=ROOT / "target" / "page-screenshots")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        try:
            check(arguments.page, arguments.program, arguments.tokens, arguments.floor, arguments.screenshots, profile)
        except Failure as failure:
            print(f"page_check: {failure}", file=sys.stderr)
            return 1
    print("the page is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
