"""ReductionConfig: a value that is checked once, and that every form gives back."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import agglo
from agglo import ReductionConfig
from agglo.schedule import Constant, Counts, Geometric, Linear, PerBlock, Stages
from agglo.text import format_value, parse_options, parse_value

RATES = st.sampled_from([0.25, 0.5, 0.7, 1.0])
SCHEDULES = st.sampled_from(
    [Stages(0.5, blocks=(3, 6)), Counts((90, 30)), Constant(8, start=2), Linear(4), Geometric(0.8), PerBlock((0, 9))]
)
BUDGETS = st.one_of(
    st.fixed_dictionaries({"keep_rate": RATES | st.lists(RATES, min_size=1, max_size=3).map(tuple)}),
    st.fixed_dictionaries({"schedule": SCHEDULES}),
    st.fixed_dictionaries({"flops": st.sampled_from([0.35, 0.5, 1.0])}),
    st.fixed_dictionaries({"threshold": st.floats(0, 2)}),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "linkage": st.sampled_from(["single", "complete"]),
        "features": st.sampled_from(["tokens", "values"]),
        "importance": st.sampled_from(["class", None]),
        "proportional": st.sampled_from([True, False, None]),
        "last_block": st.sampled_from(["all", "class_token"]),
        "every": st.integers(1, 5),
        "merge": st.sampled_from([("attn",), ("attn", "mlp")]),
    },
)


@given(BUDGETS, OPTIONS)
def test_every_form_leads_back(budget: dict[str, Any], options: dict[str, Any]) -> None:
    config = ReductionConfig.of("atc", **budget, **options)
    forms = [
        ReductionConfig.parse(str(config)),
        ReductionConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        eval(repr(config), {**vars(agglo.schedule), "ReductionConfig": ReductionConfig}),
        pickle.loads(pickle.dumps(config)),
        replace(config),
    ]
    for again in forms:
        assert again == config and hash(again) == hash(config) and str(again) == str(config)
    assert config.create_method() == ReductionConfig.parse(str(config)).create_method()


def test_what_is_said_in_several_ways_is_one_value() -> None:
    one = ReductionConfig(keep_rate=0.5, options={"linkage": "average", "exponent": 0.5})
    assert one == ReductionConfig(keep_rate=0.5) == ReductionConfig.parse("atc:keep_rate=0.5,linkage=average")
    assert ReductionConfig(schedule="linear:8") == ReductionConfig(schedule=Linear(8))  # type: ignore[arg-type]
    assert ReductionConfig(keep_rate=0.5) != ReductionConfig("tome", keep_rate=0.5)
    assert len({ReductionConfig(keep_rate=0.5), one, ReductionConfig(keep_rate=0.25)}) == 2


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, "keep_rate, flops, schedule, threshold"),
        ({"flops": 0.5, "blocks": (3,)}, "blocks"),
        ({"flops": 0.5, "keep_rate": 0.5}, "keep_rate and flops"),
        ({"flops": 0}, "flops"),
        ({"keep_rate": 0.5, "threshold": 0.1}, "keep_rate and threshold"),
        ({"schedule": "linear:8", "blocks": (3,)}, "blocks"),
        ({"method": "tome", "threshold": 0.1}, "threshold"),
        ({"schedule": Stages(0.5, returning=True)}, "returning"),
        ({"keep_rate": 0.5, "place": "before_block"}, "features"),
        ({"method": "evit", "keep_rate": 0.5, "place": "before_block"}, "place"),
        ({"keep_rate": 0.5, "output": "merged_late", "blocks": (3,)}, "blocks"),
        ({"keep_rate": 0.5, "output": "smaller_image", "linkage": "single"}, "smaller_image"),
        ({"keep_rate": 0.5, "conectivity": "grid"}, "connectivity"),
        ({"keep_rate": 0.5, "window": 4, "connectivity": "grid"}, "window"),
        ({"keep_rate": 0.5, "window": 4, "importance": "class"}, "importance"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        ReductionConfig.of(**arguments)


def test_a_dict_of_another_version_or_with_other_keys_is_refused() -> None:
    written = ReductionConfig(keep_rate=0.5).to_dict()
    with pytest.raises(ValueError, match="version"):
        ReductionConfig.from_dict({**written, "version": 2})
    with pytest.raises(ValueError, match="speed"):
        ReductionConfig.from_dict({**written, "speed": 2})


def test_a_config_and_its_arguments_are_the_same_call() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, x = timm.create_model("test_vit").eval(), torch.randn(2, 3, 160, 160)
    config = ReductionConfig("tome", keep_rate=0.5, proportional=False, options={"features": "tokens"})
    with torch.no_grad():
        by_config = agglo.apply(model, config)(x)
        report = agglo.report(model)
        assert report is not None and report.config == config
        by_arguments = agglo.apply(model, "tome", keep_rate=0.5, proportional=False, features="tokens")(x)
        assert agglo.report(model) == report
        by_text = agglo.apply(model, str(config))(x)
    assert torch.equal(by_config, by_arguments) and torch.equal(by_config, by_text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(0, 1e6), lambda v: st.lists(v, max_size=3)))
def test_values_are_written_and_read(value: Any) -> None:
    assert parse_value(format_value(value)) == value
    assert parse_options([f"name={format_value(value)}"]) == {"name": value}
