"""Every example of every page runs as it is written there, and every command on a page is one that exists."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerate.state import AcceleratorState

from agglo.hosts import registry as hosts
from agglo.lab.cli import parser
from agglo.lab.tasks.classification import data as data_sets
from agglo.methods import registry as methods
from tests.support.pages import ROOT, Example, all_pages, commands, examples, fences

PAGES = all_pages()
EXAMPLES = [example for page in PAGES for example in examples(page)]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, one process of a group of one, and registries that are put back afterwards.

    What torch.compile is given is traced as ever, but not made into C++, which takes a minute and is torch's matter.
    """
    data_sets.dataset_names()  # finds all there are, so that what is put back is whole
    registries = [methods._METHODS, data_sets._KNOWN]
    known, at_home = [dict(registry) for registry in registries], dict(sys.modules)
    monkeypatch.setattr(hosts, "HOSTS", hosts.HOSTS)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,  # torch binds any that is free
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    random.seed(0)
    yield
    for registry, before in zip(registries, known, strict=True):
        registry.clear()
        registry.update(before)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib" and name not in at_home]:
        del sys.modules[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # accelerate remembers a group of one, which training tests in this process would look for.
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.id)
def test_example(example: Example, surroundings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mylib")
    monkeypatch.setitem(sys.modules, "mylib", module)
    exec(compile(example.source, str(example.page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_not_run_says_why(page: Path) -> None:
    for fence in fences(page.read_text(encoding="utf-8")):
        if fence.language == "python" and fence.reason is not None:
            assert len(fence.reason.split()) >= 3, f"{page.name}, line {fence.line}: {fence.reason!r} is no reason"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = [(fence.line, words) for fence in fences(page.read_text(encoding="utf-8")) for words in commands(fence)]
    for line, (program, *words) in typed:
        if program == "make":
            targets = [word for word in words if "=" not in word]
            unknown = [target for target in targets if not re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)]
            assert not unknown, f"{page.name}, line {line}: the Makefile has no target {unknown}"
            continue
        try:
            parser().parse_args(words)
        except SystemExit as stopped:
            pytest.fail(f"{page.name}, line {line}: agglo {' '.join(words)} is refused ({stopped})")
