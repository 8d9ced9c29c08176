"""timm's BEiT, CaiT and NaFlexViT: their own `forward_features`, with blocks that run on fewer and fewer tokens.

As for transformers (`transformers_loop.py`), what is around the loop stays the library's: a stand-in for `self` has
other blocks, and each gives back all tokens, in the original number and order. In CaiT the class token comes after the
blocks that are reduced, and reads the patches of all positions. NaFlexViT's padded batches are reduced image by image
size; with rotary positions it takes images of one size alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from agglo.hosts.swap import PassSetup, ReducedModule, UnsupportedModelError, begins_pass
from agglo.hosts.vit.base import Host, Layout, Parts, Projected, matrix_entries
from agglo.hosts.vit.passing import Pass, checkpointed, directly
from agglo.hosts.vit.reading import StandIn
from agglo.hosts.vit.rotary import Rotary
from agglo.hosts.vit.sequences import Sequences, Split, padded, real_tokens
from agglo.hosts.vit.timm_parts import block_weights, parts_of
from agglo.hosts.vit.timm_probe import is_like_a_block, prove_blocks

_SHARED = "shared_rel_pos_bias"


class _Given(Parts):
    """A block's parts, handed to the library's block with what its loop gives beside the tokens."""

    def __init__(self, parts: Any, given: Mapping[str, Any]) -> None:
        self.parts, self.given = parts, given
        there = [value for value in given.values() if value is not None]
        self.needs_all_tokens = bool(there)
        self.treats_images_alike = not there

    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return block(x, **self.given)

    def project(self, block: Any, x: Tensor, rotary: Tensor | None) -> Projected:
        return self.parts.project(block, x, rotary)

    def attend(self, block: Any, projected: Projected, sizes: Tensor | None) -> Tensor | None:
        return self.parts.attend(block, projected, sizes)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        return self.parts.join(block, x, attended, projected)

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return self.parts.feed(block, x)


class _Blocks(list[Any]):
    """The blocks of one pass: looped over, sliced, or called as a whole."""

    def __call__(self, x: Tensor) -> Tensor:
        for step in self:
            x = step(x)
        return x


class _Loop:
    """lazy: whether nobody sees what blocks give but the next one."""

    def __init__(self, model: Any, setup: PassSetup, lazy: bool, grid: tuple[int, int] | None) -> None:
        self.model, self.setup, self.lazy, self.grid = model, setup, lazy, grid
        self.run: Pass | Split | None = None
        self.blocks = list(model.blocks)
        self.steps = _Blocks(_Step(self, index, block) for index, block in enumerate(self.blocks))

    def step(self, index: int, block: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
        parts, n_tokens = _Given(parts_of(block), given), int(x.shape[1])
        if self.run is None:
            self.run = self._begun(x, parts, given)
        if isinstance(self.run, Split):
            self.run.run(index, block, parts, given)
        else:
            self.run.parts = parts
            if _bias(block) is not None or given.get(_SHARED) is not None:
                shared = given.get(_SHARED)
                self.run.use_bias(lambda one: _sum(_bias(one), shared))
            self.run.block(index, block)
        last = index == len(self.blocks) - 1
        if last:
            runs = self.run.passes if isinstance(self.run, Split) else [self.run]
            for trace in self.setup.traces:
                for run in runs:
                    trace.record(run.steps)
        out = x if self.lazy and not last else self.run.full()
        assert out.shape[1] == n_tokens
        return out

    def _begun(self, x: Tensor, parts: Parts, given: dict[str, Any]) -> Pass | Split:
        mask, rope = given.get("attn_mask"), given.get("rope")
        prefix = _prefix(self.model)

        def begin(tokens: Tensor) -> Pass:
            n_patches = int(tokens.shape[1]) - prefix
            fits = self.grid is not None and self.grid[0] * self.grid[1] == n_patches
            grid = self.grid if fits else None
            rotary = None
            if rope is not None:
                if grid is None or rope.dim() > 2:
                    raise ValueError("rotary positions of padded images do not go with token reduction")
                rotary = Rotary(rope, grid, prefix)
            return Pass(
                self.setup,
                parts,
                tokens,
                depth=len(self.blocks),
                prefix=prefix,
                training=self.model.training,
                rotary=rotary,
                call=checkpointed if self.model.grad_checkpointing else directly,
                grid=grid,
            )

        if mask is None:
            return begin(x)
        real = real_tokens(mask)
        if real is None:
            raise ValueError("attn_mask does not go with token reduction: call agglo.remove(model) first")

        def one(each: Sequences, tokens: Tensor) -> Pass:
            return begin(tokens)

        return Split(x, padded(real), one, None)


class _Step:
    def __init__(self, loop: _Loop, index: int, block: nn.Module) -> None:
        self.loop, self.index, self.block = loop, index, block

    def __call__(self, x: Tensor, **given: Any) -> Tensor:
        return self.loop.step(self.index, self.block, x, given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class _ReducedTimmLoop(ReducedModule):
    @begins_pass
    def forward_features(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return _original(self).forward_features(_standing(self, setup, True, args, kwargs), *args, **kwargs)

    @begins_pass
    def forward_intermediates(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return _original(self).forward_intermediates(_standing(self, setup, False, args, kwargs), *args, **kwargs)


def _original(model: nn.Module) -> Any:
    return getattr(type(model), "agglo_original", type(model))  # the class may have been swapped back


def _standing(model: Any, setup: PassSetup, lazy: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
    image = args[0] if args else next(iter(kwargs.values()))
    grid = None
    if isinstance(image, Tensor) and image.dim() == 4:
        grid = _embedding(model).dynamic_feat_size(image.shape[-2:])
    loop = _Loop(model, setup, lazy, grid)
    return StandIn(model, blocks=loop.steps, grad_checkpointing=False)


def _prefix(model: Any) -> int:
    """CaiT's class token is not there yet."""
    return 0 if hasattr(model, "blocks_token_only") else int(model.num_prefix_tokens)


def _embedding(model: Any) -> Any:
    return model.embeds if hasattr(model, "embeds") else model.patch_embed


def _bias(block: Any) -> Tensor | None:
    has = getattr(block.attn, "relative_position_bias_table", None) is not None
    return block.attn._get_rel_pos_bias() if has else None


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


class TimmLoop(Host):
    """timm's BEiT, CaiT and NaFlexViT."""

    model_classes: ClassVar[tuple[str, ...]] = ("timm.Beit", "timm.Cait", "timm.NaFlexVit")

    def check(self, module: Any) -> None:
        for method in ("forward_features", "forward_intermediates"):
            definer = getattr(type(module), method).__module__
            if definer.split(".")[0] not in ("timm", "agglo"):
                raise UnsupportedModelError(
                    f"{type(module).__name__} replaces timm's {method} (in {definer}); agglo would bypass it"
                )
        for block in module.blocks:
            if not is_like_a_block(block) and not hasattr(block, "attns"):
                raise UnsupportedModelError(
                    f"{type(module).__name__} is built from {type(block).__name__}, which has not the parts of a block "
                    "that agglo knows: norm1, attn with qkv, norm2, mlp"
                )
        if getattr(module, "rope_is_mixed", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} with mixed rotary positions, another table for every block, is not supported"
            )

    def prove(self, module: Any) -> None:
        prove_blocks(module.blocks, type(module).__name__)

    def layout(self, module: Any) -> Layout:
        attention, asking, mlp, heads, width = block_weights(module.blocks[0])
        embed = _embedding(module)
        side = getattr(embed, "grid_size", None) or getattr(embed, "pos_embed_grid_size", None) or (16, 16)
        grid = int(side[0]), int(side[1])
        return Layout(
            depth=len(module.blocks),
            prefix=_prefix(module),
            patches=grid[0] * grid[1],
            attention_weights=attention,
            attention_width=heads * width,
            mlp_weights=mlp,
            embedding_weights=matrix_entries(embed.proj),
            head_madds=matrix_entries(getattr(module, "head", None)),
            width=int(module.embed_dim),
            heads=heads,
            grid=grid,
            asking_weights=asking,
        )

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return _ReducedTimmLoop
