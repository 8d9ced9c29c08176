"""The host of docs/hosts.md keeps its contract: the test class that the page shows is collected here and runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from agglo.hosts import registry
from agglo.testing import HostContract
from tests.support.pages import ROOT, Example, fences

PAGE = ROOT / "docs" / "hosts.md"
SHOWN = [fence for fence in fences(PAGE.read_text(encoding="utf-8")) if fence.language == "python" and not fence.reason]
SOURCE = Example(PAGE, "", [(fence.line, fence.code) for fence in SHOWN]).source


@contextmanager
def typed(source: str) -> Iterator[ModuleType]:
    """What a page shows, as a reader types it into one file: the library `mylib`, its host and its test. The host is
    known, and the library can be imported, as long as this lasts."""
    library = ModuleType("mylib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "HOSTS", registry.HOSTS)
        patch.setitem(sys.modules, "mylib", library)
        exec(compile(source, str(PAGE), "exec"), library.__dict__)
        yield library


def contract_in(library: ModuleType) -> type[HostContract]:
    """The one class that the page derives from the contract."""
    classes = [value for value in vars(library).values() if isinstance(value, type)]
    (contract,) = [cls for cls in classes if issubclass(cls, HostContract) and cls is not HostContract]
    return contract


with typed(SOURCE) as _library:
    LIBRARY, HOSTS, CONTRACT = _library, registry.HOSTS, contract_in(_library)


@pytest.fixture(autouse=True)
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HOSTS", HOSTS)
    monkeypatch.setitem(sys.modules, "mylib", LIBRARY)


class TestDocumentedHost(CONTRACT):  # type: ignore[misc, valid-type]
    """Every test of the contract, with the model and the images of the page."""

    def test_is_the_pages_own(self) -> None:
        assert type(self.model()) is LIBRARY.MyViT
        assert type(registry.host_of(self.model())) is LIBRARY.MyHost


def test_a_broken_host_fails() -> None:
    right = "return x + block.proj("
    assert SOURCE.count(right) == 1
    with typed(SOURCE.replace(right, "return x - block.proj(")) as broken, pytest.raises(AssertionError):
        contract_in(broken)().test_keeping_everything_and_blocks_taken_apart_are_the_dense_model()
