"""Take the images of the playground for README and docs in a browser: make playground-images"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.lab.playground.test_browser import DESKTOP, FLAGS, READY, Visit, browser_file
from tests.support.playground import played

IMAGES = Path(__file__).parents[1] / "docs" / "images"
# The tabs in the docs, and the windows that they are shown in.
SHOWN: dict[str, dict[str, Any]] = {
    "Tokens": {"viewport": DESKTOP},
    "Detection": {"viewport": DESKTOP, "color_scheme": "dark"},
}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work, played(Path(work)) as page, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_file(), args=FLAGS)
        for name, settings in SHOWN.items():
            visit = Visit(browser.new_context(**settings).new_page(), page.address)
            visit.open(name)
            visit.window.wait_for_selector(READY[name])
            if name == "Tokens":
                frame = visit.window.locator("#tokens-result figure.groups .frame").nth(2)
                box = frame.bounding_box()
                frame.click(position={"x": 0.55 * box["width"], "y": 0.6 * box["height"]})
            visit.window.wait_for_timeout(600)
            with Image.open(io.BytesIO(visit.window.screenshot(full_page=True))) as image:
                image = image.convert("RGB").quantize(256)  # fewer colours halve the file
                image.save(IMAGES / f"playground-{name.lower()}.png", optimize=True)
        browser.close()
