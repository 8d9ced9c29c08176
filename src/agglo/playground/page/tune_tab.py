"""The Tune tab: a curve whose points are applied to the other tabs."""

from __future__ import annotations

from typing import Any

import gradio as gr

from agglo.playground.belonging import DETECTION, SYNTHESIS, TABS, TOKENS, how_to_open, tab_of
from agglo.playground.fronts import AXES, SPEED, Front
from agglo.playground.models import Models
from agglo.playground.page.answers import error_html
from agglo.playground.page.picker import script
from agglo.playground.page.tabs import NONE, DetectionTab, SynthesisTab, Tab, TokensTab
from agglo.playground.page.tune_html import front_html, point_html
from agglo.playground.settings import methods


class TuneTab(Tab):
    """tokens, synthesis, detection: the tabs that points are applied to."""

    def __init__(self, models: Models, tokens: TokensTab, synthesis: SynthesisTab, detection: DetectionTab) -> None:
        super().__init__(models)
        self._tokens, self._synthesis, self._detection = tokens, synthesis, detection

    def build(self) -> Any:
        first = self._first()
        with gr.Tab("Tune", id="tune") as tab:
            with gr.Row():
                name = gr.Dropdown(list(self.models.fronts.by_name), value=first.name, label="result of agglo tune")
                axis = gr.Radio(list(AXES), value=SPEED, label="against")
            plot = gr.HTML(front_html(first, SPEED, None), js_on_load=script("points.js"), elem_id="tune-plot")
            point = gr.Dropdown(self._points(first), value=None, label="point", info="or click it in the curve")
            shown = gr.HTML(elem_id="tune-point")
        targets = [self._tokens.method, self._synthesis.tuned, self._detection.method]
        quick: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 8}
        asked: dict[str, Any] = {"inputs": [name, axis, point], "outputs": [plot, shown, *targets]}
        axis.change(self.curve, [name, axis, point], plot, api_name="curve", **quick)
        name.change(self.other_result, [name, axis], [point, plot, shown], api_visibility="private", **quick)
        # Not at a change: only what a visitor chooses is applied, and to look at another result changes nothing.
        point.input(self.point, **asked, api_name="point", **quick)
        plot.click(self.clicked, None, point, api_visibility="private", **quick).then(
            self.point, **asked, api_visibility="private", **quick
        )
        return tab

    def _first(self) -> Front:
        """The result of the page's classifier, if there is one."""
        fronts = self.models.fronts.by_name.values()
        return next((front for front in fronts if tab_of(front, self.models.names) == TOKENS), next(iter(fronts)))

    @staticmethod
    def _points(front: Front) -> list[tuple[str, int]]:
        return [(f"{number}: {front.note(point)}", number) for number, point in enumerate(front.points)]

    def curve(self, name: str, axis: str, point: int | None) -> str:
        try:
            return front_html(self.models.fronts.named(name), axis, point)
        except Exception as error:
            return error_html(error)

    def other_result(self, name: str, axis: str) -> tuple[Any, ...]:
        try:
            front = self.models.fronts.named(name)
            return gr.Dropdown(choices=self._points(front), value=None), front_html(front, axis, None), ""
        except Exception as error:
            return gr.skip(), gr.skip(), error_html(error)

    def clicked(self, event: gr.EventData) -> int:
        return int(event.point)

    def point(self, name: str, axis: str, number: int) -> tuple[Any, ...]:
        """The curve with the point lit, the point in words, and the method of the tab that it is for."""
        try:
            front = self.models.fronts.named(name)
            chosen = front.chosen(number)
            tab = tab_of(front, self.models.names)
            told = how_to_open(front) if tab is None else f"Applied: the {tab.capitalize()} tab now runs this schedule."
            choice = (chosen.title, front.reference(number))
            updates: dict[str, Any] = {
                TOKENS: gr.Dropdown(choices=[*methods(), choice], value=choice[1]),
                SYNTHESIS: gr.Dropdown(choices=[NONE, choice], value=choice[1]),
                DETECTION: gr.Dropdown(choices=[*methods(), choice], value=choice[1]),
            }
            applied = [updates[each] if each == tab else gr.skip() for each in TABS]
            return front_html(front, axis, number), point_html(front, number, told), *applied
        except Exception as error:
            return gr.skip(), error_html(error), gr.skip(), gr.skip(), gr.skip()
