"""The component that takes a picture: examples to press, and a file to choose or drop.

Gradio's own answers an upload with the path of a file on the server. This one hands the picture over as text, with the
request that needs it, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import gradio as gr
import numpy as np

from agglo.playground.examples import Example
from agglo.playground.page.html import data_url
from agglo.playground.uploads import FORMATS, MOST_BYTES

_LARGE = 400_000  # bytes of a file that is made smaller in the browser
_LONGEST = 1024  # pixels that are then left of its long side
_SMALL = 96  # pixels of the pictures on buttons

_TEMPLATE = """
<div class="picker">
  <p class="name">${label_text}</p>
  <img class="chosen" alt="the chosen picture"
    src="${value && value.startsWith('data:') ? value : (examples.find(e => e.value === value) || examples[0]).src}">
  <div class="examples" role="group" aria-label="Examples">
    ${examples.map(e => `<button type="button" data-pick="${e.value}" title="${e.title}" aria-label="${e.title}"
      aria-pressed="${e.value === value}"><img src="${e.src}" alt=""></button>`).join("")}
  </div>
  <label class="drop">Your own: choose a file or drop it here<input type="file" accept="image/*"></label>
  <p class="said" role="alert"></p>
</div>
"""


def script(name: str) -> str:
    """A file of JavaScript or CSS in this folder."""
    return files("agglo.playground.page").joinpath(name).read_text(encoding="utf-8")


def picker(examples: Sequence[Example], value: str, label: str) -> Any:
    """A Gradio component whose value is "example:..." or a data URL."""
    too_large = f"The file is too large; at most {MOST_BYTES // 1024 // 1024} MB of {', '.join(FORMATS)} are accepted."
    return gr.HTML(
        value=value,
        html_template=_TEMPLATE,
        js_on_load=script("picker.js"),
        examples=[{"value": each.value, "title": each.title, "src": _small(each)} for each in examples],
        label_text=label,
        large=_LARGE,
        longest=_LONGEST,
        most=MOST_BYTES,
        too_large=too_large,
    )


def _small(example: Example) -> str:
    image = example.image.copy()
    image.thumbnail((2 * _SMALL, 2 * _SMALL))
    return data_url(np.asarray(image))
