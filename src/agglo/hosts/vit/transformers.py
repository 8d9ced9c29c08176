"""transformers' ViT, DeiT, ViTMAE, DINOv2 (with registers too), CLIP and SigLIP vision models.

Each is reduced where its loop over layers lies, so classifiers, backbones, contrastive models and VLMs that hold one
work as they are, in transformers 5.6 to 5.22. Hidden states are full-length. Attention maps are not given: a reduced
model attends between groups of tokens. ViTMAE reduces the patches its random masking leaves, and gives as many back.
The chosen attention implementation runs the layers before the first reduction; after it proportional attention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from agglo.hosts.swap import PassSetup, ReducedModule, UnsupportedModelError, begins_pass
from agglo.hosts.vit.base import Head, Host, Layout, matrix_entries, require_own
from agglo.hosts.vit.run import Run, checkpointed, directly, run_blocks
from agglo.hosts.vit.transformers_parts import CLIPParts, DinoParts, LayerParts, ViTParts
from agglo.methods import Grid
from agglo.methods.base import square

HiddenStates = tuple[Tensor | None, ...] | None


def _run(
    tower: Any, setup: PassSetup, x: Tensor, options: dict[str, Any], grid: Grid | None = None
) -> tuple[Run, HiddenStates]:
    """Run x (B, T, C) through a tower's layers; hidden states as asked for in the options of `forward`."""
    _refuse(tower, options)
    kind = _tower(tower)
    layers = _layers(tower)
    asked = _option(tower, options, "output_hidden_states")
    chosen = sorted(asked) if isinstance(asked, (list, tuple, set)) else None
    keep: Sequence[int] = range(len(layers)) if chosen is None else chosen
    checkpointing = tower.training and any(getattr(m, "gradient_checkpointing", False) for m in tower.modules())
    run = run_blocks(
        setup,
        layers,
        x,
        parts=kind.parts,
        prefix=kind.prefix(tower),
        training=tower.training,
        call=checkpointed if checkpointing else directly,
        keep=keep if asked else (),
        grid=grid,
    )
    if not asked:
        return run, None
    if chosen is None:
        return run, (x, *run.kept)
    states = dict(zip(chosen, run.kept, strict=True))
    return run, tuple(states.get(index) for index in range(len(layers)))


def _as_asked(tower: Any, output: Any, options: dict[str, Any]) -> Any:
    """The output, or a tuple of its parts: what transformers' decorators do around a forward."""
    return output.to_tuple() if _option(tower, options, "return_dict", True) is False else output


class _ReducedViT(ReducedModule):
    """ViT and DeiT."""

    @begins_pass
    def forward(
        self: Any,
        setup: PassSetup,
        pixel_values: Any = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        x = self.embeddings(
            pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype),
            bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=interpolate_pos_encoding,
        )
        options = {**kwargs, "attention_mask": attention_mask}
        run, hidden_states = _run(self, setup, x, options, _grid(self.config, pixel_values.shape[-2:]))
        # The norm acts on each token alone: before unmerging it has fewer to do.
        last = run.restored(self.layernorm(run.tokens))
        pooled = None if self.pooler is None else self.pooler(last)
        output = BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled, hidden_states=hidden_states)
        return _as_asked(self, output, kwargs)


class _ReducedMAE(ReducedModule):
    """ViTMAE's encoder: x holds the patches that its masking left, in shuffled order."""

    @begins_pass
    def forward(
        self: Any,
        setup: PassSetup,
        pixel_values: Tensor | None = None,
        noise: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        from transformers.models.vit_mae.modeling_vit_mae import ViTMAEModelOutput

        x, mask, restore = self.embeddings(pixel_values, noise=noise, interpolate_pos_encoding=interpolate_pos_encoding)
        run, hidden_states = _run(self, setup, x, {**kwargs, "attention_mask": attention_mask})
        last = run.restored(self.layernorm(run.tokens))
        output = ViTMAEModelOutput(last_hidden_state=last, mask=mask, ids_restore=restore, hidden_states=hidden_states)
        return _as_asked(self, output, kwargs)


class _ReducedEncoder(ReducedModule):
    """DINOv2's encoder, between embeddings and final norm: model and backbone share it."""

    @begins_pass
    def forward(self: Any, setup: PassSetup, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        options = {**kwargs, "attention_mask": attention_mask}
        n_patches, grid = hidden_states.shape[1] - _tower(self).prefix(self), setup.plan.grid
        # The image is out of sight. DINOv2 takes any size; one that is not the model's own is taken for a square.
        grid = grid if grid is not None and grid[0] * grid[1] == n_patches else square(n_patches)
        run, states = _run(self, setup, hidden_states, options, grid)
        output = BaseModelOutput(last_hidden_state=run.restored(), hidden_states=states)
        return _as_asked(self, output, kwargs)


class _ReducedCLIP(ReducedModule):
    """CLIP's vision model: the pooled class token alone passes the last norm."""

    @begins_pass
    def forward(
        self: Any,
        setup: PassSetup,
        pixel_values: Any = None,
        interpolate_pos_encoding: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        embedded = self.embeddings(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        grid = _grid(self.config, pixel_values.shape[-2:])
        run, hidden_states = _run(self, setup, self.pre_layrnorm(embedded), kwargs, grid)
        output = BaseModelOutputWithPooling(
            last_hidden_state=run.restored(),
            pooler_output=self.post_layernorm(run.tokens[:, 0]),
            hidden_states=hidden_states,
        )
        return _as_asked(self, output, kwargs)


class _ReducedSigLIP(ReducedModule):
    """SigLIP's vision model: no class token, attention pooling over all patches."""

    @begins_pass
    def forward(
        self: Any,
        setup: PassSetup,
        pixel_values: Any = None,
        interpolate_pos_encoding: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        embedded = self.embeddings(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        run, hidden_states = _run(self, setup, embedded, kwargs, _grid(self.config, pixel_values.shape[-2:]))
        last = run.restored(self.post_layernorm(run.tokens))
        output = BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=self.head(last) if self.use_head else None,
            hidden_states=hidden_states,
        )
        return _as_asked(self, output, kwargs)


@dataclass(frozen=True)
class _Tower:
    """A class that owns a loop over layers: what overrides it, how its layers come apart, and its prefix tokens."""

    mixin: type[ReducedModule]
    parts: LayerParts
    prefix_tokens: int

    def prefix(self, module: Any) -> int:
        return self.prefix_tokens + int(getattr(module.config, "num_register_tokens", 0))


_TOWERS = {
    "ViTModel": _Tower(_ReducedViT, ViTParts(), 1),
    "DeiTModel": _Tower(_ReducedViT, ViTParts(), 2),
    "ViTMAEModel": _Tower(_ReducedMAE, ViTParts(), 1),
    "Dinov2Encoder": _Tower(_ReducedEncoder, DinoParts(), 1),
    "Dinov2WithRegistersEncoder": _Tower(_ReducedEncoder, DinoParts(), 1),
    "CLIPVisionModel": _Tower(_ReducedCLIP, CLIPParts(), 1),
    "SiglipVisionModel": _Tower(_ReducedSigLIP, CLIPParts(), 0),
}


# Classifiers that read no patch, and how many tokens in front they read.
_READERS = {
    "ViTForImageClassification": 1,
    "DeiTForImageClassification": 1,
    "DeiTForImageClassificationWithTeacher": 2,
}


def _layers(module: Any) -> list[Any]:
    """The layers a module loops over, itself or through its encoder."""
    for owner in (module, getattr(module, "encoder", None)):
        for name in ("layers", "layer"):
            if isinstance(found := getattr(owner, name, None), nn.ModuleList):
                return list(found)
    return []


def _tower(module: nn.Module) -> _Tower:
    return next(_TOWERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _TOWERS)


def _option(module: Any, options: dict[str, Any], name: str, default: Any = False) -> Any:
    given = options.get(name)
    return getattr(module.config, name, default) if given is None else given


def _refuse(module: nn.Module, options: dict[str, Any]) -> None:
    for name in ("attention_mask", "head_mask"):
        given = options.get(name)
        # A list of None, one for each layer, was how no head_mask was handed on.
        if given is not None and not (isinstance(given, list) and all(each is None for each in given)):
            raise ValueError(f"{name} does not go with token reduction: call agglo.remove(model) first")
    if _option(module, options, "output_attentions"):
        raise ValueError(
            "output_attentions=True does not go with token reduction: attention runs between groups of tokens, in "
            "kernels that give no weights; call agglo.remove(model) first"
        )


class TransformersViT(Host):
    """transformers' plain vision transformers."""

    model_classes: ClassVar[tuple[str, ...]] = tuple(f"transformers.{name}" for name in _TOWERS)

    def recognises(self, module: nn.Module) -> bool:
        return super().recognises(module) and bool(_layers(module))

    def check(self, module: nn.Module) -> None:
        name, tower = type(module).__name__, _tower(module)
        definer = type(module).forward.__module__
        if definer.split(".")[0] not in ("transformers", "agglo"):
            raise UnsupportedModelError(f"{name} replaces transformers' forward (in {definer}); agglo would bypass it")
        for layer in _layers(module):
            unknown = tower.parts.unknown(layer)
            if unknown is not None:
                import transformers

                version = transformers.__version__
                raise UnsupportedModelError(
                    f"{name} is built from {unknown}, which agglo does not know (transformers {version})"
                )

    def layout(self, module: Any) -> Layout:
        tower, config = _tower(module), module.config
        layers = _layers(module)
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention_width = config.num_attention_heads * head_width
        grid = _grid(config, _pair(config.image_size))
        patch_height, patch_width = _pair(config.patch_size)
        embedded = grid[0] * grid[1]
        embedding_weights = config.num_channels * patch_height * patch_width * config.hidden_size
        patches = int(embedded * (1 - getattr(config, "mask_ratio", 0.0)))
        return Layout(
            depth=len(layers),
            prefix=tower.prefix(module),
            patches=patches,
            attention_weights=4 * config.hidden_size * attention_width,
            attention_width=attention_width,
            mlp_weights=matrix_entries(*tower.parts.mlp(layers[0])),
            embedding_weights=embedding_weights * embedded // patches,
            head_madds=_head_madds(module, patches),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            grid=None if tower.mixin is _ReducedMAE else grid,
            asking_weights=2 * config.hidden_size * attention_width,
        )

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return _tower(module).mixin

    def head(self, model: nn.Module, module: nn.Module) -> Head:
        owners = [
            (owner, name) for owner in model.modules() for name, child in owner.named_children() if child is module
        ]
        for owner, name in owners:
            known = [cls.__name__ for cls in type(owner).__mro__ if cls.__name__ in _READERS]
            if known:
                require_own(owner, ("forward",), "transformers")
                return Head(_READERS[known[0]], reader=owner, loop=name, watched=(f"{name}.layernorm",))
        holder = f"in {type(owners[0][0]).__name__}" if owners else "by itself"
        raise UnsupportedModelError(
            f"unread='drop' needs a head that reads class and distillation tokens alone: {', '.join(_READERS)}. "
            f"{type(module).__name__} {holder} gives its patches to whoever calls it"
        )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _grid(config: Any, image: Sequence[int]) -> Grid:
    """(rows, columns) of the patches of an image of (height, width) pixels."""
    height, width = _pair(config.patch_size)
    return int(image[0]) // height, int(image[1]) // width


def _head_madds(module: Any, patches: int) -> int:
    """Of the pooler inside the tower. SigLIP's projects every patch to a key and a value."""
    head = getattr(module, "head", None)
    if head is None:
        return matrix_entries(getattr(module, "pooler", None))
    return matrix_entries(head) + (patches - 1) * 2 * module.config.hidden_size**2
