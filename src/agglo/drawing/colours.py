"""The look of each method on every chart: one colour and one marker; related methods have related colours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

DENSE, SLICED, FREE = "dense", "sliced dense", "free"
GRID, FAINT, INK = "#e8e8e8", "#c9c9c9", "#444444"


@dataclass(frozen=True)
class Look:
    """A colour, a marker and a line style, by matplotlib's names."""

    colour: str
    marker: str = "o"
    line: str = "-"


LOOKS: dict[str, Look] = {
    DENSE: Look("#8a8a8a", "o", "--"),
    SLICED: Look("#b3b3b3", "o", "--"),
    FREE: Look("#dcdcdc", "o"),
    # hard merging
    "atc": Look("#2f6fb0", "D"),
    "atc single": Look("#86bbe8", "o"),
    "atc average": Look("#2f6fb0", "D"),
    "atc complete": Look("#143c69", "^"),
    "tome": Look("#e8862e", "s"),
    "kmedoids": Look("#1b9e77", "v"),
    "dpc_knn": Look("#7d4fb0", "P"),
    "dpc_knn equal": Look("#b79ad6", "P"),
    "pool": Look("#2fb3cf", "X"),
    # soft merging
    "sit": Look("#9c2763", "o"),
    "patch_merger": Look("#d0478f", "s"),
    "sinkhorn": Look("#ec9ac4", "D"),
    # pruning
    "topk": Look("#c2362b", "o"),
    "evit": Look("#e8705f", "s"),
    "ats": Look("#7a1a12", "D"),
    "dynamicvit": Look("#f2a89c", "^"),
    "dynamicvit_prsv": Look("#a86458", "v"),
    "random": Look("#a58a6b", "P"),
    # pruning in a fixed pattern
    "l1": Look("#d9c84a", "o"),
    "l2": Look("#a8951f", "s"),
    "linf": Look("#6b5d0e", "D"),
    # tokens that skip blocks
    "svit": Look("#8cc152", "o"),
    "evovit": Look("#3f7d1f", "s"),
}
_FURTHER = ("#5c6bc0", "#00897b", "#c158dc", "#6d8a96", "#ef5777", "#3c40c6", "#b33939", "#218c74")
_MARKERS = "o^DsvPX"
_LINES = ("-", "--", ":", "-.")
_KNOWN = re.compile(rf"({'|'.join(sorted(LOOKS, key=len, reverse=True))})(?!\w)")


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for every name of one chart.

    A name may go on after its method's: "tome, linear" and "kmedoids(weights='equal')" look like tome and kmedoids, and
    where a chart has several of one method, each further one has another line style. Methods that are not ours get
    colours of their own, in the order they come.

    >>> looks(["tome, linear", "tome"])["tome"].colour == LOOKS["tome"].colour
    True
    """
    names = list(dict.fromkeys(names))
    found = {name: LOOKS[name] for name in names if name in LOOKS}
    times: Counter[str | None] = Counter(found.keys())
    for name in names:
        if name in found:
            continue
        method = method_of(name)
        if method is not None:
            found[name] = replace(LOOKS[method], line=_LINES[times[method] % len(_LINES)])
        else:
            number = times[None]
            marker, line = _MARKERS[number % len(_MARKERS)], _LINES[number // len(_FURTHER) % len(_LINES)]
            found[name] = Look(_FURTHER[number % len(_FURTHER)], marker, line)
        times[method] += 1
    return found


def method_of(name: str) -> str | None:
    """Return the known method that a name begins with; None if there is none.

    >>> method_of("atc average, linear"), method_of("l1:option=value"), method_of("l1norm"), method_of("mine")
    ('atc average', 'l1', None, None)
    """
    found = _KNOWN.match(name)
    return None if found is None else found[1]


def in_order(names: Iterable[str]) -> list[str]:
    """Return every name once, in the order of LOOKS, so that all charts have one order; other methods come last."""
    order = {method: number for number, method in enumerate(LOOKS)}
    return sorted(dict.fromkeys(names), key=lambda name: order.get(method_of(name) or "", len(order)))
