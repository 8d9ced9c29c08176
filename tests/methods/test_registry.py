"""Methods by name and as values: listed, added by users, equal, hashable, written and read back."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import agglo
from agglo.methods import ATC, Method, Outcome, View, create, import_modules, registry
from agglo.text import parse_call

timm = pytest.importorskip("timm")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
VARIED: dict[str, list[dict[str, Any]]] = {
    "atc": [
        {"linkage": "complete", "features": "values", "sizes": "ignored"},
        {"importance": "class", "exponent": 0.25, "mean": "preserve_norm"},
    ],
    "random": [{"seed": 3}],
    "kmedoids": [{"weights": "equal", "iterations": 5, "released": True}],
    "sinkhorn": [{"temperature": 1e-3}],
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Method]]:
    """The registry, put back afterwards."""
    known = dict(registry._METHODS)
    monkeypatch.setattr(registry, "_METHODS", known)
    return known


def test_every_method_is_listed_with_what_it_is() -> None:
    listed = {info.name: info for info in agglo.list_methods()}
    assert {"atc", "tome", "l1", "l2", "linf", "topk", "evit", "dynamicvit", "ats", "random", "pool"} <= set(listed)
    assert list(listed) == sorted(listed)
    for name, info in listed.items():
        method = create(name)
        assert info.learns == isinstance(method, nn.Module)
        assert set(info.options) == set(method.options()), name
        assert info.description and info.reach
        assert info.reference or name in ("random", "pool")
    assert (listed["evit"].kind, listed["evit"].needs_class_attention) == ("prunes", True)


def test_the_document_lists_what_there_is() -> None:
    rows = {row.split("`")[1]: row for row in DOCUMENT.splitlines() if row.startswith("| `")}
    assert list(rows) == [info.name for info in agglo.list_methods()]
    for info in agglo.list_methods():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", rows[info.name])[2:-1]]
        yes = {True: "yes", False: ""}
        assert cells == [info.description, info.kind, yes[info.learns], yes[info.needs_class_attention], info.reach]


def test_names_are_kept_apart(registered: dict[str, type[Method]]) -> None:
    def another(name: str | None) -> type[Method]:
        class Another(Method):
            def reduce(self, view: View) -> Outcome:
                raise NotImplementedError

        if name is not None:
            Another.name = name
        return Another

    with pytest.raises(ValueError, match=r"'atc' is taken by agglo.methods.atc.ATC"):
        agglo.register(another("atc"))
    with pytest.raises(ValueError, match="needs a name"):
        agglo.register(another(None))
    with pytest.raises(TypeError, match=r"subclass of agglo\.Method"):
        agglo.register(nn.Linear)  # type: ignore[type-var]
    first = agglo.register(another("another"))
    second = agglo.register(another("another"))
    assert registered["another"] is second is not first


def test_every_form_leads_back() -> None:
    for info in agglo.list_methods():
        for options in [{}, *VARIED.get(info.name, [])]:
            method = create(info.name, **options)
            name, _, written = parse_call(str(method))
            again = create(name, **written)
            assert type(again) is type(method)
            assert again.options() == method.options()
            assert eval(repr(method), {type(method).__name__: type(method)}).options() == method.options()
        assert str(create(info.name)) == info.name


def test_methods_are_values() -> None:
    assert create("atc", linkage="single") == ATC("single")
    assert len({create("atc"), create("atc"), create("atc", linkage="single"), create("tome"), create("l1")}) == 4
    assert create("atc") != create("atc", linkage="single") != "atc"
    assert create("l1") != create("l2")
    learned = create("sit")
    assert learned == learned != create("sit")
    assert len({create("sit"), create("sit")}) == 2
    mixed = create("atc", linkage="single", importance="class")
    assert str(mixed) == "atc:linkage=single,importance=class"
    name, _, written = parse_call("atc:importance=class , linkage=single")
    assert create(name, **written) == mixed


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("", "accepted: name, or name:value"),
        ("atc:linkage=single,linkage=average", "'linkage' twice"),
        ("tomate:linkage=single", "'tome'"),
        ("atc:linkage", "'linkage'"),
        ("atc:link=single", "'link'"),
        ("atc:linkage=ward", "linkage='ward'"),
    ],
)
def test_errors_name_what_is_accepted(wrong: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        agglo.ReductionConfig.parse(wrong)


OWN = """
import agglo

@agglo.register
class Own(agglo.Method):
    name = "own_first"
    def reduce(self, view):
        raise NotImplementedError
"""


@pytest.mark.usefixtures("registered")
def test_modules_are_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_methods.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    import_modules(["own_methods"])
    assert create("own_first").name == "own_first"
    for module, reason in (("own_absent", "own_absent"), ("own_broken", "no_such_library")):
        with pytest.raises(ValueError, match=f"module '{module}' cannot be imported: ModuleNotFoundError.*{reason}"):
            import_modules([module])
