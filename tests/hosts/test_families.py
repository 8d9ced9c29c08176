"""Every family of the list in tests/support/families.py, from one tiny random model each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import agglo
from agglo.testing import TakenApart, assert_same, tensors
from tests.support.families import FAMILIES, PAGE, SMALL, TRANSFORMERS, Family, page

pytest.importorskip("transformers")
pytest.importorskip("timm")

every_family = pytest.mark.parametrize("family", FAMILIES, ids=[family.id for family in FAMILIES])


@every_family
@torch.no_grad()
def test_keeping_everything_and_taking_apart_are_dense_and_removal_is_exact(family: Family) -> None:
    model, x = family.fresh(), family.inputs()
    types, keys = [type(part) for part in model.modules()], list(model.state_dict())
    dense = family.run(model, x)
    assert_same(family.run(agglo.apply(model, keep_rate=1.0), x), dense, atol=1e-6)
    apart = family.run(agglo.apply(model, TakenApart(), schedule=agglo.Stages(0.5)), x)
    assert_same(apart, dense, atol=1e-4)
    agglo.apply(model, keep_rate=0.5)
    report: Any = agglo.report(model)
    assert report.gflops_after < report.gflops_before
    with agglo.trace(model) as trace:
        reduced = family.run(model, x)
    for grouping in trace.groupings.values():
        assert grouping.n_groups < grouping.labels.shape[1]
        in_front = torch.arange(grouping.prefix)
        assert torch.equal(grouping.labels[0, : grouping.prefix], in_front), "prefix tokens are never merged"
        assert (grouping.labels[:, grouping.prefix :] >= grouping.prefix).all()
        assert grouping.sizes.sum(dim=1).eq(grouping.labels.shape[1]).all()
    assert [(t.shape, t.dtype) for t in tensors(reduced)] == [(t.shape, t.dtype) for t in tensors(dense)]
    assert all(t.isfinite().all() for t in tensors(reduced))
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(tensors(reduced), tensors(dense), strict=True))
    assert list(model.state_dict()) == keys
    assert_same(family.run(agglo.remove(model), x), dense)
    assert [type(part) for part in model.modules()] == types


@every_family
def test_gradients_and_training(family: Family) -> None:
    models, x = [family.fresh().train() for _ in range(2)], family.inputs()
    agglo.apply(models[1], keep_rate=0.5)
    for model in models:
        outputs = [t for t in tensors(family.run(model, x)) if t.requires_grad]
        sum(t.float().pow(2).mean() for t in outputs).backward()  # type: ignore[union-attr]
    learns = [{name for name, p in model.named_parameters() if p.grad is not None} for model in models]
    assert learns[0] == learns[1]
    gradients = [p.grad for p in models[1].parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients)


ONE_OF_EACH_LAYOUT = [("BeitForImageClassification", "beit.layers"), ("DINOv3ViTModel", "model.layer")]


@pytest.mark.parametrize(("cls", "layers"), ONE_OF_EACH_LAYOUT)
@torch.no_grad()
def test_one_family_of_each_layout_compiles(cls: str, layers: str) -> None:
    family = next(family for family in TRANSFORMERS if family.cls == cls)
    model, x = family.fresh(), family.inputs()
    del model.get_submodule(layers)[2:]
    agglo.apply(model, "tome", keep_rate=0.5, blocks=(0,))
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(x).to_tuple(), expected.to_tuple(), atol=1e-5)


def test_the_table_of_families_is_of_now() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "python -m tests.support.families writes it anew"


def test_a_layer_that_only_looks_the_part_is_refused() -> None:
    import transformers

    model = transformers.ViTModel(transformers.ViTConfig(**SMALL))

    class OddLayer(type(model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states, *args, **kwargs) + 0.01 * hidden_states.mean(dim=1, keepdim=True)

    for layer in model.layers:
        layer.__class__ = OddLayer
    with pytest.raises(agglo.UnsupportedModelError, match=r"OddLayer of ViTModel .* off by 0\.\d+ .* docs/hosts\.md"):
        agglo.apply(model, keep_rate=0.5)
    agglo.apply(model, keep_rate=0.5, probe=False)
    assert agglo.report(model) is not None
