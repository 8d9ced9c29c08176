"""The page as a whole."""

from __future__ import annotations

from typing import Any

import gradio as gr

from agglo.playground.models import Models
from agglo.playground.page.picker import script
from agglo.playground.page.tabs import DetectionTab, DynamicTab, SynthesisTab, TokensTab
from agglo.playground.page.tune_tab import TuneTab
from agglo.version import __version__

TITLE = "agglo playground"
_FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_MONOSPACED = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
_WAITING = 64  # requests at most
_VISITORS = 100  # whose groups are kept; Gradio forgets the one who was away longest first


def build(models: Models) -> Any:
    """The page, as Gradio's Blocks."""
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
        page.load(**{**tokens.ask, "api_name": None, "api_visibility": "private"})
    page.queue(max_size=_WAITING, api_open=False)
    page.state_session_capacity = _VISITORS
    return page


def looks() -> dict[str, Any]:
    """Theme and style, as Gradio's server takes them. Fonts are the visitor's own: none is asked of another host."""
    theme: Any = gr.themes.Default(primary_hue="blue", font=list(_FONT), font_mono=list(_MONOSPACED))
    # Gradio's own is too faint to read.
    theme = theme.set(body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_300")
    theme = theme.set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300")
    return {"theme": theme, "css": script("style.css")}
