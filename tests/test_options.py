"""Every public option that is a choice, a flag or a number refuses what it is not, before anything changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import timm
import torch

import agglo
from agglo.config import ReductionConfig
from agglo.methods import ATC
from agglo.methods.registry import find
from agglo.methods.tomesd import ToMeSD
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
    agglo.schedule.Counts: {"left": (*LIST, (0,)), "blocks": LIST, "returning": FLAG},
    agglo.schedule.Constant: {"t": WHOLE, "start": WHOLE},
    agglo.schedule.Linear: {"t": WHOLE},
    agglo.schedule.Geometric: {"keep_rate": (*NUMBER, 0, 1.5), "start": WHOLE},
    agglo.schedule.PerBlock: {"removed": LIST},
}
OURS = [info.name for info in agglo.list_methods() if find(info.name).__module__.startswith("agglo.")]
OPTIONS = [(name, option) for name in OURS for option in find(name).defaults()]


def require_refusals(call: Callable[..., Any], option: str, wrong: tuple[Any, ...]) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=rf"\b{option}\b"):
            call(**{option: value})


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


@pytest.mark.parametrize("option", APPLY)
def test_options_of_apply(option: str) -> None:
    model = timm.create_model("test_vit").eval()
    budget = {} if option in ("keep_rate", "schedule", "threshold", "tuned") else {"keep_rate": 0.5}
    require_refusals(lambda **given: agglo.apply(model, **{**budget, **given}), option, APPLY[option])
    assert agglo.report(model) is None


@pytest.mark.parametrize("option", DIFFUSION)
def test_options_of_diffusion_models(option: str) -> None:
    model, _ = unet()
    require_refusals(lambda **given: agglo.apply(model, **{"keep_rate": 0.5, **given}), option, DIFFUSION[option])
    assert agglo.report(model) is None


def test_options_of_methods_on_a_grid() -> None:
    for option, wrong in GRID_ATC.items():
        make = partial(ATC, window=2) if option == "spread" else ATC
        require_refusals(make, option, wrong)
    for option, wrong in GRID_TOME.items():
        require_refusals(ToMeSD, option, wrong)


@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_options_of_methods(method: str, option: str) -> None:
    default = find(method).defaults()[option]
    if isinstance(default, bool):
        wrong: tuple[Any, ...] = (*FLAG, None)
    elif isinstance(default, (int, float)):
        wrong = (*(WHOLE if isinstance(default, int) else NUMBER), None)
    elif option in {**GRID_TOME, **GRID_ATC} and option != "features":
        return  # tested above
    else:
        wrong = (*CHOICE, [], ["off"], [True])
    require_refusals(find(method), option, wrong)


@pytest.mark.parametrize("option", CLUSTER)
def test_options_of_clustering(option: str) -> None:
    given: dict[str, Any] = {"features": torch.rand(12, 2), "k": 2}
    if option == "threshold":
        del given["k"]
    if option == "distances":
        del given["features"]
    if option in ("window", "connectivity", "spread"):
        given["grid"] = (3, 4)
    if option in ("grid", "spread"):
        given["window"] = 2
    require_refusals(lambda **wrong: agglo.cluster(**{**given, **wrong}), option, CLUSTER[option])


@pytest.mark.parametrize("option", ["features", "linkage", "distances", "weights", "metric", "backend", "check"])
def test_options_of_the_tree(option: str) -> None:
    given = {} if option == "distances" else {"features": torch.rand(12, 2)}
    require_refusals(lambda **wrong: agglo.linkage(**{**given, **wrong}), option, CLUSTER[option])


def test_options_of_a_cut() -> None:
    tree = agglo.linkage(torch.rand(12, 2))
    require_refusals(lambda k: agglo.clustering.cut(tree, k), "k", CLUSTER["k"])
    require_refusals(lambda tree: agglo.clustering.cut(tree, 2), "tree", NEITHER)


@pytest.mark.parametrize(
    ("schedule", "option"), [(schedule, option) for schedule, wrong in SCHEDULES.items() for option in wrong]
)
def test_options_of_schedules(schedule: type[agglo.Schedule], option: str) -> None:
    first = next(iter(SCHEDULES[schedule]))
    budget = {"keep_rate": 0.5, "left": (3,), "t": 1, "removed": (1,)}
    given = {} if option == first else {first: budget[first]}
    require_refusals(lambda **wrong: schedule(**given, **wrong), option, SCHEDULES[schedule][option])
