"""Recipes: readable TOML files of settings, with the cases in which some of them differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from agglo.experiments.training.reduction import BUDGETS, OF_METHOD, ReductionSettings
from agglo.experiments.training.settings import checked, explanations

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


S = TypeVar("S", bound=ReductionSettings)


@dataclass(frozen=True)
class Case:
    """Settings that hold where others have certain values and none has some others, and what is to be said about it.

    refusal: why there is no run in this case.
    """

    when: Mapping[str, Sequence[Any]]
    unless: Mapping[str, Sequence[Any]]
    values: Mapping[str, Any]
    note: str | None
    refusal: str | None

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether every setting of `when` has one of its values there, and no setting of `unless`."""
        wanted = all(settings[name] in values for name, values in self.when.items())
        return wanted and not any(settings[name] in values for name, values in self.unless.items())


@dataclass(frozen=True)
class Recipe(Generic[S]):
    """Settings of a family of runs. Cases are taken from first to last; each sees what the earlier ones set."""

    task: Recipes[S]
    name: str
    about: str
    values: Mapping[str, Any]
    cases: Sequence[Case]

    def resolve(self, choices: Mapping[str, Any]) -> tuple[S, list[str]]:
        """The settings when a person chose some of them, and the notes of the cases that hold and of what gave way."""
        chosen = checked(self.task.settings, choices, "command line")
        chosen = {**self.task.implied(chosen), **chosen}
        values: dict[str, Any] = {**self.task.start, **self.values}
        values = {**values, **self.task.of_data({**values, **chosen}), **self.values}
        notes = []
        yielding = self.task.giving_way(chosen)
        for case in self.cases:
            settled = {**values, **yielding, **chosen}
            if case.holds(settled):
                if case.refusal:
                    these = ", ".join(f"{name}={settled[name]!r}" for name in {**case.when, **case.unless})
                    raise ValueError(f"recipe {self.name} with {these}: {case.refusal}")
                values.update(case.values)
                if case.note:
                    notes.append(case.note)
        notes += _notes_on(yielding, values, chosen)
        return self.task.settings(**{**values, **yielding, **chosen}), notes


def _nothing(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Recipes(Generic[S]):
    """The recipes of a task.

    settings: the class of its settings. package: whose folder "recipes" holds its own ones.
    start: every setting as it is where nobody says otherwise.
    implied: the settings that follow from what a person chose, unless chosen too.
    of_data: those that follow from the data set, unless a recipe says otherwise.
    of_method: those that mean nothing without a method. beside_no_method: those that have no place beside one.
    """

    settings: type[S]
    package: str
    start: Mapping[str, Any]
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing
    of_data: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing
    of_method: Sequence[str] = OF_METHOD
    beside_no_method: Sequence[str] = ()

    def names(self) -> list[str]:
        """The recipes of the package."""
        return sorted(
            path.name.removesuffix(".toml") for path in self._folder().iterdir() if path.name.endswith(".toml")
        )

    def load(self, name: str) -> Recipe[S]:
        """A recipe of the package by name, or any other by the path of its .toml file."""
        if name.endswith(".toml"):
            path = Path(name)
            if not path.is_file():
                raise ValueError(f"recipe={name!r} is not a file")
            try:
                return self.parse(path.read_text(encoding="utf-8"), path.stem)
            except UnicodeDecodeError as error:
                raise ValueError(f"recipe={name!r} is not text in UTF-8: {error}") from error
        if name not in self.names():
            raise ValueError(f"recipe={name!r} is none of {', '.join(self.names())}, and no .toml file")
        return self.parse((self._folder() / f"{name}.toml").read_text(encoding="utf-8"), name)

    def parse(self, text: str, name: str) -> Recipe[S]:
        """A recipe from the text of its file; ValueError names what it cannot hold."""
        source = f"recipe {name}"
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{source} is not TOML: {error}") from error
        _require_keys(content, ("about", "settings", "case"), source, "a recipe")
        cases = content.get("case", [])
        if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
            raise ValueError(f"{source}: cases are written [[case]], each under its own")
        values = checked(self.settings, _table(content, "settings", source, "[settings]"), source)
        about = _text(content, "about", source) or ""
        return Recipe(self, name, about, values, [self._case(case, source, n) for n, case in enumerate(cases, 1)])

    def _case(self, content: Mapping[str, Any], source: str, number: int) -> Case:
        place = f"{source}: case {number}"
        _require_keys(content, ("when", "unless", "set", "note", "refuse"), place, "a case")
        when, unless, values = (
            _table(content, key, place, f"{key} = {{ name = value }}") for key in ("when", "unless", "set")
        )
        return Case(
            self._alternatives(when, source),
            self._alternatives(unless, source),
            checked(self.settings, values, source),
            _text(content, "note", place),
            _text(content, "refuse", place),
        )

    def _alternatives(self, table: Mapping[str, Any], source: str) -> dict[str, list[Any]]:
        """Settings with the values that a case is for, one or several of each."""
        each = {name: values if isinstance(values, list) else [values] for name, values in table.items()}
        return {
            name: [checked(self.settings, {name: value}, source)[name] for value in values]
            for name, values in each.items()
        }

    def giving_way(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """What of a recipe has no place beside what a person chose, and what it is then."""
        names: set[str] = set()
        if any(chosen.get(name) is not None for name in BUDGETS):
            names.update(BUDGETS)
        if chosen.get("method") == "none":
            names.update(self.of_method)
        elif chosen.get("method") is not None:
            names.update(self.beside_no_method)
        return {name: self.start[name] for name in self.start if name in names and name not in chosen}

    def _folder(self) -> Any:
        return files(self.package) / "recipes"


def _notes_on(yielding: Mapping[str, Any], values: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    """A line for each setting of a recipe that gave way; for a dense model it goes without saying."""
    if chosen.get("method") == "none":
        return []
    budget = next((name for name in BUDGETS if chosen.get(name) is not None), "")
    causes = {name: budget if name in BUDGETS else "method" for name in yielding}
    return [
        f"the recipe's {name} gives way to {cause}={chosen[cause]!r}"
        for name, cause in causes.items()
        if values[name] != yielding[name]
    ]


def _require_keys(content: Mapping[str, Any], accepted: Sequence[str], source: str, what: str) -> None:
    for key in content:
        if key not in accepted:
            listed = f"{', '.join(accepted[:-1])} and {accepted[-1]}"
            raise ValueError(f"{source}: {key!r} is unknown; {what} has {listed}")


def _table(content: Mapping[str, Any], key: str, source: str, form: str) -> dict[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{source}: {key}={value!r} must be a table: {form}")
    return value


def _text(content: Mapping[str, Any], key: str, source: str) -> str | None:
    value = content.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{source}: {key}={value!r} must be text")
    return value


def shown(settings: Any, notes: Sequence[str]) -> str:
    """Settings as they would stand in a recipe, after their notes, each with what it means."""
    lines = [f"# {note}" for note in notes]
    meanings = explanations(type(settings))
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
    return name.strip(), tomllib.loads(f"value = {value}")["value"] if _is_toml(value) else value.strip()


def assignments(text: str) -> tuple[str, list[Any]]:
    """`name=value,value` of the command line, each value read as `assignment` does; a comma inside of a list, a table
    or quotes is its own.

    >>> assignments("patch_drop_rates=[0.5,0.5],[]"), assignments("linkage=single,none")
    (('patch_drop_rates', [[0.5, 0.5], []]), ('linkage', ['single', 'none']))
    """
    name, equals, rest = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is not of the form name=value,value")
    pieces, values = rest.split(","), []
    while pieces:
        # Up to the first comma where TOML is complete; where it never is, a plain word ends at the next one.
        ends = (end for end in range(1, len(pieces) + 1) if _is_toml(",".join(pieces[:end])))
        end = next(ends, 1)
        values.append(assignment(f"{name}={','.join(pieces[:end])}")[1])
        pieces = pieces[end:]
    return name.strip(), values


def _is_toml(value: str) -> bool:
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True
