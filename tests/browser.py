"""Layout of our pages in a real browser: headless Chromium, measured by a page of the test's own.

The page under test runs no script, so a page around it shows it in frames of several widths and measures them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from suite_plugins.patience import patient

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""Path of Chromium; None if it is not installed."""
WIDTHS = (360, 768, 1280)
SECONDS = 120
_MEASURE = """<!DOCTYPE html><meta charset="utf-8"><body><pre id="measured">none</pre><script>
const widths = %s, measured = {};
function measure(page) {
  const root = page.documentElement, empty = [], wide = [], flat = [];
  for (const section of page.querySelectorAll("section")) {
    const heading = section.querySelector("h2");
    if (!heading) continue;
    const words = section.innerText.replace(heading.innerText, "").trim();
    if (!words && !section.querySelector("svg") || section.offsetHeight <= heading.offsetHeight + 8)
      empty.push(heading.innerText);
  }
  for (const each of page.querySelectorAll("body *")) {
    if (each.closest(".scroll") && !each.matches(".scroll")) continue;
    if (each.closest("svg") && !each.matches("svg.chart-plot")) continue;
    const place = each.getBoundingClientRect();
    if (place.width && place.right > root.clientWidth + 1) wide.push(each.outerHTML.slice(0, 200));
  }
  for (const plot of page.querySelectorAll("svg.chart-plot")) {
    const place = plot.getBoundingClientRect();
    if (place.width < 150 || place.height < 100) flat.push(plot.getAttribute("aria-label"));
  }
  return {scroll: root.scrollWidth, width: root.clientWidth, height: root.scrollHeight, empty, wide, flat,
          charts: page.querySelectorAll("svg.chart-plot").length};
}
function show(at) {
  if (at == widths.length) {
    document.getElementById("measured").textContent = JSON.stringify(measured);
    return;
  }
  const frame = document.createElement("iframe");
  frame.width = widths[at]; frame.height = 900; frame.src = %s; frame.style.border = 0;
  frame.onload = () => { measured[widths[at]] = measure(frame.contentDocument); show(at + 1); };
  document.body.append(frame);
}
show(0);
</script>"""


@dataclass(frozen=True)
class Seen:
    """Measurements of a page at one width."""

    width: int
    scroll: int
    """Width of its content."""
    height: int
    charts: int
    empty: list[str]
    """Headings of empty sections."""
    wide: list[str]
    """Elements that overflow on the right, except those in a box that scrolls by itself."""
    flat: list[str]
    """Charts too small to be read."""


def seen(page: Path, folder: Path, *, dark: bool = False) -> list[Seen]:
    """Measure the page at WIDTHS; skip the test without Chromium. `folder`: an empty one for the browser."""

    if CHROMIUM is None:
        pytest.skip("needs Chromium to look at the page")
    around = folder / "around.html"
    around.write_text(_MEASURE % (json.dumps(WIDTHS), json.dumps(page.as_uri())), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--window-size=1400,1000",
    ]
    options += [f"--user-data-dir={folder / 'profile'}", "--timeout=60000", "--dump-dom"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    ran = subprocess.run(
        [CHROMIUM, *options, around.as_uri()], capture_output=True, text=True, timeout=patient(SECONDS), check=True
    )
    found = re.search(r'<pre id="measured">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found is not None, ran.stdout[:2000]
    measured: dict[str, Any] = json.loads(unescape(found[1]))
    return [Seen(**measured[str(width)]) for width in WIDTHS]


def photograph(page: Path, picture: Path, folder: Path, *, width: int, height: int) -> None:
    """Write a PNG of the page; `folder`: an empty one for the browser."""
    assert CHROMIUM is not None, "needs Chromium to draw the picture"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
    options += [f"--window-size={width},{height}", f"--screenshot={picture}"]
    subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, timeout=patient(SECONDS), check=True)
