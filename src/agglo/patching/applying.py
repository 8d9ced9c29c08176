"""apply and remove, and what goes with them: what changes a model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import nn

from agglo import tuned as tuned_results
from agglo.hosts import diffusion, learned, vlm
from agglo.hosts.refusals import require_whole_blocks
from agglo.hosts.registry import applied_modules, find_tower
from agglo.hosts.swap import Applied, Reading, ReducedModule, UnsupportedModelError, install, uninstall
from agglo.hosts.vit.base import Layout
from agglo.hosts.vit.reading import ReducedReader
from agglo.methods import Method, ModelShape, create
from agglo.methods.base import Place
from agglo.plan import Plan, require_place
from agglo.schedule import Rates, Schedule, Stages, as_schedule

M = TypeVar("M")
P = TypeVar("P")

UNREAD = ("keep", "drop")

_changing = threading.RLock()  # models are applied to and released one after the other


def apply(
    model: M,
    method: str | Method = "atc",
    *,
    keep_rate: Rates | None = None,
    schedule: Schedule | Sequence[int] | str | None = None,
    threshold: float | None = None,
    tuned: tuned_results.Source | None = None,
    blocks: Sequence[int] | None = None,
    tower: str | nn.Module | None = None,
    proportional: bool | None = None,
    acts: Place | None = None,
    unread: str = "keep",
    output: str = "restored",
    probe: bool = True,
    **options: Any,
) -> M:
    """Make a vision transformer faster by reducing its tokens as it runs. In place; `agglo.remove` undoes it.

    What matters:
        keep_rate: fraction of patch tokens that stays at each stage, in (0, 1]; a list gives one per stage.
        method: "atc" (default), the name of another that `agglo.list_methods()` lists, or a Method.
        linkage (atc): "average", "single" or "complete".
        output: for vision-language models, so that the language model gets fewer tokens too. "merged": the tower runs
            reduced, and what is merged stays merged. "merged late": the tower runs whole, and its tokens are merged
            once on their way to the language model; keep_rate is then the fraction that is left. How many that is
            `agglo.image_tokens(model)` says, and `agglo.adapt_processor` makes prompts fit. "smaller picture" is the
            baseline: nothing is merged, the picture is scaled down. "restored", the default, gives every position its
            group's token.

    Instead of keep_rate, one of:
        schedule: `Stages`, `Constant`, `Linear`, `Geometric`, or a list of tokens removed at each block.
        threshold: merge tokens up to this cosine distance, so that every image keeps as many as it needs.
        tuned: what `agglo.tune` found, or its file, or the name of a ready-made one; method and options are then its.

    To tinker with:
        blocks: 0-based blocks that reduce, for keep_rate and threshold; by default a quarter, a half and three
            quarters of the depth (3, 6, 9 of 12).
        features: what atc and tome compare tokens by: "keys", "keys_per_head", "tokens" or "values".
        proportional: let a merged token weigh in attention as much as its members did; None leaves it to the method.
        acts: where a method that merges hard acts: "after attention" or "before block", which spares attention too.
            Before a block there are no keys and values of it: atc and tome need features="tokens" there. What tokens
            weigh by attention comes from the block before. None leaves it to the method.
        unread: "drop" lets the last block compute only what a head that reads the class token alone needs. The output
            is the same but for rounding; features, hidden states, traces and hooks still see every patch. "keep", the
            default, computes all. UnsupportedModelError where the head reads patches.
        any other option of the method, by its name.
        probe: before anything changes, run one block of each kind both as the library does and in parts, on a small
            random input, and raise UnsupportedModelError if the two differ. Done once per kind; False leaves it out.
        tower: the submodule to reduce (or its name), for models with several.

    Outputs keep their shapes and token order, unless `output` says otherwise. An earlier `apply` is replaced; forward
    passes that run in other threads meanwhile go on with it to their end. Returns the model.

    A method that learns brings parameters (`agglo_method.*` in the state dict). Apply it before an optimiser is made,
    which would not know of them, and before DistributedDataParallel or FSDP wraps the model. Applied again by its name,
    with the same options, it keeps what it learned if all shapes are the same (dynamicvit at another keep rate), and
    starts anew with a warning if not (sit at another keep rate). An instance works in one model at a time.

    Pipelines and models of diffusers have options of their own: see `agglo.hosts.diffusion.apply`.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("deit_tiny_patch16_224"), keep_rate=0.5)
    >>> agglo.reduction(model).counts
    [196, 196, 196, 98, 98, 98, 49, 49, 49, 24, 24, 24]
    """
    if tuned is not None:
        beside = {"keep_rate": keep_rate, "schedule": schedule, "threshold": threshold, "blocks": blocks, **options}
        beside |= {"proportional": proportional, "method": None if method == "atc" else method}
        beside |= {"acts": acts, "unread": None if unread == "keep" else unread}
        if given := [name for name, value in beside.items() if value is not None]:
            raise ValueError(f"tuned={tuned!r} says it all; {given[0]}={beside[given[0]]!r} does not go with it")
        where = {"output": output, **({} if tower is None else {"tower": tower})}
        return apply(model, **{**tuned_results.arguments(tuned), **where})
    if diffusion.is_diffusion(model):
        dropped = None if unread == "keep" else unread
        leaving = None if output == "restored" else output
        diffusion.require_none(
            schedule=schedule,
            threshold=threshold,
            blocks=blocks,
            tower=tower,
            acts=acts,
            unread=dropped,
            output=leaving,
        )
        with _changing:
            diffusion.apply(model, method, keep_rate=keep_rate, proportional=proportional, **options)
        return model
    choices = {"keep_rate": keep_rate, "schedule": schedule, "threshold": threshold}
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"give one of keep_rate, schedule and threshold, not {' and '.join(given) or 'none'}")
    if schedule is not None and blocks is not None:
        raise ValueError("blocks go with keep_rate or threshold; a schedule has its own")
    chosen = create(method, **options)
    if threshold is not None and not chosen.takes_threshold:
        raise ValueError(f"method {chosen.name!r} takes no threshold; give keep_rate or schedule")
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold={threshold!r} must be a cosine distance, 0 to 2")
    if unread not in UNREAD:
        raise ValueError(f"unread={unread!r} is not known; accepted: {', '.join(map(repr, UNREAD))}")
    vlm.require_output(output)
    require_place(chosen, acts)
    if keep_rate is not None:
        schedule = chosen.schedule(keep_rate, blocks)
    decided = None if schedule is None else as_schedule(schedule)
    if decided is not None and decided.returning and chosen.tokens_return == "never":
        raise ValueError(f"{decided!r} is for methods whose tokens return; those that {chosen.name} drops are gone")
    whole = cast(nn.Module, model)
    if output in ("merged late", "smaller picture"):
        _require_default(output, blocks=blocks, tower=tower, acts=acts, unread=None if unread == "keep" else unread)
        if output == "smaller picture" and (method != "atc" or options):
            raise ValueError("output='smaller picture' merges nothing: it takes no method and no options of one")
        _apply_late(whole, Plan(decided, threshold, proportional=False), chosen, output)
        return model
    speaker = vlm.find(whole, output) if output == "merged" else None
    module, host = find_tower(whole, tower)
    require_whole_blocks(module)
    if keep_rate is not None and host.rates_are_nested and isinstance(decided, Stages) and not decided.returning:
        decided = replace(decided, nested=True)
    host.check(module)
    if probe:
        host.prove(module)
    layout = host.layout(module)
    head = host.head(whole, module) if unread == "drop" else None
    plan = Plan(
        schedule=decided,
        threshold=threshold,
        blocks=None if blocks is None else tuple(blocks),
        proportional=chosen.proportional if proportional is None else proportional,
        grid=layout.grid,
        acts=acts,
        reads=None if head is None else head.reads,
        ends=(layout.prefix - layout.suffix, layout.suffix),
    )
    outlet = None
    if speaker is not None:
        plan = vlm.merged_plan(plan, *speaker, layout.depth, host)
        outlet = vlm.tower_outlet(*speaker, layout, plan, chosen)
    shape = _shape_of(plan, chosen, layout)  # an impossible request raises here, before anything changes
    loop, mixin = host.loop(module), host.mixin(module)
    sight = host.sight(module) if chosen.reads_grid else None
    with _changing:
        _require_no_override(loop, mixin)
        if sight is not None:
            _require_no_override(module, sight[0])
        if head is not None and head.reader is not None:
            _require_no_override(head.reader, ReducedReader)
        chosen = learned.prepare(chosen, isinstance(method, str), shape, model=whole, tower=module, loop=loop)
        install(loop, mixin, Applied(plan, chosen))
        for reader in _readers(whole, loop):
            uninstall(reader)
        if sight is not None:
            install(module, *sight)
        if head is not None and head.reader is not None:
            install(head.reader, ReducedReader, Reading(head.loop, mixin, head.watched, head.settings))
        for former in vlm.outlets(whole):
            uninstall(former)
        if speaker is not None and outlet is not None:
            install(speaker[0], speaker[1].mixin, outlet)
        learned.mark_built(chosen)
    return model


def _apply_late(model: nn.Module, plan: Plan, method: Method, output: str) -> None:
    """Merge the tokens of a vision-language model between its tower, which runs whole, and its language model."""
    module, family = vlm.find(model, output)
    outlet = vlm.late_outlet(module, family, plan, method, output)
    with _changing:
        _require_no_override(module, family.mixin)
        for former in applied_modules(model):
            uninstall(former)
        install(module, family.mixin, outlet)


def _require_default(output: str, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is for a tower that runs reduced; with output={output!r} it runs whole")


def image_tokens(model: nn.Module, dense: int | None = None) -> int:
    """How many tokens a picture takes in the prompt of a reduced vision-language model: known before it is seen.

    dense: how many it takes without reduction, for models whose pictures differ in size (Qwen-VL). Where a picture is
    cut into tiles, the number is that of one tile.

    >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
    >>> small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    >>> vision = {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 8, **small}
    >>> config = LlavaConfig(vision_config=vision, text_config={"model_type": "llama", "vocab_size": 99, **small})
    >>> model = LlavaForConditionalGeneration(config)
    >>> model = agglo.apply(model, keep_rate=0.25, output="merged late")
    >>> agglo.image_tokens(model)  # of 64
    16
    """
    return vlm.image_tokens(model, dense)


def adapt_processor(processor: P, model: nn.Module) -> P:
    """Let a processor of transformers write as many placeholders for each picture as the model now takes. In place.

    Call it again after every other `apply`. With a model that is not reduced, the processor is as it was; so it is
    after `agglo.remove(processor)`. What `save_pretrained` writes is the processor as it was. Returns the processor.

    >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
    >>> small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    >>> vision = {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 8, **small}
    >>> config = LlavaConfig(vision_config=vision, text_config={"model_type": "llama", "vocab_size": 99, **small})
    >>> model = LlavaForConditionalGeneration(config)
    >>> model = agglo.apply(model, keep_rate=0.25, output="merged late")
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"<image>": 0, "what": 1}, unk_token="what"))
    >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["<image>"])
    >>> square = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    >>> processor = LlavaProcessor(CLIPImageProcessor(**square), tokenizer, patch_size=8, image_token="<image>",
    ...     vision_feature_select_strategy="default", num_additional_image_tokens=1)
    >>> processor = agglo.adapt_processor(processor, model)
    >>> prompt = processor(images=torch.zeros(3, 64, 64), text="<image> what", return_tensors="pt")
    >>> int((prompt["input_ids"] == 0).sum())
    16
    """
    vlm.adapted(processor, model)
    return processor


def _readers(model: nn.Module, loop: nn.Module) -> list[nn.Module]:
    """Modules of the model that were given another class since they read what the loop gives."""
    readers = [module for module in model.modules() if isinstance(module, ReducedReader)]
    return [reader for reader in readers if any(part is loop for part in reader.modules())]


def _shape_of(plan: Plan, method: Method, layout: Layout) -> ModelShape:
    targets = plan.targets(method, layout.patches, layout.depth, layout.grid)
    counts = [] if plan.schedule is None else [target for target in targets if target is not None]
    before = [layout.patches, *(counts if method.tokens_return == "never" else [layout.patches] * len(counts))]
    stages = tuple(zip(before, counts, strict=False))
    blocks = tuple(block for block, target in enumerate(targets) if target is not None)
    acts: Place = "before block" if plan.acts_before_block(method) else "after attention"
    shape = ModelShape(stages, layout.width, layout.heads, layout.prefix, blocks, acts)
    method.check(shape)
    return shape


def _require_no_override(loop: nn.Module, mixin: type[ReducedModule]) -> None:
    """A function put on the instance goes before its class: the reduction would silently not happen."""
    ours = {name for cls in mixin.__mro__ if issubclass(cls, ReducedModule) for name in vars(cls)}
    theirs = sorted(ours.intersection(vars(loop)))
    if theirs:
        raise UnsupportedModelError(
            f"{theirs[0]} of this {type(loop).__name__} was replaced on the instance (accelerate's hooks and mixed "
            "precision do this), so that agglo's would never run: call agglo.apply before that happens"
        )


def remove(model: M) -> M:
    """Take every reduction out of a model again: it is exactly as it was. Returns the model. (A processor that
    `adapt_processor` changed is taken too.)

    Forward passes that run in other threads meanwhile go on reduced to their end. What a method has learned goes with
    it: save the state dict first, or keep the instance, which can be applied again.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), keep_rate=0.5)
    >>> print(agglo.reduction(agglo.remove(model)))
    None
    """
    with _changing:
        if diffusion.is_diffusion(model):
            diffusion.remove(model)
            return model
        if isinstance(model, vlm.AdaptedProcessor):
            vlm.restored(model)
            return model
        for module in applied_modules(cast(nn.Module, model)):
            uninstall(module)
    return model
