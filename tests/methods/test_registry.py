"""Methods by name: what is listed, what a user adds, and that the documentation says the same."""

from __future__ import annotations

import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import agglo
from agglo.methods import Method, Outcome, View, create, registry
from agglo.methods.registry import find

timm = pytest.importorskip("timm")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Method]]:
    """The registry, put back afterwards."""
    known = dict(registry._METHODS)
    monkeypatch.setattr(registry, "_METHODS", known)
    return known


def test_every_method_is_listed_in_words() -> None:
    listed = {info.name: info for info in agglo.list_methods()}
    assert {"atc", "tome", "l1", "l2", "linf", "topk", "evit", "dynamicvit", "ats", "random", "pool"} <= set(listed)
    assert list(listed) == sorted(listed)
    for name, info in listed.items():
        method = create(name)
        assert info.learns == isinstance(method, nn.Module)
        assert set(info.options) == set(method.options()), name
        assert info.description[0].isupper() and 20 < len(info.description) < 160, info.description
        assert info.reach
        assert info.reference or name in ("random", "pool")
    assert listed["atc"].options[:3] == ("linkage", "features", "sizes")
    assert (listed["evit"].kind, listed["evit"].needs_class_attention) == ("prunes", True)
    assert "0.5" in listed["tome"].reach


def test_the_package_is_a_plain_one() -> None:
    import agglo.methods.atc
    import agglo.methods.dynamic_vit as dynamic_vit
    from agglo.methods import ATC

    assert not callable(agglo.methods)
    assert ATC is agglo.methods.atc.ATC
    assert agglo.methods is sys.modules["agglo.methods"]
    assert agglo.methods.dynamic_vit.distillation_loss is dynamic_vit.distillation_loss


def test_every_file_beside_the_helpers_is_a_method() -> None:
    files = {file.name for file in pkgutil.iter_modules(agglo.methods.__path__) if not file.ispkg}
    names = [info.name for info in (*agglo.list_methods(), *agglo.list_methods(diffusion=True))]
    homes = {find(name).__module__.rpartition(".")[2] for name in (*names, "free")}
    assert files == homes | {"base", "registry"}


def test_the_document_lists_what_there_is() -> None:
    rows = {row.split("`")[1]: row for row in DOCUMENT.splitlines() if row.startswith("| `")}
    assert list(rows) == [info.name for info in agglo.list_methods()]
    for info in agglo.list_methods():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", rows[info.name])[2:-1]]
        yes = {True: "yes", False: ""}
        assert cells == [info.description, info.kind, yes[info.learns], yes[info.needs_class_attention], info.reach]
        assert info.reference in DOCUMENT


def test_the_documents_example_runs(registered: dict[str, type[Method]], capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(example.split("class ")[1].splitlines()) <= 20
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "docs/methods.md", "exec"), scope)
    assert "Loudest(), Stages(0.5): 196 -> 24 patch tokens" in capsys.readouterr().out
    tokens = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    shown = View(tokens, None, None, None, None, None, 1, 3, None, 0, False)
    labels = registered["loudest"]().reduce(shown).grouping.labels
    norms = tokens[:, 1:].norm(dim=-1)
    for b in range(2):
        kept = {i for i in range(8) if labels[b, 1 + i] >= 0}
        assert kept == set(norms[b].argsort(descending=True)[:3].tolist())
    with torch.no_grad():
        assert scope["model"].eval()(torch.randn(1, 3, 224, 224)).shape == (1, 1000)


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
