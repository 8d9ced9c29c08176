"""One page for all tests that ask one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agglo.lab.options import EMBEDDED
from agglo.lab.playground.tokens import Classifier, open_classifier
from tests.support.playground import Played, played

pytest.importorskip("gradio")


@pytest.fixture(scope="package")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with played(tmp_path_factory.mktemp("play")) as running:
        yield running
        assert running.stop() == 130


@pytest.fixture(scope="package")
def classifier() -> Classifier:
    return open_classifier(EMBEDDED)
