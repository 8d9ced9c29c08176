"""Write what was measured into the pages of the documentation, each table between its marks.

    make pages          write them
    make check-pages    fail if a page or a table in results/ differs from the records

Every table comes from a record in results/; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from agglo.lab.bench import diffusion, vlm
from agglo.lab.bench.clustering import Case, Contention, contention_table, table
from agglo.lab.bench.methods import table as methods_table
from agglo.lab.bench.model import table as speed_table
from agglo.lab.paper.listing import table as items_table
from agglo.lab.paper.output import MARKDOWN, pages_of, read_results, replace_between_marks, tables_of
from agglo.lab.paper.registry import BENCHMARKS, items
from agglo.lab.paper.study import Settings
from agglo.utils.machine import load_warning
from agglo.utils.tables import Column, Table
from studies import studies
from tools import choosing, ready_made
from tools.choosing import keep_rate_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FULL, MINIATURE = Settings(output=RESULTS), Settings(output=RESULTS, miniature=True)


def against_peers() -> str:
    """Return the clustering's table, where it was measured, and what memory it took."""
    recorded = _load("clustering.json")
    memory = "; ".join(f"{linkage} {share:.2f}" for linkage, share in recorded["peak_memory"].items())
    return (
        f"{_where(recorded)}.\n\n{table([Case(**case) for case in recorded['cases']])}\n\n"
        f"Peak memory beside the input at the largest N, in distance matrices: {memory}."
    )


def contended() -> str:
    recorded = _load("clustering-contended.json")
    results = [Contention(**result) for result in recorded["contention"]]
    return f"{_where(recorded)}.\n\n{contention_table(results)}"


def speed() -> str:
    recorded = _load("model.json")
    lines = [*speed_table(recorded).splitlines(), load_warning(recorded["machine"])]
    indented = "\n".join(f"    {line}" for line in lines if line)
    return f"{indented}\n\n({recorded['machine']['date'][:10]})"


def one_stage() -> str:
    """Return what every method itself takes."""
    recorded = _load("methods.json")
    settings = recorded["settings"]
    return (
        f"What a method itself takes to reduce {settings['batch_size']} images of {settings['tokens']} tokens "
        f"({settings['dim']} channels) to {settings['target']}, keys and attention given (`make bench-methods`, "
        f"methods in turns, medians of {settings['repeats']}; {_where(recorded)}):\n\n"
        f"{methods_table(recorded).markdown()}"
    )


def denoising_step() -> str:
    """Return the times of a denoising step of Stable Diffusion's size."""
    recorded = _load("diffusion.json")
    notes = "".join(f"\n- {line}" for line in diffusion.not_run(recorded))
    return f"{diffusion.headline(recorded)}.\n\n{diffusion.table(recorded).markdown()}{notes and chr(10)}{notes}"


def first_token() -> str:
    """Return a vision-language model's time to its first token."""
    recorded = _load("vlm.json")
    head = f"{vlm.headline(recorded)}, {recorded['machine']['date'][:10]} (`make bench-vlm`)."
    notes = (vlm.noise_of(recorded), load_warning(recorded["machine"]))
    return "\n".join([f"{head}\n\n{vlm.table(recorded).markdown()}\n", *(f"- {note}" for note in notes if note)])


def benchmark_table() -> str:
    columns = [Column("benchmark", left=True), Column("what is timed", left=True)]
    return Table(columns, [[f"`agglo bench {each.name}`", each.about] for each in BENCHMARKS]).markdown()


README_MODEL = "deit_tiny_patch16_224"
_README_METHODS = {"tome": "ToMe", "atc average": "ATC"}


def readme_numbers() -> str:
    return accuracy_and_speed(read_results(FULL.folder("off-the-shelf")), _load("model.json"))


def accuracy_and_speed(accuracy: list[dict[str, Any]], speed: dict[str, Any]) -> str:
    """Return the README's table: top-1 of `agglo reproduce off-the-shelf` beside speeds of `agglo bench model`.

    Speeds are medians of ratios within a repeat, against two dense models: the one that passes a batch a few images at
    a time, as all reduced ones do ("free" at keep rate 1: nothing is merged), and timm's own.
    """
    here = [result for result in accuracy if (result["model"], result["data"]) == (README_MODEL, "imagenet")]
    top1 = {(result["method"], result["keep_rate"]): result.get("top1") for result in here}
    images = next(result["images"] for result in here if "images" in result)
    timed = {(result["name"], keep_rate_of(result)): result["images_per_second"] for result in speed["results"]}
    if ("free", 1.0) not in timed:
        raise ValueError("the speeds have no row for keep rate 1, which says what slicing alone is worth")
    dense, sliced = timed["dense", None], timed["free", 1.0]
    rows: list[list[Any]] = [["dense", top1["dense", None], _ratio(sliced, sliced), _ratio(sliced, dense)]]
    for rate in sorted({rate for _, rate in timed if rate is not None and rate < 1}, reverse=True):
        for name, shown in _README_METHODS.items():
            row: list[Any] = ["cannot", None, None]
            if (name, rate) in timed and top1.get((name, rate)) is not None:
                row = [top1[name, rate], _ratio(timed[name, rate], sliced), _ratio(timed[name, rate], dense)]
            rows.append([f"{shown}, keep rate {rate:g}", *row])
    columns = [Column("DeiT-Tiny, off the shelf", left=True), Column("top-1", ".1f")]
    columns += [Column("speed"), Column("speed with slicing")]
    about = (
        f"{images} ImageNet images (`make off-the-shelf`); batches of {speed['settings']['batch_size']}, "
        f"{_where(speed)} (`make bench-model`)."
    )
    return f"{Table(columns, rows).markdown()}\n\n{about}"


def _ratio(one: list[float], other: list[float]) -> str:
    return f"{median(a / b for a, b in zip(one, other, strict=True)):.2f}x"


def _where(recorded: dict[str, Any]) -> str:
    machine = recorded["machine"]
    return f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}"


def _load(name: str) -> dict[str, Any]:
    path = RESULTS / "bench" / name
    if not path.exists():
        benchmark = path.stem.partition("-")[0]  # clustering-contended.json is of bench-clustering
        raise ValueError(f"{path.relative_to(ROOT)} was not measured yet: make bench-{benchmark}")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


ALL = {**items(), **studies()}


def _of(name: str, settings: Settings) -> Callable[[], str]:
    return lambda: tables_of(ALL[name], settings)


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
    ("docs/reproduce.md", "items", lambda: items_table(items().values(), RESULTS)),
    ("docs/reproduce.md", "studies", lambda: items_table(studies().values(), RESULTS)),
    ("docs/reproduce.md", "benchmarks", benchmark_table),
    ("docs/reproduce.md", "rank", _of("rank", FULL)),
    ("docs/reproduce.md", "difference", _of("difference", FULL)),
    ("docs/off-the-shelf.md", "accuracy", _of("off-the-shelf", FULL)),
    ("docs/off-the-shelf.md", "better", _of("better-atc", FULL)),
    ("docs/off-the-shelf.md", "speed", speed),
    ("docs/off-the-shelf.md", "one stage", one_stage),
    ("docs/mini-study.md", "off the shelf", _of("off-the-shelf", MINIATURE)),
    ("docs/mini-study.md", "fine-tuned", _of("fine-tuned", MINIATURE)),
    ("docs/mini-study.md", "rank", _of("rank", MINIATURE)),
    ("docs/mini-study.md", "difference", _of("difference", MINIATURE)),
    ("docs/mini-study.md", "better", _of("better-tuned", MINIATURE)),
    ("docs/more-items.md", "more items", more_items),
    ("docs/mini-synthesis.md", "distances", _of("diffusion-fid", MINIATURE)),
    ("docs/mini-synthesis.md", "samples", _of("diffusion-samples", MINIATURE)),
    ("docs/mini-synthesis.md", "options", _of("diffusion-options", MINIATURE)),
    ("docs/mini-synthesis.md", "terrain", _of("terrain", FULL)),
    ("docs/synthesis.md", "diffusion", denoising_step),
    ("docs/mini-detection.md", "overfit", _of("coco-overfit", FULL)),
    ("docs/mini-detection.md", "detection", _of("detection", MINIATURE)),
    ("docs/mini-detection.md", "nuclei", _of("nuclei", FULL)),
    ("docs/detection.md", "padding", _of("padding", MINIATURE)),
    ("docs/clustering.md", "peers", against_peers),
    ("docs/clustering.md", "contention", contended),
    ("docs/tune.md", "ready-made", ready_made.summary),
    ("docs/tune.md", "places", _of("places", FULL)),
    ("docs/choosing.md", "budgets", choosing.budgets),
    ("docs/choosing.md", "tasks", choosing.tasks),
    ("docs/choosing.md", "speeds", choosing.speeds),
    ("docs/vlm.md", "vlm", first_token),
    ("README.md", "numbers", readme_numbers),
)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page with the text that it should have."""
    texts: dict[Path, str] = {}
    for page, name, text in PAGES:
        path = ROOT / page
        texts[path] = replace_between_marks(texts.get(path) or path.read_text(encoding="utf-8"), name, text())
    yield from texts.items()


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
    stale = [(path, text) for path, text in (*pages(), *tables_in_results()) if path.read_text("utf-8") != text]
    if is_check and stale:
        names = "\n".join(str(path.relative_to(ROOT)) for path, _ in stale)
        raise SystemExit(f"{names}\nthese differ from the records: make pages writes them")
    for path, text in stale:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
