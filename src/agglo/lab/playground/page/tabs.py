"""The page: controls, what they ask for, and where the answer goes. What is computed lies in the modules below."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import gradio as gr
import numpy as np

from agglo.clustering.arguments import LINKAGES
from agglo.lab.data.fashion_mnist import CLASSES
from agglo.lab.playground import synthesis
from agglo.lab.playground.detection import detect
from agglo.lab.playground.fronts import AXES, SPEED, Front
from agglo.lab.playground.images import EASY, FORMATS, HARD, MOST_BYTES, Example, chosen_image, garments, scenes
from agglo.lab.playground.models import LONGEST_PROMPT, Models
from agglo.lab.playground.page.html import (
    asset,
    compared_html,
    curve_html,
    data_url,
    detected_html,
    error_html,
    render,
)
from agglo.lab.playground.settings import Chosen, choose, methods
from agglo.lab.playground.tokens import compare
from agglo.version import __version__

TITLE = "agglo playground"
_WAITING = 64  # requests at most
_VISITORS = 100  # whose groups are kept; Gradio forgets the one who was away longest first
_KEPT = 1800.0  # seconds that the groups of a visitor's images are kept
_BETWEEN = 0.1  # seconds at least between two looks at an image that is being drawn
_ATTENTIONS = 8  # self-attentions of the embedded generator; what others have is known once they have drawn
_NONE = "none"
_QUICK: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 8}
# Requests that follow a control: only the latest position of a slider counts.
_FOLLOW: dict[str, Any] = {"trigger_mode": "always_last", **_QUICK}
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
            f"that saves and what it costs. `{models.classifier_title}`, agglo {__version__}."
        )
        tokens, synthesis, detection = TokensTab(models), SynthesisTab(models), DetectionTab(models)
        with gr.Tabs():
            tokens.build()
            DynamicTab(models).build()
            synthesis.build()
            detection.build()
            TuneTab(models, tokens, synthesis, detection).build()
        page.load(**tokens.ask, api_visibility="private")
    page.queue(max_size=_WAITING, api_open=False)
    page.state_session_capacity = _VISITORS
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


def picker(examples: Sequence[Example], value: str, label: str) -> Any:
    """Return a component with examples to press and a file to choose or drop.

    Gradio's own answers an upload with the path of a file on the server. The value of this one is "example:..." or a
    data URL, which goes with the request that needs it, and nothing is stored.
    """
    return gr.HTML(
        value=value,
        html_template=_PICKER,
        js_on_load=asset("picker.js"),
        examples=[{"value": each.value, "title": each.name, "src": _thumbnail(each)} for each in examples],
        label_text=label,
        large=400_000,  # bytes of a file that is made smaller in the browser
        longest=1024,  # pixels that are then left of its long side
        most=MOST_BYTES,
        too_large=f"The file is too large; at most {MOST_BYTES // 1024 // 1024} MB of {', '.join(FORMATS)} go.",
    )


def _thumbnail(example: Example) -> str:
    image = example.image.copy()
    image.thumbnail((192, 192))
    return data_url(np.asarray(image))


def answering(n_outputs: int = 1, error_at: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that shows an error in one output of a request, and leaves the others as they are."""

    def decorate(answer: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(answer)
        def guarded(*arguments: Any) -> Any:
            try:
                return answer(*arguments)
            except Exception as error:
                outputs = [error_html(error) if number == error_at else gr.skip() for number in range(n_outputs)]
                return outputs[0] if n_outputs == 1 else tuple(outputs)

        return guarded

    return decorate


def _controls() -> Any:
    return gr.Column(scale=1, min_width=250)


def _results() -> Any:
    return gr.Column(scale=3, min_width=320)


def _groups_html(name: str) -> Any:
    """Return a component for HTML whose groups light up."""
    return gr.HTML(js_on_load=asset("groups.js"), elem_id=name)


def _linkage_menu(label: str = "linkage (atc)") -> Any:
    return gr.Dropdown(list(LINKAGES), value="average", label=label, min_width=110)


def _method_row(label: str, method: str) -> tuple[Any, Any]:
    with gr.Row():
        return gr.Dropdown(methods(), value=method, label=label, min_width=120), _linkage_menu()


def _keep_rate_slider(value: float = 0.5) -> Any:
    return gr.Slider(0.1, 1.0, value, step=0.05, label="keep rate", info="of the tokens at each stage")


def _ending_at(maximum: int, value: float) -> Any:
    """Return a slider with another end. It moves if it stood beyond: Gradio refuses requests with such a value."""
    return gr.Slider(maximum=maximum, value=min(int(value), maximum))


class Tab:
    """A tab of the page."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def chosen(self, method: str, linkage: str, keep_rate: float) -> Chosen:
        """Return a method by its name, or a point of the Tune tab by its reference."""
        return self.models.fronts.resolve(method) or choose(method, linkage, keep_rate=keep_rate)


class TokensTab(Tab):
    """Two methods side by side, with one slider."""

    def build(self) -> None:
        with gr.Tab("Tokens", id="tokens"), gr.Row():
            with _controls():
                image = picker(garments(), self.models.first_image, "Image")
                rate = _keep_rate_slider()
                self.method, linkage = _method_row("method", "atc")
                other, other_linkage = _method_row("beside it", "tome")
            with _results():
                shown = _groups_html("tokens-result")
        inputs = [image, rate, self.method, linkage, other, other_linkage]
        self.ask = {"fn": self.answer, "inputs": inputs, "outputs": shown, **_FOLLOW}
        gr.on([each.change for each in inputs], **self.ask, api_name="tokens")

    @answering()
    def answer(self, image: str, keep_rate: float, method: str, linkage: str, other: str, other_linkage: str) -> str:
        sides = [self.chosen(method, linkage, keep_rate), self.chosen(other, other_linkage, keep_rate)]
        opened = chosen_image(image)
        with self.models.classifier.use() as classifier:
            found = compare(classifier, opened, sides)
        return compared_html(found)


class DynamicTab(Tab):
    """A threshold instead of a keep rate: every image keeps as many tokens as it needs."""

    def build(self) -> None:
        with gr.Tab("Dynamic", id="dynamic") as tab, gr.Row():
            with _controls():
                info = "cosine distance up to which groups merge"
                distance = gr.Slider(0.0, 0.5, 0.1, step=0.01, label="threshold", info=info)
                linkage = _linkage_menu("linkage")
                easy = picker(garments(), EASY, "An easy image")
                hard = picker(garments(), HARD, "A hard one")
            with _results():
                shown = _groups_html("dynamic-result")
        inputs = [easy, hard, distance, linkage]
        events = [tab.select, *(each.change for each in inputs)]
        gr.on(events, self.answer, inputs, shown, api_name="dynamic", **_FOLLOW)

    @answering()
    def answer(self, easy: str, hard: str, threshold: float, linkage: str) -> str:
        images = {"the easy image": chosen_image(easy), "the hard one": chosen_image(hard)}
        chosen = choose("atc", linkage, threshold=threshold)
        with self.models.classifier.use() as classifier:  # one by one, so that each image shows its own time
            found = {name: compare(classifier, image, [chosen]) for name, image in images.items()}
        return render("dynamic", images=found, line=chosen.line)


class SynthesisTab(Tab):
    """One seed dense, with ToMe and with ATC."""

    def build(self) -> None:
        with gr.Tab("Synthesis", id="synthesis"), gr.Row():
            with _controls():
                if self.models.takes_prompts:
                    what: Any = gr.Textbox("A photograph of a pagoda.", label="prompt", max_length=LONGEST_PROMPT)
                else:
                    what = gr.Dropdown(list(CLASSES), value="Sneaker", label="what to draw")
                seed = gr.Number(0, label="seed", precision=0, minimum=0, maximum=synthesis.MOST_SEED)
                rate = _keep_rate_slider()
                linkage = _linkage_menu()
                self.tuned = gr.Dropdown([_NONE], value=_NONE, label="beside them", info="a point of the Tune tab")
                button = gr.Button("Draw", variant="primary")
                drawn = gr.State([], time_to_live=_KEPT)
            with _results():
                shown = gr.HTML(elem_id="synthesis-result")
                steps = self.models.steps
                with gr.Row():
                    step = gr.Slider(1, max(2, steps), (steps + 1) // 2, step=1, label="groups of step", min_width=140)
                    attention = gr.Slider(0, _ATTENTIONS - 1, 0, step=1, label="self-attention", min_width=140)
                groups = _groups_html("synthesis-groups")
        inputs, outputs = [what, seed, rate, linkage, self.tuned, step, attention], [shown, drawn, step, attention]
        quiet: dict[str, Any] = {"show_progress": "hidden"}
        drawing = button.click(self.answer, inputs, outputs, api_name="synthesis", concurrency_limit=4, **quiet)
        ask: dict[str, Any] = {"fn": self.groups, "inputs": [drawn, step, attention], "outputs": groups}
        drawing.then(**ask, api_name="groups", **quiet)
        gr.on([step.change, attention.change], **ask, api_visibility="private", **_FOLLOW)

    def answer(
        self, what: str, seed: float, keep_rate: float, linkage: str, tuned: str, step: float, attention: float
    ) -> Iterator[Any]:
        """Yield the images as they are drawn, their groups, and the sliders of groups with the ends that they have."""
        try:
            chosen = [choose(name, linkage, keep_rate=keep_rate) for name in ("tomesd", "atc")]
            if tuned != _NONE:
                chosen.append(self.chosen(tuned, linkage, keep_rate))
            last, shown = None, 0.0
            for last in synthesis.draw(self.models.generator, self.models.request(what, seed), chosen):
                if time.monotonic() - shown >= _BETWEEN:
                    shown = time.monotonic()
                    yield render("synthesis", found=last), gr.skip(), gr.skip(), gr.skip()
            assert last is not None
            attentions = max((len(groups.steps[0]) for groups in last.groups), default=1)
            sliders = _ending_at(max(2, last.steps), step), _ending_at(max(1, attentions - 1), attention)
            yield render("synthesis", found=last), last.groups, *sliders
        except Exception as error:
            yield error_html(error), [], gr.skip(), gr.skip()

    @answering()
    def groups(self, drawn: list[synthesis.Groups], step: float, attention: float) -> str:
        return render("groups", drawn=drawn, step=int(step), attention=int(attention))


class DetectionTab(Tab):
    """What a detector finds, dense and reduced."""

    def build(self) -> None:
        with gr.Tab("Detection", id="detection") as tab, gr.Row():
            with _controls():
                image = picker(scenes(), scenes()[0].value, "Image")
                rate = _keep_rate_slider(0.7)
                self.method, linkage = _method_row("method", "atc")
                score = gr.Slider(0.05, 0.95, 0.5, step=0.05, label="score", info="at least, of what is drawn")
            with _results():
                shown = _groups_html("detection-result")
        inputs = [image, rate, self.method, linkage, score]
        events = [tab.select, *(each.change for each in inputs)]
        gr.on(events, self.answer, inputs, shown, api_name="detection", **_FOLLOW)

    @answering()
    def answer(self, image: str, keep_rate: float, method: str, linkage: str, score: float) -> str:
        chosen = self.chosen(method, linkage, keep_rate)
        opened = chosen_image(image)
        with self.models.detector.use() as detector:
            found = detect(detector, opened, chosen, score)
        return detected_html(found)


class TuneTab(Tab):
    """Curves of `agglo tune`, whose points are applied to the other tabs."""

    def __init__(self, models: Models, tokens: TokensTab, synthesis: SynthesisTab, detection: DetectionTab) -> None:
        super().__init__(models)
        self._menus = {"tokens": tokens.method, "synthesis": synthesis.tuned, "detection": detection.method}

    def build(self) -> None:
        fronts = self.models.fronts.by_name.values()
        of_classifier = (front for front in fronts if self.models.tab_for_model(front.model) == "tokens")
        first = next(of_classifier, next(iter(fronts)))
        with gr.Tab("Tune", id="tune"):
            with gr.Row():
                name = gr.Dropdown(list(self.models.fronts.by_name), value=first.name, label="result of agglo tune")
                axis = gr.Radio(list(AXES), value=SPEED, label="against")
            plot = gr.HTML(curve_html(first, SPEED, None), js_on_load=asset("points.js"), elem_id="tune-plot")
            point = gr.Dropdown(_choices(first), value=None, label="point", info="or click it in the curve")
            shown = gr.HTML(elem_id="tune-point")
        private: dict[str, Any] = {"api_visibility": "private", **_QUICK}
        ask: dict[str, Any] = {"inputs": [name, axis, point], "outputs": [plot, shown, *self._menus.values()]}
        axis.change(self.curve, [name, axis, point], plot, api_name="curve", **_QUICK)
        name.change(self.other_result, [name, axis], [point, plot, shown], **private)
        # Not at a change: only what a visitor chooses is applied, and to look at another result changes nothing.
        point.input(self.point, **ask, api_name="point", **_QUICK)
        plot.click(self.clicked, None, point, **private).then(self.point, **ask, **private)

    @answering()
    def curve(self, name: str, axis: str, point: int | None) -> str:
        return curve_html(self.models.fronts.named(name), axis, point)

    @answering(3, error_at=2)
    def other_result(self, name: str, axis: str) -> tuple[Any, ...]:
        front = self.models.fronts.named(name)
        return gr.Dropdown(choices=_choices(front), value=None), curve_html(front, axis, None), ""

    def clicked(self, event: gr.EventData) -> int:
        return int(event.point)

    @answering(5, error_at=1)
    def point(self, name: str, axis: str, number: int) -> tuple[Any, ...]:
        """Return the curve with the point lit, a table of the point, and the menu of the tab that runs its model."""
        front = self.models.fronts.named(name)
        chosen, value = front.chosen(number), front.reference(number)
        tab = self.models.tab_for_model(front.model)
        if tab is None:
            options = "--model, --pipeline and --detector of agglo play open models."
            applied = f"Not applied: no tab runs {front.title}; {options}"
        else:
            applied = f"Applied: the {tab.capitalize()} tab now runs this schedule."
        shown = render("point", front=front, point=front.points[number], line=chosen.line, applied=applied)
        menus = {name: gr.skip() for name in self._menus}
        if tab is not None:
            others = [_NONE] if tab == "synthesis" else methods()
            menus[tab] = gr.Dropdown(choices=[*others, (chosen.title, value)], value=value)
        return curve_html(front, axis, number), shown, *menus.values()


def _choices(front: Front) -> list[tuple[str, int]]:
    return [(f"{number}: {front.note(point)}", number) for number, point in enumerate(front.points)]
