"""Write what was measured into the pages of the documentation, each table between its marks.

    make pages          write them
    make check-pages    fail if a page or a table in results/ differs from the records

Every table comes from a record in results/; nothing is measured here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from agglo.lab.paper.output import MARKDOWN, pages_of, read_results, replace_between_marks, tables_of
from agglo.lab.paper.registry import GPU_HOURS, benchmarks, described, items, overview
from agglo.lab.paper.study import Settings, Study
from studies import studies
from tools import choosing, ready_made

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FULL, MINIATURE = Settings(output=RESULTS), Settings(output=RESULTS, miniature=True)

ALL = {**items(), **studies()}


def _of(name: str, settings: Settings) -> Callable[[], str]:
    return lambda: tables_of(ALL[name], settings)


def _listed(listed: Mapping[str, Study]) -> str:
    every = listed.values()
    return f"{overview(every, RESULTS).markdown()}\n\n{GPU_HOURS}\n\n{described(every).markdown()}"


def _timed(name: str) -> Callable[[], str]:
    describe = import_module(f"agglo.lab.bench.{name}").describe
    return lambda: f"`make bench-{name}`: {describe(choosing.record(f'bench/{name}.json'))}"


MORE = (
    *("ranking-per-rate", "hyper-parameters", "mae", "curves-augreg", "curves-swag", "curves-mae", "clusters"),
    *("throughput-model", "throughput-frameworks", "throughput-tokens", "better-atc", "places"),
)


def more_items() -> str:
    """Return the items that have no page of their own, with their images."""
    parts = []
    for name in MORE:
        item = ALL[name]
        folder = MINIATURE.folder(name)
        images = [f"![{item.name}](../{path.relative_to(ROOT).as_posix()})" for path in sorted(folder.glob("*.png"))]
        parts += [f"## {name}", tables_of(item, MINIATURE), *images]
    return "\n\n".join(parts)


# Page, name of its marks, what stands between them.
PAGES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("docs/reproduce.md", "items", lambda: _listed(items())),
    ("docs/reproduce.md", "studies", lambda: _listed(studies())),
    ("docs/reproduce.md", "benchmarks", lambda: benchmarks(RESULTS).markdown()),
    ("docs/reproduce.md", "rank", _of("rank", FULL)),
    ("docs/reproduce.md", "difference", _of("difference", FULL)),
    ("docs/off-the-shelf.md", "accuracy", _of("off-the-shelf", FULL)),
    ("docs/off-the-shelf.md", "better", _of("better-atc", FULL)),
    ("docs/off-the-shelf.md", "speed", _timed("model")),
    ("docs/off-the-shelf.md", "one stage", _timed("methods")),
    ("docs/mini-study.md", "off the shelf", _of("off-the-shelf", MINIATURE)),
    ("docs/mini-study.md", "fine-tuned", _of("fine-tuned", MINIATURE)),
    ("docs/mini-study.md", "rank", _of("rank", MINIATURE)),
    ("docs/mini-study.md", "difference", _of("difference", MINIATURE)),
    ("docs/more-items.md", "more items", more_items),
    ("docs/mini-synthesis.md", "distances", _of("diffusion-fid", MINIATURE)),
    ("docs/mini-synthesis.md", "samples", _of("diffusion-samples", MINIATURE)),
    ("docs/mini-synthesis.md", "options", _of("diffusion-options", MINIATURE)),
    ("docs/mini-synthesis.md", "terrain", _of("terrain", FULL)),
    ("docs/synthesis.md", "diffusion", _timed("diffusion")),
    ("docs/mini-detection.md", "detection", _of("detection", MINIATURE)),
    ("docs/mini-detection.md", "nuclei", _of("nuclei", FULL)),
    ("docs/clustering.md", "peers", _timed("clustering")),
    ("docs/heal.md", "healing", _of("healing", FULL)),
    ("docs/tune.md", "ready-made", ready_made.summary),
    ("docs/tune.md", "places", _of("places", FULL)),
    ("docs/choosing.md", "recipe", _of("recipe", FULL)),
    ("docs/choosing.md", "budgets", choosing.budgets),
    ("docs/choosing.md", "tasks", choosing.tasks),
    ("docs/choosing.md", "speeds", choosing.speeds),
    ("docs/vlm.md", "vlm", _timed("vlm")),
    ("README.md", "numbers", choosing.readme),
)


def pages() -> dict[Path, str]:
    """Return every page with the text that it should have."""
    texts: dict[Path, str] = {}
    for page, name, text in PAGES:
        path = ROOT / page
        texts[path] = replace_between_marks(texts.get(path) or path.read_text(encoding="utf-8"), name, text())
    return texts


def tables_in_results() -> Iterator[tuple[Path, str]]:
    """Yield every table that `agglo reproduce` left in results/, with the text that follows from its record."""
    for settings in (FULL, MINIATURE):
        for item in ALL.values():
            path = settings.folder(item.name) / MARKDOWN
            if not path.exists():
                continue
            images = [Path(name) for name in re.findall(r"^!\[.*\]\((.*)\)$", path.read_text(encoding="utf-8"), re.M)]
            for name, text in pages_of(item, read_results(path.parent), settings, images).items():
                yield path.with_name(name), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check = parser.parse_args().check
    stale = [(path, text) for path, text in (*pages().items(), *tables_in_results()) if path.read_text("utf-8") != text]
    if is_check and stale:
        names = "\n".join(str(path.relative_to(ROOT)) for path, _ in stale)
        raise SystemExit(f"{names}\nthese differ from the records: make pages writes them")
    for path, text in stale:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
