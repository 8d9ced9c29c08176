"""timm's VisionTransformer (DeiT, AugReg, DeiT-3, MAE, DINOv2, SigLIP, CLIP) and Eva (EVA-02, DINOv3, PE).

Rotary models: tokens are compared by their keys before rotation, and a merged token sits at the size-weighted mean
position of its members.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from agglo.hosts.swap import PassSetup, ReducedModule, UnsupportedModelError, begins_pass
from agglo.hosts.vit.base import Host, Layout, Parts, Projected, matrix_entries
from agglo.hosts.vit.rotary import Rotary
from agglo.hosts.vit.run import Run, checkpointed, directly, run_blocks

_BLOCKS = ("Block", "ResPostBlock", "EvaBlock", "EvaBlockPostNorm")
_ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")
_POST_NORM = ("ResPostBlock", "EvaBlockPostNorm")


class _TimmParts(Parts):
    """Blocks with norm1, attn, norm2, mlp; the two LayerScales are ls1/ls2 modules or gamma_1/gamma_2 vectors."""

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return cast(Tensor, block(x) if rotary is None else block(x, rope=rotary))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None) -> Projected:
        attn = block.attn
        x = x if _is_post_norm(block) else block.norm1(x)
        q, k, v = _qkv(attn, x)
        q, k = attn.q_norm(q), attn.k_norm(k)
        features = k
        if rotary is not None:
            prefix, half = attn.num_prefix_tokens, getattr(attn, "rotate_half", False)
            q, k = (_rotated(tensor, rotary, prefix, half).type_as(v) for tensor in (q, k))
        if k.shape[1] != q.shape[1]:  # grouped queries
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        gate = getattr(attn, "gate", None)
        return Projected(
            q,
            k,
            v,
            features=features,
            gate=None if gate is None else gate(x).sigmoid(),
            scale=attn.scale,
            dropout=attn.attn_drop.p if attn.training else 0.0,
        )

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        attn = block.attn
        out = attended.transpose(1, 2).flatten(2)
        if hasattr(attn, "norm"):
            out = attn.norm(out)
        if projected.gate is not None:
            out = out * projected.gate
        out = attn.proj_drop(attn.proj(out))
        out = block.norm1(out) if _is_post_norm(block) else _scaled(block, out, "ls1", "gamma_1")
        return x + cast(Tensor, block.drop_path1(out))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        if _is_post_norm(block):
            return x + cast(Tensor, block.drop_path2(block.norm2(block.mlp(x))))
        return x + cast(Tensor, block.drop_path2(_scaled(block, block.mlp(block.norm2(x)), "ls2", "gamma_2")))


def _is_post_norm(block: nn.Module) -> bool:
    return type(block).__name__ in _POST_NORM


def _scaled(block: nn.Module, x: Tensor, module_name: str, vector_name: str) -> Tensor:
    if hasattr(block, module_name):
        return cast(Tensor, getattr(block, module_name)(x))
    gamma = getattr(block, vector_name, None)
    return x if gamma is None else gamma * x


def _qkv(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, d); k and v may have fewer heads."""

    def heads(tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:-1], -1, attn.head_dim).transpose(1, 2)

    if attn.qkv is None:
        return heads(attn.q_proj(x)), heads(attn.k_proj(x)), heads(attn.v_proj(x))
    qkv = attn.qkv(x)
    if getattr(attn, "q_bias", None) is not None:
        qkv = qkv + torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    # Not unflatten: in an ONNX file written by way of TorchScript it fixes the batch size.
    q, k, v = qkv.reshape(*qkv.shape[:-1], 3, -1, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _rotated(x: Tensor, table: Tensor, prefix: int, half: bool) -> Tensor:
    from timm.layers.pos_embed_sincos import apply_rot_embed_cat

    return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], table, half)], dim=2)


_PARTS = _TimmParts()


def _run(model: Any, setup: PassSetup, image: Tensor, stop: int | None = None, keep: tuple[int, ...] = ()) -> Run:
    """Embed the image and run it through the blocks before `stop`."""
    embedded = model._pos_embed(model.patch_embed(image))
    # Eva drops patches in there already and returns its rotary table too.
    x, table = embedded if isinstance(embedded, tuple) else (model.patch_drop(embedded), None)
    grid = model.patch_embed.dynamic_feat_size(image.shape[-2:])
    rotary = None
    if table is not None:
        rotary = _rotary(table, grid, model.num_prefix_tokens, bool(getattr(model, "rope_mixed", False)))
    blocks = list(model.blocks)
    return run_blocks(
        setup,
        blocks[:stop],
        model.norm_pre(x),
        parts=_PARTS,
        prefix=model.num_prefix_tokens,
        training=model.training,
        depth=len(blocks),
        rotary=rotary,
        call=checkpointed if model.grad_checkpointing else directly,
        keep=keep,
        grid=grid,
    )


def _features(model: Any, run: Run) -> Tensor:
    """Tokens after the last norm, in the original number and order."""
    # The norm acts on each token alone: before unmerging it has fewer to do.
    return run.restored(model.norm(run.tokens))


class _ReducedTimm(ReducedModule):
    """forward_features and forward_intermediates of both classes, around the shared loop."""

    @begins_pass
    def forward_features(
        self: Any, setup: PassSetup, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _require_no_mask(attn_mask, is_causal)
        return _features(self, _run(self, setup, x))

    @begins_pass
    def forward_intermediates(
        self: Any,
        setup: PassSetup,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        from timm.models._features import feature_take_indices

        _require_no_mask(attn_mask, is_causal)
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt={output_fmt!r} is not known; accepted: 'NCHW', 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        run = _run(self, setup, x, stop=last + 1 if stop_early else None, keep=tuple(take))
        tokens = [self.norm(kept) if norm else kept for kept in run.kept]
        n_prefix = self.num_prefix_tokens
        prefix, maps = [t[:, :n_prefix] for t in tokens], [t[:, n_prefix:] for t in tokens]
        if output_fmt == "NCHW":
            grid = self.patch_embed.dynamic_feat_size(x.shape[-2:])
            maps = [t.unflatten(1, grid).permute(0, 3, 1, 2).contiguous() for t in maps]
        final = None if intermediates_only else _features(self, run)
        with_prefix = return_prefix_tokens and n_prefix > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": maps}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            return result if final is None else {**result, "image_features": final}
        intermediates = list(zip(maps, prefix, strict=True)) if with_prefix else maps
        return intermediates if final is None else (final, intermediates)


class _ReducedTimmClassifier(_ReducedTimm):
    """With timm's own `forward`, a head that reads prefix tokens alone needs no unmerging."""

    @begins_pass
    def forward(
        self: Any, setup: PassSetup, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _require_no_mask(attn_mask, is_causal)
        run = _run(self, setup, x)
        reads_prefix_alone = self.global_pool == "token" and self.attn_pool is None
        return cast(Tensor, self.forward_head(self.norm(run.reduced) if reads_prefix_alone else _features(self, run)))


def _require_no_mask(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise ValueError("attn_mask and is_causal do not go with token reduction: call agglo.remove(model) first")


def _rotary(table: Tensor, grid: tuple[int, int], prefix: int, mixed: bool) -> Rotary:
    batched = table.dim() == (5 if mixed else 4)
    if batched:
        raise ValueError("patch dropout of a rotary model does not go with token reduction: set its patch_drop to None")
    return Rotary(list(table.unbind(0)) if mixed else table, (int(grid[0]), int(grid[1])), prefix)


class TimmViT(Host):
    """timm's plain and rotary vision transformers."""

    model_classes: ClassVar[tuple[str, ...]] = ("timm.VisionTransformer", "timm.VisionTransformerDistilled", "timm.Eva")

    def check(self, module: Any) -> None:
        for method in ("forward_features", "forward_intermediates"):
            definer = getattr(getattr(type(module), method, None), "__module__", None)
            if definer is not None and definer.split(".")[0] not in ("timm", "agglo"):
                raise UnsupportedModelError(
                    f"{type(module).__name__} replaces timm's {method} (in {definer}); agglo would bypass it"
                )
        for block in module.blocks:
            if type(block).__name__ not in _BLOCKS:
                raise UnsupportedModelError(
                    f"{type(module).__name__} is built from {type(block).__name__}; supported: {', '.join(_BLOCKS)}"
                )
            if type(block.attn).__name__ not in _ATTENTIONS:
                raise UnsupportedModelError(
                    f"{type(module).__name__} attends by {type(block.attn).__name__}; "
                    f"supported: {', '.join(_ATTENTIONS)}"
                )

    def layout(self, module: Any) -> Layout:
        block, embed = module.blocks[0], module.patch_embed
        patches = int(embed.num_patches)
        return Layout(
            depth=len(module.blocks),
            prefix=module.num_prefix_tokens,
            patches=patches,
            attention_weights=matrix_entries(block.attn),
            attention_width=block.attn.num_heads * block.attn.head_dim,
            mlp_weights=matrix_entries(block.mlp),
            embedding_weights=matrix_entries(embed.proj),
            head_madds=matrix_entries(getattr(module, "head", None)),
            width=module.embed_dim,
            heads=block.attn.num_heads,
            grid=embed.grid_size,
        )

    def mixin(self, module: Any) -> type[ReducedModule]:
        forward_is_timms = type(module).forward.__module__.split(".")[0] in ("timm", "agglo")
        return _ReducedTimmClassifier if forward_is_timms else _ReducedTimm
