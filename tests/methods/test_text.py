"""Methods as values: equal, hashable, written and read back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agglo
from agglo.methods import ATC, Method, Outcome, View, create, import_methods, registry
from agglo.methods.registry import find

VARIED: dict[str, list[dict[str, Any]]] = {
    "atc": [
        {"linkage": "single"},
        {"linkage": "complete", "features": "values", "sizes": "ignored"},
        {"importance": "class", "exponent": 0.25, "mean": "preserve_norm"},
        {"linkage": ["single", "average"], "features": ["keys", "tokens"], "importance": ["received", None]},
        {"features": ["keys"]},
    ],
    "tome": [{"order": "position"}, {"features": ["keys", "tokens"], "mean": "preserve_norm"}],
    "pool": [{"mean": "preserve_norm"}],
    "random": [{"seed": 3}],
    "l1": [{"released": False}],
    "kmedoids": [{"weights": "equal", "iterations": 5, "released": True}],
    "evovit": [{"momentum": 0.25, "per_block": True}],
    "sinkhorn": [{"temperature": 1e-3}],
}
ALL = [(info.name, options) for info in agglo.list_methods() for options in [{}, *VARIED.get(info.name, [])]]


@pytest.mark.parametrize(("name", "options"), ALL)
def test_every_form_leads_back(name: str, options: dict[str, Any]) -> None:
    method = create(name, **options)
    again = agglo.methods.parse_method(str(method))
    assert type(again) is type(method)
    assert again.options() == method.options()
    assert eval(repr(method), {type(method).__name__: type(method)}).options() == method.options()
    assert str(create(name)) == name


def test_methods_are_values() -> None:
    assert create("atc", linkage="single") == agglo.methods.parse_method("atc:linkage=single") == ATC("single")
    assert len({create("atc"), create("atc"), create("atc", linkage="single"), create("tome"), create("l1")}) == 4
    assert create("atc") != create("atc", linkage="single") != "atc"
    assert create("l1") != create("l2")
    learned = create("sit")
    assert learned == learned != create("sit")
    assert len({create("sit"), create("sit")}) == 2
    assert repr(create("tome")) == "ToMe(features='keys', order='released', mean='plain')"
    assert str(create("kmedoids", released=True)) == "kmedoids:released=true"
    mixed = create("atc", linkage=("single", "average"), importance=["class", None])
    assert str(mixed) == "atc:linkage=[single,average],importance=[class,none]"
    assert agglo.methods.parse_method("atc:importance=[class, none] , linkage=[single,average]") == mixed


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("", "accepted: name, or name:value"),
        ("atc:", "'atc:'"),
        ("tomate:linkage=single", "'tome'"),
        ("atc:linkage", "'linkage'"),
        ("atc:linkage=single,", "comma"),
        ("atc:linkage=", "linkage="),
        ("atc:link=single", "'link'"),
        ("atc:linkage=ward", "linkage='ward'"),
        ("atc:linkage=single,linkage=average", "'linkage' twice"),
        ("atc:linkage=[single,average", "no closing"),
        ("atc:linkage=[single,,average]", "comma"),
        ("atc:linkage=[]", "linkage"),
        ("atc:linkage=[single,ward]", "'ward'"),
    ],
)
def test_errors_name_what_is_accepted(wrong: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        agglo.methods.parse_method(wrong)


class Holder(Method):
    name: ClassVar[str] = "holder"

    def __init__(self, value: Any = "nothing") -> None:
        self.value = value

    def reduce(self, view: View) -> Outcome:
        raise NotImplementedError


class Forgetful(Method):
    name: ClassVar[str] = "forgetful"

    def __init__(self, value: int) -> None:
        pass

    def reduce(self, view: View) -> Outcome:
        raise NotImplementedError


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry, put back afterwards."""
    monkeypatch.setattr(registry, "_METHODS", {**registry._METHODS, "holder": Holder})
    monkeypatch.setattr(registry, "_loaded", set())


words = st.text(max_size=8) | st.text("[](),='a\\", max_size=4)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, width=32) | words


@given(value=values | st.lists(values, max_size=3))
def test_any_plain_value_is_written_or_refused(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_METHODS", {**registry._METHODS, "holder": Holder})
        try:
            written = str(Holder(value))
        except ValueError:
            assert any(isinstance(each, str) for each in (value if isinstance(value, list) else [value]))
            return
        assert agglo.methods.parse_method(written).options()["value"] == value


def test_lists_as_options_can_be_hashed_and_forgotten_options_are_named() -> None:
    assert hash(Holder([1, [2]])) == hash(Holder([1, [2]]))
    assert Holder([1]) == Holder([1]) != Holder([2])
    with pytest.raises(TypeError, match=r"Forgetful takes 'value'.*keep it as self.value"):
        repr(Forgetful(1))


PLUGIN = """
import agglo
class {cls}(agglo.Method):
    '''Keeps the first patches, whatever they show.'''
    name = {name!r}
    def reduce(self, view):
        raise NotImplementedError
"""


def install(folder: Path, module: str, code: str, entry: str) -> None:
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[agglo.methods]\n{entry}\n")


def test_plugins_are_found_and_broken_ones_named(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "plug_one", PLUGIN.format(cls="First", name="plug_first"), "first = plug_one:First")
    install(tmp_path, "plug_two", "import no_such_library", "second = plug_two")
    taken = PLUGIN.format(cls="Third", name="atc")
    install(tmp_path, "plug_three", taken, "third = plug_three:Third")
    install(tmp_path, "plug_four", "raise SystemExit(1)", "fourth = plug_four")
    monkeypatch.syspath_prepend(tmp_path)
    create("atc")  # known without a look at plug-ins
    assert "plug_one" not in sys.modules
    with pytest.warns(RuntimeWarning) as warned:
        names = [info.name for info in agglo.list_methods()]
    assert "plug_first" in names
    assert find("atc") is ATC
    messages = sorted(str(each.message) for each in warned)
    assert [message.split("'")[1] for message in messages] == ["fourth", "second", "third"]
    assert "No module named 'no_such_library'" in messages[1]
    assert "'atc' is taken" in messages[2]
    agglo.list_methods()  # each is tried once
    assert create("plug_first").name == "plug_first"


def test_modules_are_imported_by_name(registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = PLUGIN.format(cls="Own", name="own_first").replace("class Own", "@agglo.register\nclass Own")
    (tmp_path / "own_methods.py").write_text(own)
    (tmp_path / "own_nothing.py").write_text("")
    (tmp_path / "own_broken.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert import_methods(["own_methods"]) == ["own_first"]
    assert import_methods(["own_methods"]) == ["own_first"]
    assert agglo.methods.parse_method("own_first").name == "own_first"
    with pytest.raises(ValueError, match=r"module 'own_nothing' registers no method: mark its class with"):
        import_methods(["own_nothing"])
    with pytest.raises(ValueError, match=r"module 'own_absent' is neither installed nor in .*"):
        import_methods(["own_absent"])
    with pytest.raises(ValueError, match="give a module's name, not its file"):
        import_methods(["own_methods.py"])
    with pytest.raises(ValueError, match=r"own_broken. cannot be imported: ModuleNotFoundError.*no_such_library"):
        import_methods(["own_broken"])
