"""transformers' vision models: the contract for every family, composite models, and timm's ViT as an oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import agglo
from agglo.testing import HostContract, TakenApart, assert_same

tf = pytest.importorskip("transformers")

# Hidden states of chosen layers, tuples, and the names below: older versions are held to the contract alone.
VERSION = tuple(int(part) for part in tf.__version__.split(".")[:2])
current = pytest.mark.skipif(VERSION < (5, 20), reason="written for outputs and names of transformers 5.20")

SMALL = {
    "image_size": 64, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 8, "num_attention_heads": 3,
    "intermediate_size": 96,
}  # fmt: skip
DINO = {name: value for name, value in SMALL.items() if name != "intermediate_size"}


class TransformersContract(HostContract):
    """Every output is compared: hidden states, last state, pooled state or logits."""

    def run(self, model: nn.Module, x: Tensor) -> Any:
        return model(x, output_hidden_states=True)

    def run_copy(self, model: nn.Module, x: Tensor) -> Any:
        """Asked for hidden states, transformers puts hooks on the layers that cannot be pickled."""
        return model(x)


class TestDINOv2Backbone(TransformersContract):
    """It always asks its tower for hidden states."""

    def model(self) -> nn.Module:
        return tf.Dinov2Backbone(tf.Dinov2Config(**DINO, out_features=["stage2", "stage5", "stage8"]))

    @torch.no_grad()
    def test_copies_run_themselves(self) -> None:
        """Copies only: transformers puts local functions on these models, which cannot be pickled."""
        model, x = agglo.apply(self.fresh(), keep_rate=self.keep_rate), self.image()
        expected, twin = self.run(model, x), copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert_same(self.run(twin, x), expected)


def noise(x: Tensor) -> Tensor:
    """Each image's own, so that it is masked alike alone and in a batch: (B, 64)."""
    return F.avg_pool2d(x.float().mean(1), 8).flatten(1)


class TestViTMAE(TransformersContract):
    def model(self) -> nn.Module:
        return tf.ViTMAEModel(tf.ViTMAEConfig(**SMALL, mask_ratio=0.5))

    def run(self, model: nn.Module, x: Tensor) -> Any:
        return model(x, noise=noise(x), output_hidden_states=True)

    def run_copy(self, model: nn.Module, x: Tensor) -> Any:
        return model(x, noise=noise(x))


IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))

TOWERS = {
    "mae": lambda **options: tf.ViTMAEModel(tf.ViTMAEConfig(**SMALL, mask_ratio=0.0, **options)),
    "registers": lambda **options: tf.Dinov2WithRegistersModel(tf.Dinov2WithRegistersConfig(**DINO, **options)),
}
every_tower = pytest.mark.parametrize("name", ["mae", "registers"])


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return TOWERS[name](**options).eval()


def run(model: Any, x: Tensor = IMAGE, **options: Any) -> Any:
    """With its masking left to chance ViTMAE would shuffle the tokens anew each time."""
    if "MAE" in type(getattr(model, "_orig_mod", model)).__name__:
        options["noise"] = torch.rand(len(x), x.shape[2] * x.shape[3] // 64, generator=torch.Generator().manual_seed(5))
    return model(x, **options)


@torch.no_grad()
def test_hidden_states_are_full_length_and_members_share_a_value() -> None:
    model = build("registers")
    dense = run(model, output_hidden_states=True).hidden_states
    agglo.apply(model, keep_rate=0.5)
    with agglo.trace(model) as trace:
        states = run(model, output_hidden_states=True).hidden_states
    assert [state.shape for state in states] == [state.shape for state in dense]
    first = min(trace.groupings)
    assert_same(states[: first + 1], dense[: first + 1])
    for block, grouping in trace.groupings.items():
        for state, labels in zip(states[block + 1], grouping.labels, strict=True):
            for group in range(grouping.n_groups):
                members = state[labels == group]
                assert torch.equal(members, members[:1].expand_as(members))


@current
@every_tower
@torch.no_grad()
def test_outputs_are_chosen_as_in_the_dense_model(name: str) -> None:
    model = build(name)
    options: list[dict[str, Any]] = [
        {"return_dict": False},
        {"return_dict": False, "output_hidden_states": True},
        {"output_hidden_states": [1, 6]},
        {"output_hidden_states": False},
        {},
    ]

    def outputs() -> list[Any]:
        given = [run(model, **chosen) for chosen in options]
        model.config.output_hidden_states = True
        by_default = run(model)
        model.config.output_hidden_states = False
        return [*given, by_default]

    dense = outputs()
    agglo.apply(model, keep_rate=1.0)
    reduced = outputs()
    for ours, theirs in zip(reduced, dense, strict=True):
        assert type(ours) is type(theirs)
        if not isinstance(theirs, tuple):
            assert list(ours) == list(theirs)
            states = [[state is None for state in output.get("hidden_states") or ()] for output in (ours, theirs)]
            assert states[0] == states[1]
        assert_same(ours, theirs, atol=1e-5)


@every_tower
@torch.no_grad()
def test_other_image_sizes(name: str) -> None:
    model, wide = build(name), torch.randn(2, 3, 48, 80)
    # DINOv2 always interpolates. ViTMAE forgets its class token when it counts positions; a reduced one does too.
    options = {} if name == "registers" else {"interpolate_pos_encoding": True}
    dense = run(model, wide, **options)
    assert_same(run(agglo.apply(model, TakenApart(), schedule=[1]), wide, **options), dense, atol=1e-5)
    agglo.apply(model, keep_rate=0.5)
    with agglo.trace(model) as trace:
        run(model, wide, **options)
    prefix = agglo.report(model).prefix  # type: ignore[union-attr]
    assert [g.n_groups - prefix for g in trace.groupings.values()] == [30, 15, 7]


@current
def test_what_a_reduced_model_cannot_give_is_refused() -> None:
    model = agglo.apply(build("mae", attn_implementation="eager"), keep_rate=0.5)
    with pytest.raises(ValueError, match="output_attentions=True does not go with token reduction"):
        run(model, output_attentions=True)
    with pytest.raises(ValueError, match="attention_mask does not go"):
        run(model, attention_mask=torch.ones(2, 65))
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"agglo\.remove\(model\) first"):
        run(model)
    assert len(run(agglo.remove(model)).attentions) == 8


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = agglo.apply(build("registers"), keep_rate=0.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        run(model).last_hidden_state.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_same(gradients[1], gradients[0], atol=1e-5)


@torch.no_grad()
def test_an_applied_model_is_saved_as_the_dense_one(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = tf.ViTForImageClassification(tf.ViTConfig(**SMALL, num_labels=10)).eval()
    dense = model(IMAGE)
    agglo.apply(model, keep_rate=0.5).save_pretrained(tmp_path)
    loaded = tf.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert agglo.report(loaded) is None
    assert_same(loaded.eval()(IMAGE), dense)


@current
def test_a_layer_without_attention_is_refused_by_name() -> None:
    model = tf.ViTModel(tf.ViTConfig(**SMALL))
    model.layers[2].attention = nn.Identity()
    with pytest.raises(agglo.UnsupportedModelError, match="ViTModel is built from ViTLayer, which has no attention"):
        agglo.apply(model, keep_rate=0.5)


def test_flops() -> None:
    with torch.device("meta"):
        model = tf.ViTModel(tf.ViTConfig(), add_pooling_layer=False)
    report: Any = agglo.report(agglo.apply(model, keep_rate=0.5))
    assert report.gflops_before == pytest.approx(17.58, abs=0.03)  # ViT-B/16 as published
    assert report.counts == [196] * 3 + [98] * 3 + [49] * 3 + [24] * 3
