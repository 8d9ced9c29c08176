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
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 50}
IDS = torch.tensor([[1, 5, 9, 49], [3, 7, 2, 49]])
DINO = {name: value for name, value in SMALL.items() if name != "intermediate_size"}


class TransformersContract(HostContract):
    """Every output is compared: hidden states, last state, pooled state or logits."""

    def run(self, model: nn.Module, x: Tensor) -> Any:
        return model(x, output_hidden_states=True)

    def run_copy(self, model: nn.Module, x: Tensor) -> Any:
        """Asked for hidden states, transformers puts hooks on the layers that cannot be pickled."""
        return model(x)


class NeverPickled(TransformersContract):
    """Models that always ask their towers for hidden states."""

    @torch.no_grad()
    def test_copies_run_themselves(self) -> None:
        """Copies only: transformers puts local functions on these models, which cannot be pickled."""
        model, x = agglo.apply(self.fresh(), keep_rate=self.keep_rate), self.image()
        expected, twin = self.run(model, x), copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert_same(self.run(twin, x), expected)


class TestViT(TransformersContract):
    def model(self) -> nn.Module:
        return tf.ViTModel(tf.ViTConfig(**SMALL, attn_implementation="sdpa"))


class TestDeiTWithTeacher(TransformersContract):
    def model(self) -> nn.Module:
        return tf.DeiTForImageClassificationWithTeacher(tf.DeiTConfig(**SMALL, num_labels=10))


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


class TestDINOv2Backbone(NeverPickled):
    def model(self) -> nn.Module:
        return tf.Dinov2Backbone(tf.Dinov2Config(**DINO, out_features=["stage2", "stage5", "stage8"]))


class TestDINOv2WithRegisters(TransformersContract):
    def model(self) -> nn.Module:
        return tf.Dinov2WithRegistersModel(tf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=4))


class TestCLIPVisionEagerWithProjection(TransformersContract):
    def model(self) -> nn.Module:
        config = tf.CLIPVisionConfig(**SMALL, projection_dim=24, attn_implementation="eager")
        return tf.CLIPVisionModelWithProjection(config)


class TestCLIP(TransformersContract):
    def model(self) -> nn.Module:
        return tf.CLIPModel(tf.CLIPConfig(vision_config=SMALL, text_config=TEXT, projection_dim=24))

    def run(self, model: nn.Module, x: Tensor) -> Any:
        output = model(pixel_values=x, input_ids=IDS)
        return output.image_embeds, output.vision_model_output

    run_copy = run


class TestLLaVA(NeverPickled):
    """A VLM reads the last hidden state but one, without the class token."""

    def model(self) -> nn.Module:
        text = tf.LlamaConfig(**{**TEXT, "vocab_size": 60}, num_key_value_heads=2)
        vision = tf.CLIPVisionConfig(**SMALL)
        return tf.LlavaForConditionalGeneration(
            tf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=59, image_seq_length=64)
        )

    def run(self, model: nn.Module, x: Tensor) -> Any:
        ids = torch.tensor([[1] + [59] * 64 + [5, 7]]).repeat(len(x), 1)
        return model(input_ids=ids, pixel_values=x, use_cache=False).logits

    run_copy = run


IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))

TOWERS = {
    "vit": lambda **options: tf.ViTModel(tf.ViTConfig(**SMALL, **options)),
    "mae": lambda **options: tf.ViTMAEModel(tf.ViTMAEConfig(**SMALL, mask_ratio=0.0, **options)),
    "registers": lambda **options: tf.Dinov2WithRegistersModel(tf.Dinov2WithRegistersConfig(**DINO, **options)),
    "clip": lambda **options: tf.CLIPVisionModel(tf.CLIPVisionConfig(**SMALL, **options)),
}
every_tower = pytest.mark.parametrize("name", TOWERS)


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return TOWERS[name](**options).eval()


def run(model: Any, x: Tensor = IMAGE, **options: Any) -> Any:
    """With its masking left to chance ViTMAE would shuffle the tokens anew each time."""
    if "MAE" in type(getattr(model, "_orig_mod", model)).__name__:
        options["noise"] = torch.rand(len(x), x.shape[2] * x.shape[3] // 64, generator=torch.Generator().manual_seed(5))
    return model(x, **options)


@every_tower
@torch.no_grad()
def test_hidden_states_are_full_length_and_members_share_a_value(name: str) -> None:
    model = build(name)
    dense = run(model, output_hidden_states=True)
    agglo.apply(model, keep_rate=0.5)
    with agglo.trace(model) as trace:
        reduced = run(model, output_hidden_states=True)
    assert [state.shape for state in reduced.hidden_states] == [state.shape for state in dense.hidden_states]
    first = min(trace.groupings)
    assert_same(reduced.hidden_states[: first + 1], dense.hidden_states[: first + 1])
    for block, grouping in trace.groupings.items():
        state = reduced.hidden_states[block + 1]
        for image in range(len(IMAGE)):
            for group in range(grouping.n_groups):
                members = state[image, grouping.labels[image] == group]
                assert torch.equal(members, members[:1].expand_as(members))
    assert_same(run(model).to_tuple(), reduced.to_tuple()[: len(run(model).to_tuple())])


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
@every_tower
def test_what_a_reduced_model_cannot_give_is_refused(name: str) -> None:
    model = agglo.apply(build(name, attn_implementation="eager"), keep_rate=0.5)
    with pytest.raises(ValueError, match="output_attentions=True does not go with token reduction"):
        run(model, output_attentions=True)
    if name != "registers":
        with pytest.raises(ValueError, match="attention_mask does not go"):
            run(model, attention_mask=torch.ones(2, 65))
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"agglo\.remove\(model\) first"):
        run(model)
    assert len(run(agglo.remove(model)).attentions) == 8


@every_tower
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = agglo.apply(build(name), keep_rate=0.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        run(model).last_hidden_state.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_same(gradients[1], gradients[0], atol=1e-5)


@torch.no_grad()
def test_hooks_on_layers_see_no_merged_tokens() -> None:
    model = agglo.apply(build("vit"), keep_rate=0.5, proportional=False)
    run(agglo.remove(model), output_hidden_states=True)  # transformers leaves its hooks on the layers
    agglo.apply(model, keep_rate=0.5, proportional=False)
    states = run(model, output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in states] == [65] * 9


@torch.no_grad()
def test_an_applied_model_is_saved_as_the_dense_one(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = tf.ViTForImageClassification(tf.ViTConfig(**SMALL, num_labels=10)).eval()
    dense = model(IMAGE)
    agglo.apply(model, keep_rate=0.5).save_pretrained(tmp_path)
    loaded = tf.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert agglo.report(loaded) is None
    assert_same(loaded.eval()(IMAGE), dense)


class OwnForward(tf.ViTModel):  # type: ignore[misc, name-defined]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).last_hidden_state


class OwnLayer(nn.Module):
    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


@current
def test_subclasses_are_refused_by_name() -> None:
    config = tf.ViTConfig(**SMALL)
    with pytest.raises(agglo.UnsupportedModelError, match="OwnForward replaces forward of transformers"):
        agglo.apply(OwnForward(config), keep_rate=0.5)
    model = tf.ViTModel(config)
    model.layers[2] = OwnLayer()
    with pytest.raises(agglo.UnsupportedModelError, match="ViTModel is built from OwnLayer"):
        agglo.apply(model, keep_rate=0.5)
    model = tf.ViTModel(config)
    model.layers[2].attention = OwnLayer()
    with pytest.raises(agglo.UnsupportedModelError, match="ViTModel is built from ViTLayer, which has no attention"):
        agglo.apply(model, keep_rate=0.5)


def test_flops() -> None:
    report = agglo.report(agglo.apply(tf.ViTModel(tf.ViTConfig(), add_pooling_layer=False), keep_rate=0.5))
    assert report is not None
    assert report.gflops_before == pytest.approx(17.58, abs=0.03)  # ViT-B/16 as published
    assert report.counts == [196] * 3 + [98] * 3 + [49] * 3 + [24] * 3
    masked = agglo.report(agglo.apply(tf.ViTMAEModel(tf.ViTMAEConfig(**SMALL)), keep_rate=0.5))
    assert masked is not None
    assert masked.n_tokens == 16
    registers = agglo.report(agglo.apply(build("registers"), keep_rate=0.5))
    assert registers is not None
    assert registers.prefix == 5


def timm_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a transformers ViT classifier under timm's names."""
    state, renamed = model.state_dict(), {}
    for name, tensor in state.items():
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            tensor = torch.cat([state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for ours, theirs in (
            ("vit.embeddings.cls_token", "cls_token"),
            ("vit.embeddings.position_embeddings", "pos_embed"),
            ("vit.embeddings.patch_embeddings.projection", "patch_embed.proj"),
            ("vit.layers.", "blocks."),
            ("vit.layernorm", "norm"),
            ("layernorm_before", "norm1"),
            ("layernorm_after", "norm2"),
            ("attention.q_proj", "attn.qkv"),
            ("attention.o_proj", "attn.proj"),
            ("classifier", "head"),
        ):
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


@current
@pytest.mark.parametrize(("linkage", "attention"), [("average", "sdpa"), ("single", "eager")])
@torch.no_grad()
def test_atc_is_that_of_timm_with_the_same_weights(linkage: str, attention: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    config = tf.ViTConfig(**{**SMALL, "num_hidden_layers": 12}, num_labels=10, attn_implementation=attention)
    model = tf.ViTForImageClassification(config).eval()
    for parameter in model.parameters():  # initialised so small that most keys are alike
        parameter.add_(torch.randn(parameter.shape) * 0.05)
    twin = timm.models.vision_transformer.VisionTransformer(
        img_size=64, patch_size=8, embed_dim=48, depth=12, num_heads=3, mlp_ratio=2, num_classes=10
    ).eval()
    for norm in (module for module in twin.modules() if isinstance(module, nn.LayerNorm)):
        norm.eps = config.layer_norm_eps
    twin.load_state_dict(timm_weights(model), strict=True)
    assert_same(model(IMAGE).logits, twin(IMAGE), atol=1e-5)
    for one in (model, twin):
        agglo.apply(one, keep_rate=0.5, linkage=linkage)
    with agglo.trace(model) as ours, agglo.trace(twin) as theirs:
        assert_same(model(IMAGE).logits, twin(IMAGE), atol=1e-4)
    for block, grouping in theirs.groupings.items():
        assert torch.equal(ours.groupings[block].labels, grouping.labels)
