"""`ReductionConfig`: the one value that says how a model is reduced.

Command lines, records, training settings, tuned results and benchmarks all carry this value. It holds names and plain
values, checks them when it is made, and can be compared, hashed, written to JSON and typed as text:

    atc:keep_rate=0.5,linkage=single
    tome:schedule=(counts:90,30,10,blocks=[3,6,9]),proportional=false
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from agglo.checks import choice, number, whole_numbers
from agglo.methods import Method, create
from agglo.methods.base import PLACES, Place
from agglo.methods.registry import find
from agglo.schedule import Rates, Schedule, Stages, as_schedule
from agglo.text import format_call, parse_call

LastBlock = Literal["all", "class_token"]
OutputTokens = Literal["restored", "merged", "merged_late", "smaller_image"]
Part = Literal["attn", "cross", "mlp"]
Sharing = Literal["block", "resolution"]

VERSION = 1
DOWNSAMPLES = (1, 2, 4, 8, 16, 32)  # every level of a U-Net halves rows and columns
BUDGETS = ("keep_rate", "flops", "schedule", "threshold")
# Not for diffusion models, and for no other models.
CLASSIFIER_FIELDS = ("flops", "schedule", "threshold", "blocks", "place", "last_block", "output")
DIFFUSION_FIELDS = ("max_downsample", "merge", "share", "every", "drift")


@dataclass(frozen=True, repr=False)
class ReductionConfig:
    """How a model is reduced. Exactly one of `keep_rate`, `flops`, `schedule` and `threshold` is given.

    Args:
        method: The name of a method that `agglo.list_methods()` lists.
        keep_rate: Fraction of patch tokens that stays at each stage, in (0, 1]; a list gives one per stage.
        flops: Fraction of the dense model's multiply-adds that is left, in (0, 1). `agglo.apply` replaces it by the
            recipe for the model, which `agglo.recipe` returns: a schedule, and options that are not given here.
        schedule: Tokens left after each block: a `Schedule`, its text, or a list of tokens removed at each block.
        threshold: Merge tokens up to this cosine distance, so that every image keeps as many as it needs.
        blocks: 0-based blocks that reduce, for keep_rate and threshold; by default a quarter, a half and three quarters
            of the depth (3, 6, 9 of 12).
        place: Where a method that merges hard acts: "after_attention", or "before_block", which spares attention too.
            A block's keys and values do not exist before it: atc and tome need features="tokens" there. None leaves it
            to the method.
        proportional: Whether a merged token weighs in attention as much as its members did; None leaves it to the
            method.
        last_block: "class_token" lets the last block compute only what a head needs that reads the class token alone.
            The output is the same but for rounding. "all" computes every token.
        output: For vision-language models: "restored" gives every position its group's token. "merged" lets merged
            tokens leave the tower. "merged_late" runs the tower whole and merges once on the way to the language model.
            "smaller_image" is the baseline: nothing is merged, the image is scaled down.
        max_downsample: For diffusion models: the largest downsampling factor of the latent at which tokens merge; None
            takes the finest resolution that has attention.
        merge: For diffusion models: parts of a block that run with one token per group: "attn", "cross", "mlp".
        share: For diffusion models: "resolution" lets the blocks of a resolution share the grouping of the first.
        every: For diffusion models: denoising steps for which a block keeps its grouping.
        drift: For diffusion models: keep a grouping until its features have moved by this much, relative to what they
            were.
        options: Options of the method, by name.

    Raises:
        ValueError: A value is not accepted, or two do not go together.

    >>> config = agglo.ReductionConfig(keep_rate=0.5, options={"linkage": "single"})
    >>> print(config)
    atc:keep_rate=0.5,linkage=single
    >>> agglo.ReductionConfig.parse("atc:keep_rate=0.5,linkage=single") == config
    True
    """

    method: str = "atc"
    keep_rate: Rates | None = None
    flops: float | None = None
    schedule: Schedule | None = None
    threshold: float | None = None
    blocks: tuple[int, ...] | None = None
    place: Place | None = None
    proportional: bool | None = None
    last_block: LastBlock = "all"
    output: OutputTokens = "restored"
    max_downsample: int | None = None
    merge: tuple[Part, ...] = ("attn",)
    share: Sharing = "block"
    every: int = 1
    drift: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        method = create(self.method, **self.options)
        # As the method keeps them and without its defaults, so that configs of the same meaning are equal.
        kept, defaults = method.options(), method.defaults()
        given = {name: kept[name] for name in kept if name in self.options and kept[name] != defaults[name]}
        self._set("options", given)
        self._check(method)

    def _check(self, method: Method) -> None:
        """Raise ValueError for a value that is not accepted, or that does not go with the method or another value."""
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(BUDGETS)}, not {' and '.join(given) or 'none'}")
        if self.blocks is not None:
            if self.schedule is not None or self.flops is not None:
                raise ValueError("blocks go with keep_rate or threshold; schedule and flops have their own")
            self._set("blocks", whole_numbers("blocks", self.blocks))
        if self.keep_rate is not None:
            self._set("keep_rate", Stages(self.keep_rate, self.blocks).keep_rate)
        if self.schedule is not None:
            self._set("schedule", as_schedule(self.schedule))
        if self.flops is not None:
            self._set("flops", number("flops", self.flops, above=0, maximum=1))
        if self.threshold is not None:
            self._set("threshold", number("threshold", self.threshold, minimum=0))
        choice("proportional", self.proportional, (None, True, False))
        for name, words in {"last_block": LastBlock, "output": OutputTokens, "share": Sharing}.items():
            choice(name, getattr(self, name), get_args(words))
        choice("max_downsample", self.max_downsample, (None, *DOWNSAMPLES))
        several = isinstance(self.merge, Iterable) and not isinstance(self.merge, str) and self.merge
        parts = self.merge if several else (self.merge,)
        self._set("merge", tuple(choice("merge", part, get_args(Part)) for part in parts))
        number("every", self.every, whole=True, minimum=1)
        if self.drift is not None:
            self._set("drift", number("drift", self.drift, minimum=0))
        self._check_place(method)
        if self.threshold is not None and not method.takes_threshold:
            raise ValueError(f"method {method.name!r} takes no threshold; give keep_rate or schedule")
        if self.schedule is not None and self.schedule.returning and method.tokens_return == "never":
            raise ValueError(f"{self.schedule!r} is for methods whose tokens return; {method.name} drops them for good")
        if self.output in ("merged_late", "smaller_image"):
            others = ("flops", "blocks", "place", "last_block")
            self.require_defaults(others, f"output={self.output!r} lets the tower run whole")
        if self.output == "smaller_image" and (self.method != "atc" or self.options):
            raise ValueError("output='smaller_image' merges nothing: it takes no method and no options of one")

    def _check_place(self, method: Method) -> None:
        choice("place", self.place, (None, *PLACES))
        if self.place in (None, method.place):
            return
        if self.place != "before_block" or not method.may_act_before:
            raise ValueError(f"place={self.place!r} does not go with method {method.name!r}, which acts {method.place}")
        features = method.options().get("features", "tokens")
        if features != "tokens":
            raise ValueError(f"features={features!r} do not exist before a block; place='before_block' needs 'tokens'")

    def require_defaults(self, names: Iterable[str], reason: str) -> None:
        """Raise ValueError, which gives the reason, for the first of the fields that was set."""
        for name in names:
            if getattr(self, name) != DEFAULTS[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect: {reason}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, method: str | Method = "atc", **arguments: Any) -> ReductionConfig:
        """Make a config from flat arguments, as `agglo.apply` takes them: fields and options of the method by name.

        Options of a method instance are its own.
        """
        own = {name: value for name, value in arguments.items() if name in _FIELDS}
        options = {name: value for name, value in arguments.items() if name not in _FIELDS}
        if isinstance(method, Method):
            if options:
                raise ValueError(f"option {min(options)!r} goes with a method's name, not with the instance {method!r}")
            config = object.__new__(cls)  # no name to look up: the instance need not be registered
            for name, value in {**DEFAULTS, "options": {}, **own, "method": method.name}.items():
                config._set(name, value)
            config._check(method)
            return config
        accepted = find(method).defaults()
        for name in options:
            choice(f"argument of method {method!r}", name, [*accepted, *sorted(_FIELDS)])
        return cls(method, **own, options=options)

    @classmethod
    def parse(cls, text: str) -> ReductionConfig:
        """Parse the text `method:key=value,key=value`; keys are fields and options of the method.

        >>> agglo.ReductionConfig.parse("tome:keep_rate=0.5")
        ReductionConfig('tome', keep_rate=0.5)
        """
        name, values, arguments = parse_call(text)
        if values:
            raise ValueError(f"{text!r}: write key=value, not {values[0]!r}")
        return cls.of(name, **arguments)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ReductionConfig:
        """Make a config from what `to_dict` gave.

        Raises:
            ValueError: The version is another, or a key is unknown.
        """
        arguments = dict(content)
        choice("version", arguments.pop("version", None), (VERSION,))
        return cls.of(**arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the version, the method, and all that differs from the defaults."""
        return {"version": VERSION, "method": self.method, **_plain(self.given())}

    def given(self) -> dict[str, Any]:
        """Return what differs from the defaults, as the flat arguments of `agglo.apply`, without the method."""
        own = {name: getattr(self, name) for name in DEFAULTS if name in _FIELDS}
        return {name: value for name, value in own.items() if value != DEFAULTS[name]} | dict(self.options)

    def create_method(self) -> Method:
        """Create the method with its options."""
        return create(self.method, **self.options)

    @property
    def budget(self) -> str:
        """How far the model is reduced, such as "keep 0.5", "flops 0.5", "threshold 0.2" or "linear:16"."""
        if self.keep_rate is not None:
            rates = self.keep_rate if isinstance(self.keep_rate, Sequence) else [self.keep_rate]
            return f"keep {' '.join(f'{rate:g}' for rate in rates)}"
        if self.flops is not None:
            return f"flops {self.flops:g}"
        return str(self.schedule) if self.threshold is None else f"threshold {self.threshold:g}"

    def __str__(self) -> str:
        return format_call(self.method, (), self.given())

    def __repr__(self) -> str:
        given = {name: value for name, value in self.given().items() if name in _FIELDS}
        given |= {"options": dict(self.options)} if self.options else {}
        return f"ReductionConfig({', '.join([repr(self.method), *(f'{k}={v!r}' for k, v in given.items())])})"

    def __hash__(self) -> int:
        return hash((self.method, self.budget))


_FIELDS = frozenset(each.name for each in fields(ReductionConfig)) - {"method", "options"}
DEFAULTS = {each.name: each.default for each in fields(ReductionConfig) if each.default is not MISSING}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Schedule) else value
