"""Every public name is on the API page and has an example in its docstring, which runs."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
from typing import Any

import pytest
import torch

import agglo
from agglo.hosts import registry as hosts
from agglo.methods import registry as methods
from tests.support.pages import ROOT, examples

PAGE = ROOT / "docs" / "api.md"
DOCUMENTED = sorted(set(re.findall(r"^::: agglo\.([\w.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)))


def example_of(name: str, value: Any) -> doctest.DocTest:
    """What a docstring shows, without examples that are nothing but comments."""
    public = {public: getattr(agglo, public) for public in agglo.__all__}
    surroundings = {**vars(inspect.getmodule(value)), **public, "agglo": agglo, "torch": torch}
    found = doctest.DocTestParser().get_doctest(value.__doc__ or "", surroundings, f"agglo.{name}", None, None)
    found.examples = [shown for shown in found.examples if not shown.source.lstrip().startswith("#")]
    return found


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    known = dict(methods._METHODS)
    monkeypatch.setattr(hosts, "HOSTS", hosts.HOSTS)
    yield
    methods._METHODS.clear()
    methods._METHODS.update(known)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_example(name: str, registry: None, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    example = example_of(name, pydoc.locate(f"agglo.{name}"))
    assert example.examples, f"agglo.{name} has no example: write one into its docstring, after >>>"
    outcome = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
    assert outcome.failed == 0, capsys.readouterr().out


def test_every_public_name_is_on_the_page() -> None:
    missing = {name for name in agglo.__all__ if not name.startswith("__")} - set(DOCUMENTED)
    assert not missing, f"docs/api.md has no line '::: agglo.NAME' for {', '.join(sorted(missing))}"
    assert any("agglo.__version__" in example.source for example in examples(PAGE))
