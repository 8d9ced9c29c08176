"""The checks of options, against what may be given in their place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agglo.checks import choice, flag, number, whole_numbers

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.integers(), st.integers(), max_size=2),
    st.just(np.zeros(2)),
    st.just(torch.zeros(2)),
    st.builds(object),
)
CHOICES = (None, True, 1, 2, "a", "average")


def is_plain_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@given(ANYTHING)
def test_a_choice_is_one_of_those_accepted_and_of_its_type(value: Any) -> None:
    if any(type(value) is type(each) and value == each for each in CHOICES):
        assert choice("option", value, CHOICES) == value
    else:
        with pytest.raises(ValueError, match=r"^option="):
            choice("option", value, CHOICES)


def test_a_choice_names_what_is_near_and_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"^linkage='avrage' .* mean 'average'\? accepted: 'average'$"):
        choice("linkage", "avrage", {"average": 1})
    with pytest.raises(ValueError, match=r"accepted: None, 'average', or a function$"):
        choice("linkage", 3, (None, "average"), also=", or a function")
    assert type(choice("linkage", np.str_("average"), ("average",))) is str


@given(ANYTHING)
def test_a_flag_is_true_or_false(value: Any) -> None:
    if isinstance(value, bool):
        assert flag("option", value) is value
    else:
        with pytest.raises(ValueError, match=r"^option=.* must be True or False$"):
            flag("option", value)


@given(ANYTHING, st.booleans())
def test_a_number_is_a_number_within_its_bounds(value: Any, whole: bool) -> None:
    fits = is_plain_number(value) and (isinstance(value, int) or not whole)
    for bounds, is_within in (
        ({}, lambda x: True),
        ({"minimum": 2}, lambda x: x >= 2),
        ({"above": 0, "maximum": 1}, lambda x: 0 < x <= 1),
    ):
        if fits and is_within(value):
            assert number("option", value, whole=whole, **bounds) is value
        else:
            with pytest.raises(ValueError, match=r"^option="):
                number("option", value, whole=whole, **bounds)


def test_numbers_of_numpy_become_pythons() -> None:
    assert type(number("option", np.int64(3))) is int and type(number("option", np.float32(0.5))) is float


@given(ANYTHING, st.sampled_from([None, 1, 2]))
def test_whole_numbers_are_a_list_of_so_many(values: Any, length: int | None) -> None:
    is_list = isinstance(values, list) and values and all(value >= 1 for value in values)
    if is_list and length in (None, len(values)):
        assert whole_numbers("option", values, minimum=1, length=length) == tuple(values)
    else:
        with pytest.raises(ValueError, match=r"^option="):
            whole_numbers("option", values, minimum=1, length=length)
