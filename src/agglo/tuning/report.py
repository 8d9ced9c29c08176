"""What a search found, in words: what was chosen, what it is worth, and what the images can show of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from agglo.experiments.machine import load_warning
from agglo.experiments.tables import Column, Table
from agglo.tuning.statistics import SURE, Drop, Quality, quality_from
from agglo.tuning.target import Target

_KEPT, _MISSED, _OPEN = "kept", "missed", "not shown"


def text(content: Mapping[str, Any]) -> str:
    """The report of a finished search."""
    chosen, data, settings, machine = (content[part] for part in ("chosen", "data", "settings", "machine"))
    target = target_of(content)
    where = machine["gpu"] or f"{machine['cpu']}, {settings['threads']} threads"
    head = [
        f"{content['model']['name']}: {target}",
        f"measured on {where}, {settings['device']}, {settings['dtype']}, batch {data['batch_size']}; "
        f"searched on {data['search']} images, confirmed on {data['confirmation']} others",
    ]
    parts = ["\n".join(head), "\n".join(_chosen(content)), promise(content), _table(content)]
    notes = [*_counts_of_work(content), *content["notes"]]
    notes += [f"left out: {reason}" for reason in content["left_out"]]
    if busy := load_warning(machine):
        notes.append(busy)
    written = ", ".join(f"{name}={value!r}" for name, value in chosen["apply"].items())
    parts += ["\n".join(notes), f"agglo.apply(model, {written})"]
    return "\n\n".join(parts)


def target_of(content: Mapping[str, Any]) -> Target:
    return Target(content["target"]["kind"], content["target"]["value"])


def _chosen(content: Mapping[str, Any]) -> list[str]:
    chosen = content["chosen"]
    seen, unseen = quality_from(chosen["search"]), quality_from(chosen["confirmation"])
    tokens = " ".join(str(count) for count, _ in groupby([content["dense"]["tokens"], *chosen["counts"]]))
    speed = chosen["speed"]
    lines = [
        f"chosen: {described(chosen)}",
        f"patch tokens: {tokens}; {chosen['gflops']:.3f} of the dense model's GFLOPs",
        f"speed: {speed['median']:.2f} times dense, in turns with it (half of {speed['turns']} turns between "
        f"{speed['low']:.2f} and {speed['high']:.2f})",
        f"{content['settings']['objective']} to the dense output: {unseen.distance:.4g} +- {unseen.distance_error:.2g} "
        f"on images the search did not see, {seen.distance:.4g} on those it saw",
    ]
    if unseen.drop is not None:
        accuracy = content["dense"]["accuracy"]
        lines.append(f"accuracy lost: {unseen.drop} of {accuracy:.2f} (paired, {unseen.images} images)")
    if unseen.disagreement is not None:
        lines.append(f"decisions that are not the dense model's: {unseen.disagreement} of 100")
    return lines


def promise(content: Mapping[str, Any]) -> str:
    """What can be promised of the target, and what cannot with these images."""
    target, chosen = target_of(content), content["chosen"]
    quality = quality_from(chosen["confirmation"])
    if target.kind == "gflops":
        return f"{_KEPT}: {chosen['gflops']:.3f} of the dense GFLOPs, {target.value:g} was asked for"
    if target.kind == "speedup":
        reached = chosen["speed"]["median"]
        word = _KEPT if reached >= target.value else _MISSED
        return f"{word}: {reached:.2f} times as fast on this machine, {target.value:g} was asked for"
    return _promised_drop(quality, target.value)


def _promised_drop(quality: Quality, most: float) -> str:
    by_labels = quality.drop is not None
    found = quality.drop or quality.disagreement
    assert found is not None
    what = "accuracy" if by_labels else "decisions, of which accuracy can lose no more than that"
    verdict = found.within(most)
    bound = f"{found.points:.2f} + {SURE:g} x {found.error:.2f}"
    if verdict:
        return f"{_KEPT}: at most {most:g} points of {what}: {bound} is below it"
    if verdict is False:
        return f"{_MISSED}: {found} of {what} are lost on images the search did not see, {most:g} was asked for"
    left_open = f"at most {most:g} points of {what}: {found} on {found.images} images leaves it open"
    return f"{_OPEN}: {left_open}; {_needed(found, most)}"


def _needed(found: Drop, most: float) -> str:
    needed = found.images_needed(most)
    if needed is None:
        return "more of it than that was lost on these images: ask for less, or search on more images"
    return f"about {needed} images to confirm with would show it, if it stays at that"


def _table(content: Mapping[str, Any]) -> str:
    """The best of each method, each at its own best schedule."""
    rows = [content["chosen"], *content["beside"]]
    qualities = [quality_from(row["confirmation"]) for row in rows]
    columns = [Column("method", left=True), Column("x dense", ".2f"), Column("GFLOPs", ".3f")]
    columns.append(Column(content["settings"]["objective"], ".4g"))
    if qualities[0].disagreement is not None:
        columns.append(Column("changed"))
    if qualities[0].drop is not None:
        columns.append(Column("lost"))
    cells: list[list[Any]] = []
    for row, quality in zip(rows, qualities, strict=True):
        line = [described(row), row["speed"]["median"], row["gflops"], quality.distance]
        line += [f"{d.points:.2f} +- {d.error:.2f}" for d in (quality.disagreement, quality.drop) if d is not None]
        cells.append(line)
    title = "every method at its own best schedule, on the images the search did not see:"
    return f"{title}\n{Table(columns, cells).text()}"


def described(row: Mapping[str, Any]) -> str:
    """A method, its options and its schedule, as a person would say them."""
    said = dict(row["apply"])
    method, schedule = said.pop("method"), said.pop("schedule", None)
    options = ", ".join(f"{name} {value}" for name, value in said.items())
    return " ".join(filter(None, (method, f"({options})" if options else "", schedule)))


def _counts_of_work(content: Mapping[str, Any]) -> list[str]:
    qualities = [step for step in content["steps"] if step["kind"] == "quality"]
    cannot = sum(step["kind"] == "cannot" for step in content["steps"])
    tried = len({str(step["key"]["apply"]) for step in qualities})
    apart = f", {cannot} more cannot do what was asked for" if cannot else ""
    return [f"tried: {tried} ways in {len(qualities)} evaluations{apart}; {content['seconds']:.0f} seconds"]
