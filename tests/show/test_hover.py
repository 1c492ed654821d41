"""Does a browser draw the page of a run, and show values where a pointer is?"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxpar.show.chart import WIDTH
from jaxpar.show.hover import SCRIPT
from jaxpar.show.run_data import read_run
from jaxpar.show.run_page import as_html
from tests.show.handmade_runs import BEGAN, write_full_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)
MEASURE = """<pre id="measured"></pre><script>
window.addEventListener("error", e => document.title = "error: " + e.message);
const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
const at = x => ({clientX: box.left + x * box.width, clientY: box.top + 9});
plot.dispatchEvent(new PointerEvent("pointermove", at(0.305)));
const tip = document.querySelector(".tip").innerText;
plot.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
const next = document.querySelector(".tip b").innerText;
const crosses = document.querySelectorAll(".cross").length;
plot.dispatchEvent(new PointerEvent("pointerleave"));
const line = document.querySelector("path.first.line");
document.getElementById("measured").textContent = JSON.stringify({
  tip, next, crosses, left: document.querySelectorAll(".tip, .cross").length,
  plots: document.querySelectorAll(".plot").length,
  curve: line.getBoundingClientRect().width / box.width,
  colour: getComputedStyle(line).stroke,
  scrolls: document.documentElement.scrollWidth > innerWidth,
});</script></body>"""


def test_script_does_not_end_its_element_and_sets_texts_as_text():
    assert "</" not in SCRIPT
    assert "innerHTML" not in SCRIPT
    assert f"const WIDTH = {WIDTH};" in SCRIPT


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize(
    ("scheme", "colour"), [(0, "rgb(98, 163, 245)"), (1, "rgb(42, 111, 201)")]
)
def test_chromium_draws_the_page_and_shows_values(
    tmp_path: Path, scheme: int, colour: str
) -> None:
    """Scheme 0 is a dark screen, 1 a light one."""
    run = read_run(write_full_run(tmp_path / "run"))
    page = tmp_path / "page.html"
    page.write_text(as_html([run], BEGAN).replace("</body>", MEASURE))
    done = subprocess.run(
        [
            str(CHROMIUM),
            *QUIET,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (text,) = re.findall(r'<pre id="measured">(.+?)</pre>', done.stdout, re.DOTALL)
    found = json.loads(text.replace("&gt;", ">").replace("&amp;", "&"))
    tip = found["tip"].split()
    assert tip[:3] == ["step", "61", "train"]
    assert "skipped: loss nan, batch 60" in found["tip"]
    assert found["next"] == "step 62", "the next point of the longest line"
    assert found["crosses"] == found["plots"] > 8
    assert found["left"] == 0
    assert found["curve"] == pytest.approx(0.995, abs=0.01)
    assert found["colour"] == colour
    assert found["scrolls"] is False
