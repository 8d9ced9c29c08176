"""timm's vision transformers: VisionTransformer, Eva, BEiT, CaiT and NaFlexViT.

In CaiT the class token comes after the blocks that are reduced, and reads all positions. NaFlexViT's padded batches are
reduced image by image; with rotary positions its images must be of one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.base import (
    Host,
    Layout,
    matrix_entries,
    overridden_methods,
    refuse_given,
    require_no_bypass,
    require_own,
)
from agglo.hosts.common.blocks import AttentionInputs, Projected
from agglo.hosts.common.forward_pass import NO_INPUTS, ForwardPass
from agglo.hosts.common.layers import LayerParts, Structure, require_structure
from agglo.hosts.common.loop import BlockLoop, Given
from agglo.hosts.common.positions import Positions
from agglo.hosts.common.probe import ProbeCase, prove, random_input
from agglo.hosts.common.sequences import Split, padded, real_tokens
from agglo.hosts.common.swap import (
    Head,
    PassSetup,
    ReducedModule,
    StandIn,
    UnsupportedModelError,
    are_watched,
    begins_pass,
)
from agglo.methods import Grid

_FEATURES = ("forward_features", "forward_intermediates")
_HEAD = ("forward", "forward_head", "pool")  # what reads the tokens after the last norm


class TimmParts(LayerParts):
    """A block of timm."""

    @property
    def needs_all_tokens(self) -> bool:  # type: ignore[override]
        return any(value is not None and value is not False for name, value in self.given.items() if name != "rope")

    @property
    def treats_images_alike(self) -> bool:  # type: ignore[override]
        return not self.needs_all_tokens

    def whole(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Tensor:
        given = self.given if rotary is None else {**self.given, "rope": rotary}
        return cast(Tensor, block(x, **given))

    def rotate(self, attention: Any, q: Tensor, k: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor]:
        if rotary is None:
            return q, k
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        prefix, half = attention.num_prefix_tokens, getattr(attention, "rotate_half", False)

        def turned(x: Tensor) -> Tensor:
            return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rotary, half)], dim=2)

        is_front = q.shape[2] < k.shape[2]  # only prefix tokens, which have no position
        return q if is_front else turned(q), turned(k)


class _ParallelParts(TimmParts):
    """ParallelThingsBlock: several attentions, which are one of all their heads, then several MLPs."""

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        each = [self.project_normed(one.attn, one.norm(x), rotary, n_front) for one in block.attns]
        q, k, v = (torch.cat([getattr(one, name) for one in each], dim=1) for name in "qkv")
        return replace(each[0], q=q, k=k, v=v, features=k)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        each = zip(block.attns, attended.chunk(len(block.attns), dim=1), strict=True)
        return x + torch.stack([one.drop_path(one.ls(self.output(one, x, out, None))) for one, out in each]).sum(dim=0)

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + torch.stack([one(x) for one in block.ffns]).sum(dim=0)


class _TalkingParts(TimmParts):
    """CaiT: heads are mixed before and after the softmax.

    The last mix adds a constant to every weight, which s copies of a token get s times: so does a token of size s.
    """

    def attend(self, block: Any, projected: Projected, sizes: Tensor | None) -> Tensor:
        attn, scale = block.attn, cast(float, projected.scale)
        logits = (projected.q * scale) @ projected.k.transpose(-2, -1)
        logits = attn.proj_l(logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        logits = logits if sizes is None else logits + sizes.log().to(logits.dtype)[:, None, None]
        weights = logits.softmax(dim=-1).permute(0, 2, 3, 1)
        if sizes is None:
            weights = attn.proj_w(weights)
        else:
            mixed = F.linear(weights, attn.proj_w.weight)
            weights = mixed + sizes.to(mixed.dtype)[:, None, :, None] * attn.proj_w.bias
        return cast(Tensor, attn.attn_drop(weights.permute(0, 3, 1, 2)) @ projected.v)


def one_branch(block: Any) -> Any:
    """Return one of a block's parallel branches under the names of a plain block, or the block, which has no others."""
    if not hasattr(block, "attns"):
        return block
    attention, mlp = block.attns[0], block.ffns[0]
    return SimpleNamespace(norm1=attention.norm, attn=attention.attn, norm2=mlp.norm, mlp=mlp.mlp)


class _Anatomy(NamedTuple):
    """How blocks of a class come apart."""

    parts: type[TimmParts]
    structure: Structure
    has_position_bias: bool

    @staticmethod
    def of(block: Any) -> _Anatomy:
        one, kind = one_branch(block), TimmParts
        if hasattr(block, "attns"):
            kind = _ParallelParts
        elif hasattr(block.attn, "proj_l"):
            kind = _TalkingParts
        return _Anatomy(kind, Structure.of(one), hasattr(one.attn, "relative_position_bias_table"))


def parts_of(block: Any) -> TimmParts:
    """Return how a block comes apart that timm calls with the tokens alone."""
    anatomy = _Anatomy.of(block)
    return anatomy.parts(anatomy.structure, {})


class _TimmLoop(BlockLoop):
    """The blocks of a model that was called with an image, or with patches."""

    instead: Given = MappingProxyType({"grad_checkpointing": False})
    image_grid: Grid | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        image = args[0] if args else next(iter(kwargs.values()))
        if isinstance(image, Tensor) and image.dim() == 4:
            rows, columns = _embedding(self.owner).dynamic_feat_size(image.shape[-2:])
            self.image_grid = int(rows), int(columns)  # tensors, while TorchScript watches
        return super().call(method, *args, **kwargs)

    def parts(self, block: nn.Module, given: Given) -> TimmParts:
        # `begin` refuses a true `is_causal`; TorchScript makes a tensor of a false one, which attention refuses.
        given = {name: value for name, value in given.items() if name != "is_causal"}
        anatomy = self.known_of(block, _Anatomy.of)
        return anatomy.parts(anatomy.structure, given)

    def inputs(self, block: Any, x: Tensor, given: Given) -> AttentionInputs:
        bias, rotary = given.get("shared_rel_pos_bias"), given.get("rope")
        if self.known_of(block, _Anatomy.of).has_position_bias and block.attn.relative_position_bias_table is not None:
            own = block.attn._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        return NO_INPUTS if bias is None and rotary is None else AttentionInputs(rotary=rotary, bias=bias)

    def begin(self, block: nn.Module, x: Tensor, given: Given) -> ForwardPass | Split:
        mask, rope = given.get("attn_mask"), given.get("rope")
        is_padded = hasattr(self.owner, "embeds")  # NaFlexViT
        if mask is None and not given.get("is_causal"):
            return self._begin(x, rope)
        refuse_given(attn_mask=None if is_padded else mask, is_causal=bool(given.get("is_causal")))
        assert mask is not None
        sequences = padded(real_tokens("attn_mask", mask).expand(x.shape[0], -1))
        return Split(x, sequences, lambda _, tokens: self._begin(tokens, rope), None)

    def _begin(self, x: Tensor, rope: Tensor | None) -> ForwardPass:
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
        return _TimmLoop(self, setup, lazy=True).call("forward_features", *args, **kwargs)

    @begins_pass
    def forward_intermediates(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return _TimmLoop(self, setup).call("forward_intermediates", *args, **kwargs)


class _ReducedTimmClassifier(_ReducedTimm):
    """A model with timm's own `forward` and head: where that reads only prefix tokens, nothing is unmerged."""

    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Tensor:
        reads_prefix = _reads_only_prefix(self)
        if reads_prefix and setup.plan.reads is not None:
            setup = replace(setup, front_only=not are_watched([self.norm]))
        loop = _TimmLoop(self, setup, lazy=True, restores=not reads_prefix)
        return cast(Tensor, self.forward_head(loop.call("forward_features", *args, **kwargs)))


def _reads_only_prefix(model: Any) -> bool:
    """Return whether timm's own head reads no patch."""
    return model.global_pool == "token" and model.attn_pool is None


def _embedding(model: Any) -> Any:
    return model.embeds if hasattr(model, "embeds") else model.patch_embed


@dataclass(frozen=True)
class Embedded:
    """An image before the first block: tokens (B, T, C), (rows, columns) of its patches, and any rotary tables."""

    tokens: Tensor
    grid: Grid
    rope: Tensor | None
    per_block: bool  # whether there is a table for each block

    def table(self, block: int) -> Tensor | None:
        """Return the rotary table of a block."""
        return self.rope[block] if self.rope is not None and self.per_block else self.rope


def embed(model: Any, image: Tensor, positions: Tensor | None = None) -> Embedded:
    """Return an image (B, 3, H, W) as the first block of a VisionTransformer or Eva sees it.

    `positions` is the position embedding (1, T, C) for the grid of this image; None leaves it to timm.
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


def _probe_cases(block: Any) -> Iterator[ProbeCase]:
    """Yield small random inputs for a copy of a block."""
    one, n_tokens, bias = one_branch(block), 7, None
    if getattr(one.attn, "relative_position_bias_table", None) is not None:
        n_tokens, bias = one.attn.window_size[0] * one.attn.window_size[1] + 1, one.attn._get_rel_pos_bias()
    x = random_input((2, n_tokens, one.norm1.weight.shape[-1]), one.norm1.weight)
    yield parts_of(block), x, AttentionInputs(bias=bias)
    if hasattr(one.attn, "num_prefix_tokens"):  # one that rotates, if it is given a table
        table = random_input((n_tokens - one.attn.num_prefix_tokens, 2 * one.attn.head_dim), x)
        yield parts_of(block), x, AttentionInputs(rotary=table, bias=bias)


class TimmViT(Host):
    """timm's vision transformers."""

    model_classes: ClassVar[tuple[str, ...]] = (
        "timm.VisionTransformer", "timm.Eva", "timm.Beit", "timm.Cait", "timm.NaFlexVit",
    )  # fmt: skip

    def check(self, module: Any) -> None:
        require_no_bypass(module, _FEATURES, "timm")
        require_structure(module, map(one_branch, module.blocks))
        if getattr(module, "rope_is_mixed", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} with mixed rotary positions, another table for every block, is not supported"
            )

    def prove(self, module: Any) -> None:
        prove(module.blocks, type(module).__name__, _probe_cases)

    def layout(self, module: Any) -> Layout:
        block, embedding = module.blocks[0], _embedding(module)
        one, branches = one_branch(block), len(getattr(block, "attns", "1"))
        sizes = {name: number * branches for name, number in Structure.of(one).sizes(one).items() if name != "width"}
        side = getattr(embedding, "grid_size", None) or getattr(embedding, "pos_embed_grid_size", None) or (16, 16)
        grid = int(side[0]), int(side[1])
        return Layout(
            depth=len(module.blocks),
            prefix=0 if hasattr(module, "blocks_token_only") else int(module.num_prefix_tokens),  # CaiT's comes later
            patches=int(getattr(embedding, "num_patches", None) or grid[0] * grid[1]),
            embedding_weights=matrix_entries(getattr(embedding, "proj", embedding)),
            head_madds=matrix_entries(getattr(module, "head", None)),
            width=int(module.embed_dim),
            grid=grid,
            **sizes,
        )

    def head(self, model: nn.Module, module: Any) -> Head:
        if not _has_known_head(module):
            return super().head(model, module)
        require_own(module, _HEAD, "timm")
        if not _reads_only_prefix(module):
            raise UnsupportedModelError(
                f"last_block='class_token' needs a head that reads the class token alone (global_pool='token'); this "
                f"{type(module).__name__} pools patches (global_pool={module.global_pool!r})"
            )
        return Head(reads=2 if hasattr(module, "head_dist") else 1)

    def mixin(self, module: Any) -> type[ReducedModule]:
        known = _has_known_head(module) and not overridden_methods(module, _HEAD, "timm")
        return _ReducedTimmClassifier if known else _ReducedTimm


def _has_known_head(model: Any) -> bool:
    """Return whether the head is that of VisionTransformer and Eva, not of BEiT, CaiT or NaFlexViT."""
    return hasattr(model, "attn_pool") and not hasattr(model, "embeds")
