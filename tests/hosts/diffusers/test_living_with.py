"""Merging together with hooks, processors, adapters, ControlNet, compilation and other threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.testing import assert_same
from tests.support.diffusion import MODELS, Whole, diffusers, dit, run, unet, unet_of_maps

processors: Any = pytest.importorskip("diffusers.models.attention_processor")
accelerate: Any = pytest.importorskip("accelerate")


def reduced(make: Any = unet, **options: Any) -> tuple[Any, Any, Tensor]:
    """A model, its inputs, and what it gives reduced; it is dense again."""
    model, inputs = make()
    result = run(agglo.apply(model, **{"keep_rate": 0.5, **options}), inputs)
    return agglo.remove(model), inputs, result


HOOKS: dict[str, Any] = {
    "whole": lambda model: accelerate.hooks.add_hook_to_module(
        model, accelerate.hooks.AlignDevicesHook(io_same_device=True)
    ),
    "every layer": lambda model: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "casting": lambda model: model.enable_layerwise_casting(torch.float32, torch.float32),
    "groups": lambda model: model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), "leaf_level"),
}


@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_accelerate_and_diffusers(hooks_first: bool, kind: str) -> None:
    model, inputs, expected = reduced()
    dense = run(model, inputs)
    if hooks_first:
        HOOKS[kind](model)
    agglo.apply(model, keep_rate=0.5)
    if not hooks_first:
        HOOKS[kind](model)
    assert_same(run(model, inputs), expected, atol=1e-6)
    agglo.remove(model)
    assert_same(run(model, inputs), dense, atol=1e-6)


@pytest.mark.parametrize("make", [unet, unet_of_maps])
@pytest.mark.parametrize("proportional", [True, False])
def test_attention_processors(make: Any, proportional: bool) -> None:
    model, inputs, expected = reduced(make, proportional=proportional)
    agglo.apply(model, keep_rate=0.5, proportional=proportional)
    for module in model.modules():
        if isinstance(module, processors.Attention):
            module.set_processor(processors.AttnProcessor())
    assert_same(run(model, inputs), expected, atol=2e-5)
    if make is unet:
        model.set_attention_slice("max")
        assert_same(run(model, inputs), expected, atol=2e-5)
        model.set_attn_processor(processors.AttnProcessor2_0())
        model.fuse_qkv_projections()
        assert_same(run(model, inputs), expected, atol=2e-5)


class WithoutSoftmax:
    """A processor that never calls scaled_dot_product_attention."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None
    ) -> Tensor:
        return attn.to_out[0](attn.to_q(hidden_states))


def test_a_processor_that_cannot_weigh_groups_stops_the_pass() -> None:
    model, inputs = unet()
    model.set_attn_processor(WithoutSoftmax())
    agglo.apply(model, keep_rate=0.5)
    with pytest.raises(RuntimeError, match="proportional=False"):
        run(model, inputs)
    agglo.apply(model, keep_rate=0.5, proportional=False)
    assert run(model, inputs).isfinite().all()


@pytest.mark.parametrize("applied_first", [True, False])
def test_peft(applied_first: bool) -> None:
    """Reduced with an adapter, put in before or after, is reduced with its weights fused."""
    peft = pytest.importorskip("peft", minversion="0.15")
    model, inputs, plain = reduced()
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)  # None of them is zero.
    if applied_first:
        agglo.apply(model, keep_rate=0.5)
    torch.manual_seed(1)
    model.add_adapter(config)
    model.eval()
    if not applied_first:
        agglo.apply(model, keep_rate=0.5)
    with_adapter = run(model, inputs)
    assert (with_adapter - plain).abs().max() > 1e-3
    model.disable_adapters()
    assert_same(run(model, inputs), plain, atol=1e-6)
    model.enable_adapters()
    model.fuse_lora()
    assert_same(run(model, inputs), with_adapter, atol=1e-5)
    model.unfuse_lora()
    model.delete_adapters("default")
    assert_same(run(model, inputs), plain, atol=1e-5)


def with_ip_adapter() -> tuple[Any, Any]:
    model, inputs = unet()
    chosen = {}
    for name, processor in model.attn_processors.items():
        if name.endswith("attn1.processor"):
            chosen[name] = processor
        else:
            width = model.get_submodule(name.removesuffix(".processor")).to_q.in_features
            chosen[name] = processors.IPAdapterAttnProcessor2_0(width, 12, num_tokens=(4,), scale=0.7)
    model.set_attn_processor(chosen)
    projection = diffusers.models.embeddings.ImageProjection(
        image_embed_dim=6, cross_attention_dim=12, num_image_text_embeds=4
    )
    model.encoder_hid_proj = diffusers.models.embeddings.MultiIPAdapterImageProjection([projection])
    model.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return model.eval(), {**inputs, "added_cond_kwargs": {"image_embeds": [torch.randn(2, 1, 6)]}}


def test_ip_adapter() -> None:
    model, inputs = with_ip_adapter()
    dense = run(model, inputs)
    masks = {"cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 8, 8)]}}
    for merge in (("attn",), ("attn", "cross")):
        assert torch.equal(run(agglo.apply(model, keep_rate=1.0, merge=merge), inputs), dense)
        agglo.apply(model, keep_rate=0.5, merge=merge)
        one, other = run(model, inputs), run(model, inputs, added_cond_kwargs={"image_embeds": [torch.ones(2, 1, 6)]})
        assert (one - other).abs().max() > 1e-5
        assert (one - dense).norm() < dense.norm()
        if merge == ("attn",):
            assert run(model, inputs, **masks).isfinite().all()
    with pytest.raises(RuntimeError, match="IP-Adapter masks"):
        run(model, inputs, **masks)


def test_ip_adapters_of_joint_attention() -> None:
    """Their attention to the image is of the merged queries: with groups of one token nothing changes."""
    model, inputs = MODELS["flux"]()
    torch.manual_seed(1)
    own: Any = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    for block in model.transformer_blocks:
        block.attn.set_processor(own.FluxIPAdapterAttnProcessor(32, 12, num_tokens=(4,), scale=0.7).eval())
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(2, 4, 12)]}
    dense = run(model, inputs)
    assert_same(run(agglo.apply(model, Whole(), keep_rate=0.5), inputs), dense, atol=1e-5)
    result = run(agglo.apply(model, keep_rate=0.5), inputs)
    assert 1e-5 < (result - dense).abs().max() < dense.abs().max()


def test_controlnet() -> None:
    model, inputs, plain = reduced()
    torch.manual_seed(1)
    control = diffusers.ControlNetModel.from_unet(model, conditioning_channels=3).eval()
    for parameter in control.controlnet_down_blocks.parameters():
        nn.init.normal_(parameter, std=0.1)
    image = torch.rand(2, 3, 64, 64)

    def controlled() -> Tensor:
        with torch.no_grad():
            down, mid = control(**inputs, controlnet_cond=image, return_dict=False)
        return run(model, inputs, down_block_additional_residuals=down, mid_block_additional_residual=mid)

    agglo.apply(model, keep_rate=0.5)
    result = controlled()
    assert (result - plain).abs().max() > 1e-4
    agglo.apply(control, keep_rate=0.5)
    assert not torch.equal(controlled(), result)
    agglo.remove(control)
    assert torch.equal(controlled(), result)


def test_what_a_reduced_model_cannot_do_is_refused() -> None:
    model, inputs = unet()
    agglo.apply(model, keep_rate=0.5)
    with pytest.raises(RuntimeError, match="attention_mask"):
        run(model, inputs, attention_mask=torch.ones(2, 64))
    model, inputs = MODELS["wan"]()
    agglo.apply(model, keep_rate=0.5)
    names = {"spatial_attention_block_identifiers": ("blocks",), "current_timestep_callback": lambda: 500}
    model.enable_cache(diffusers.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, **names))
    with pytest.raises(RuntimeError, match="pyramid_attention_broadcast"):
        run(model, inputs)


def test_chunks_and_checkpoints_go_where_they_change_nothing() -> None:
    model, inputs, expected = reduced(dit)
    for block in model.transformer_blocks:
        block.set_chunk_feed_forward(8, dim=1)
    model.enable_gradient_checkpointing()
    agglo.apply(model, keep_rate=0.5)
    assert_same(run(model, inputs), expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="disable_gradient_checkpointing"):
        model(**inputs)
    agglo.apply(model, keep_rate=0.5, merge=("mlp",))
    with pytest.raises(RuntimeError, match="feed-forward chunking"):
        run(model, inputs)


def test_blocks_compiled_one_by_one() -> None:
    model, inputs = dit(num_layers=1)
    expected = run(agglo.apply(model, keep_rate=0.5), inputs)
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(backend="eager", fullgraph=True)
    assert_same(run(model, inputs), expected, atol=1e-5)


def test_a_compiled_model_notices_apply_and_remove_and_keeps_groupings() -> None:
    model, inputs = dit(num_layers=1)
    timesteps = [torch.tensor([t, t]) for t in (9, 7, 5)]

    def steps(of: Any) -> list[Tensor]:
        with agglo.hosts.diffusers.generation():
            return [run(of, inputs, timestep=t) for t in timesteps]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    dense = run(compiled, inputs)
    agglo.apply(compiled, keep_rate=0.5, every=2)
    assert_same(steps(compiled), steps(model), atol=1e-5)
    agglo.remove(compiled)
    assert_same(run(compiled, inputs), dense, atol=1e-5)


def run_interrupted(model: Any, inputs: Any, meanwhile: Any) -> Tensor:
    """What a pass gives in whose middle, before the second resolution, something else happens in another thread."""
    waiting, going = threading.Event(), threading.Event()

    def pause(module: nn.Module, args: Any) -> None:
        waiting.set()
        assert going.wait(60)

    results: list[Tensor] = []
    handle = model.down_blocks[1].register_forward_pre_hook(pause)
    thread = threading.Thread(target=lambda: results.append(run(model, inputs)))
    thread.start()
    assert waiting.wait(60)
    meanwhile()
    going.set()
    thread.join()
    handle.remove()
    return results[0]


def test_applying_and_removing_while_another_thread_runs_the_model() -> None:
    """A pass goes on with the plan that it began with; of a removal, what comes after may be dense already."""
    model, inputs, expected = reduced(max_downsample=2)
    dense = run(model, inputs)
    options = {"keep_rate": 0.5, "max_downsample": 2}
    assert torch.equal(run_interrupted(model, inputs, lambda: agglo.apply(model, **options)), dense)
    assert torch.equal(run(model, inputs), expected)
    other = lambda: agglo.apply(model, "pool", keep_rate=0.3, max_downsample=2)  # noqa: E731
    assert torch.equal(run_interrupted(model, inputs, other), expected)
    agglo.apply(model, **options)
    result = run_interrupted(model, inputs, lambda: agglo.remove(model))
    assert result.isfinite().all()
    assert not torch.equal(result, dense) and not torch.equal(result, expected)
    assert torch.equal(run(model, inputs), dense)
