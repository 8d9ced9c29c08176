"""The loop over a tower's layers, as transformers wrote it (`hosts/common/loop.py`), and what its layers are handed."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from agglo.compiling import constant_result
from agglo.hosts.common.base import bound_arguments, refuse_given
from agglo.hosts.common.blocks import AttentionInputs
from agglo.hosts.common.forward_pass import ForwardPass
from agglo.hosts.common.layers import Structure
from agglo.hosts.common.loop import BlockLoop, Given
from agglo.hosts.common.sequences import Sequences, Split, block_boundaries, boundaries, packed, padded, real_tokens
from agglo.hosts.common.swap import PassSetup, ReducedModule, Setting, StandIn, begins_pass, original_class
from agglo.hosts.transformers.parts import (
    TUPLES,
    TransformersParts,
    append_positions,
    bias_of,
    has_tiles,
    loop_of,
    pair,
    parts_for,
    positions_of,
    split_positions,
    table_of,
    tile_order,
)
from agglo.methods import Grid

_TOKENS = ("hidden_states", "hidden_state")
_CAPTURING = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"
# What says of which patches an image is made, where images are padded to one size.
_PADDED = ("Siglip2", "Idefics2", "Idefics3", "SmolVLM")


class _StandIn(StandIn):
    """A stand-in that leaves on its original the mark of transformers that hooks are installed."""

    @property
    def _output_capturing_hooks_installed(self) -> bool:
        return getattr(self._original, _INSTALLED, False)

    @_output_capturing_hooks_installed.setter
    def _output_capturing_hooks_installed(self, value: bool) -> None:
        setattr(self._original, _INSTALLED, value)


class ReducedLoop(ReducedModule):
    """Overrides the `forward` that loops over layers.

    Its stand-ins for `self` have the original's name: transformers looks up by it what can be recorded.
    """

    agglo_stand_in: ClassVar[type[StandIn]] = _StandIn

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "agglo_original" in vars(cls):  # not for classes that others make of this one
            original = cls.agglo_original
            names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
            cls.agglo_stand_in = type(original.__name__, (_StandIn,), names)

    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return LayerLoop(self, setup, args, kwargs).call("forward", *args, **kwargs)


class _Forwarded(threading.local):
    """The grid of the image that a tower of this thread is called with: torch.compile follows assignments to it."""

    def __init__(self) -> None:
        self.grid: Grid | None = None


_FORWARDED = _Forwarded()


class GridForwardingTower(ReducedModule):
    """A tower whose loop over layers lies in a module of its own, which is given tokens and never sees the image.

    For methods that ask where patches are, it says how many rows and columns of them the image has, which at another
    size than the tower's own cannot be told from their number.
    """

    @begins_pass
    def forward(self: Any, setting: Setting, *args: Any, **kwargs: Any) -> Any:
        before, _FORWARDED.grid = _FORWARDED.grid, _grid_of_pixels(self, args, kwargs)
        try:
            return original_class(self).forward(self, *args, **kwargs)
        finally:
            _FORWARDED.grid = before


class LayerLoop(BlockLoop):
    """The layers of one forward pass."""

    stand_in_class = _StandIn

    def __init__(self, owner: Any, setup: PassSetup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = loop_of(owner)
        assert found is not None
        _, self.blocks_name = found
        super().__init__(owner, setup, lazy=_is_plain(type(owner), self.blocks_name))
        self.instead = append_positions(owner)
        self.image_grid = _grid_of_pixels(owner, args, kwargs) or _FORWARDED.grid
        self.table: Tensor | None = None
        self.points: Tensor | None = None
        self.tile_bias: Tensor | None = None
        self.waiting: list[tuple[Callable[[Tensor], None], Tensor, Tensor | None]] = []
        self.is_packed = "Pixtral" in type(owner).__name__
        self.is_padded = type(owner).__name__.startswith(_PADDED)
        given = bound_arguments(type(owner), args, kwargs)
        if not has_tiles(owner) and not self.is_packed and not self.is_padded:
            refuse_given(attention_mask=given.get("attention_mask"))
        refuse_given(head_mask=given.get("head_mask"))

    def step(self, index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = bound_arguments(type(block), args, kwargs)
        tokens = next(iter(given)) if args else next(name for name in _TOKENS if name in given)
        x = given.pop(tokens)
        given, self.points = split_positions(given, bool(self.instead))
        hooks = _hidden_state_hooks(block, given)
        last = index == len(self.blocks) - 1
        if hooks and last and isinstance(self.run, ForwardPass):
            self.run.front_only = False
        run = self.advance(index, block, x, given)

        def tell(state: Tensor) -> None:
            for hook in hooks:
                hook(block, (x,), state)

        if self.setup.plan.merged:
            if isinstance(run, Split):
                raise ValueError("images of different sizes cannot leave merged: output='merged_late' can do it")
            self._tell_merged(index, run, tell)
            self.given_back = run.reduced() if last else x if self.lazy else run.full()
        else:
            self.given_back = x if self.lazy and not last and not hooks else run.full()
            tell(self.given_back)
        return (self.given_back, None) if type(block).__name__ in TUPLES else self.given_back

    def parts(self, block: nn.Module, given: Given) -> TransformersParts:
        return parts_for(block, self.known_of(block, Structure.of), given)

    def inputs(self, block: nn.Module, x: Tensor, given: Given) -> AttentionInputs:
        bias = self.tile_bias
        if not isinstance(self.run, Split):
            bias = bias_of(block, given, int(x.shape[1]))
        return AttentionInputs(rotary=self.table, bias=bias, bounds=boundaries(given))

    def begin(self, block: nn.Module, x: Tensor, given: Given) -> ForwardPass | Split:
        table, points, mask = table_of(given), self.points, given.get("attention_mask")
        self.table = table
        bounds, sequences, prefix = boundaries(given), None, None
        if bounds is None and mask is not None and self.is_packed:
            bounds = block_boundaries("attention_mask", mask)
        if bounds is not None:
            sequences = packed(bounds, None if points is None else _extents(points, bounds))
        elif mask is not None and self.is_padded:
            sequences = padded(real_tokens("attention_mask", mask).expand(x.shape[0], -1))
        elif has_tiles(self.owner):
            order, prefix = tile_order(self.owner.config, x)
            rows = torch.arange(x.shape[0], device=x.device)
            sequences = [Sequences(rows[:, None] * x.shape[1] + order, rows)]
            self.tile_bias = None if mask is None else mask[:, :, order][..., order]

        def begin_one(each: Sequences | None, tokens: Tensor) -> ForwardPass:
            own = table if table is None or each is None else table[each.index[0]]
            where = points if points is None or each is None else points[each.index]
            ends, n_tokens = self.setup.plan.ends, int(tokens.shape[1])
            positions = positions_of(block, own, where, ends, n_tokens, self.grid(n_tokens - sum(ends)))
            return self.begin_pass(tokens, positions, prefix)

        return begin_one(None, x) if sequences is None else Split(x, sequences, begin_one, bounds)

    def grid(self, n_patches: int) -> Grid | None:
        # Where the grid is not forwarded, as for methods that do not ask for it, a size that is not the model's own is
        # taken for a square.
        image = self.image_grid
        fits = image is not None and image[0] * image[1] == n_patches
        return image if fits else super().grid(n_patches)

    def is_checkpointing(self) -> bool:
        modules = self.owner.modules()
        return self.owner.training and any(getattr(module, "gradient_checkpointing", False) for module in modules)

    def _tell_merged(self, index: int, run: ForwardPass, tell: Callable[[Tensor], None]) -> None:
        """Call back with the tokens that a layer left, one per group, in order of the groups' first members.

        States that are read side by side must have one token for each of the same groups, those of the deepest of them.
        Of an earlier one these are the size-weighted means over their members, told once the groups are known.
        """
        together = self.setup.plan.read_blocks
        deepest = max(together) if len(together) > 1 else -1
        if index > deepest:
            tell(run.reduced())
            return
        self.waiting.append((tell, run.reduced(), run.full() if index in together and index < deepest else None))
        if index == deepest:
            for tell_one, state, full in self.waiting:
                tell_one(state if full is None or run.total is None else run.merged_like_now(full))


@constant_result
def _is_plain(owner: type[nn.Module], name: str) -> bool:
    """Return whether the loop passes the output of a layer to the next one only."""
    return _found_plain(cast(Any, owner), name)


@cache
def _found_plain(owner: type[nn.Module], name: str) -> bool:
    """Read the source of `forward`: the body of the one loop over layers is one statement, the call of the layer."""
    try:
        original = getattr(owner, "agglo_original", owner)
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(original.forward)))
        loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
    except (OSError, TypeError, SyntaxError):
        return False
    bodies = [node.body for node in loops if ast.unparse(node.iter) == f"self.{name}"]
    if len(bodies) != 1 or len(bodies[0]) != 1:
        return False
    match bodies[0][0]:
        case ast.Assign(targets=[ast.Name(id=out)], value=ast.Call(args=args, keywords=keywords)):
            return [ast.unparse(each) for each in (*args, *(k.value for k in keywords))].count(out) == 1
    return False


def _grid_of_pixels(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Grid | None:
    """(rows, columns) of the patches, where the loop is called with the images (B, C, H, W) themselves."""
    image = kwargs.get("pixel_values", args[0] if args else None)
    side = getattr(getattr(owner, "config", None), "patch_size", None)
    if side is None or getattr(image, "ndim", 0) != 4:
        return None
    height, width = pair(side)
    return int(image.shape[-2]) // height, int(image.shape[-1]) // width  # type: ignore[union-attr]


def _extents(points: Tensor, bounds: Tensor) -> Tensor:
    """Return how far each packed sequence reaches along the axes: (sequences, 2 axes).

    A sequence of a single row or column has its start instead, which no rotary table of other positions shows.
    """
    pieces = points.split((bounds[1:] - bounds[:-1]).tolist())
    begins = torch.stack([piece[0] for piece in pieces]).long()
    extents = torch.stack([piece.amax(dim=0) - piece.amin(dim=0) for piece in pieces]).long()
    return torch.cat([extents, begins.where((extents == 0).any(dim=1, keepdim=True), 0)], dim=1)


def _hidden_state_hooks(layer: nn.Module, given: Given) -> list[Any]:
    """Return transformers' hooks on a layer that collect hidden states now; ValueError if attention weights are."""
    from transformers.utils.output_capturing import _active_collector

    hooks = [hook for hook in layer._forward_hooks.values() if getattr(hook, "__module__", "") == _CAPTURING]
    collected = (_active_collector.get() or {}) if hooks or not torch.compiler.is_compiling() else {}
    if given.get("output_attentions") or any("attentions" in name for name in collected):
        raise ValueError(
            "output_attentions=True does not go with token reduction: attention runs between groups of tokens, in "
            "kernels that give no weights; call agglo.remove(model) first"
        )
    return hooks if "hidden_states" in collected else []
