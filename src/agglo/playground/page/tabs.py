"""The tabs: controls, what they ask for, and where the answer goes. All that is computed is in the rooms below."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gradio as gr

from agglo.clustering.arguments import LINKAGES
from agglo.experiments.fashion_mnist import CLASSES
from agglo.playground import detection, dynamic, synthesis, tokens
from agglo.playground.examples import EASY, HARD, picture, scenes, single_things
from agglo.playground.models import Models
from agglo.playground.page.answers import error_html
from agglo.playground.page.detection_html import detected_html
from agglo.playground.page.picker import picker, script
from agglo.playground.page.synthesis_html import drawn_html, step_html
from agglo.playground.page.tokens_html import compared_html, thresholded_html
from agglo.playground.settings import Chosen, choose, choose_diffusion, methods

_FOLLOW: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", "concurrency_limit": 8}
_BETWEEN = 0.1  # seconds at least between two looks at a picture that is being drawn
_KEPT = 1800.0  # seconds that groups of a visitor's pictures are kept
NONE = "none"
_ATTENTIONS = 8  # self-attentions of the embedded generator; what others have is known once they have drawn


def controls() -> Any:
    return gr.Column(scale=1, min_width=250)


def results() -> Any:
    return gr.Column(scale=3, min_width=320)


def method_row(label: str, method: str, linkage: str) -> tuple[Any, Any]:
    with gr.Row():
        chosen = gr.Dropdown(methods(), value=method, label=label, min_width=120)
        how = gr.Dropdown(list(LINKAGES), value=linkage, label="linkage (atc)", min_width=110)
    return chosen, how


def keep_rate_slider(value: float = 0.5) -> Any:
    return gr.Slider(0.1, 1.0, value, step=0.05, label="keep rate", info="of the tokens at each stage")


class Tab:
    """models: of the page."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def chosen(self, method: str, linkage: str, keep_rate: float) -> Chosen:
        """A method by its name, or a point of the Tune tab by its reference."""
        return self.models.fronts.resolve(method) or choose(method, linkage, keep_rate=keep_rate)


class TokensTab(Tab):
    """Two methods side by side, with one slider."""

    def build(self) -> Any:
        with gr.Tab("Tokens", id="tokens") as tab, gr.Row():
            with controls():
                image = picker(single_things(), self.models.first_picture, "Picture")
                rate = keep_rate_slider()
                self.method, linkage = method_row("method", "atc", "average")
                other, other_linkage = method_row("beside it", "tome", "average")
            with results():
                shown = gr.HTML(js_on_load=script("groups.js"), elem_id="tokens-result")
        inputs = [image, rate, self.method, linkage, other, other_linkage]
        self.ask = {"fn": self.answer, "inputs": inputs, "outputs": shown, "api_name": "tokens", **_FOLLOW}
        gr.on([each.change for each in inputs], **self.ask)
        return tab

    def answer(self, image: str, keep_rate: float, method: str, linkage: str, other: str, other_linkage: str) -> str:
        try:
            sides = [self.chosen(method, linkage, keep_rate), self.chosen(other, other_linkage, keep_rate)]
            opened = picture(image)
            with self.models.classifier.borrowed() as classifier:
                found = tokens.compare(classifier, opened, sides)
            return compared_html(found)
        except Exception as error:
            return error_html(error)


class DynamicTab(Tab):
    def build(self) -> Any:
        with gr.Tab("Dynamic", id="dynamic") as tab, gr.Row():
            with controls():
                distance = gr.Slider(
                    0.0, 0.5, 0.1, step=0.01, label="threshold", info="cosine distance up to which groups merge"
                )
                linkage = gr.Dropdown(list(LINKAGES), value="average", label="linkage")
                easy = picker(single_things(), EASY, "An easy picture")
                hard = picker(single_things(), HARD, "A hard one")
            with results():
                shown = gr.HTML(js_on_load=script("groups.js"), elem_id="dynamic-result")
        inputs = [easy, hard, distance, linkage]
        ask = {"fn": self.answer, "inputs": inputs, "outputs": shown, "api_name": "dynamic", **_FOLLOW}
        gr.on([tab.select, *(each.change for each in inputs)], **ask)
        return tab

    def answer(self, easy: str, hard: str, threshold: float, linkage: str) -> str:
        try:
            images = [picture(easy), picture(hard)]
            with self.models.classifier.borrowed() as classifier:
                found = dynamic.threshold(classifier, images, threshold, linkage)
            return thresholded_html(found, ["the easy picture", "the hard one"])
        except Exception as error:
            return error_html(error)


class SynthesisTab(Tab):
    def build(self) -> Any:
        with gr.Tab("Synthesis", id="synthesis") as tab, gr.Row():
            with controls():
                if self.models.takes_prompts:
                    what: Any = gr.Textbox("A photograph of a pagoda.", label="prompt", max_length=300)
                else:
                    what = gr.Dropdown(list(CLASSES), value="Sneaker", label="what to draw")
                seed = gr.Number(0, label="seed", precision=0, minimum=0, maximum=synthesis.MOST_SEED)
                rate = keep_rate_slider()
                linkage = gr.Dropdown(list(LINKAGES), value="average", label="linkage (atc)")
                self.tuned = gr.Dropdown([NONE], value=NONE, label="beside them", info="a point of the Tune tab")
                button = gr.Button("Draw", variant="primary")
                kept = gr.State([], time_to_live=_KEPT)
            with results():
                shown = gr.HTML(elem_id="synthesis-result")
                steps = self.models.steps
                with gr.Row():
                    step = gr.Slider(1, max(2, steps), (steps + 1) // 2, step=1, label="groups of step", min_width=140)
                    attention = gr.Slider(0, _ATTENTIONS - 1, 0, step=1, label="self-attention", min_width=140)
                groups = gr.HTML(js_on_load=script("groups.js"), elem_id="synthesis-groups")
        inputs = [what, seed, rate, linkage, self.tuned, step, attention]
        drawing = button.click(
            self.answer,
            inputs,
            [shown, kept, step, attention],
            api_name="synthesis",
            show_progress="hidden",
            concurrency_limit=4,
        )
        asked: dict[str, Any] = {"fn": self.groups, "inputs": [kept, step, attention], "outputs": groups}
        drawing.then(**asked, api_name="groups", show_progress="hidden")
        gr.on([step.change, attention.change], **asked, api_visibility="private", **_FOLLOW)
        return tab

    def answer(
        self, what: str, seed: float, keep_rate: float, linkage: str, tuned: str, step: float, attention: float
    ) -> Iterator[Any]:
        """step, attention: where the sliders of the groups stand."""
        try:
            ways = [choose_diffusion("tome", linkage, keep_rate), choose_diffusion("atc", linkage, keep_rate)]
            if tuned != NONE:
                ways.append(self.chosen(tuned, linkage, keep_rate))
            request = self.models.request(what, seed)
            last, told = None, 0.0
            for last in synthesis.draw(self.models.generator, request, ways):
                if time.monotonic() - told >= _BETWEEN:
                    told = time.monotonic()
                    yield drawn_html(last), gr.skip(), gr.skip(), gr.skip()
            assert last is not None
            kept = last.kept
            attentions = max((len(way.groups[0]) for way in kept), default=1)
            sliders = _ending_at(max(2, last.steps), step), _ending_at(max(1, attentions - 1), attention)
            yield drawn_html(last), kept, *sliders
        except Exception as error:
            yield error_html(error), [], gr.skip(), gr.skip()

    def groups(self, ways: list[synthesis.Kept], step: float, attention: float) -> str:
        try:
            return step_html(ways, int(step), int(attention))
        except Exception as error:
            return error_html(error)


def _ending_at(maximum: int, value: float) -> Any:
    """A slider with another end. It moves if it stood beyond: Gradio refuses every request with such a value."""
    return gr.Slider(maximum=maximum, value=min(int(value), maximum))


class DetectionTab(Tab):
    def build(self) -> Any:
        with gr.Tab("Detection", id="detection") as tab, gr.Row():
            with controls():
                image = picker(scenes(), scenes()[0].value, "Picture")
                rate = keep_rate_slider(0.7)
                self.method, linkage = method_row("method", "atc", "average")
                score = gr.Slider(0.05, 0.95, 0.5, step=0.05, label="score", info="at least, of what is drawn")
            with results():
                shown = gr.HTML(js_on_load=script("groups.js"), elem_id="detection-result")
        inputs = [image, rate, self.method, linkage, score]
        ask = {"fn": self.answer, "inputs": inputs, "outputs": shown, "api_name": "detection", **_FOLLOW}
        gr.on([tab.select, *(each.change for each in inputs)], **ask)
        return tab

    def answer(self, image: str, keep_rate: float, method: str, linkage: str, score: float) -> str:
        try:
            chosen = self.chosen(method, linkage, keep_rate)
            opened = picture(image)
            with self.models.detector.borrowed() as detector:
                found = detection.detect(detector, opened, chosen, score)
            return detected_html(found)
        except Exception as error:
            return error_html(error)
