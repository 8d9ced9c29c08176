"""Pictures of the playground for README and docs, taken in a browser: make playground-pictures

python -m tools.playground_pictures --all FOLDER    every tab, wide, on a phone and dark, to look at
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "docs" / "images"
KEPT = {("light", "Tokens"): "playground-tokens.png", ("dark", "Detection"): "playground-detection.png"}
KEPT[("light", "Tune")] = "playground-tune.png"
WINDOWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
}
READY = {
    "Tokens": "#tokens-result table",
    "Dynamic": "#dynamic-result table",
    "Synthesis": "#synthesis-groups figure",
    "Detection": "#detection-result table",
    "Tune": "#tune-point table",
}
_COLOURS = 256
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@contextmanager
def page() -> Iterator[str]:
    """The address of a playground."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agglo", "play", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().partition(" at ")[2].split()[0]
    finally:
        process.terminate()
        process.wait()


def open_tab(window: Any, name: str) -> None:
    found = window.get_by_role("tab", name=name, exact=True)
    if found.count() and found.first.is_visible():
        found.first.click()
    else:  # on a phone some are in a menu
        window.locator(".overflow-menu > button").first.click()
        window.locator(".overflow-dropdown button", has_text=name).click()


def show(window: Any, name: str) -> None:
    """A tab with something on it."""
    open_tab(window, name)
    if name == "Synthesis":
        window.get_by_role("button", name="Draw").click()
    if name == "Tune":
        window.locator("#tune-plot [data-point='1'] .target").click()
    window.wait_for_selector(READY[name], timeout=120_000)
    if name == "Tokens":
        window.locator("#tokens-result [data-leaf]").first.wait_for()
        frame = window.locator("#tokens-result figure.groups .frame").nth(2)
        box = frame.bounding_box()
        frame.click(position={"x": 0.55 * box["width"], "y": 0.6 * box["height"]})
    window.wait_for_timeout(600)


def save(content: bytes, path: Path) -> None:
    """With fewer colours, which halves the file."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        image.convert("RGB").quantize(_COLOURS).save(path, optimize=True)


def main() -> None:
    from playwright.sync_api import sync_playwright

    from tests.playground.test_browser import browser_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write every tab there instead")
    folder = parser.parse_args().all
    with page() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_file(), args=_FLAGS)
        for kind, settings in WINDOWS.items():
            window = browser.new_context(**settings).new_page()
            window.goto(address)
            window.wait_for_selector(READY["Tokens"], timeout=120_000)
            for name in READY:
                if folder is None and (kind, name) not in KEPT:
                    continue
                show(window, name)
                path = IMAGES / KEPT[kind, name] if folder is None else folder / f"{kind}-{name.lower()}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                save(window.screenshot(full_page=True), path)
                print(path)
        browser.close()


if __name__ == "__main__":
    main()
