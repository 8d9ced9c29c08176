"""What holds for every method: counts, batches, precisions, compilation, training, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.methods import Outcome, create
from tests.support.reductions import STAGES, built, images, lively_vit, view

CASES: list[tuple[str, dict[str, Any]]] = [
    *((info.name, {"seed": 0} if info.name == "random" else {}) for info in agglo.list_methods()),
    ("kmedoids", {"weights": "equal"}),
    ("kmedoids", {"released": True}),
    ("dpc_knn", {"weights": "equal"}),
    ("evovit", {"per_block": True}),
    ("atc", {"importance": "received", "mean": "preserve_norm"}),
    ("diffrate", {"pruned": (0, 0, 1, 8, 9, 3)}),
]
every_method = pytest.mark.parametrize(("name", "options"), CASES)
PAIRS = ("tome", "pitome", "tofu", "mctf", "dtem")
RINGS = {
    "l1": {0.25: [40, 12, 4], 0.7: [136, 92, 68]},
    "l2": {0.25: [52, 12, 4], 0.7: [140, 96, 68]},
    "linf": {0.25: [36, 16, 4], 0.7: [144, 100, 64]},
}
LEARNED = {
    "sit": [f"mixers.{stage}.{key}" for stage in range(3)
            for key in ("norm.weight", "norm.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "scale")],
    "patch_merger": [f"mixers.{stage}.{key}" for stage in range(3) for key in ("norm.weight", "norm.bias", "queries")],
    "sinkhorn": [f"mixers.{stage}.centres" for stage in range(3)],
    "dpc_knn": [f"scorers.{stage}.weight" for stage in range(3)],
}  # fmt: skip


def applied(name: str, options: dict[str, Any], model: Any = None, keep_rate: float = 0.6) -> Any:
    model = agglo.apply(lively_vit(32, 4) if model is None else model, name, keep_rate=keep_rate, **options)
    if name == "svit":  # gates of clear and varied decisions
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.agglo_method.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@every_method
@pytest.mark.parametrize("rate", [0.25, 0.7])
@torch.no_grad()
def test_counts_are_those_of_the_study(name: str, options: dict[str, Any], rate: float) -> None:
    model, x = lively_vit(), images()
    dense = list(model.state_dict())
    if name in PAIRS and rate < 0.5:
        with pytest.raises(ValueError, match="at least 98 stay"):
            agglo.apply(model, name, keep_rate=rate)
        return
    agglo.apply(model, name, keep_rate=rate, **options)
    with agglo.trace(model) as trace:
        logits = model(x)
    assert torch.equal(model(x), logits)
    report: Any = agglo.report(model)
    counts = [step.outcome.grouping.n_groups - 1 for step in trace.steps]
    for step, count in zip(trace.steps, counts, strict=True):
        assert report.varies == "about" or count <= report.counts[step.block]
        assert report.varies != "no" or count == report.counts[step.block]
        labels = step.total.labels
        assert (labels[:, 0] == 0).all() and (labels[:, 1:] != 0).all() and labels.max() < step.total.n_groups
        drops = (labels < 0).any()
        assert drops or step.total.sizes.sum(dim=1).tolist() == [197, 197] or step.outcome.weights is not None
    if name not in ("svit", "evovit", "pool"):
        assert [step.block for step in trace.steps] == [3, 6, 9]
        expected = RINGS.get(name, {rate: [count + (name == "evit") for count in STAGES[rate]]})[rate]
        assert report.counts[3::3] == expected
    new = [key.removeprefix("agglo_method.") for key in model.state_dict() if key not in dense]
    learns = next(info.learns for info in agglo.list_methods() if info.name == name)
    if name in LEARNED:
        assert sorted(new) == ([] if options else sorted(LEARNED[name]))
    else:
        assert bool(new) == learns
    assert list(agglo.remove(model).state_dict()) == dense


@every_method
@torch.no_grad()
def test_images_of_a_batch_do_not_meet(name: str, options: dict[str, Any]) -> None:
    if name == "random":
        return  # each image of a batch has its own draw
    model, x = applied(name, options), images(4, (32, 32))
    together = model.forward_features(x)
    for index in range(4):
        torch.testing.assert_close(together[index], model.forward_features(x[index : index + 1])[0], rtol=0, atol=3e-5)


@every_method
def test_an_odd_grid_and_a_batch_of_one(name: str, options: dict[str, Any]) -> None:
    model = applied(name, options, lively_vit((20, 4), 4))
    for mode in (model.train(), model.eval()):
        features = mode.forward_features(images(1, (20, 4)))
        assert features.shape == (1, 6, 24) and features.isfinite().all()
        features.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# In ats and svit counts depend on the images, in diffrate_learned on parameters, and random draws from a generator; the
# others share their code.
UNCOMPILED = ("ats", "svit", "diffrate_learned", "random", "l1", "linf", "dynamicvit_prsv")


@pytest.mark.parametrize("name", [info.name for info in agglo.list_methods() if info.name not in UNCOMPILED])
def test_a_decision_is_one_graph(name: str) -> None:
    """That of a whole model: test_validation.py."""
    method = built(create(name, **({"iterations": 1} if name in ("kmedoids", "sinkhorn") else {})), n=16, target=8)
    shown = view(n=16, target=8 if name != "pool" else 9, grid=(4, 4), memory=torch.rand(2, 17))

    def reduced(tokens: Tensor) -> Tensor:
        outcome: Outcome = method.reduce(replace(shown, tokens=tokens))
        return outcome.new_tokens(tokens)

    torch._dynamo.reset()
    compiled = torch.compile(reduced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(shown.tokens), reduced(shown.tokens))


@every_method
def test_copies_precisions_and_checkpointing(name: str, options: dict[str, Any]) -> None:
    model, x = applied(name, options), images(3, (32, 32))
    with torch.no_grad():
        expected = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(twin(x), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(x).isfinite().all()
        half = copy.deepcopy(model).to(torch.bfloat16)
        assert half(x.bfloat16()).dtype == torch.bfloat16
    learns = hasattr(model, "agglo_method")
    gradients = []
    for checkpointing in (False, True):
        model.train().set_grad_checkpointing(checkpointing)
        model.zero_grad()
        torch.manual_seed(0)
        logits = model(x)
        if not learns:
            torch.testing.assert_close(logits, expected)  # they train as they evaluate
        logits.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", [info.name for info in agglo.list_methods() if info.learns])
def test_every_parameter_learns(name: str) -> None:
    model = agglo.apply(lively_vit(32, 5), name, keep_rate=0.6).train()
    with agglo.trace(model) as trace:
        loss = model(images(3, (32, 32))).pow(2).sum()
    assert (trace.loss is not None) == (name in ("svit", "dynamicvit", "dynamicvit_prsv", "diffrate_learned"))
    (loss if trace.loss is None else loss + trace.loss).backward()
    for key, parameter in model.agglo_method.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key
