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

import agglo
from agglo.checks import choice, number, whole_numbers
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
    "flops": (*NUMBER, 0, 1.5),
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
    agglo.Counts: {"left": (*LIST, (0,)), "blocks": LIST},
    agglo.Constant: {"t": WHOLE, "start": WHOLE},
    agglo.Linear: {"t": WHOLE},
    agglo.Geometric: {"keep_rate": (*NUMBER, 0, 1.5), "start": WHOLE},
    agglo.PerBlock: {"removed": LIST},
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


def test_a_choice_is_of_its_type_and_names_what_is_near_and_what_is_accepted() -> None:
    assert choice("option", True, (1, True)) is True and choice("option", None, ("a", None)) is None
    assert type(choice("linkage", np.str_("average"), ("average",))) is str
    for value in (1, True, b"average", ["average"], np.zeros(2)):
        with pytest.raises(ValueError, match=r"^linkage=.*accepted: None, 'average', or a function$"):
            choice("linkage", value, (None, "average"), also=", or a function")
    with pytest.raises(ValueError, match=r"^linkage='avrage' .* mean 'average'\?"):
        choice("linkage", "avrage", {"average": 1})


def test_numbers_are_within_bounds_and_pythons_own() -> None:
    assert type(number("option", np.int64(3))) is int and type(number("option", np.float32(0.5))) is float
    assert number("option", 1, above=0, maximum=1) == 1 and whole_numbers("option", [2, 1], length=2) == (2, 1)
    for value, bounds in [(0, {"above": 0}), (2, {"maximum": 1}), (1, {"minimum": 2}), (math.nan, {}), (True, {})]:
        with pytest.raises(ValueError, match=r"^option="):
            number("option", value, **bounds)
