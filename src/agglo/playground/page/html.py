"""Pieces of HTML. Pictures are part of the text, as data URLs: nothing is written to disk, and no path is named."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from agglo.drawing.detections import draw_groups_under
from agglo.drawing.groups import Ints, Pixels, count_groups, draw_groups, enlarged, tokens

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN_SIDE = 224  # pixels that a picture has at least
_LARGE = 60_000  # bytes of a PNG
CLICK_HINT = (
    '<p class="hint lit" role="status" aria-live="polite">Click a patch, or walk over them with the arrow keys: its '
    "group lights up in every picture.</p>"
)


def data_url(pixels: Pixels) -> str:
    """A picture (H, W, 3) as PNG, exact, or as WebP where that would be large: photographs."""
    from PIL import Image as images

    image = images.fromarray(pixels)
    kind, content = "png", _saved(image, "PNG", compress_level=1)  # quick to make rather than small
    if len(content) > _LARGE:
        kind, content = "webp", _saved(image, "WEBP", quality=88, method=1)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _saved(image: Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def scale_for(picture: Pixels) -> int:
    """How many times larger a small picture is shown."""
    return max(1, SHOWN_SIDE // min(picture.shape[:2]))


def figure(pixels: Pixels, caption: str, alternative: str) -> str:
    """A picture with a line below it."""
    return (
        f'<figure><div class="frame"><img src="{data_url(pixels)}" alt="{escape(alternative)}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def picture_figure(picture: Pixels, caption: str, alternative: str) -> str:
    """A picture as it is, in a size to look at."""
    return figure(enlarged(picture, scale_for(picture)), caption, alternative)


def groups_figure(
    picture: Pixels,
    labels: Ints,
    where: str,
    whose: str,
    *,
    spans: tuple[float, float] | None = None,
    scale: int | None = None,
) -> str:
    """Groups over a picture, whose patches can be clicked. where: they are from, such as "after block 3". whose: what
    made them, which the words about a group begin with. spans: how many patches (down, across) lie over the picture,
    if a padded grid reaches beyond it. scale: how many times larger it is drawn; None is `scale_for`."""
    rows, columns = labels.shape
    down, across = labels.shape if spans is None else spans
    scale = scale_for(picture) if scale is None else scale
    drawn = (
        draw_groups(picture, labels, scale=scale) if spans is None else draw_groups_under(picture, labels, spans, scale)
    )
    count = count_groups(labels)
    words = f"{where}: {tokens(count)}"
    listed = ",".join(map(str, labels.reshape(-1).tolist()))
    return (
        f'<figure class="groups" tabindex="0" role="application" data-rows="{rows}" data-columns="{columns}" '
        f'data-labels="{listed}" data-count="{count}" data-down="{down:g}" data-across="{across:g}" '
        f'data-name="{escape(whose)} {escape(where)}" '
        f'aria-label="{escape(words)}. Arrow keys walk over the patches.">'
        f'<div class="frame"><img src="{data_url(drawn)}" '
        f'alt="{escape(words)}"><svg viewBox="0 0 {across:g} {down:g}" preserveAspectRatio="none" aria-hidden="true">'
        f"</svg></div><figcaption>{escape(words)}</figcaption></figure>"
    )


def figures(parts: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(parts)}</div>'


def code(lines: Sequence[str]) -> str:
    """Lines of Python that give the same."""
    text = "\n".join(dict.fromkeys(lines))
    return f'<pre class="line" tabindex="0" aria-label="The same in Python"><code>{escape(text)}</code></pre>'


def refused(sentence: str) -> str:
    """What cannot be done, in the place of what was asked for."""
    return f'<p class="refused" role="alert">{escape(sentence)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Cells are HTML already; the first of each row is its name."""
    tops = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table><thead><tr>{tops}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def section(name: str, *parts: str) -> str:
    """What a tab shows. name: the class by which styles and scripts find it."""
    return f'<section class="agglo {name}">{"".join(parts)}</section>'
