"""timm's vision transformers.

VisionTransformer (DeiT, AugReg, MAE, DINOv2, SigLIP, CLIP), Eva (EVA-02, DINOv3, PE), BEiT, CaiT and NaFlexViT.

Rotary models: tokens are compared by their keys before rotation, and a merged token sits at the size-weighted mean
position of its members. In CaiT the class token comes after the blocks that are reduced, and reads the patches of all
positions. NaFlexViT's padded batches are reduced image by image; with rotary positions it takes images of one size
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from agglo.hosts.common.base import (
    Host,
    Layout,
    matrix_entries,
    overridden_methods,
    require_kind,
    require_no_bypass,
    require_own,
)
from agglo.hosts.common.blocks import AttentionInputs
from agglo.hosts.common.forward_pass import Pass
from agglo.hosts.common.loop import Given, Loop
from agglo.hosts.common.positions import Positions
from agglo.hosts.common.probe import Case, prove, random_input
from agglo.hosts.common.readers import Head, are_watched
from agglo.hosts.common.refusals import refuse_given
from agglo.hosts.common.sequences import Split, padded, real_tokens
from agglo.hosts.common.swap import PassSetup, ReducedModule, StandIn, UnsupportedModelError, begins_pass
from agglo.hosts.timm.parts import TimmParts, block_weights, parts_of
from agglo.methods import Grid

PARTS = TimmParts()
_FEATURES = ("forward_features", "forward_intermediates")
_HEAD = ("forward", "forward_head", "pool")  # what reads the tokens after the last norm
_BLOCKS = ("Block", "ResPostBlock", "EvaBlock", "EvaBlockPostNorm", "ParallelThingsBlock")
_ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")
_PARTS = ("norm1", "attn", "norm2", "mlp")


class _TimmLoop(Loop):
    """The blocks of a model that was called with an image, or with patches."""

    instead: Given = MappingProxyType({"grad_checkpointing": False})

    def __init__(self, owner: Any, setup: PassSetup, image: Any, *, lazy: bool, restores: bool = True) -> None:
        super().__init__(owner, setup, lazy=lazy, restores=restores)
        self.image_grid: Grid | None = None
        if isinstance(image, Tensor) and image.dim() == 4:
            rows, columns = _embedding(owner).dynamic_feat_size(image.shape[-2:])
            self.image_grid = int(rows), int(columns)  # tensors, while TorchScript watches

    def parts(self, block: nn.Module, given: Given) -> TimmParts:
        # `begin` refuses a true `is_causal`; TorchScript makes a tensor of a false one, which attention refuses.
        return parts_of(block, {name: value for name, value in given.items() if name != "is_causal"})

    def inputs(self, block: Any, x: Tensor, given: Given) -> AttentionInputs:
        own = None
        if getattr(getattr(block, "attn", None), "relative_position_bias_table", None) is not None:
            own = block.attn._get_rel_pos_bias()
        shared = given.get("shared_rel_pos_bias")
        bias = shared if own is None else own if shared is None else own + shared
        return AttentionInputs(rotary=given.get("rope"), bias=bias)

    def begin(self, block: nn.Module, x: Tensor, given: Given) -> Pass | Split:
        mask, rope = given.get("attn_mask"), given.get("rope")
        is_padded = hasattr(self.owner, "embeds")  # NaFlexViT
        if mask is None and not given.get("is_causal"):
            return self._begin(x, rope)
        refuse_given(attn_mask=None if is_padded else mask, is_causal=bool(given.get("is_causal")))
        assert mask is not None
        sequences = padded(real_tokens("attn_mask", mask).expand(x.shape[0], -1))
        return Split(x, sequences, lambda _, tokens: self._begin(tokens, rope), None)

    def _begin(self, x: Tensor, rope: Tensor | None) -> Pass:
        grid = self.grid(int(x.shape[1]) - self.setup.plan.ends[0])
        per_block = bool(getattr(self.owner, "rope_mixed", False))
        if rope is not None and (grid is None or rope.dim() > 2 + per_block):
            raise ValueError("rotary positions of padded images, or with patch dropout, do not go with reduction")
        return self.begin_pass(x, None if rope is None or grid is None else Positions(grid))

    def grid(self, n_patches: int) -> Grid | None:
        grid = self.image_grid
        return grid if grid is not None and grid[0] * grid[1] == n_patches else None


class _ReducedTimm(ReducedModule):
    """timm's own methods, with blocks that run on fewer and fewer tokens."""

    @begins_pass
    def forward_features(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        loop = _TimmLoop(self, setup, _first(args, kwargs), lazy=True)
        return loop.call("forward_features", *args, **kwargs)

    @begins_pass
    def forward_intermediates(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        loop = _TimmLoop(self, setup, _first(args, kwargs), lazy=False)
        return loop.call("forward_intermediates", *args, **kwargs)


class _ReducedTimmClassifier(_ReducedTimm):
    """A model with timm's own `forward` and head: where that reads prefix tokens alone, nothing is unmerged."""

    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Tensor:
        reads_prefix = _reads_prefix_alone(self)
        if reads_prefix and setup.plan.reads is not None:
            setup = replace(setup, front_only=not are_watched([self.norm]))
        loop = _TimmLoop(self, setup, _first(args, kwargs), lazy=True, restores=not reads_prefix)
        return cast(Tensor, self.forward_head(loop.call("forward_features", *args, **kwargs)))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _reads_prefix_alone(model: Any) -> bool:
    """Return whether timm's own head reads no patch."""
    return model.global_pool == "token" and model.attn_pool is None


def _embedding(model: Any) -> Any:
    return model.embeds if hasattr(model, "embeds") else model.patch_embed


def _prefix(model: Any) -> int:
    """Return the number of prefix tokens. CaiT's class token comes after the blocks."""
    return 0 if hasattr(model, "blocks_token_only") else int(model.num_prefix_tokens)


@dataclass(frozen=True)
class Embedded:
    """An image before the first block: tokens (B, T, C), prefix tokens first, and (rows, columns) of its patches."""

    tokens: Tensor
    grid: Grid
    rope: Tensor | None  # of a rotary model: a table
    per_block: bool  # or one for each block

    def table(self, block: int) -> Tensor | None:
        return self.rope if self.rope is None or not self.per_block else self.rope[block]


def embed(model: Any, image: Tensor, positions: Tensor | None = None) -> Embedded:
    """Return an image (B, 3, H, W) as the first block of a VisionTransformer or Eva sees it.

    Args:
        positions: (1, T, C), the absolute position embedding of this image's grid, for a model with
            `dynamic_img_size`; None leaves it to timm.
    """
    grid = model.patch_embed.dynamic_feat_size(image.shape[-2:])
    patches = model.patch_embed(image)
    if positions is None:
        embedded = model._pos_embed(patches)
    else:
        here = StandIn(model, pos_embed=positions, patch_embed=StandIn(model.patch_embed, grid_size=grid))
        embedded = type(model)._pos_embed(here, patches)
    # Eva drops patches in there already and returns its rotary table too.
    x, rope = embedded if isinstance(embedded, tuple) else (model.patch_drop(embedded), None)
    per_block = bool(getattr(model, "rope_mixed", False))
    if rope is not None and rope.dim() > 3 + per_block:
        raise ValueError("patch dropout of a rotary model does not go with token reduction: set its patch_drop to None")
    return Embedded(model.norm_pre(x), (int(grid[0]), int(grid[1])), rope, per_block)


def _probe_cases(block: Any) -> Iterator[Case]:
    """Yield small random inputs for a copy of a block."""
    attentions = [block.attn] if hasattr(block, "attn") else [one.attn for one in block.attns]
    for attn in attentions:
        attn.attn_drop.p = 0.0  # kernels draw it in ways of their own
    norm = block.norm1 if hasattr(block, "norm1") else block.attns[0].norm
    n_tokens, bias = 7, None
    if getattr(attn, "relative_position_bias_table", None) is not None:
        n_tokens, bias = attn.window_size[0] * attn.window_size[1] + 1, attn._get_rel_pos_bias()
    x = random_input((2, n_tokens, norm.weight.shape[-1]), norm.weight)
    yield parts_of(block), x, AttentionInputs(bias=bias)
    if hasattr(attn, "num_prefix_tokens"):  # one that rotates, if it is given a table
        table = random_input((n_tokens - attn.num_prefix_tokens, 2 * attn.head_dim), x)
        yield parts_of(block), x, AttentionInputs(rotary=table, bias=bias)


class TimmViT(Host):
    """timm's VisionTransformer and Eva."""

    model_classes: ClassVar[tuple[str, ...]] = ("timm.VisionTransformer", "timm.VisionTransformerDistilled", "timm.Eva")

    def check(self, module: Any) -> None:
        require_no_bypass(module, _FEATURES, "timm")
        require_kind(module, module.blocks, _BLOCKS, "is built from")
        for block in module.blocks:
            attentions = [block.attn] if hasattr(block, "attn") else [one.attn for one in block.attns]
            require_kind(module, attentions, _ATTENTIONS, "attends by")

    def prove(self, module: Any) -> None:
        prove(module.blocks, type(module).__name__, _probe_cases)

    def layout(self, module: Any) -> Layout:
        attention, asking, mlp, heads, width = block_weights(module.blocks[0])
        embedding = _embedding(module)
        side = getattr(embedding, "grid_size", None) or getattr(embedding, "pos_embed_grid_size", None) or (16, 16)
        grid = int(side[0]), int(side[1])
        return Layout(
            depth=len(module.blocks),
            prefix=_prefix(module),
            patches=int(getattr(embedding, "num_patches", None) or grid[0] * grid[1]),
            attention_weights=attention,
            attention_width=heads * width,
            mlp_weights=mlp,
            embedding_weights=matrix_entries(getattr(embedding, "proj", embedding)),
            head_madds=matrix_entries(getattr(module, "head", None)),
            width=int(module.embed_dim),
            heads=heads,
            grid=grid,
            query_side_params=asking,
        )

    def head(self, model: nn.Module, module: Any) -> Head:
        require_own(module, _HEAD, "timm")
        if not _reads_prefix_alone(module):
            raise UnsupportedModelError(
                f"last_block='class_token' needs a head that reads the class token alone (global_pool='token'); this "
                f"{type(module).__name__} pools patches (global_pool={module.global_pool!r})"
            )
        return Head(reads=2 if hasattr(module, "head_dist") else 1)

    def mixin(self, module: Any) -> type[ReducedModule]:
        return _ReducedTimmClassifier if not overridden_methods(module, _HEAD, "timm") else _ReducedTimm


class OtherTimmViT(TimmViT):
    """timm's BEiT, CaiT and NaFlexViT, whose heads are left alone."""

    model_classes: ClassVar[tuple[str, ...]] = ("timm.Beit", "timm.Cait", "timm.NaFlexVit")
    head = Host.head

    def check(self, module: Any) -> None:
        require_no_bypass(module, _FEATURES, "timm")
        for block in module.blocks:
            has_parts = all(hasattr(block, name) for name in _PARTS) and hasattr(block.attn, "qkv")
            if not has_parts and not hasattr(block, "attns"):
                raise UnsupportedModelError(
                    f"{type(module).__name__} is built from {type(block).__name__}, which has not the parts of a block "
                    "that agglo knows: norm1, attn with qkv, norm2, mlp"
                )
        if getattr(module, "rope_is_mixed", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} with mixed rotary positions, another table for every block, is not supported"
            )

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return _ReducedTimm
