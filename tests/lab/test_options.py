"""Arguments follow from the fields of a dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from agglo.lab.options import AtLeastOne, Fraction, add_options, help_texts, matching, option, require_limits


@dataclass(frozen=True, kw_only=True)
class Base:
    GROUP: ClassVar = "base"

    epochs: AtLeastOne = option(30, "passes")
    rate: Fraction | None = option(None, "100 % is 1", exclusive=True)
    word: Literal["a", "b"] = option("a", exclusive=True)


@dataclass(frozen=True, kw_only=True)
class Own(Base):
    epochs: AtLeastOne = 6
    data: Path = option(help="where", positional=True)
    sizes: Sequence[int] = option((1, 2))
    more: Sequence[str] = option([], "any")
    fast: bool = option(False)
    safe: bool = option(True)


def read(*words: str) -> Own:
    parser = argparse.ArgumentParser()
    add_options(parser, Own)
    return Own(**matching(Own, parser.parse_args(words)))


def test_what_is_typed_and_what_is_not() -> None:
    assert read("x") == Own(data=Path("x"))
    typed = read("x", "--epochs", "3", "--sizes", "5", "--more", "p", "--more", "q", "r", "--fast", "--no-safe")
    assert typed == Own(data=Path("x"), epochs=3, sizes=[5], more=["p", "q", "r"], fast=True, safe=False)
    assert read("x").more == []


@pytest.mark.parametrize("words", [[], ["x", "--epochs", "0"], ["x", "--rate", "2"], ["x", "--word", "c"],
                                   ["x", "--rate", "1", "--word", "b"], ["x", "--sizes", "1.5"]])  # fmt: skip
def test_what_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        read(*words)


def test_the_help_page_has_groups_and_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Own)
    page = parser.format_help()
    assert "base:\n  --epochs N" in page and "passes (default: 6)" in page and "(default: 1 2)" in page
    assert "100 % is 1\n" in page
    assert help_texts(Own)["epochs"] == "passes"


def test_limits_hold_for_instances_too() -> None:
    require_limits(Own(data=Path("x")))
    for changes in ({"epochs": 0}, {"rate": 1.5}, {"word": "c"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            require_limits(Own(data=Path("x"), **changes))
