"""Differences between cells of detectors: each to dense, and what the paper's tables say of who is ahead of whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from agglo.detection.evaluation.matches import interval
from agglo.detection.evaluation.one_pass import KINDS
from agglo.reproduce.detectors import DENSE, SHELF, TUNED, Samples, Scale

LEAST_LOST = 1 / 3  # of the dense AP, with a single token


@dataclass(frozen=True)
class Term:
    """A cell in a sum of AP: added, or with sign -1 taken away."""

    sign: int
    training: str
    method: str
    keep_rate: float | None = None


@dataclass(frozen=True)
class Claim:
    """Something that is above 0 in the paper's table for both of its detectors, for boxes and for masks."""

    words: str
    terms: tuple[Term, ...]


def ahead(training: str, better: str, worse: str, rate: float) -> Claim:
    return Claim(f"{training} at {rate:.0%}: {better} ahead of {worse}", _pair(training, better, worse, rate))


def to_dense_words(training: str, name: str, rate: float) -> str:
    return f"{training}: {name} {rate:.0%} to dense"


def _pair(training: str, one: str, other: str, rate: float) -> tuple[Term, ...]:
    return Term(1, training, one, rate), Term(-1, training, other, None if other == DENSE else rate)


def _recovers(name: str, rate: float) -> Claim:
    """Fine-tuned, a method loses less against dense than off the shelf."""
    shelf = [Term(-term.sign, term.training, term.method, term.keep_rate) for term in _pair(SHELF, name, DENSE, rate)]
    words = f"{name} at {rate:.0%}: fine-tuned it loses less against dense than off the shelf"
    return Claim(words, (*_pair(TUNED, name, DENSE, rate), *shelf))


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
# Against what the paper's tables do not have at these keep rates.
BESIDES = tuple(
    ahead(training, "atc average", other, rate)
    for training in (SHELF, TUNED)
    for rate in (0.25, 0.5)
    for other in ("pool", "random", "evit")
)


def claims_of(scale: Scale) -> list[Claim]:
    """All differences that a scale has the cells for."""
    found = []
    for training, methods, rates in (
        (SHELF, scale.shelf, scale.shelf_rates),
        (TUNED, scale.fine_tuned, scale.tuned_rates),
    ):
        for rate in rates:
            for entry in methods:
                base = Term(-1, training, scale.dense_name(entry))
                terms = (Term(1, training, entry.name, rate), base)
                found.append(Claim(to_dense_words(training, entry.name, rate), terms))
    found += [*CLAIMS, *BESIDES]
    known = {term for claim in found[: -len(CLAIMS) - len(BESIDES)] for term in map(_place, claim.terms)}
    # Where the dense detector is not trained on, the fine-tuned ones are compared with it as it is.
    return [_with_dense(claim, scale) for claim in found if all(_place(term) in known for term in claim.terms)]


def _place(term: Term) -> tuple[str, str, float | None]:
    return term.training, term.method, term.keep_rate


def _with_dense(claim: Claim, scale: Scale) -> Claim:
    if scale.tuned_dense:
        return claim
    terms = tuple(Term(t.sign, SHELF, t.method) if t.keep_rate is None else t for t in claim.terms)
    return Claim(claim.words, terms)


def difference(
    claim: Claim,
    seeds: Sequence[int],
    result: Callable[[Term, int], Mapping[str, Any]],
    samples: Callable[[Term, int], Samples],
) -> dict[str, Any]:
    """By "box" and "mask": a difference of means over seeds, with its 95 % interval over resampled images."""
    found = {}
    for kind in KINDS.values():
        values = [sum(term.sign * result(term, seed)[f"{kind}_AP"] for term in claim.terms) for seed in seeds]
        parts = [[term.sign * samples(term, seed)[kind] for term in claim.terms] for seed in seeds]
        low, high = interval(np.sum(parts, axis=1).mean(axis=0))
        found[kind] = {"value": float(np.mean(values)), "low": low, "high": high, "by_seed": values}
    return found


def lost(
    dense: Mapping[str, Any], collapsed: Mapping[str, Any], of_dense: Samples, of_collapsed: Samples
) -> dict[str, Any]:
    """By kind: which share of the dense AP is lost with a single token, with its interval."""
    found = {}
    for kind in KINDS.values():
        share = float(_lost(np.array(dense[f"{kind}_AP"]), np.array(collapsed[f"{kind}_AP"])))
        low, high = interval(_lost(of_dense[kind], of_collapsed[kind]))
        found[kind] = {"share": share, "low": low, "high": high}
    return found


def _lost(dense: Any, collapsed: Any) -> Any:
    """Of nothing, nothing is lost."""
    return np.where(dense > 0, 1 - collapsed / np.where(dense > 0, dense, 1), 0.0)


def passes(collapsed: Mapping[str, Any]) -> bool:
    """Whether a detector loses enough: otherwise the ViT hardly matters to it, and methods differ by chance."""
    return all(collapsed["lost"][kind]["share"] >= LEAST_LOST for kind in KINDS.values())


def verdict(found: Mapping[str, Any]) -> str:
    """What intervals over images and the seeds say about a claim that both differences are above 0."""
    kinds = list(KINDS.values())
    by_images = [kind for kind in kinds if found[kind]["low"] > 0 or found[kind]["high"] < 0]
    sure = [kind for kind in by_images if _seeds_agree(found[kind]["by_seed"])]
    if not sure:
        return "undecided: seeds differ by more" if by_images else "undecided"
    signs = {found[kind]["value"] > 0 for kind in sure}
    if len(signs) > 1:
        return "boxes and masks disagree"
    said = "agrees" if signs == {True} else "the other way round"
    said = said if len(sure) == len(kinds) else f"only {sure[0]} AP: {said}"
    return f"{said} (one seed)" if len(found[sure[0]]["by_seed"]) == 1 else said


def _seeds_agree(differences: Sequence[float]) -> bool:
    """Whether trainings of other seeds are on the same side of 0, further from it than they are apart; one seed cannot
    disagree."""
    if len(differences) == 1:
        return True
    one_side = min(differences) > 0 or max(differences) < 0
    return one_side and abs(fmean(differences)) > stdev(differences)
