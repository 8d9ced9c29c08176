"""What `agglo.apply` settled on for a diffusion model: what is merged, how far, and what is used again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, get_args

from agglo.grouping import Mean
from agglo.hosts.diffusion import local
from agglo.hosts.diffusion.tome import GridToMe
from agglo.methods import Grid, LearnedMethod, Method, RememberingMethod, create
from agglo.methods.helpers.per_reduction import lists_of

Part = Literal["attn", "cross", "mlp"]
Share = Literal["block", "resolution"]

PARTS: tuple[str, ...] = get_args(Part)
SHARES: tuple[str, ...] = get_args(Share)
VARIANTS = ("paper", "tomesd")


@dataclass(frozen=True)
class Plan:
    """One immutable value per `apply`; a forward pass reads it once, at its beginning.

    keep_rate: groups for every token of a self-attention.
    sites: self-attentions that are reduced, by their number in the model.
    merge: which parts of a block run with one token per group.
    proportional: whether log(size) is added to the attention logits of the image tokens.
    share: "block" for a grouping per block, "resolution" for one that all blocks of a resolution use.
    every: denoising steps for which a grouping is kept.
    drift: relative change of the features up to which it is kept; None does not look.
    """

    method: Method
    keep_rate: float
    sites: frozenset[int]
    merge: frozenset[str]
    proportional: bool
    share: str = "block"
    every: int = 1
    drift: float | None = None

    @property
    def remembers(self) -> bool:
        """Whether groupings outlive a call of the model."""
        return self.every > 1 or self.drift is not None

    @property
    def mean(self) -> Mean:
        """How the tokens of a group become one, for methods that have the option."""
        mean: Mean = getattr(self.method, "mean", "plain")
        return mean

    def target(self, n_tokens: int, grid: Grid | None) -> int:
        """Groups that n_tokens tokens end in; ValueError if the method cannot reach that."""
        asked = asked_for(n_tokens, self.keep_rate)
        return n_tokens if asked == n_tokens else self.method.stages(n_tokens, [asked], grid)[0]


def asked_for(n_tokens: int, keep_rate: float) -> int:
    """Groups to keep: as many tokens are removed as the paper and tomesd remove, the whole part of N * (1 - keep_rate).

    >>> asked_for(4096, 0.9), asked_for(10, 0.9), asked_for(5, 0.5)
    (3687, 9, 3)
    """
    return max(1, ceil(n_tokens * keep_rate - 1e-9))  # 10 * 0.9 is 9, whatever binary fractions make of it


def settled_method(
    method: str | Method, variant: str | None, proportional: bool | None, options: dict[str, Any]
) -> tuple[Method, bool]:
    """The method and whether attention is proportional, from what the user said and the defaults of a variant.

    agglo's own mode compares atc's tokens by their keys and weighs groups by their sizes. `tome` is its authors': block
    inputs, no weights.
    """
    if variant is not None and variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is not known; accepted: {', '.join(map(repr, VARIANTS))}")
    if variant is not None:
        method = _variant_method(method, variant)
        if proportional:
            raise ValueError(f"variant={variant!r} has no proportional attention; leave out variant= to choose freely")
        if options.get("features", "tokens") != "tokens":
            raise ValueError(
                f"variant={variant!r} compares block inputs, features='tokens', not {options['features']!r}; "
                "leave out variant= to choose freely"
            )
        options = {**options, "features": "tokens"}
        proportional = False
    chosen = _created(method, options)
    _require_grouping(chosen)
    return chosen, chosen.proportional if proportional is None else proportional


def _created(method: str | Method, options: dict[str, Any]) -> Method:
    """The methods that are others on a token grid than in a classifier, and all else by its name."""
    if method == "tome":
        return GridToMe(**known(GridToMe, options))
    if method == "atc" and not local.OPTIONS.isdisjoint(options):
        return local.LocalATC(**known(local.LocalATC, options))
    return create(method, **options)


def known(method: type[Method], options: dict[str, Any]) -> dict[str, Any]:
    """The options themselves; ValueError if there is one that the method does not take."""
    accepted = list(inspect.signature(method).parameters)
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(f"method {method.name!r} has no option {unknown[0]!r}; accepted: {', '.join(accepted)}")
    return options


def _variant_method(method: str | Method, variant: str) -> str:
    wanted = "atc" if variant == "paper" else "tome"
    if method not in ("atc", wanted):  # "atc" is what apply takes when nothing is said
        raise ValueError(f"variant={variant!r} is of method {wanted!r}, not {method!r}")
    return wanted


def _require_grouping(method: Method) -> None:
    """ValueError unless the method answers with groups and needs nothing but tokens, keys and values for it."""
    reasons = {
        "learns": isinstance(method, LearnedMethod),
        "mixes tokens softly": method.kind == "merges soft",
        "asks what the class token attends to": method.needs_class_attention or isinstance(method, RememberingMethod),
        "asks for attention weights": method.needs_attention_received,
        "lets tokens skip whole blocks": method.tokens_return != "never",
        "has an option for each reduction": bool(lists_of(method)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"method {method.name!r} {reason}, which a diffusion model has no use for: around a self-attention "
                "only methods that group tokens work, such as 'atc', 'tome', 'pool' and 'random'"
            )


def checked(name: str, value: str, accepted: Iterable[str]) -> str:
    """The value itself, or ValueError."""
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is not known; accepted: {', '.join(map(repr, accepted))}")
    return value
