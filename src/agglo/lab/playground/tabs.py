"""The page: controls, what they ask for, and where the answer goes. What is computed lies in other modules.

A tab is a function, called inside the page's Blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL.Image import Image

from agglo.clustering.api import LINKAGES
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.data.fashion_mnist import CLASSES
from agglo.lab.playground.detection import detect
from agglo.lab.playground.html import asset, data_url, render
from agglo.lab.playground.images import EASY, HARD, LIMITS, MOST_BYTES, PREFIX, chosen_image, garments, scenes
from agglo.lab.playground.models import Models
from agglo.lab.playground.settings import choose, methods
from agglo.lab.playground.synthesis import SynthesisResult, draw
from agglo.lab.playground.tokens import compare
from agglo.version import __version__

TITLE = "agglo playground"
_NONE = "none"
# Requests that follow a control: only the latest position of a slider counts.
_FOLLOW: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", "concurrency_limit": 8}
_PICKER = """
<div class="picker">
  <p class="name">${label_text}</p>
  <img class="chosen" alt="the chosen image"
    src="${value && value.startsWith('data:') ? value : (examples.find(e => e.value === value) || examples[0]).src}">
  <div class="examples" role="group" aria-label="Examples">
    ${examples.map(e => `<button type="button" data-pick="${e.value}" title="${e.title}" aria-label="${e.title}"
      aria-pressed="${e.value === value}"><img src="${e.src}" alt=""></button>`).join("")}
  </div>
  <label class="drop">Your own: choose a file or drop it here<input type="file" accept="image/*"></label>
  <p class="said" role="alert"></p>
</div>
"""


def build(models: Models) -> Any:
    """Return the page as Gradio's Blocks."""
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown(
            f"# {TITLE}\nA vision transformer needs few of its tokens. Move a slider and see which ones merge, what "
            f"that saves and what it costs. `{Path(models.spec.name).name}`, agglo {__version__}."
        )
        with gr.Tabs():
            tokens_tab(models, page)
            dynamic_tab(models)
            synthesis_tab(models)
            detection_tab(models)
    page.queue(max_size=64, api_open=False)
    return page


def looks() -> dict[str, Any]:
    """Return theme and style for Gradio's server. Fonts are the visitor's own: none is asked of another host."""
    font = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    monospaced = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
    theme: Any = gr.themes.Default(primary_hue="blue", font=font, font_mono=monospaced)
    # Gradio's own is too faint to read.
    theme = theme.set(body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_300")
    theme = theme.set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300")
    return {"theme": theme, "css": asset("style.css")}


def answering(answer: Callable[..., str]) -> Callable[..., str]:
    """Show what the visitor can mend in place of the answer. Gradio prints other errors in the terminal."""

    @wraps(answer)
    def guarded(*arguments: Any) -> str:
        try:
            return answer(*arguments)
        except ModuleNotFoundError as error:
            return render("refused", sentence=f"This needs {error.name}: pip install 'agglo[web]' brings all of it.")
        except (ValueError, UnsupportedModelError) as error:
            return render("refused", sentence=str(error))

    return guarded


def picker(examples: Mapping[str, Image], value: str, label: str) -> Any:
    """Return a component with examples to press and a file to choose or drop.

    Gradio's own answers an upload with the path of a file on the server. The value of this one is "example:..." or a
    data URL, which goes with the request that needs it, and nothing is stored.
    """

    def thumbnail(image: Image) -> str:
        image = image.copy()
        image.thumbnail((192, 192))
        return data_url(np.asarray(image))

    return gr.HTML(
        value=value,
        html_template=_PICKER,
        js_on_load=asset("picker.js"),
        examples=[{"value": PREFIX + name, "title": name, "src": thumbnail(each)} for name, each in examples.items()],
        label_text=label,
        large=400_000,  # bytes of a file that is made smaller in the browser
        longest=1024,  # pixels that are then left of its long side
        most=MOST_BYTES,
        too_large=f"The file is too large; {LIMITS}.",
    )


def _controls() -> Any:
    return gr.Column(scale=1, min_width=250)


def _results(name: str) -> Any:
    """Return a component for HTML whose groups light up."""
    with gr.Column(scale=3, min_width=320):
        return gr.HTML(js_on_load=asset("groups.js"), elem_id=name)


def _linkage_menu(label: str = "linkage (atc)") -> Any:
    return gr.Dropdown(list(LINKAGES), value="average", label=label, min_width=110)


def _method_row(label: str, method: str, tuned: list[tuple[str, str]]) -> tuple[Any, Any]:
    """Return the menus of methods and linkages. Results of `agglo tune` are methods with a schedule of their own."""
    with gr.Row():
        choices = [*((name, name) for name in methods()), *tuned]
        return gr.Dropdown(choices, value=method, label=label, min_width=120), _linkage_menu()


def _keep_rate_slider(value: float = 0.5) -> Any:
    return gr.Slider(0.1, 1.0, value, step=0.05, label="keep rate", info="of the tokens at each stage")


def tokens_tab(models: Models, page: Any) -> None:
    """Two methods side by side, with one slider."""

    @answering
    def answer(image: str, keep_rate: float, method: str, linkage: str, other: str, other_linkage: str) -> str:
        configs = [choose(method, linkage, keep_rate=keep_rate), choose(other, other_linkage, keep_rate=keep_rate)]
        opened = chosen_image(image)
        with models.classifier.use() as classifier:
            return render("tokens", found=compare(classifier, opened, configs))

    with gr.Tab("Tokens", id="tokens"), gr.Row():
        with _controls():
            image = picker(garments(), models.first_image, "Image")
            rate, tuned = _keep_rate_slider(), models.tuned_for("tokens")
            method, linkage = _method_row("method", "atc", tuned)
            other, other_linkage = _method_row("compare with", "tome", tuned)
        shown = _results("tokens-result")
    inputs = [image, rate, method, linkage, other, other_linkage]
    gr.on([page.load, *(each.change for each in inputs)], answer, inputs, shown, api_name="tokens", **_FOLLOW)


def dynamic_tab(models: Models) -> None:
    """A threshold instead of a keep rate: every image keeps as many tokens as it needs."""

    @answering
    def answer(easy: str, hard: str, threshold: float, linkage: str) -> str:
        images = {"the easy image": chosen_image(easy), "the hard one": chosen_image(hard)}
        config = choose("atc", linkage, threshold=threshold)
        with models.classifier.use() as classifier:  # one by one, so that each image shows its own time
            return render("dynamic", images={n: compare(classifier, each, [config]) for n, each in images.items()})

    with gr.Tab("Dynamic", id="dynamic") as tab, gr.Row():
        with _controls():
            info = "cosine distance up to which groups merge"
            distance = gr.Slider(0.0, 0.5, 0.1, step=0.01, label="threshold", info=info)
            linkage = _linkage_menu("linkage")
            easy = picker(garments(), EASY, "An easy image")
            hard = picker(garments(), HARD, "A hard one")
        shown = _results("dynamic-result")
    inputs = [easy, hard, distance, linkage]
    gr.on([tab.select, *(each.change for each in inputs)], answer, inputs, shown, api_name="dynamic", **_FOLLOW)


def synthesis_tab(models: Models) -> None:
    """One seed dense, with ToMe and with ATC."""

    def answer(
        what: str,
        seed: int,
        keep_rate: float,
        linkage: str,
        tuned: str,
        progress: Any = gr.Progress(),  # noqa: B008 how Gradio finds it
    ) -> Iterator[str]:
        """Yield all images that are drawn so far."""
        drawn: list[SynthesisResult] = []
        try:
            configs = [None, *(choose(name, linkage, keep_rate=keep_rate) for name in ("tomesd", "atc"))]
            configs += [] if tuned == _NONE else [choose(tuned)]
            request = models.request(what, int(seed))
            for number, config in enumerate(configs, start=1):
                title = f"image {number} of {len(configs)}"
                with models.generator.use() as generator:
                    steps = generator.steps
                    drawn.append(draw(generator, request, config, lambda step: progress((step, steps), desc=title)))  # noqa: B023
                yield render("synthesis", images=drawn)
        except (ValueError, ModuleNotFoundError) as error:
            yield render("refused", sentence=str(error))

    with gr.Tab("Synthesis", id="synthesis"), gr.Row():
        with _controls():
            if models.pipeline is not None:
                what: Any = gr.Textbox("A photograph of a pagoda.", label="prompt", max_length=300)
            else:
                what = gr.Dropdown(list(CLASSES), value="Sneaker", label="what to draw")
            seed = gr.Number(0, label="seed", precision=0, minimum=0, maximum=2**31 - 1)
            rate = _keep_rate_slider()
            linkage = _linkage_menu()
            tuned = gr.Dropdown([_NONE, *models.tuned_for("synthesis")], value=_NONE, label="compare with")
            button = gr.Button("Draw", variant="primary")
        shown = _results("synthesis-result")
    button.click(answer, [what, seed, rate, linkage, tuned], shown, api_name="synthesis", concurrency_limit=4)


def detection_tab(models: Models) -> None:
    """What a detector finds, dense and reduced."""

    @answering
    def answer(image: str, keep_rate: float, method: str, linkage: str, score: float) -> str:
        config, opened = choose(method, linkage, keep_rate=keep_rate), chosen_image(image)
        with models.detector.use() as detector:
            return render("detection", found=detect(detector, opened, config, score))

    with gr.Tab("Detection", id="detection") as tab, gr.Row():
        with _controls():
            image = picker(scenes(), f"{PREFIX}scene 1", "Image")
            rate = _keep_rate_slider(0.7)
            method, linkage = _method_row("method", "atc", models.tuned_for("detection"))
            score = gr.Slider(0.05, 0.95, 0.5, step=0.05, label="score", info="at least, of what is drawn")
        shown = _results("detection-result")
    inputs = [image, rate, method, linkage, score]
    gr.on([tab.select, *(each.change for each in inputs)], answer, inputs, shown, api_name="detection", **_FOLLOW)
