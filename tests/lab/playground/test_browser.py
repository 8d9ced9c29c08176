"""The page in a real browser: every tab is driven, and its numbers are the library's.

Playwright drives Chromium: Debian's (`apt install chromium`), one of `playwright install chromium`, or what
AGGLO_BROWSER names.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from agglo import tuned
from agglo.lab.playground.detection import detect
from agglo.lab.playground.images import EASY, FIRST, HARD, chosen_image
from agglo.lab.playground.settings import choose, python_line
from agglo.lab.playground.tokens import Classifier, compare
from tests.lab.playground.test_images import bomb
from tests.support.playground import Played

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need playwright: pip install playwright"
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-quic", "--disable-component-update", "--disable-sync"]
SECONDS = 120  # at most for anything: a machine may have other things to do
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
READY = {
    "Tokens": "#tokens-result table",
    "Dynamic": "#dynamic-result table",
    "Synthesis": "#synthesis-result table",
    "Detection": "#detection-result table",
}


def browser_file() -> str | None:
    """The browser of this machine; None leaves it to Playwright to find its own."""
    named = os.environ.get("AGGLO_BROWSER")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        try:
            running = driver.chromium.launch(executable_path=browser_file(), args=FLAGS)
        except playwright.Error as error:
            pytest.skip(
                "no browser: apt install chromium, or playwright install chromium, or AGGLO_BROWSER=its file "
                f"({str(error).splitlines()[0]})"
            )
        yield running
        running.close()


class Visit:
    """A visitor's window. hosts: all that it asked. troubles: errors of its scripts."""

    def __init__(self, window: Any, address: str) -> None:
        self.window, self.hosts, self.troubles = window, set(), []
        window.set_default_timeout(SECONDS * 1000)
        window.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc or request.url[:5]))
        window.on("pageerror", lambda error: self.troubles.append(str(error)))
        window.on("console", lambda said: said.type == "error" and self.troubles.append(said.text))
        window.goto(address)
        window.wait_for_selector("#tokens-result figure.groups")

    def open(self, tab: str) -> None:
        found = self.window.get_by_role("tab", name=tab, exact=True)
        if found.count() and found.first.is_visible():
            found.first.click()
        else:  # tabs that find no room are in a menu
            self.window.locator(".overflow-menu > button").first.click()
            self.window.locator(".overflow-dropdown button", has_text=tab).click()

    def set_slider(self, label: str, value: float) -> None:
        """By the number beside it."""
        number = self.window.locator(f"input[type=number][aria-label*='{label}']:visible").first
        number.fill(str(value))
        number.press("Enter")

    def wait(self, expression: str) -> None:
        self.window.wait_for_function(expression)

    def counts(self, where: str) -> list[list[int]]:
        cells = self.window.locator(f"{where} [data-counts]").all()
        return [[int(count) for count in cell.get_attribute("data-counts").split()] for cell in cells]

    def line(self, where: str) -> str:
        return str(self.window.locator(f"{where} pre.line code").inner_text())


@pytest.fixture
def visit(browser: Any, page: Played) -> Iterator[Visit]:
    context = browser.new_context(viewport=DESKTOP)
    visitor = Visit(context.new_page(), page.address)
    yield visitor
    context.close()
    assert visitor.hosts <= {urlsplit(page.address).netloc, "data:", "blob:"}
    assert visitor.troubles == []


def test_tokens(visit: Visit, classifier: Classifier) -> None:
    visit.window.locator("[data-pick='example:boot']").first.click()
    visit.set_slider("keep rate", 0.3)
    visit.wait("document.querySelectorAll('#tokens-result [data-counts]')[1]?.dataset.counts === '196 58 17 5'")
    visit.wait("document.querySelector('#tokens-result .refused')?.innerText.includes('tome')")
    visit.set_slider("keep rate", 0.6)
    visit.wait("document.querySelectorAll('#tokens-result figure.groups').length === 6")
    sides = [choose("atc", keep_rate=0.6), choose("tome", keep_rate=0.6)]
    found = compare(classifier, chosen_image("example:boot"), sides)
    assert visit.counts("#tokens-result") == [[196, *one.counts] for one in found.passes]
    gflops = [float(cell.get_attribute("data-gflops")) for cell in visit.window.locator("#tokens-result .gflops").all()]
    assert gflops == [one.gflops for one in found.passes]
    answers = visit.window.locator("#tokens-result .answer").all()
    expected = [one.top[rank] for rank in range(5) for one in found.passes]
    assert [cell.get_attribute("data-name") for cell in answers] == [name for name, _ in expected]
    probabilities = [float(cell.get_attribute("data-probability")) for cell in answers]
    assert probabilities == pytest.approx([probability for _, probability in expected], rel=1e-4)
    of_dense = [found.dense.top[rank][0] for rank in range(5) for _ in found.passes]
    differ = [answer[0] != name for answer, name in zip(expected, of_dense, strict=True)]
    assert ["differs" in cell.get_attribute("class") for cell in answers] == differ
    assert visit.line("#tokens-result").splitlines() == [side.line for side in found.sides]
    assert visit.window.locator("#tokens-result svg.dendrogram").get_attribute("data-groups") == "117"
    _click_a_patch(visit, found)


def _click_a_patch(visit: Visit, found: Any) -> None:
    """Its group lights up in every figure, with its members and its size; arrow keys go on from there."""
    row, column = 6, 9
    frame = visit.window.locator("#tokens-result figure.groups .frame").nth(1)
    box = frame.bounding_box()
    frame.click(position={"x": (column + 0.5) * box["width"] / 14, "y": (row + 0.5) * box["height"] / 14})

    def check(patch: tuple[int, int]) -> None:
        figures = visit.window.locator("#tokens-result figure.groups").all()
        stages = [labels for one in found.passes for labels in one.stages.values()]
        for figure, labels in zip(figures, stages, strict=True):
            members = np.flatnonzero(labels.reshape(-1) == labels[patch])
            assert figure.get_attribute("data-size") == str(len(members))
            assert figure.get_attribute("data-members") == " ".join(map(str, members))
            assert figure.locator("svg .rim").count() == 1
        lit = visit.window.locator("#tokens-result [data-leaf].lit").all()
        first = np.flatnonzero(stages[0].reshape(-1) == stages[0][patch])
        assert {int(leaf.get_attribute("data-leaf")) for leaf in lit} == set(first.tolist())
        words = visit.window.locator("#tokens-result .lit[role=status]").inner_text()
        assert f"{patch[0] + 1}/{patch[1] + 1}" in words and f"{len(first)} patch" in words

    check((row, column))
    figure = visit.window.locator("#tokens-result figure.groups").nth(1)
    figure.focus()
    figure.press("ArrowLeft")
    figure.press("ArrowDown")
    check((row + 1, column - 1))
    figure.press("Escape")
    assert visit.window.locator("#tokens-result svg .rim").count() == 0


def test_a_file_of_ones_own(visit: Visit, classifier: Classifier, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "own.png")
    chooser = visit.window.locator(".picker input[type=file]").first
    chooser.set_input_files(tmp_path / "own.png")
    visit.wait("document.querySelector('.picker img.chosen').src.startsWith('data:image/png')")
    found = compare(classifier, Image.fromarray(pixels), [choose("atc", keep_rate=0.5)])
    labels = ",".join(map(str, found.passes[1].stages[3].reshape(-1)))
    visit.wait(f"document.querySelector('#tokens-result figure.groups')?.dataset.labels === '{labels}'")
    for content, says in ((b"no image at all", "no image"), (bomb(6000, 6000), "6000 x 6000")):
        (tmp_path / "bad.png").write_bytes(content)
        chooser.set_input_files(tmp_path / "bad.png")
        visit.wait(f"document.querySelector('#tokens-result .refused')?.innerText.includes('{says}')")
    (tmp_path / "large.png").write_bytes(bytes(9 * 1024 * 1024))
    chooser.set_input_files(tmp_path / "large.png")
    visit.wait("document.querySelector('.picker .said').innerText.includes('too large')")
    visit.troubles.clear()  # the browser cannot show what is no image


def test_a_large_photograph_is_made_smaller_before_it_is_sent(visit: Visit, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.jpg", quality=95)
    visit.window.locator(".picker input[type=file]").first.set_input_files(tmp_path / "large.jpg")
    visit.wait("document.querySelector('.picker img.chosen').src.startsWith('data:image/jpeg')")
    source = visit.window.locator(".picker img.chosen").first.get_attribute("src")
    with Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))) as sent:
        assert sent.size == (1024, 768)


def test_dynamic(visit: Visit, classifier: Classifier) -> None:
    visit.open("Dynamic")
    visit.window.wait_for_selector(READY["Dynamic"])
    visit.set_slider("threshold", 0.2)
    chosen = choose("atc", threshold=0.2)
    counts = [[196, *compare(classifier, chosen_image(name), [chosen]).passes[1].counts] for name in (EASY, HARD)]
    text = " ".join(map(str, counts[0]))
    visit.wait(f"document.querySelector('#dynamic-result [data-counts]')?.dataset.counts === '{text}'")
    assert visit.counts("#dynamic-result") == counts and counts[0][-1] < counts[1][-1]
    assert visit.line("#dynamic-result") == python_line(chosen)


def test_synthesis(visit: Visit) -> None:
    visit.open("Synthesis")
    visit.window.get_by_role("button", name="Draw").click()
    visit.wait("document.querySelectorAll('#synthesis-result tbody tr').length === 3")
    figures = visit.window.locator("#synthesis-result figure.groups").all()
    assert [figure.get_attribute("data-count") for figure in figures] == ["128"] * 6
    assert [figure.get_attribute("data-name").split()[-1] for figure in figures] == ["1", "13", "25"] * 2


def test_detection(visit: Visit) -> None:
    from agglo.lab.tasks.detection.specs import open_detector

    visit.open("Detection")
    visit.window.wait_for_selector(READY["Detection"])
    found = detect(open_detector("embedded"), chosen_image("example:scene 1"), choose("atc", keep_rate=0.7), 0.5)
    assert visit.counts("#detection-result") == [[196], [196, *found.reduced.counts]]
    objects = visit.window.locator("#detection-result .objects").all_inner_texts()
    assert objects == [str(len(one.objects["labels"])) for one in found.passes]
    figures = visit.window.locator("#detection-result figure.groups").all()
    for figure, labels in zip(figures, found.reduced.stages.values(), strict=True):
        assert figure.get_attribute("data-labels") == ",".join(map(str, labels.reshape(-1)))
    patch = (5, 8)
    frame = figures[0].locator(".frame")
    box = frame.bounding_box()
    frame.click(position={"x": (patch[1] + 0.5) * box["width"] / 14, "y": (patch[0] + 0.5) * box["height"] / 14})
    for figure, labels in zip(figures, found.reduced.stages.values(), strict=True):
        members = np.flatnonzero(labels.reshape(-1) == labels[patch])
        assert figure.get_attribute("data-members") == " ".join(map(str, members))


def test_a_result_of_tune_is_a_method(visit: Visit, classifier: Classifier) -> None:
    config = tuned.config("agglo_fashion_vit-half")
    visit.window.get_by_label("method", exact=True).first.click()
    visit.window.locator("[data-testid=dropdown-option]", has_text="agglo_fashion_vit-half").click()
    found = compare(classifier, chosen_image(FIRST), [config])
    counts = " ".join(map(str, [196, *found.passes[1].counts]))
    visit.wait(f"document.querySelectorAll('#tokens-result [data-counts]')[1]?.dataset.counts === '{counts}'")
    assert visit.line("#tokens-result").splitlines()[0] == python_line(config)


def test_by_keyboard(visit: Visit) -> None:
    """Tab reaches the tabs, the examples, the slider and the figures, in this order; what it reaches can be used."""
    reached: list[str] = []
    for _ in range(40):
        visit.window.keyboard.press("Tab")
        found = visit.window.evaluate(
            "(e => e.getAttribute('role') || e.type || e.dataset.pick || e.tagName)(document.activeElement)"
        )
        if found not in reached:
            reached.append(found)
    wanted = ["tab", "button", "file", "range", "application"]
    assert [each for each in reached if each in wanted] == wanted
    slider = visit.window.locator("input[type=range]").first
    slider.focus()
    slider.press("ArrowRight")
    visit.wait("document.querySelectorAll('#tokens-result [data-counts]')[1]?.dataset.counts === '196 107 59 32'")


def test_a_name_in_a_figure_is_text_whatever_it_holds(visit: Visit) -> None:
    figure = visit.window.locator("#tokens-result figure.groups").first
    figure.evaluate("figure => { figure.dataset.name = '<img src=x onerror=\"window.ran = true\">'; }")
    figure.locator(".frame").click()
    status = visit.window.locator("#tokens-result .lit[role=status]")
    assert "<img src=x" in status.inner_text() and status.locator("img").count() == 0
    assert visit.window.evaluate("window.ran") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_in_light_and_dark(browser: Any, page: Played, scheme: str) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme=scheme, device_scale_factor=2)
    visitor = Visit(context.new_page(), page.address)
    for tab, ready in READY.items():
        visitor.open(tab)
        if tab == "Synthesis":
            visitor.window.get_by_role("button", name="Draw").click()
            visitor.window.wait_for_selector("#synthesis-result figure.groups")
        visitor.window.wait_for_selector(ready)
        wide = visitor.window.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"], f"{tab} is {wide} pixels wide"
        ink, paper = (_lightness(visitor, ready, name) for name in ("color", "background-color"))
        assert abs(ink - paper) > 0.5, f"{tab}: text of lightness {ink} on {paper}"
        assert (paper < 0.5) == (scheme == "dark")
    assert visitor.hosts <= {urlsplit(page.address).netloc, "data:", "blob:"} and visitor.troubles == []
    context.close()


def _lightness(visitor: Visit, selector: str, name: str) -> float:
    """Of a thing's text, or of the first ground under it that is not transparent; 0 black, 1 white."""
    return float(
        visitor.window.evaluate(
            """([selector, name]) => {
                const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
                for (let e = document.querySelector(selector); e; e = e.parentElement) {
                    context.clearRect(0, 0, 1, 1);
                    context.fillStyle = getComputedStyle(e).getPropertyValue(name);
                    context.fillRect(0, 0, 1, 1);
                    const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
                    if (alpha > 200) return (0.299 * red + 0.587 * green + 0.114 * blue) / 255;
                }
                return 1;
            }""",
            [selector, name],
        )
    )
