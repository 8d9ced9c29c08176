"""Recipes: readable TOML files of settings, with the cases in which some of them differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from agglo.lab.options import help_texts
from agglo.lab.training.reduction import BUDGETS, OF_METHOD, ReductionSettings
from agglo.lab.training.settings import checked

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


S = TypeVar("S", bound=ReductionSettings)
_IN_CASE = {"when": dict, "unless": dict, "set": dict, "note": str, "refuse": str}
_TOML_TYPES: dict[type, str] = {str: "text", dict: "a table: { name = value }", list: "an array of tables: [[case]]"}


@dataclass(frozen=True)
class Case:
    """Settings that apply where others have certain values.

    Attributes:
        when: Values of which every named setting must have one.
        unless: Values of which no named setting may have one.
        values: The settings.
        note: Shown to the user.
        refusal: Why there is no run in this case.
    """

    when: Mapping[str, Sequence[Any]]
    unless: Mapping[str, Sequence[Any]]
    values: Mapping[str, Any]
    note: str | None
    refusal: str | None

    def holds(self, settings: Mapping[str, Any]) -> bool:
        wanted = all(settings[name] in values for name, values in self.when.items())
        return wanted and not any(settings[name] in values for name, values in self.unless.items())


@dataclass(frozen=True)
class Recipe(Generic[S]):
    """Settings of a family of runs. Cases apply from first to last; each sees what the earlier ones set."""

    task: Recipes[S]
    name: str
    about: str
    values: Mapping[str, Any]
    cases: Sequence[Case]

    def resolve(self, choices: Mapping[str, Any]) -> tuple[S, list[str]]:
        """Return the settings for what a user chose, and notes on the cases that apply and on overridden settings."""
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


@dataclass(frozen=True)
class Recipes(Generic[S]):
    """The recipes of a task.

    Attributes:
        settings: The class of its settings.
        package: Whose folder "recipes" holds its recipes.
        start: The default of every setting.
        implied: Returns the settings that follow from what a user chose, unless chosen too.
        of_data: Returns those that follow from the data set, unless a recipe says otherwise.
        of_method: Settings that mean nothing without a method.
        beside_no_method: Settings that exclude a method.
    """

    settings: type[S]
    package: str
    start: Mapping[str, Any]
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda chosen: {}
    of_data: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    of_method: Sequence[str] = OF_METHOD
    beside_no_method: Sequence[str] = ()

    def names(self) -> list[str]:
        """Return the names of the package's recipes."""
        names = (path.name for path in self._folder().iterdir())
        return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))

    def load(self, name: str) -> Recipe[S]:
        """Load a recipe of the package by name, or any other by the path of its .toml file."""
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
        """Parse the text of a recipe; ValueError names what it cannot hold."""
        source = f"recipe {name}"
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{source} is not TOML: {error}") from error
        _require(content, {"about": str, "settings": dict, "case": list}, source)
        cases = []
        for number, case in enumerate(content.get("case", []), 1):
            _require(case, _IN_CASE, where := f"{source}: case {number}")
            cases.append(
                Case(
                    self._alternatives(case.get("when", {}), where),
                    self._alternatives(case.get("unless", {}), where),
                    checked(self.settings, case.get("set", {}), where),
                    case.get("note"),
                    case.get("refuse"),
                )
            )
        values = checked(self.settings, content.get("settings", {}), source)
        return Recipe(self, name, content.get("about", ""), values, cases)

    def _alternatives(self, table: Mapping[str, Any], source: str) -> dict[str, list[Any]]:
        each = {name: values if isinstance(values, list) else [values] for name, values in table.items()}
        return {
            name: [checked(self.settings, {name: value}, source)[name] for value in values]
            for name, values in each.items()
        }

    def giving_way(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a recipe that what a user chose excludes, with the values they get."""
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
    """Return a line for each setting of a recipe that was overridden; for a dense model none is needed."""
    if chosen.get("method") == "none":
        return []
    budget = next((name for name in BUDGETS if chosen.get(name) is not None), "")
    causes = {name: budget if name in BUDGETS else "method" for name in yielding}
    return [
        f"the recipe's {name} gives way to {cause}={chosen[cause]!r}"
        for name, cause in causes.items()
        if values[name] != yielding[name]
    ]


def _require(content: Any, accepted: Mapping[str, type], source: str) -> None:
    """Raise ValueError unless a TOML table has only these keys, with values of these types."""
    if not isinstance(content, dict):
        raise ValueError(f"{source}: {content!r} must be a table")
    for key, value in content.items():
        if key not in accepted:
            raise ValueError(f"{source}: {key!r} is unknown; accepted: {', '.join(accepted)}")
        if not isinstance(value, accepted[key]):
            raise ValueError(f"{source}: {key}={value!r} must be {_TOML_TYPES[accepted[key]]}")


def shown(settings: Any, notes: Sequence[str]) -> str:
    """Return settings as a recipe would have them, after their notes, each with its help text."""
    lines = [f"# {note}" for note in notes]
    meanings = help_texts(type(settings))
    for name, value in asdict(settings).items():
        assigned = f"{name} = {_toml('none' if value is None else value)}"
        lines.append(f"{assigned:<40} # {meanings[name]}" if name in meanings else assigned)
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def assignment(text: str) -> tuple[str, Any]:
    """Parse `name=value`; the value is read as TOML, and as plain text if it is none.

    >>> assignment("lr=1e-3"), assignment("tracker=tensorboard"), assignment("method_options={k = 5}")
    (('lr', 0.001), ('tracker', 'tensorboard'), ('method_options', {'k': 5}))
    """
    name, value = _halves(text)
    return name, tomllib.loads(f"value = {value}")["value"] if _is_toml(value) else value.strip()


def assignments(text: str) -> tuple[str, list[Any]]:
    """Parse `name=value,value`, each value as `assignment` does; commas inside of lists, tables or quotes do not split.

    >>> assignments("patch_drop_rates=[0.5,0.5],[]"), assignments("linkage=single,none")
    (('patch_drop_rates', [[0.5, 0.5], []]), ('linkage', ['single', 'none']))
    """
    name, rest = _halves(text)
    pieces, values = rest.split(","), []
    while pieces:
        # Up to the first comma where TOML is complete; where it never is, a plain word ends at the next one.
        ends = (end for end in range(1, len(pieces) + 1) if _is_toml(",".join(pieces[:end])))
        end = next(ends, 1)
        values.append(assignment(f"{name}={','.join(pieces[:end])}")[1])
        pieces = pieces[end:]
    return name, values


def _halves(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is not of the form name=value")
    return name.strip(), value


def _is_toml(value: str) -> bool:
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True
