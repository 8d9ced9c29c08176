"""Recipes: readable TOML files of settings, with the cases in which some of them differ."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from agglo.config import BUDGETS
from agglo.lab.options import help_texts
from agglo.lab.training.settings import ReductionSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


S = TypeVar("S", bound=ReductionSettings)
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table", list: "a list"}


@dataclass(frozen=True)
class Case:
    """Settings that apply where others have certain values."""

    when: dict[str, Any] = field(default_factory=dict)  # values by setting, of which every setting must have one
    unless: dict[str, Any] = field(default_factory=dict)  # values by setting, of which no setting may have one
    set: dict[str, Any] = field(default_factory=dict)
    note: str | None = None  # shown to the user
    refuse: str | None = None  # why there is no run in this case


@dataclass(frozen=True)
class _File:
    about: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    case: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe(Generic[S]):
    """Settings of a family of runs. Cases apply from first to last; each sees what the earlier ones set."""

    task: Recipes[S]
    name: str
    about: str
    values: Mapping[str, Any]
    cases: Sequence[Case]

    def resolve(self, choices: Mapping[str, Any]) -> tuple[S, list[str]]:
        """Return the settings for what a user chose, and the notes of the cases that apply."""
        chosen = checked(self.task.settings, choices, "command line")
        implied: set[str] = set()  # to go without what the recipe says
        if chosen.get("checkpoint") is not None:  # replaces the weights that a recipe starts from
            implied.update({"pretrained", "from_scratch"} & self.task.start.keys())
        if any(chosen.get(name) is not None for name in BUDGETS):
            implied.update(BUDGETS)
        if chosen.get("method") is not None:
            own = self.task.settings
            implied.update(own.of_method if chosen["method"] == "none" else own.of_no_method)
        chosen = {**{name: self.task.start[name] for name in implied}, **chosen}
        values: dict[str, Any] = {**self.task.start, **self.values}
        values = {**values, **self.task.of_data({**values, **chosen}), **self.values}
        notes = []
        for case in self.cases:
            settled = {**values, **chosen}
            excluded = any(settled[name] in values for name, values in case.unless.items())
            if not excluded and all(settled[name] in values for name, values in case.when.items()):
                if case.refuse:
                    these = ", ".join(f"{name}={settled[name]!r}" for name in {**case.when, **case.unless})
                    raise ValueError(f"recipe {self.name} with {these}: {case.refuse}")
                values.update(case.set)
                notes += [case.note] if case.note else []
        return self.task.settings(**{**values, **chosen}), notes


@dataclass(frozen=True)
class Recipes(Generic[S]):
    """The recipes of a task."""

    settings: type[S]
    package: str  # whose folder "recipes" holds them
    # Returns the settings that follow from the data set, unless a recipe says otherwise.
    of_data: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}

    @property
    def start(self) -> dict[str, Any]:
        """The default of every setting."""
        settings: Any = self.settings
        return {**asdict(settings(from_scratch=True)), "from_scratch": False}

    def names(self) -> list[str]:
        """Return the names of the package's recipes."""
        names = (path.name for path in (files(self.package) / "recipes").iterdir())
        return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))

    def load(self, name: str) -> Recipe[S]:
        """Load a recipe of the package by name, or any other by the path of its .toml file."""
        if not name.endswith(".toml") and name not in self.names():
            raise ValueError(f"recipe={name!r} is none of {', '.join(self.names())}, and no .toml file")
        path = Path(name) if name.endswith(".toml") else files(self.package) / "recipes" / f"{name}.toml"
        if not path.is_file():
            raise ValueError(f"recipe={name!r} is not a file")
        return self.parse(path.read_text(encoding="utf-8"), Path(name).stem)

    def parse(self, text: str, name: str) -> Recipe[S]:
        """Parse the text of a recipe; ValueError names what it cannot hold."""
        source = f"recipe {name}"
        try:
            file = _File(**checked(_File, tomllib.loads(text), source))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{source} is not TOML: {error}") from error
        cases = []
        for number, table in enumerate(file.case, 1):
            case = Case(**checked(Case, table, where := f"{source}: case {number}"))
            when, unless = self._alternatives(case.when, where), self._alternatives(case.unless, where)
            cases.append(replace(case, when=when, unless=unless, set=checked(self.settings, case.set, where)))
        return Recipe(self, name, file.about, checked(self.settings, file.settings, source), cases)

    def _alternatives(self, table: Mapping[str, Any], source: str) -> dict[str, list[Any]]:
        each = {name: values if isinstance(values, list) else [values] for name, values in table.items()}
        return {
            name: [checked(self.settings, {name: value}, source)[name] for value in values]
            for name, values in each.items()
        }


def checked(settings: type[Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return values by name with the types of a dataclass; ValueError names what is not a field or has another type."""
    types = get_type_hints(settings)
    for name in values:
        if name not in types:
            close = difflib.get_close_matches(name, types, n=3) or sorted(types)
            raise ValueError(f"{source}: {name!r} is not a setting; close to it: {', '.join(close)}")
    return {name: _as_type(types[name], value, f"{source}: {name}") for name, value in values.items()}


def _as_type(hint: Any, value: Any, name: str) -> Any:
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {str if get_origin(each) is Literal else get_origin(each) or each: each for each in hints}
    if NoneType in kinds and value in (None, "none"):
        return None
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        raise ValueError(f"{name}={value!r} must be {' or '.join(_TYPES.get(kind, 'none') for kind in kinds)}")
    if isinstance(value, list):
        return [_as_type(get_args(kinds[list])[0], item, name) for item in value]
    return value


def shown(settings: Any, notes: Sequence[str]) -> str:
    """Return settings as a recipe would have them, after their notes, each with its help text."""
    lines = [f"# {note}" for note in notes]
    meanings = help_texts(type(settings))
    for name, value in asdict(settings).items():
        assigned = f"{name} = {_as_toml('none' if value is None else value)}"
        lines.append(f"{assigned:<40} # {meanings[name]}" if name in meanings else assigned)
    return "\n".join(lines)


def _as_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_as_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def assignment(text: str) -> tuple[str, Any]:
    """Parse `name=value`; the value is read as TOML, and as plain text if it is none.

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
