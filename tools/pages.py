"""Writes what is measured into the pages of the documentation, each table between its marks.

    make pages

Every table comes from a record in results/; a test compares the pages with the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agglo.bench import diffusion_report
from agglo.bench.clustering import Case, goals, table
from agglo.bench.contention import Contention, report
from agglo.bench.methods import table as methods_table
from agglo.bench.model_report import table as speed_table
from agglo.bench.playground import table as latency_table
from agglo.bench.vlm import body, headline, notes
from agglo.reproduce.item import Settings
from agglo.reproduce.listing import benchmark_table, done_table
from agglo.reproduce.listing import table as items_table
from agglo.reproduce.pages import tables_of, write_between_marks
from agglo.reproduce.registry import BENCHMARKS, item_named, items
from tools import choosing, readme_figures, ready_made

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FULL, MINIATURE = Settings(output=RESULTS), Settings(output=RESULTS, miniature=True)


def against_peers() -> str:
    """The clustering's table, where it was measured, what memory it took, and how many goals were met."""
    recorded = _load("clustering.json")
    cases = [Case(**case) for case in recorded["cases"]]
    judged = goals(cases)
    missed = [line.removeprefix("MISSED: ") for line in judged if line.startswith("MISSED")]
    memory = "; ".join(f"{linkage} {share:.2f}" for linkage, share in recorded["peak_memory"].items())
    return (
        f"{_where(recorded)}\n\n{table(cases)}\n\n"
        f"Peak memory beside the input at the largest N, in distance matrices: {memory}.\n"
        f"Goals met: {len(judged) - len(missed)} of {len(judged)}; short of them: {'; '.join(missed) or 'none'}."
    )


def contended() -> str:
    recorded = _load("clustering-contended.json")
    return f"{_where(recorded)}\n\n{report([Contention(**result) for result in recorded['contention']], bullet='- ')}"


def speed() -> str:
    recorded = _load("model.json")
    indented = "\n".join(f"    {line}" for line in speed_table(recorded).splitlines())
    return f"{indented}\n\n({recorded['machine']['date'][:10]})"


def smaller_batches() -> str:
    """The batch of 16 in a sentence."""
    recorded = _load("model-batch16.json")
    rows = {(one["name"], one["keep_rate"]): one for one in recorded["results"]}
    atc = [f"{rows['atc average', rate]['to_dense']:.2f} times as fast at {rate * 100:g} %" for rate in (0.5, 0.25)]
    machine, batch = recorded["machine"], recorded["settings"]["batch_size"]
    where = f"{machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}"
    return (
        f"At batch {batch} (`results/bench/model-batch16.json`; {where}) the dense model ran "
        f"{rows['dense', None]['median']:.1f} images per second, and ATC was {' and '.join(atc)}."
    )


def one_stage() -> str:
    """What every method itself takes."""
    recorded = _load("methods.json")
    settings, machine = recorded["settings"], recorded["machine"]
    where = f"{machine['cpu']}, {machine['threads']} threads, load {machine['load']}, {machine['date'][:10]}"
    return (
        f"What a method itself takes to reduce {settings['batch_size']} images of {settings['tokens']} tokens "
        f"({settings['dim']} channels) to {settings['target']}, keys and attention given (`make bench-methods`, "
        f"methods in turns, medians of {settings['repeats']}; {where}):\n\n{methods_table(recorded).markdown()}"
    )


def denoising_step() -> str:
    """A step of Stable Diffusion's size: the table, where it was measured, and what it tells."""
    recorded = _load("diffusion.json")
    if not diffusion_report.is_finished(recorded):
        raise ValueError("the run of diffusion.json is unfinished: make bench-diffusion goes on with it")
    what, where = diffusion_report.headlines(recorded)
    notes = "\n".join(f"- {line}" for line in diffusion_report.notes(recorded))
    return f"{what}; {where}.\n\n{diffusion_report.body(recorded).markdown()}\n\n{notes}"


def moves_of_a_slider() -> str:
    """How long a move of the playground's slider takes."""
    recorded = _load("playground.json")
    machine, moves = recorded["machine"], len(recorded["results"][0]["milliseconds"])
    where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, {machine['date'][:10]}"
    return f"`make bench-playground`, {moves} moves each, {where}:\n\n{latency_table(recorded['results']).markdown()}"


def first_token() -> str:
    """A vision-language model's time to its first token."""
    recorded = _load("vlm.json")
    lines = "\n".join(f"- {line}" for line in notes(recorded))
    head = f"{headline(recorded)}, {recorded['machine']['date'][:10]} (`make bench-vlm`)."
    return f"{head}\n\n{body(recorded).markdown()}\n\n{lines}"


def _where(recorded: dict[str, Any]) -> str:
    machine = recorded["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date'][:10]}."


def _load(name: str) -> dict[str, Any]:
    path = RESULTS / "bench" / name
    if not path.exists():
        benchmark = path.stem.partition("-")[0]  # clustering-contended.json is of bench-clustering
        raise ValueError(f"{path.relative_to(ROOT)} was not measured yet: make bench-{benchmark}")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _of(name: str, settings: Settings) -> Callable[[], str]:
    return lambda: tables_of(item_named(name), settings)


MORE = (
    "ranking-per-rate",
    "hyper-parameters",
    "mae",
    "curves-augreg",
    "curves-swag",
    "curves-mae",
    "clusters",
    "throughput-model",
    "throughput-frameworks",
    "throughput-tokens",
    "better-atc",
    "places",
)


def more_items() -> str:
    """Items that have no page of their own, with their pictures."""
    parts = []
    for name in MORE:
        item = item_named(name)
        folder = MINIATURE.folder(name)
        pictures = [f"![{item.name}](../{path.relative_to(ROOT).as_posix()})" for path in sorted(folder.glob("*.png"))]
        parts += [f"## {name}", tables_of(item, MINIATURE), *pictures]
    return "\n\n".join(parts)


# Page, name of its marks, what stands between them.
PAGES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("docs/reproduce.md", "items", lambda: items_table(items().values())),
    ("docs/reproduce.md", "benchmarks", lambda: benchmark_table(BENCHMARKS)),
    ("docs/reproduce.md", "rank", _of("rank", FULL)),
    ("docs/reproduce.md", "difference", _of("difference", FULL)),
    ("docs/reproduce.md", "done", lambda: done_table(items().values(), RESULTS)),
    ("docs/off-the-shelf.md", "accuracy", _of("off-the-shelf", FULL)),
    ("docs/off-the-shelf.md", "better", _of("better-atc", FULL)),
    ("docs/off-the-shelf.md", "speed", speed),
    ("docs/off-the-shelf.md", "batch 16", smaller_batches),
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
    ("docs/playground.md", "latency", moves_of_a_slider),
    ("docs/vlm.md", "vlm", first_token),
    ("README.md", "numbers", lambda: readme_figures.numbers(*readme_figures.recorded())),
)


def main() -> None:
    for page, name, text in PAGES:
        write_between_marks(ROOT / page, name, text())
        print(f"{page}: {name}")


if __name__ == "__main__":
    main()
