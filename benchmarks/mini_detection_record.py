"""What the detection in miniature found so far: one JSON file, complete after every cell, and intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from agglo.detection.evaluation.matches import interval
from agglo.detection.evaluation.one_pass import KINDS
from agglo.experiments.evaluation.record import processor
from agglo.experiments.files import require_output, write_json
from benchmarks.mini_detection_cells import samples
from benchmarks.mini_detection_plan import (
    DENSE,
    RANKED,
    SHELF,
    SHELF_ENTRIES,
    TUNED,
    TUNED_ENTRIES,
    Cell,
    Plan,
    Study,
)

LEAST_LOST = 1 / 3  # of the dense AP, with a single token
_KEY = ("part", "seed", "name", "keep_rate")


class Record:
    """plan: how far the study is to go, which may grow. study: what decides its numbers, which may not change."""

    def __init__(self, path: Path, study: Study, plan: Plan, machine: Mapping[str, Any]) -> None:
        self._path = path
        self._machine = dict(machine)
        self.content: dict[str, Any] = {"dense": [], "gate": [], "results": [], "differences": []}
        if require_output(path).exists():
            self.content = json.loads(path.read_text(encoding="utf-8"))
            then = self.content["settings"]
            if changed := [name for name, value in study.fixed.items() if then[name] != value]:
                told = ", ".join(f"{name}={then[name]} there, {study.fixed[name]} now" for name in changed)
                raise ValueError(
                    f"{str(path)!r} holds another study ({told}); remove it, or give others --output and --runs"
                )
        self.content |= {"settings": study.fixed, "plan": asdict(plan), "machine": self._machine}

    def find(self, cell: Cell) -> dict[str, Any] | None:
        return next((each for each in self.content["results"] if {name: each[name] for name in _KEY} == cell.key), None)

    def result(self, cell: Cell) -> dict[str, Any]:
        found = self.find(cell)
        if found is None:
            raise ValueError(f"there is no result of {cell.title}")
        return found

    def add(self, cell: Cell, found: Mapping[str, Any]) -> None:
        self.remove(cell)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.content["results"].append({**cell.key, **found, "processor": processor(self._machine), "date": now})
        self._write()

    def remove(self, cell: Cell) -> None:
        self.content["results"] = [
            each for each in self.content["results"] if {name: each[name] for name in _KEY} != cell.key
        ]

    def add_dense(self, seed: int, weights: str, log: Sequence[Mapping[str, float]]) -> None:
        """The training of a dense detector. All cells of its seed are of these very weights."""
        before = next((each for each in self.content["dense"] if each["seed"] == seed), None)
        if before is not None and before["weights"] != weights:
            raise ValueError(
                f"{str(self._path)!r} is of another dense detector of seed {seed} ({before['weights']} there, {weights}"
                " now); remove it, or give another --output"
            )
        others = [each for each in self.content["dense"] if each["seed"] != seed]
        added = [*others, {"seed": seed, "weights": weights, "log": list(log)}]
        self.content["dense"] = sorted(added, key=lambda each: each["seed"])
        self._write()

    def add_gate(self, found: Mapping[str, Any]) -> None:
        others = [each for each in self.content["gate"] if each["seed"] != found["seed"]]
        self.content["gate"] = sorted([*others, dict(found)], key=lambda each: each["seed"])
        self._write()

    def compare(self, differences: Sequence[Mapping[str, Any]]) -> None:
        self.content["differences"] = list(differences)
        self._write()

    def _write(self) -> None:
        write_json(self._path, self.content)


def complete_seeds(content: Mapping[str, Any], part: str) -> list[int]:
    """The seeds of which every planned cell of a part is there: a mean over others would be of other methods."""
    names = {(each["seed"], each["name"], each["keep_rate"]) for each in content["results"] if each["part"] == part}
    wanted = planned(content, part)
    return [seed for seed in range(content["plan"]["seeds"]) if all((seed, *one) in names for one in wanted)]


def planned(content: Mapping[str, Any], part: str) -> list[tuple[str, float | None]]:
    """Name and keep rate of every cell of a part."""
    entries, rates = {SHELF: (SHELF_ENTRIES, "shelf_rates"), TUNED: (TUNED_ENTRIES, "tuned_rates")}[part]
    return [(DENSE.name, None), *((entry.name, rate) for rate in content["plan"][rates] for entry in entries)]


@dataclass(frozen=True)
class Term:
    """A cell in a sum of AP: added, or with sign -1 taken away."""

    sign: int
    part: str
    name: str
    rate: float | None = None


@dataclass(frozen=True)
class Claim:
    """Something that is above 0 in the study's table for both of its detectors, for boxes and for masks."""

    words: str
    terms: tuple[Term, ...]


def ahead(part: str, better: str, worse: str, rate: float) -> Claim:
    return Claim(f"{part} at {rate:.0%}: {better} ahead of {worse}", _pair(part, better, worse, rate))


def to_dense(part: str, name: str, rate: float) -> str:
    """The words of such a difference in the record."""
    return f"{part}: {name} {rate:.0%} to dense"


def _pair(part: str, one: str, other: str, rate: float) -> tuple[Term, ...]:
    return Term(1, part, one, rate), Term(-1, part, other, None if other == DENSE.name else rate)


def _recovers(name: str, rate: float) -> Claim:
    """Fine-tuned, a method loses less against dense than off the shelf."""
    terms = (*_pair(TUNED, name, DENSE.name, rate), *(_minus(term) for term in _pair(SHELF, name, DENSE.name, rate)))
    return Claim(f"{name} at {rate:.0%}: fine-tuned it loses less against dense than off the shelf", terms)


def _minus(term: Term) -> Term:
    return Term(-term.sign, term.part, term.name, term.rate)


CLAIMS = (
    ahead(SHELF, "atc average", "tome", 0.5),
    ahead(SHELF, "atc complete", "tome", 0.5),
    ahead(SHELF, "tome", "atc single", 0.5),
    ahead(SHELF, "atc average", "atc single", 0.5),
    ahead(SHELF, "atc average", "atc single", 0.25),
    ahead(SHELF, "atc complete", "atc average", 0.25),
    ahead(TUNED, "atc average", "tome", 0.5),
    ahead(TUNED, "atc complete", "tome", 0.5),
    ahead(TUNED, "atc average", "atc single", 0.5),
    ahead(TUNED, "atc average", "atc single", 0.25),
    _recovers("atc average", 0.25),
    _recovers("atc average", 0.5),
    _recovers("tome", 0.5),
)
# Against what the study's table does not have, or has at a keep rate that is not ranked here.
BESIDES = tuple(
    ahead(part, "atc average", other, rate)
    for part in (SHELF, TUNED)
    for rate in RANKED
    for other in ("pool", "random", "evit")
)


def gate(study: Study, plan: Plan, record: Record, seed: int) -> dict[str, Any]:
    """By kind: which share of the dense AP is lost with a single token, with its interval; and whether it is enough."""
    dense, collapsed = plan.gate(seed)
    found: dict[str, Any] = {"seed": seed}
    for kind in KINDS.values():
        with_tokens, without = (record.result(cell)[f"{kind}_AP"] for cell in (dense, collapsed))
        share = float(_lost(np.array(with_tokens), np.array(without)))
        low, high = interval(_lost(samples(study, dense)[kind], samples(study, collapsed)[kind]))
        found[kind] = {"dense": with_tokens, "one token": without, "lost": share, "low": low, "high": high}
    return {**found, "passed": all(found[kind]["lost"] >= LEAST_LOST for kind in KINDS.values())}


def _lost(dense: Any, collapsed: Any) -> Any:
    """Of nothing, nothing is lost."""
    return np.where(dense > 0, 1 - collapsed / np.where(dense > 0, dense, 1), 0.0)


def compared(study: Study, record: Record) -> list[dict[str, Any]]:
    """Differences, of means over seeds, with intervals over resampled scenes: every cell to dense, and the claims."""
    content = record.content
    rows = []
    claims: list[Claim] = []
    for part in (SHELF, TUNED):
        claims += [
            Claim(to_dense(part, name, rate), _pair(part, name, DENSE.name, rate))
            for name, rate in planned(content, part)
            if rate is not None
        ]
    for claim in (*claims, *CLAIMS, *BESIDES):
        seeds = [complete_seeds(content, part) for part in {term.part for term in claim.terms}]
        both = sorted(set.intersection(*map(set, seeds)))
        cells = [[Cell(term.part, seed, term.name, term.rate) for term in claim.terms] for seed in both]
        if not both or any((found := record.find(cell)) is None or "cannot" in found for row in cells for cell in row):
            continue
        rows.append({"words": claim.words, "seeds": both, **_difference(study, record, claim, cells)})
    return rows


def _difference(study: Study, record: Record, claim: Claim, cells: Sequence[Sequence[Cell]]) -> dict[str, Any]:
    signs = [term.sign for term in claim.terms]
    found = {}
    for kind in KINDS.values():
        values = [
            sum(sign * record.result(cell)[f"{kind}_AP"] for sign, cell in zip(signs, row, strict=True))
            for row in cells
        ]
        resampled = np.mean(
            [sum(sign * samples(study, cell)[kind] for sign, cell in zip(signs, row, strict=True)) for row in cells],
            axis=0,
        )
        low, high = interval(resampled)
        found[kind] = {"value": float(np.mean(values)), "low": low, "high": high, "by_seed": values}
    return found
