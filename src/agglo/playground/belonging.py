"""Which tab runs the model that a result of `agglo tune` was found for, and what to start where none does."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agglo.embedded import classifier, generator
from agglo.playground.fronts import Front
from agglo.playground.naming import same_name

TOKENS, SYNTHESIS, DETECTION = TABS = ("tokens", "synthesis", "detection")
DETECTOR = "agglo_fashion_detector"  # what results call the embedded one
# The option that puts another model in the place of each that comes with agglo.
_REPLACED_BY = {classifier.NAME: "--model", generator.NAME: "--pipeline", DETECTOR: "--detector"}


def tab_of(front: Front, names: Mapping[str, Collection[str]]) -> str | None:
    """The tab that runs the model of a result; None if none does.

    names: by tab, what a result may call the model that is open there.
    """
    return next((tab for tab in TABS if any(same_name(front.model, name) for name in names[tab])), None)


def how_to_open(front: Front) -> str:
    """What a visitor reads who chose a point of a model that is not open: no folder of the machine."""
    if option := _REPLACED_BY.get(front.model):
        return (
            f"Not applied: this is for {front.title}, and {option} put another model in its place; agglo play without "
            f"{option} runs it."
        )
    if front.objective != "kl":  # no classifier
        command = "agglo play --pipeline DIR or --detector D"
    elif front.title == front.model:
        command = f"agglo play --model {front.model} --checkpoint F"
    else:
        command = "agglo play --model, with the name that was given to agglo tune,"
    return f"Not applied: this is for {front.title}, which is not on this page; {command} opens it."
