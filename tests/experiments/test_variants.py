"""Which reductions are run side by side, and that records know them again."""

from __future__ import annotations

import json

import pytest

import agglo
from agglo.experiments.variants import describe_budget, variants_of
from agglo.methods import create


def test_every_method_at_every_budget() -> None:
    variants = variants_of(
        ["tome", "atc", "tome"],
        keep_rates=[0.5, 0.25, 0.5],
        thresholds=[0.1],
        schedules=["linear:16", agglo.Stages(0.5, blocks=[3]), "stages:0.5@3"],
        linkages=["single", "complete"],
    )
    budgets = ["keep 0.5", "keep 0.25", "threshold 0.1", "linear:16", "stages:0.5@3"]
    names = ["tome", "atc single", "atc complete"]
    assert [(v.budget_text, v.name) for v in variants] == [(budget, name) for budget in budgets for name in names]
    assert [repr(v.method) for v in variants[1:3]] == [repr(create("atc", linkage=x)) for x in ("single", "complete")]
    for variant in variants:
        assert sum(value is not None for value in variant.budget.values()) == 1
        assert describe_budget(json.loads(json.dumps(variant.budget))) == variant.budget_text


def test_options_per_reduction_are_written_in_brackets() -> None:
    lists = "[single,average]"
    variants = variants_of(
        ["atc:importance=[class,none],mean=preserve_norm", "tome", "atc:linkage=[complete,single]"],
        keep_rates=[0.5],
        linkages=["single", lists, lists],
        features="[tokens,keys]",
    )
    weighing = {"features": ["tokens", "keys"], "importance": ["class", None], "mean": "preserve_norm"}
    expected = {
        "atc single importance=[class,none],mean=preserve_norm": create("atc", **weighing, linkage="single"),
        "atc [single,average] importance=[class,none],mean=preserve_norm": create(
            "atc", **weighing, linkage=["single", "average"]
        ),
        "tome": create("tome", features=["tokens", "keys"]),
        "atc [complete,single]": create("atc", features=["tokens", "keys"], linkage=["complete", "single"]),
    }
    assert {variant.name: variant.method for variant in variants} == expected
    assert all(agglo.parse_method(variant.method_text) == variant.method for variant in variants)
    given = {"linkage": ["single", "average"], "importance": "received"}
    (variant,) = variants_of(["atc"], keep_rates=[0.5], options=given)
    assert (variant.name, variant.method) == ("atc [single,average]", create("atc", **given))


@pytest.mark.parametrize(
    ("methods", "asked", "message"),
    [
        (["atc"], {"keep_rates": [50]}, r"did you mean 0.5\?"),
        (["atc"], {"schedules": ["linear16"]}, "schedule='linear16' is not known.*did you mean linear"),
        (["atc"], {"schedules": ["linear:1"], "blocks": [3]}, r"blocks=\(3,\) go with keep rates .* schedule=linear:1"),
        (["aTc"], {"keep_rates": [0.5]}, r"method='aTc' is not known"),
        (["evt"], {"keep_rates": [0.5]}, r"method='evt' is not known; did you mean 'evit'"),
        (["tome"], {"keep_rates": [0.5], "linkages": ["single"]}, "goes with none of the methods 'tome'"),
    ],
)
def test_what_makes_no_sense(methods: list[str], asked: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variants_of(methods, **asked)  # type: ignore[arg-type]
