"""The worked examples of CONTRIBUTING.md and docs/hosts.md run as they are written there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch

import agglo
from agglo.hosts import registry as hosts
from agglo.methods import registry as methods

ROOT = Path(__file__).parents[1]
PAGES = {"method": "CONTRIBUTING.md", "host": "docs/hosts.md"}


def example(name: str) -> str:
    """All code blocks of one example, in order."""
    text = (ROOT / PAGES[name]).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```python {name}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"{PAGES[name]} has no example {name!r}"
    return "\n".join(blocks)


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An importable module with the code of an example; what it registers is taken out again."""
    known = dict(methods._METHODS)
    monkeypatch.setattr(hosts, "HOSTS", hosts.HOSTS)
    made = ModuleType("mylib")
    monkeypatch.setitem(sys.modules, "mylib", made)
    exec(compile(example(request.param), PAGES[request.param], "exec"), made.__dict__)
    yield made
    methods._METHODS.clear()
    methods._METHODS.update(known)


@pytest.mark.parametrize("module", ["method"], indirect=True)
def test_add_a_method(module: Any) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5).eval()
    x = torch.randn(2, 3, 160, 160)
    agglo.apply(model, "runs", keep_rate=0.5)
    with agglo.trace(model) as trace, torch.no_grad():
        model(x)
    first = next(iter(trace.groupings.values()))
    patches = first.labels[:, first.prefix :]
    assert (patches.diff(dim=1) >= 0).all(), "runs of neighbours"
    assert first.n_groups - first.prefix == patches.shape[1] // 2
    assert "runs" in {info.name for info in agglo.list_methods()}


@pytest.mark.parametrize("module", ["host"], indirect=True)
def test_add_a_host(module: Any) -> None:
    torch.manual_seed(0)
    model = module.MyViT().eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        dense = model(x)
        agglo.apply(model, keep_rate=1.0)
        assert torch.allclose(model(x), dense, atol=1e-5)
        agglo.apply(model, keep_rate=0.5)
        assert not torch.allclose(model(x), dense, atol=1e-5)
        found = agglo.reduction(model)
        assert found is not None and found.counts == [64, 64, 32, 32, 16, 16, 8, 8]
        agglo.remove(model)
        assert torch.equal(model(x), dense)
