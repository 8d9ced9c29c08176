"""Every public option that is a choice, a flag or a number refuses what it is not, before anything changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

import agglo
from agglo.checks import choice, flag, number, whole_numbers
from agglo.config import ReductionConfig
from agglo.methods import ATC
from agglo.methods.registry import find
from agglo.methods.tome import ToMeSD
from tests.support.diffusion import unet

NEITHER = (object(), {}, math.nan, "off")  # no number, no flag and no name of anything
CHOICE = (*NEITHER, True, 0)
FLAG = (*NEITHER, 1, "True")
NUMBER = (*NEITHER, True, "1", -1)
WHOLE = (*NUMBER, 1.5)
LIST = (*NEITHER, 3, (-1,), (True,), (1.5,), ("a",), ())
PAIR = (*LIST, (2,), (2, 2, 2), (2, 0))

Wrong = Mapping[str, tuple[Any, ...]]

APPLY: Wrong = {
    "method": CHOICE,
    "keep_rate": (*NUMBER, [], [0.5, "a"], [True], 0, 1.5),
    "schedule": (*NEITHER, True, 3, [1, "a"], "stages:a"),
    "threshold": NUMBER,
    "tuned": (object(), math.nan, "off", True),
    "blocks": LIST,
    "tower": (*NEITHER, True, torch.nn.Identity()),
    "proportional": FLAG,
    "place": CHOICE,
    "last_block": CHOICE,
    "output": CHOICE,
    "probe": (*FLAG, None),
}
DIFFUSION: Wrong = {
    "method": CHOICE,
    "keep_rate": (*NUMBER, [0.5], None, 0, 1.5),
    "proportional": FLAG,
    "max_downsample": (*WHOLE, 0, 3),
    "merge": (*CHOICE, None, ("attn", 1), ()),
    "share": (*CHOICE, None),
    "every": (*WHOLE, None, 0),
    "drift": NUMBER,
}
GRID_ATC: Wrong = {
    "window": (*WHOLE, 0, (2,), (2, 0), (2, True)),
    "connectivity": CHOICE,
    "spread": CHOICE,
}
GRID_TOME: Wrong = {
    "features": CHOICE,
    "stride": PAIR,
    "use_rand": (*FLAG, None),
    "seed": (*NEITHER, True, 1.5),
}
CLUSTER: Wrong = {
    "features": (*NEITHER, torch.ones(12, 2, dtype=torch.int64)),
    "k": (*WHOLE, 0, [], [2, "a"]),
    "linkage": (*CHOICE, None),
    "threshold": (*NEITHER, True, "1"),
    "distances": NEITHER,
    "weights": NEITHER,
    "metric": (*CHOICE, None),
    "grid": PAIR,
    "window": (*WHOLE, 0, (2,), (2, 0)),
    "connectivity": CHOICE,
    "spread": (*CHOICE, None),
    "backend": (*CHOICE, ""),
    "check": FLAG,
}
SCHEDULES: Mapping[type[agglo.Schedule], Wrong] = {
    agglo.Stages: {"keep_rate": APPLY["keep_rate"], "blocks": LIST, "nested": FLAG, "returning": FLAG},
    agglo.schedule.Counts: {"left": (*LIST, (0,)), "blocks": LIST},
    agglo.schedule.Constant: {"t": WHOLE, "start": WHOLE},
    agglo.schedule.Linear: {"t": WHOLE},
    agglo.schedule.Geometric: {"keep_rate": (*NUMBER, 0, 1.5), "start": WHOLE},
    agglo.schedule.PerBlock: {"removed": LIST},
}
OURS = [info.name for info in agglo.list_methods() if find(info.name).__module__.startswith("agglo.")]


def require_refusals(call: Callable[..., Any], wrong: Wrong, **given: Any) -> None:
    """Require that each wrong value is refused by a message that names the option."""
    for option, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"\b{option}\b"):
                call(**{**given, option: value})


def parameters(call: Callable[..., Any]) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, parameter in inspect.signature(call).parameters.items() if parameter.kind not in kinds}


def test_no_option_is_left_out() -> None:
    assert parameters(agglo.apply) | parameters(ReductionConfig) == {*APPLY, *DIFFUSION, "model", "options"}
    assert parameters(ATC) > GRID_ATC.keys()
    assert parameters(ToMeSD) == GRID_TOME.keys()
    assert parameters(agglo.cluster) == CLUSTER.keys()
    assert parameters(agglo.linkage) < CLUSTER.keys()
    for schedule, wrong in SCHEDULES.items():
        assert parameters(schedule) == wrong.keys()


def test_options_of_apply() -> None:
    model = timm.create_model("test_vit").eval()
    for option, wrong in APPLY.items():
        budget = {} if option in ("keep_rate", "schedule", "threshold", "tuned") else {"keep_rate": 0.5}
        require_refusals(partial(agglo.apply, model), {option: wrong}, **budget)
    assert agglo.report(model) is None


def test_options_of_diffusion_models() -> None:
    model, _ = unet()
    require_refusals(partial(agglo.apply, model), DIFFUSION, keep_rate=0.5)
    assert agglo.report(model) is None


def test_options_of_methods_on_a_grid() -> None:
    require_refusals(ToMeSD, GRID_TOME)
    for option, wrong in GRID_ATC.items():
        require_refusals(partial(ATC, window=2) if option == "spread" else ATC, {option: wrong})


@pytest.mark.parametrize("method", OURS)
def test_options_of_methods(method: str) -> None:
    for option, default in find(method).defaults().items():
        if isinstance(default, bool):
            wrong: tuple[Any, ...] = (*FLAG, None)
        elif isinstance(default, (int, float)):
            wrong = (*(WHOLE if isinstance(default, int) else NUMBER), None)
        elif option in {**GRID_TOME, **GRID_ATC} and option != "features":
            continue  # tested above
        else:
            wrong = (*CHOICE, [], ["off"], [True])
        require_refusals(find(method), {option: wrong})


def test_options_of_clustering() -> None:
    tokens: dict[str, Any] = {"features": torch.rand(12, 2)}
    for option, wrong in CLUSTER.items():
        given = {**({} if option == "distances" else tokens), **({} if option == "threshold" else {"k": 2})}
        if option in ("window", "connectivity", "spread"):
            given["grid"] = (3, 4)
        if option in ("grid", "spread"):
            given["window"] = 2
        require_refusals(agglo.cluster, {option: wrong}, **given)
        if option in parameters(agglo.linkage):
            require_refusals(agglo.linkage, {option: wrong}, **({} if option == "distances" else tokens))
    tree = agglo.linkage(torch.rand(12, 2))
    require_refusals(partial(agglo.clustering.cut, tree), {"k": CLUSTER["k"]})
    require_refusals(partial(agglo.clustering.cut, k=2), {"tree": NEITHER})


def test_options_of_schedules() -> None:
    budget = {"keep_rate": 0.5, "left": (3,), "t": 1, "removed": (1,)}
    for schedule, options in SCHEDULES.items():
        first = next(iter(options))
        for option, wrong in options.items():
            require_refusals(schedule, {option: wrong}, **({} if option == first else {first: budget[first]}))


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
        with pytest.raises(ValueError, match=r"^option="):
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
