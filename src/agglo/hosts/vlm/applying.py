"""The reduction that `agglo.apply` puts into a vision-language model."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from agglo.checks import number
from agglo.config import ReductionConfig
from agglo.hosts.common.base import Host, Layout
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.vlm.families import Family
from agglo.hosts.vlm.reduction import VLMReduction, reduced_vlms, vlm_reduction_of
from agglo.methods import Method
from agglo.methods.baselines import Pooling
from agglo.plan import Plan


def late_reduction(model: nn.Module, family: Family, config: ReductionConfig, method: Method) -> VLMReduction:
    """Return the reduction of a model whose tower runs whole.

    The connector's outputs are merged once, or the image is made smaller.
    """
    rate = config.keep_rate
    schedule = config.schedule if rate is None else method.schedule(rate, None)
    plan = Plan(schedule, config.threshold, proportional=False)
    _require_known_count(method, plan)
    shrink = family.shrink(model) if config.output == "smaller_image" else None
    by, each = _at_connector(method) if shrink is None else Pooling(), family.side(model) ** 2
    return VLMReduction(config, family.dense(model), plan, 1, None, by, None, each, shrink)


def tower_reduction(
    model: nn.Module, family: Family, layout: Layout, plan: Plan, config: ReductionConfig, method: Method, host: Host
) -> tuple[Plan, VLMReduction]:
    """Return the plan of the tower, and the reduction of a model whose tower runs reduced.

    The tower's groups pass a pointwise connector; the outputs of others are merged to the same fraction.
    """
    _require_known_count(method, plan)
    dense = family.dense(model)
    if not family.pointwise:
        by, each = _at_connector(method), family.side(model) ** 2
        return plan, VLMReduction(config, dense, plan, layout.depth, None, by, method, each)
    if not host.may_stay_merged:
        raise UnsupportedModelError(
            f"the tower of this {type(model).__name__}, none of transformers' own, cannot hand on merged tokens: use "
            "output='merged_late'"
        )
    plan = replace(plan, merged=True, read_blocks=family.read_blocks(model, layout.depth))
    left = plan.counts(method, layout.patches, layout.depth, layout.grid)[max(plan.read_blocks)]
    handed_on = layout.prefix + left - family.left_out(model)
    return plan, VLMReduction(config, dense, plan, layout.depth, handed_on)


def image_tokens(model: nn.Module, dense: int | None = None) -> int:
    """Return how many tokens an image takes in the prompt of a reduced vision-language model.

    Args:
        model: The reduced model. Where it cuts an image into tiles, the number is that of one tile.
        dense: How many it takes without reduction, for models whose images differ in size (Qwen-VL).

    >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
    >>> small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    >>> vision = {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 8, **small}
    >>> config = LlavaConfig(vision_config=vision, text_config={"model_type": "llama", "vocab_size": 99, **small})
    >>> model = LlavaForConditionalGeneration(config)
    >>> model = agglo.apply(model, keep_rate=0.25, output="merged_late")
    >>> agglo.image_tokens(model)  # of 64
    16
    """
    found = reduced_vlms(model)
    if not found:
        raise ValueError(f"{type(model).__name__} is not reduced: call agglo.apply(model, ..., output='merged') first")
    reduction = vlm_reduction_of(found[0])
    assert reduction is not None
    if dense is not None:
        dense = number("dense", dense, whole=True, minimum=1)
    if None not in (dense, reduction.dense) and dense != reduction.dense:
        raise ValueError(f"dense={dense!r}: every image of this model takes {reduction.dense} tokens without reduction")
    return reduction.count(dense)


def _at_connector(method: Method) -> Method:
    """Return the method as it merges the connector's outputs: by the tokens themselves, since there are no keys.

    Raises:
        ValueError: The method cannot.
    """
    if isinstance(method, nn.Module):
        raise ValueError(f"{method.name} learns for the tower's tokens, and this model merges the connector's")
    if method.needs_class_attention or method.needs_attention_received:
        raise ValueError(f"{method.name} needs attention weights, and there are none after the connector")
    if method.kind not in ("merges hard", "prunes"):
        raise ValueError(f"{method.name} {method.kind}; the connector's outputs can be merged hard or pruned")
    options = method.options()
    return type(method)(**{**options, "features": "tokens"} if "features" in options else options)


def _require_known_count(method: Method, plan: Plan) -> None:
    """Raise ValueError unless every image keeps the same number of tokens, known before it is seen."""
    if plan.schedule is None:
        raise ValueError(
            f"threshold={plan.threshold!r} leaves another number of tokens of every image, and a prompt needs to know "
            "it: give keep_rate or schedule"
        )
    if method.varies != "no" or method.tokens_return != "never":
        raise ValueError(f"{method.name} leaves a number of tokens that is not known beforehand, and a prompt needs it")
