"""Recipes: readable TOML files of settings, with the cases in which some of them differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from agglo.classification.settings import AUGMENTATION_SETTINGS, Settings, checked, explanations
from agglo.classification.transforms import AUGMENTATION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Case:
    """Settings that hold where others have certain values, and what is to be said about them."""

    when: Mapping[str, Sequence[Any]]
    values: Mapping[str, Any]
    note: str | None

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether every named setting has one of the values that the case is for."""
        return all(settings[name] in wanted for name, wanted in self.when.items())


@dataclass(frozen=True)
class Recipe:
    """Settings of a family of runs. Cases are taken from first to last; each sees what the earlier ones set."""

    name: str
    about: str
    values: Mapping[str, Any]
    cases: Sequence[Case]

    def resolve(self, choices: Mapping[str, Any]) -> tuple[Settings, list[str]]:
        """The settings when a person chose some of them, and the notes of the cases that hold."""
        chosen = checked(choices, "command line")
        if chosen.get("checkpoint") is not None:
            chosen = {"pretrained": False, "from_scratch": False, **chosen}
        values: dict[str, Any] = {**asdict(Settings(from_scratch=True)), "from_scratch": False, **self.values}
        values = {**values, **_augmentation({**values, **chosen}["dataset"]), **self.values}
        notes = []
        for case in self.cases:
            if case.holds({**values, **chosen}):
                values.update(case.values)
                if case.note:
                    notes.append(case.note)
        return Settings(**{**values, **chosen}), notes


def names() -> list[str]:
    """The recipes of the package."""
    return sorted(path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml"))


def load(name: str) -> Recipe:
    """A recipe of the package by name, or any other by the path of its .toml file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"recipe={name!r} is not a file")
        return parse(path.read_text(encoding="utf-8"), path.stem)
    if name not in names():
        raise ValueError(f"recipe={name!r} is none of {', '.join(names())}, and no .toml file")
    return parse((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)


def parse(text: str, name: str) -> Recipe:
    """A recipe from the text of its file; ValueError names what it cannot hold."""
    source = f"recipe {name}"
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is not TOML: {error}") from error
    unknown = set(content) - {"about", "settings", "case"}
    if unknown:
        raise ValueError(f"{source}: {sorted(unknown)[0]!r} is unknown; a recipe has about, settings and case")
    cases = []
    for case in content.get("case", []):
        when = {name: _values(name, wanted, source) for name, wanted in case.get("when", {}).items()}
        cases.append(Case(when, checked(case.get("set", {}), source), case.get("note")))
    return Recipe(name, content.get("about", ""), checked(content.get("settings", {}), source), cases)


def _values(name: str, wanted: Any, source: str) -> list[Any]:
    """The values of a setting that a case is for, one or several."""
    each = wanted if isinstance(wanted, list) else [wanted]
    return [checked({name: value}, source)[name] for value in each]


def shown(settings: Settings, notes: Sequence[str]) -> str:
    """Settings as they would stand in a recipe, after their notes, each with what it means."""
    lines = [f"# {note}" for note in notes]
    meanings = explanations()
    for name, value in asdict(settings).items():
        assigned = f"{name} = {_toml('none' if value is None else value)}"
        lines.append(f"{assigned:<40} # {meanings[name]}" if name in meanings else assigned)
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def assignment(text: str) -> tuple[str, Any]:
    """`name=value` of the command line; the value is read as TOML, and as plain text if it is none.

    >>> assignment("lr=1e-3"), assignment("tracker=tensorboard"), assignment("method_options={k = 5}")
    (('lr', 0.001), ('tracker', 'tensorboard'), ('method_options', {'k': 5}))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is not of the form name=value")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def _augmentation(dataset: str) -> dict[str, Any]:
    """What training does to the images of a data set, as settings."""
    own = AUGMENTATION.get(dataset)
    if own is None:
        raise ValueError(f"dataset={dataset!r} is not known; accepted: {', '.join(map(repr, AUGMENTATION))}")
    return {name: getattr(own, name) for name in AUGMENTATION_SETTINGS}


def _folder() -> Any:
    return files("agglo.classification") / "recipes"
