"""Which reductions are run side by side, and the names of their rows."""

from __future__ import annotations

import pytest

import agglo
from agglo import ReductionConfig
from agglo.lab.evaluation.configs import budget_of, configs_of
from agglo.utils.journal import plain


def test_every_method_at_every_budget() -> None:
    configs = configs_of(
        ["tome", "atc", "tome"],
        keep_rates=[0.5, 0.25, 0.5],
        thresholds=[],
        schedules=["linear:16", agglo.Stages(0.5, blocks=[3]), "stages:0.5,blocks=[3]"],
        linkages=["single", "complete"],
    )
    budgets = ["keep 0.5", "keep 0.25", "linear:16", "stages:0.5,blocks=[3]"]
    names = ["tome", "atc single", "atc complete"]
    assert [(config.budget, name) for config, name in configs.items()] == [
        (budget, name) for budget in budgets for name in names
    ]
    assert list(configs)[1] == ReductionConfig("atc", keep_rate=0.5, options={"linkage": "single"})
    for config in configs:
        written = plain(config.to_dict())
        assert ReductionConfig.from_dict(written) == config
        assert budget_of({"config": written}) == config.budget
    assert budget_of({"config": None}) == ""
    assert [config.budget for config in configs_of(["atc"], thresholds=[0.1, 0.2, 0.1])] == [
        "threshold 0.1",
        "threshold 0.2",
    ]


@pytest.mark.parametrize(
    ("methods", "asked", "message"),
    [
        (["atc"], {"keep_rates": [50]}, "keep_rate"),
        (["atc"], {"schedules": ["linear16"]}, "'linear16'"),
        (["atc"], {"schedules": ["linear:1"], "blocks": [3]}, "blocks"),
        (["evt"], {"keep_rates": [0.5]}, "method='evt' .* 'evit'"),
        (["tome"], {"keep_rates": [0.5], "linkages": ["single"]}, "linkage=.*'tome'"),
        (["tome"], {"keep_rates": [0.5], "speed": 1}, "speed=1"),
        (["tome"], {"thresholds": [0.5]}, "threshold"),
        (["atc:features=values"], {"keep_rates": [0.5], "features": "keys"}, "features"),
    ],
)
def test_what_makes_no_sense(methods: list[str], asked: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs_of(methods, **asked)  # type: ignore[arg-type]
