"""Looks at the site in a browser, page by page, 1280 and 400 pixels wide: `make docs` runs it on site/ where there is
Chromium or Chrome. It fails when an element is wider than its page, or when a word in a table is cut.

    python docs/generator/look.py [folder of the site]

The browser opens one page that loads all others into a frame, one after the other, measures there, and sends what it
has found back to the server that it came from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1280, 400)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 300  # seconds
PAGE = "look.html"
MEASURE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
const name = (element) => element.tagName.toLowerCase() + (element.className && "." + element.className) + " " +
  JSON.stringify(element.textContent.trim().slice(0, 60));
const scrolls = (element) => {
  for (let above = element.parentElement; above; above = above.parentElement)
    if (getComputedStyle(above).overflowX !== "visible") return true;
  return false;
};
function wide(view, page, width) {
  for (const element of view.document.querySelectorAll(".md-content *, .md-footer *, .md-header *")) {
    const box = element.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !scrolls(element))
      found.push(`${page} at ${width}: ${name(element)} ends at ${Math.round(box.right)}`);
  }
  if (view.document.documentElement.scrollWidth > width + 1) found.push(`${page} at ${width} scrolls sideways`);
}
function cut(view, page, width) {
  for (const cell of view.document.querySelectorAll("td, th")) {
    const texts = view.document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode())
      for (const word of text.data.matchAll(/[A-Za-z0-9]+/g)) {
        const range = view.document.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (tops.size > 1) found.push(`${page} at ${width}: the table's word "${word[0]}" is cut`);
      }
  }
}
async function look() {
  for (const width of widths)
    for (const page of pages) {
      const frame = document.createElement("iframe");
      frame.style.cssText = `width:${width}px;height:900px;border:0`;
      frame.src = page;
      const loaded = new Promise((done) => (frame.onload = done));
      document.body.append(frame);
      await loaded;
      wide(frame.contentWindow, page, width);
      cut(frame.contentWindow, page, width);
      frame.remove();
    }
  await fetch("found", { method: "POST", body: JSON.stringify({ looked: pages.length * widths.length, found }) });
}
look();
</script>"""


class Server(SimpleHTTPRequestHandler):
    found: Queue[dict] = Queue()

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print(f"nobody has looked at the site: there is none of {', '.join(BROWSERS)}")
        return 0
    pages = [path for path in site.rglob("*.html") if "<title>Redirecting" not in path.read_text()]
    names = sorted(str(path.relative_to(site)) for path in pages if path.name != "404.html")
    checker = site / PAGE
    checker.write_text(MEASURE.replace("PAGES", json.dumps(names), 1).replace("WIDTHS", json.dumps(WIDTHS), 1))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        result = open_in(browser, f"http://127.0.0.1:{server.server_port}/{PAGE}")
    finally:
        server.shutdown()
        checker.unlink()
    print(*result["found"], sep="\n", end="\n" * bool(result["found"]))
    print(f"looked at {result['looked']} views of {len(names)} pages: {len(result['found'])} faults")
    return int(bool(result["found"]) or not names)


def open_in(browser: str, address: str) -> dict:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            "--no-sandbox",
            "--hide-scrollbars",
            "--window-size=1400,1000",
        ]
        command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return Server.found.get(timeout=TIMEOUT)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
