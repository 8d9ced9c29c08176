"""The loop over a tower's layers, as transformers wrote it, with layers that run on fewer and fewer tokens.

The `forward` that holds the loop runs as it is, with a stand-in for `self` whose layers are `_Step`s. Each takes what
the library hands the layer, and gives back what the layer would: all tokens, in the original number and order. So
whatever a family does around its loop, or between two layers, stays the library's: what it adds to the tokens there is
found by comparison with what the layer before gave, and merged tokens gain the mean of it.

Where the source shows that nothing but the next layer sees what a layer gives, tokens are put back once, at the end.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from agglo.compiling import constant_result
from agglo.hosts.swap import PassSetup, ReducedModule, begins_pass, signed_as
from agglo.hosts.vit.passing import Pass, checkpointed, directly
from agglo.hosts.vit.reading import StandIn, are_watched
from agglo.hosts.vit.relative import RelativeBias
from agglo.hosts.vit.sequences import (
    Sequences,
    Split,
    block_boundaries,
    boundaries,
    packed,
    padded,
    real_tokens,
)
from agglo.hosts.vit.transformers_parts import Structure, parts_for
from agglo.hosts.vit.transformers_positions import bias_of, parted, positions_of, spied, table_of
from agglo.hosts.vit.transformers_states import MergedStates, leaving
from agglo.hosts.vit.transformers_tiles import has_tiles, tiles_of
from agglo.hosts.vit.transformers_tower import layers_of, pair
from agglo.methods import Grid
from agglo.methods.base import square

_TOKENS = ("hidden_states", "hidden_state")
_CAPTURING = "transformers.utils.output_capturing"
INSTALLED = "_output_capturing_hooks_installed"
GRID = "agglo_grid"  # by which a loop that does not see the picture is told of its patches (`transformers_sight.py`)
# Layers that give a tuple; the probe finds out about others.
TUPLES = ("Data2VecVisionLayer", "VJEPA2Layer", "TimesformerLayer", "Llama4VisionEncoderLayer")
# What says of which patches a picture is made, where images are padded to one size.
_PADDED = ("Siglip2", "Idefics2", "Idefics3", "SmolVLM")


class ReducedLoop(ReducedModule):
    """Overrides the `forward` that loops over layers, under the signature of the original."""

    agglo_standing: ClassVar[type[StandIn]] = StandIn

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "agglo_original" in vars(cls):  # not for classes that others make of this one
            cls.forward = signed_as(cls.agglo_original.forward, cls.forward)  # type: ignore[method-assign]
            cls.agglo_standing = standing_for(cls.agglo_original)

    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        original = getattr(type(self), "agglo_original", type(self))  # the class may have been swapped back
        grid = kwargs.pop(GRID, None)
        loop = Loop(self, setup, args, kwargs, grid)
        install_hooks(self, kwargs)
        instead = {loop.name: loop.steps, **loop.spies, INSTALLED: True}
        standing = getattr(type(self), "agglo_standing", StandIn)
        return original.forward(standing(self, **instead), *args, **kwargs)


def standing_for(original: type[nn.Module]) -> type[StandIn]:
    """Stand-ins for modules of a class, under its name, by which transformers looks up what can be recorded."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (StandIn,), names)


class Loop:
    """The layers of one forward pass."""

    def __init__(
        self, owner: Any, setup: PassSetup, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Grid | None
    ) -> None:
        self.owner, self.setup = owner, setup
        self.name = layers_of(owner)
        self.layers = list(getattr(owner, self.name))
        self.spies = spied(owner)
        self.ends = setup.plan.ends
        self.image = grid_of_pixels(owner, args, kwargs) if grid is None else grid
        self.lazy = _is_plain(type(owner), self.name)
        self.steps = [_Step(self, index, layer) for index, layer in enumerate(self.layers)]
        self.run: Pass | Split | None = None
        self.structure: Structure | None = None
        self.given_back: Tensor | None = None
        self.states = MergedStates(setup.plan)
        self.n_front: int | None = None
        if not _is_packed(owner) and not _is_padded(owner) and not has_tiles(owner):
            _refuse_mask(kwargs.get("attention_mask"))
        _refuse_mask(kwargs.get("head_mask"), "head_mask")

    def step(self, index: int, layer: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
        """Run one layer on what it is handed; the tokens it gives back."""
        given, points = parted(given, bool(self.spies))
        hooks = _listeners(layer)
        refuse_attentions(given)
        structure = self._structure(layer)
        if self.run is None:
            self.run = self._begun(layer, x, given, points)
        elif x is not self.given_back:
            if self.lazy:
                raise RuntimeError(f"{type(self.owner).__name__} changes tokens between layers, against its source")
            self._changed(x)
        last = index == len(self.layers) - 1
        parts = parts_for(layer, structure, given)
        if isinstance(self.run, Split):
            self.run.run(index, layer, parts, given)
        else:
            self.run.parts = parts
            self.run.use_bias(bias_of(layer, given, int(x.shape[1])))
            front = self.n_front if last and not hooks and not are_watched(layer.modules()) else None
            self.run.block(index, layer, front)
        merged = self._merged_run()
        lazily = self.lazy and not last and (merged is not None or not hooks)
        self.given_back = x if lazily else self.run.full()

        def tell(state: Tensor) -> None:
            for hook in hooks:
                hook(layer, (x,), state)

        if merged is None:
            tell(self.given_back)
        else:
            self.states.after(index, merged, tell)
            self.given_back = leaving(merged) if last else self.given_back
        if last:
            self._record()
        return self.given_back

    def _merged_run(self) -> Pass | None:
        """The pass, where its tokens are to leave as merged as they are."""
        if not self.setup.plan.merged:
            return None
        if isinstance(self.run, Split):
            raise ValueError("pictures of different sizes cannot leave a tower merged: output='merged late' can do it")
        return self.run

    def _structure(self, layer: Any) -> Structure:
        if self.structure is None or type(layer) is not type(self.layers[0]):
            found = Structure.of(layer)
            assert isinstance(found, Structure), found
            self.structure = found
        return self.structure

    def _begun(self, layer: Any, x: Tensor, given: dict[str, Any], points: Tensor | None) -> Pass | Split:
        table, mask = table_of(given), given.get("attention_mask")
        bounds, sequences = boundaries(given), None
        if bounds is None and mask is not None and _is_packed(self.owner):
            bounds = block_boundaries(mask)
        if bounds is not None:
            sequences = packed(bounds, None if points is None else _extents(points, bounds))
        elif mask is not None and _is_padded(self.owner):
            real = real_tokens(mask)
            if real is None:
                _refuse_mask(mask)
            else:
                sequences = padded(real)
        prefix, suffix = self.ends
        bias = None
        if has_tiles(self.owner):
            tiles = tiles_of(self.owner, x)
            prefix = tiles.kept * (x.shape[1] // (tiles.kept + tiles.patches))
            rows = torch.arange(x.shape[0], device=x.device)
            sequences = [Sequences(rows[:, None] * x.shape[1] + tiles.order, rows)]
            bias = None if mask is None else RelativeBias(tiles.bias(mask))

        def begin(tokens: Tensor, table: Tensor | None, points: Tensor | None, grid: Grid | None) -> Pass:
            n_tokens = int(tokens.shape[1])
            return Pass(
                self.setup,
                parts_for(layer, self._structure(layer), given),
                tokens,
                depth=len(self.layers),
                prefix=prefix,
                suffix=suffix,
                training=self.owner.training,
                rotary=positions_of(layer, table, points, self.ends, n_tokens, grid),
                bias=bias,
                call=checkpointed if _is_checkpointing(self.owner) else directly,
                grid=grid,
            )

        if sequences is None:
            run = begin(x, table, points, self._grid(int(x.shape[1]) - prefix - suffix))
            self.n_front = run.front(self.setup.front_only, bool(self.setup.traces), len(self.layers) - 1)
            return run

        def one(each: Sequences, tokens: Tensor) -> Pass:
            first = each.index[0]
            n_patches = int(tokens.shape[1]) - prefix - suffix
            where = None if points is None else points[each.index]
            return begin(tokens, None if table is None else table[first], where, self._grid(n_patches))

        return Split(x, sequences, one, bounds)

    def _grid(self, n_patches: int) -> Grid | None:
        # Where the image is out of sight, as it is for methods that do not ask for it, a size that is not the model's
        # own is taken for a square.
        own = self.setup.plan.grid
        if self.image is not None and self.image[0] * self.image[1] == n_patches:
            return self.image
        if own is None:
            return None
        return own if own[0] * own[1] == n_patches else square(n_patches)

    def _changed(self, x: Tensor) -> None:
        """The library did something to the tokens since the layer before."""
        assert self.given_back is not None
        assert self.run is not None
        more = int(x.shape[-2]) - int(self.given_back.shape[-2])
        if more and (more < 0 or isinstance(self.run, Split)):
            raise ValueError(f"between two layers {-more} tokens went, which does not go with token reduction")
        self.run.add(x[:, more:] - self.given_back if more else x - self.given_back)
        if more:
            assert isinstance(self.run, Pass)
            self.run.prepend(x[:, :more])

    def _record(self) -> None:
        runs = self.run.passes if isinstance(self.run, Split) else [self.run]
        for trace in self.setup.traces:
            for run in runs:
                assert run is not None
                trace.record(run.steps)


class _Step:
    """What the library finds in place of a layer. Anything but a call goes to the layer."""

    def __init__(self, loop: Loop, index: int, layer: nn.Module) -> None:
        self.loop, self.index, self.layer = loop, index, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_argument_names(type(self.layer)), args, strict=False)), **kwargs}
        name = next(name for name in _TOKENS if name in given)
        x = self.loop.step(self.index, self.layer, given.pop(name), given)
        return (x, None) if type(self.layer).__name__ in TUPLES else x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@constant_result
def _argument_names(layer: type[nn.Module]) -> tuple[str, ...]:
    """What a layer's `forward` calls its arguments, the tokens first."""
    return _found_argument_names(cast(Any, layer))


@cache
def _found_argument_names(layer: type[nn.Module]) -> tuple[str, ...]:
    names = [name for name in inspect.signature(layer.forward).parameters if name != "self"]
    return (_TOKENS[0], *names[1:])


@constant_result
def _is_plain(owner: type[nn.Module], name: str) -> bool:
    """Whether the loop over the layers, as its source shows, hands what a layer gives to the next one and to nobody
    else: its body is one statement, the call of the layer."""
    return _found_plain(cast(Any, owner), name)


@cache
def _found_plain(owner: type[nn.Module], name: str) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(_original(owner).forward)))
        loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
    except (OSError, TypeError, SyntaxError):
        return False
    loops = [node for node in loops if ast.unparse(node.iter) == f"self.{name}"]
    if len(loops) != 1 or len(loops[0].body) != 1 or not isinstance(loops[0].target, ast.Name):
        return False
    (statement,), layer = loops[0].body, loops[0].target.id
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    called, targets = statement.value.func, [ast.unparse(target) for target in statement.targets]
    arguments = [*statement.value.args, *(each.value for each in statement.value.keywords)]
    handed_on = sum(ast.unparse(argument) in targets for argument in arguments)
    return isinstance(called, ast.Name) and called.id == layer and len(targets) == 1 and handed_on == 1


def _original(cls: type[nn.Module]) -> type[nn.Module]:
    return getattr(cls, "agglo_original", cls)


def grid_of_pixels(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Grid | None:
    """(rows, columns) of the patches, where the loop is called with the pictures (B, C, H, W) themselves."""
    image = kwargs.get("pixel_values", args[0] if args else None)
    side = getattr(getattr(owner, "config", None), "patch_size", None)
    if side is None or getattr(image, "ndim", 0) != 4:
        return None
    height, width = pair(side)
    return int(image.shape[-2]) // height, int(image.shape[-1]) // width  # type: ignore[union-attr]


def _is_packed(owner: Any) -> bool:
    return "Pixtral" in type(owner).__name__


def _is_padded(owner: Any) -> bool:
    return type(owner).__name__.startswith(_PADDED)


def _extents(points: Tensor, bounds: Tensor) -> Tensor:
    """How far each packed sequence reaches along the axes, and where it begins if that cannot be told from a rotary
    table of another place, since it has a single row or column: (sequences, 2 axes)."""
    pieces = points.split((bounds[1:] - bounds[:-1]).tolist())
    begins = torch.stack([piece[0] for piece in pieces]).long()
    extents = torch.stack([piece.amax(dim=0) - piece.amin(dim=0) for piece in pieces]).long()
    return torch.cat([extents, begins.where((extents == 0).any(dim=1, keepdim=True), 0)], dim=1)


def _is_checkpointing(owner: Any) -> bool:
    return owner.training and any(getattr(module, "gradient_checkpointing", False) for module in owner.modules())


def _listeners(layer: nn.Module) -> list[Any]:
    """Hooks of transformers on a layer that collect hidden states now."""
    hooks = [hook for hook in layer._forward_hooks.values() if getattr(hook, "__module__", "") == _CAPTURING]
    if not hooks:
        return []
    collected = _collected()
    return hooks if collected is not None and "hidden_states" in collected else []


def _collected() -> dict[str, Any] | None:
    """What transformers collects in this context, by name."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get()


def install_hooks(owner: Any, options: dict[str, Any]) -> None:
    """Let transformers put its hooks on the layers if outputs are to be collected. Done for the owner itself, where it
    leaves a mark: for a stand-in it would do so each time."""
    names, config = ("output_hidden_states", "output_attentions"), getattr(owner, "config", None)
    if any(options.get(name) or getattr(config, name, False) for name in names):
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        if isinstance(owner, PreTrainedModel):
            maybe_install_capturing_hooks(owner)


def refuse_attentions(given: dict[str, Any]) -> None:
    """ValueError if attention weights are asked for."""
    asked = given.get("output_attentions")
    if not asked and not torch.compiler.is_compiling():
        asked = any("attentions" in name for name in _collected() or ())
    if asked:
        raise ValueError(
            "output_attentions=True does not go with token reduction: attention runs between groups of tokens, in "
            "kernels that give no weights; call agglo.remove(model) first"
        )


def _refuse_mask(given: Any, name: str = "attention_mask") -> None:
    # A list of None, one for each layer, was how no head_mask was handed on.
    if given is not None and not (isinstance(given, list) and all(each is None for each in given)):
        raise ValueError(f"{name} does not go with token reduction: call agglo.remove(model) first")
