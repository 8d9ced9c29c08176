"""Take the images of the playground for README and docs in a browser: make playground-images

python -m tools.playground_images --all FOLDER    every tab, wide, on a phone and dark, to look at
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.lab.playground.test_browser import DESKTOP, FLAGS, PHONE, READY, Visit, browser_file
from tests.support.playground import played

IMAGES = Path(__file__).parents[1] / "docs" / "images"
IN_DOCS = {"light-tokens", "dark-detection"}
WINDOWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": DESKTOP},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "device_scale_factor": 2},
}


def show(visit: Visit, name: str) -> None:
    """Open a tab with something on it."""
    visit.open(name)
    if name == "Synthesis":
        visit.window.get_by_role("button", name="Draw").click()
        visit.window.wait_for_selector("#synthesis-result figure.groups")
    visit.window.wait_for_selector(READY[name])
    if name == "Tokens":
        frame = visit.window.locator("#tokens-result figure.groups .frame").nth(2)
        box = frame.bounding_box()
        frame.click(position={"x": 0.55 * box["width"], "y": 0.6 * box["height"]})
    visit.window.wait_for_timeout(600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write every tab there instead")
    folder = parser.parse_args().all
    with tempfile.TemporaryDirectory() as work, played(Path(work)) as page, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_file(), args=FLAGS)
        for kind, settings in WINDOWS.items():
            visit = Visit(browser.new_context(**settings).new_page(), page.address)
            for name in READY:
                shown = f"{kind}-{name.lower()}"
                if folder is None and shown not in IN_DOCS:
                    continue
                show(visit, name)
                path = IMAGES / f"playground-{name.lower()}.png" if folder is None else folder / f"{shown}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                with Image.open(io.BytesIO(visit.window.screenshot(full_page=True))) as image:
                    image.convert("RGB").quantize(256).save(path, optimize=True)  # fewer colours halve the file
        browser.close()


if __name__ == "__main__":
    main()
