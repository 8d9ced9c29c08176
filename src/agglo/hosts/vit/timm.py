"""timm's VisionTransformer (DeiT, AugReg, DeiT-3, MAE, DINOv2, SigLIP, CLIP) and Eva (EVA-02, DINOv3, PE).

Rotary models: tokens are compared by their keys before rotation, and a merged token sits at the size-weighted mean
position of its members.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.swap import PassSetup, ReducedModule, UnsupportedModelError, begins_pass
from agglo.hosts.vit.base import Head, Host, Layout, matrix_entries, others, require_own
from agglo.hosts.vit.reading import StandIn, are_watched
from agglo.hosts.vit.rotary import Rotary
from agglo.hosts.vit.run import Run, checkpointed, directly, run_blocks
from agglo.hosts.vit.timm_parts import PARTS as PARTS
from agglo.hosts.vit.timm_parts import block_weights, parts_of
from agglo.hosts.vit.timm_probe import prove_blocks

_BLOCKS = ("Block", "ResPostBlock", "EvaBlock", "EvaBlockPostNorm", "ParallelThingsBlock")
_HEAD = ("forward", "forward_head", "pool")  # what reads the tokens after the last norm
_ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")


@dataclass(frozen=True)
class Embedded:
    """An image before the first block.

    tokens: (B, T, C), prefix tokens first. grid: (rows, columns) of its patches. rotary: the tables of a rotary model.
    """

    tokens: Tensor
    grid: tuple[int, int]
    rotary: Rotary | None


def embed(model: Any, image: Tensor, positions: Tensor | None = None) -> Embedded:
    """An image (B, 3, H, W) as the model's first block sees it.

    positions: (1, T, C), the absolute position embedding of this image's grid, for a model with `dynamic_img_size`;
        None leaves it to timm.
    """
    grid = model.patch_embed.dynamic_feat_size(image.shape[-2:])
    patches = model.patch_embed(image)
    if positions is None:
        embedded = model._pos_embed(patches)
    else:
        here = StandIn(model, pos_embed=positions, patch_embed=StandIn(model.patch_embed, grid_size=grid))
        embedded = type(model)._pos_embed(here, patches)
    # Eva drops patches in there already and returns its rotary table too.
    x, table = embedded if isinstance(embedded, tuple) else (model.patch_drop(embedded), None)
    rotary = None
    if table is not None:
        rotary = _rotary(table, grid, model.num_prefix_tokens, bool(getattr(model, "rope_mixed", False)))
    return Embedded(model.norm_pre(x), grid, rotary)


def _run(model: Any, setup: PassSetup, image: Tensor, stop: int | None = None, keep: tuple[int, ...] = ()) -> Run:
    """Embed the image and run it through the blocks before `stop`."""
    embedded = embed(model, image)
    blocks = list(model.blocks)
    return run_blocks(
        setup,
        blocks[:stop],
        embedded.tokens,
        parts=parts_of(blocks[0]),
        prefix=model.num_prefix_tokens,
        training=model.training,
        depth=len(blocks),
        rotary=embedded.rotary,
        call=checkpointed if model.grad_checkpointing else directly,
        keep=keep,
        grid=embedded.grid,
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
    """With timm's own `forward` and head, nothing is to be unmerged where that reads prefix tokens alone."""

    @begins_pass
    def forward(
        self: Any, setup: PassSetup, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _require_no_mask(attn_mask, is_causal)
        if not _reads_prefix_alone(self):
            return cast(Tensor, self.forward_head(_features(self, _run(self, setup, x))))
        run = _run(self, replace(setup, front_only=not are_watched([self.norm])), x)
        return cast(Tensor, self.forward_head(self.norm(run.reduced)))


def _reads_prefix_alone(model: Any) -> bool:
    """Whether timm's own head, which pools as the model is told, reads no patch."""
    return model.global_pool == "token" and model.attn_pool is None


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
            for attn in [block.attn] if hasattr(block, "attn") else [one.attn for one in block.attns]:
                if type(attn).__name__ not in _ATTENTIONS:
                    raise UnsupportedModelError(
                        f"{type(module).__name__} attends by {type(attn).__name__}; supported: {', '.join(_ATTENTIONS)}"
                    )

    def prove(self, module: Any) -> None:
        prove_blocks(module.blocks, type(module).__name__)

    def layout(self, module: Any) -> Layout:
        embed = module.patch_embed
        attention, asking, mlp, heads, width = block_weights(module.blocks[0])
        patches = int(embed.num_patches)
        return Layout(
            depth=len(module.blocks),
            prefix=module.num_prefix_tokens,
            patches=patches,
            attention_weights=attention,
            attention_width=heads * width,
            mlp_weights=mlp,
            embedding_weights=matrix_entries(getattr(embed, "proj", embed)),
            head_madds=matrix_entries(getattr(module, "head", None)),
            width=module.embed_dim,
            heads=heads,
            grid=embed.grid_size,
            asking_weights=asking,
        )

    def head(self, model: nn.Module, module: Any) -> Head:
        require_own(module, _HEAD, "timm")
        if not _reads_prefix_alone(module):
            raise UnsupportedModelError(
                f"unread='drop' needs a head that reads the class token alone (global_pool='token'); this "
                f"{type(module).__name__} pools patches (global_pool={module.global_pool!r})"
            )
        return Head(reads=2 if hasattr(module, "head_dist") else 1)

    def mixin(self, module: Any) -> type[ReducedModule]:
        return _ReducedTimmClassifier if not others(module, _HEAD, "timm") else _ReducedTimm
