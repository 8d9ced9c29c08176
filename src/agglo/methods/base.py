"""The interface of every token-reduction method.

A method is called once per reducing block, with a `View` of the tokens, and answers with an `Outcome`. No method keeps
anything of a forward pass on itself: two threads may run one model.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.clustering.distances import mean_over_heads
from agglo.compiling import constant_result
from agglo.grouping import Grouping, Mean
from agglo.schedule import Rates, Schedule, Stages
from agglo.text import format_call

Grid = tuple[int, int]
Kind = Literal["prunes", "merges hard", "merges soft", "skips"]
Return = Literal["never", "after_block", "after_stage"]
Varies = Literal["no", "at_most", "about"]
Place = Literal["after_attention", "before_block"]
PLACES: tuple[Place, ...] = ("after_attention", "before_block")
FEATURES = ("keys", "keys_per_head", "tokens", "values")
_CATCH_ALL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class ModelShape:
    """The model a method is applied to, known before anything runs.

    stages: (patch tokens before, patch tokens after) of each reduction, at the model's own input size; empty where a
        threshold decides.
    width, heads, prefix: channels of a token, heads of attention, tokens in front that must stay as they are.
    blocks, place: the blocks that reduce, and whether between their attention and MLP or before them.

    >>> agglo.methods.ModelShape(stages=((196, 98), (98, 49)), width=192, heads=3, prefix=1, blocks=(4, 8)).stages[0]
    (196, 98)
    """

    stages: tuple[tuple[int, int], ...]
    width: int
    heads: int
    prefix: int
    blocks: tuple[int, ...] = ()
    place: Place = "after_attention"


@dataclass(frozen=True)
class View:
    """The tokens of a batch at one block, prefix tokens first.

    tokens: (B, T, C), after the block's attention (before the block for methods that act there).
    keys, values: (B, H, T, d) of the block's attention, keys before any rotation; None before the block.
    class_attention: (B, H, T) float32, how the first token attended to each in the latest attention, if the method
        needs it; None before the first block.
    attention_received: (B, T) float32, the attention each token got there from all queries of all heads; likewise.
    sizes: (B, T), patches each token stands for, 0 for padding; None where every token is one patch.
    counts: (B,), patch tokens of each image that are no padding; None where nothing is padded.
    prefix: tokens at the front that must stay as they are.
    target: patch tokens to leave; None where a threshold decides.
    threshold: merge while groups are at most this far apart; None where a target decides.
    stage, training: how many reductions came before this one; whether the model trains.
    policy: (B, T), the mask that the method's latest outcome put on attention; None if there is none.
    tokens_before: patch tokens before each of the reductions that came before this one.
    grid: (rows, columns) of the patches before any reduction; None if the host knows of none.
    memory: (B, T), what the method remembers of each token; None unless it remembers.
    window: tokens per side of the windows within which a method had better cluster, unless its options say how, where
        the host finds that all tokens of the grid at once take too long; None where they do not.
    block, depth: the number of this block, and of how many; 0 of 1 where the host counts no blocks.

    >>> agglo.methods.View(torch.zeros(2, 197, 8), prefix=1, target=98).patches.shape
    torch.Size([2, 196, 8])
    """

    tokens: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    class_attention: Tensor | None = None
    sizes: Tensor | None = None
    counts: Tensor | None = None
    prefix: int = 0
    target: int | None = None
    threshold: float | None = None
    stage: int = 0
    training: bool = False
    attention_received: Tensor | None = None
    policy: Tensor | None = None
    tokens_before: tuple[int, ...] = ()
    grid: Grid | None = None
    memory: Tensor | None = None
    window: int | None = None
    block: int = 0
    depth: int = 1

    @property
    def patches(self) -> Tensor:
        """Return the tokens (B, T - prefix, C) that may be reduced."""
        return self.tokens[:, self.prefix :]

    @property
    def class_scores(self) -> Tensor:
        """Return the class token's attention to each patch, averaged over heads: (B, N)."""
        assert self.class_attention is not None
        return self.class_attention.mean(dim=1)[:, self.prefix :]

    def heads(self, kind: str) -> Tensor:
        """Return the "keys" or "values" (B, H, N, d) of the patch tokens, head by head, without gradient."""
        per_head = self.values if kind == "values" else self.keys
        if per_head is None:
            raise ValueError(f"features={kind!r} do not exist before a block's attention; 'tokens' do")
        return per_head[:, :, self.prefix :].detach()

    def features(self, kind: str) -> Tensor:
        """Return features (B, N, D) that tell how alike patch tokens are, without gradient.

        kind: "keys" (the paper's choice) or "values", averaged over heads; "keys_per_head", the unit keys of every
            head, concatenated; or the "tokens".
        """
        if kind == "tokens":
            return self.patches.detach()
        patches = self.heads(kind)
        if kind == "keys_per_head":
            return F.normalize(patches.float(), dim=-1).transpose(1, 2).flatten(2)
        return mean_over_heads(patches)

    def group(self, labels: Tensor, counts: Tensor | None = None, *, n_groups: int | None = None) -> Grouping:
        """Return the grouping of patch labels (B, N), numbered from 0, in n_groups; None means the target."""
        n_groups = self.target if n_groups is None else n_groups
        assert n_groups is not None
        return Grouping.of(labels, n_groups, self.prefix, self.sizes, counts)

    def keep(self, positions: Tensor, counts: Tensor | None = None) -> Grouping:
        """Keep the patches at positions (B, K) and drop all others; see `Grouping.select`."""
        return Grouping.select(positions, self.patches.shape[1], self.prefix, self.sizes, counts)

    def keep_best(self, scores: Tensor) -> Grouping:
        """Keep as many patches as the target says, those with the highest scores (B, N), in the order they have."""
        assert self.target is not None
        return self.keep(scores.topk(self.target, dim=1).indices.sort(dim=1).values)

    def keep_where(self, chosen: Tensor) -> Grouping:
        """Keep the patches that are chosen, (B, N) bool: as many as there are in each image, padded to the most."""
        refuse_onnx("counts that differ from image to image")
        counts = chosen.sum(dim=1)
        order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
        return self.keep(order[:, : max(1, int(counts.max()))], counts)


@dataclass(frozen=True)
class Outcome:
    """What a method decided.

    grouping: of the tokens in the view; for soft methods each token's strongest group.
    tokens: (B, G, C), prefix tokens first, where the new tokens are not means of their groups.
    loss: a scalar to add to the training loss; collected by `agglo.trace`.
    policy: (B, G), 1 for tokens that attention may see from here on and 0 for others, prefix tokens 1; may carry
        gradients. None leaves attention as it is.
    processed: (B, G), 1 for tokens that the blocks update from here on, prefix tokens 1, and 0 for those that pass them
        by: m block(x) + (1 - m) x. No other token attends to these, unless a policy says how. For methods that act
        before a block.
    weights: (B, K, N), how much of each patch token is in the new ones, for soft methods.
    mean: how the tokens of a group become one, see `Grouping.merge`; means nothing where tokens are given.

    >>> pairs = agglo.grouping.Grouping.of(torch.tensor([[0, 0, 1]]), n_groups=2)
    >>> agglo.methods.Outcome(pairs).new_tokens(torch.tensor([[[1.0], [3.0], [5.0]]])).tolist()
    [[[2.0], [5.0]]]
    """

    grouping: Grouping
    tokens: Tensor | None = None
    loss: Tensor | None = None
    policy: Tensor | None = None
    processed: Tensor | None = None
    weights: Tensor | None = None
    mean: Mean = "plain"

    def new_tokens(self, tokens: Tensor) -> Tensor:
        """Return what the tokens (B, T, C) of the view become: (B, G, C), prefix tokens first."""
        return self.grouping.merge(tokens, self.mean) if self.tokens is None else self.tokens


class Method(ABC):
    """A token-reduction method. Options are the keyword arguments of its constructor, kept under the same names.

    Two of the same class with the same options are equal, unless they have parameters.

    place: where: between a block's attention and its MLP, or before the block. `may_act_before` says whether users may
        move it there.
    needs_class_attention, needs_attention_received: what to compute for its views; may depend on the options.
    takes_threshold: whether a threshold may decide in place of a count.
    proportional: whether attention weighs its tokens by their sizes, unless the user says otherwise.
    varies: whether images keep the target, at most as many, or about as many.
    tokens_return: whether dropped tokens are gone, or pass by one block (the method is then asked at every block to
        which its schedule gives fewer tokens than all), or one stage (then where its stages begin).
    remembers: whether `remember` carries a number for every token from block to block, which its views then hold.
    kind, reach, reference: for `agglo.list_methods()`; the description is the first sentence of the class's docstring.
    reads_grid: whether it needs to know where patches are.
    listed: whether `list_methods` shows it: a benchmark's ceiling is no method to use.
    for_diffusion: whether it is for the self-attention of diffusion models alone.

    `agglo.register` shows how one is written.

    >>> print(agglo.methods.create("tome", features="tokens"))
    tome:features=tokens
    """

    name: ClassVar[str]
    place: ClassVar[Place] = "after_attention"
    needs_class_attention: bool = False
    needs_attention_received: bool = False
    takes_threshold: ClassVar[bool] = False
    reads_grid: bool = False
    listed: ClassVar[bool] = True
    for_diffusion: ClassVar[bool] = False
    proportional: bool = True
    varies: ClassVar[Varies] = "no"
    tokens_return: ClassVar[Return] = "never"
    remembers: ClassVar[bool] = False
    kind: ClassVar[Kind] = "merges hard"
    reach: ClassVar[str] = "any keep rate"
    reference: ClassVar[str] = ""

    @property
    def mixes(self) -> bool:
        """Whether several tokens may become one, so that padding could get into tokens that show an image."""
        return self.kind in ("merges hard", "merges soft")

    @property
    def may_act_before(self) -> bool:
        """Whether users may let it act before a block, where there are no keys and values."""
        return self.kind == "merges hard"

    def reachable(self, n_tokens: int, target: int) -> int:
        """Return how many of n_tokens are really left when target are asked for; ValueError if out of reach."""
        return target

    def least(self, n_tokens: int) -> int:
        """Return the fewest of n_tokens that one reduction can leave; a forward pass asks for no fewer."""
        return 1

    def stages(self, n_tokens: int, asked: Sequence[int], grid: Grid | None) -> list[int]:
        """Return the patch tokens left after each reduction, starting from n_tokens, when `asked` are asked for."""
        return list(accumulate(asked, self.reachable, initial=n_tokens))[1:]

    def schedule(self, keep_rate: Rates, blocks: Sequence[int] | None) -> Schedule:
        """Return what a keep rate means to this method."""
        return Stages(keep_rate, blocks)

    def window_in(self, proposed: int | None) -> int | tuple[int, int] | None:
        """Return the sides of the windows it clusters in where a view proposes some; None for all tokens at once."""
        return None

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError for what the method cannot do; called by `agglo.apply` before anything changes."""
        if (self.needs_class_attention or self.remembers) and shape.prefix == 0:
            raise ValueError(
                f"{self.name} asks what the class token attends to, and this model has none; class_token=True gives "
                "one to a ViTAdapter"
            )
        needs_attention = self.needs_class_attention or self.needs_attention_received or self.remembers
        if needs_attention and shape.place == "before_block" and 0 in shape.blocks:
            raise ValueError(
                f"{self!r} goes by the attention of the block before, and block 0 has none: reduce at a later block"
            )

    def build(self, shape: ModelShape) -> None:  # noqa: B027 most have nothing to build
        """Make parameters whose shapes depend on the model; called by `agglo.apply`, once per instance."""

    @abstractmethod
    def reduce(self, view: View) -> Outcome:
        """Decide what becomes of the tokens."""

    def decide(self, view: View) -> Outcome:
        """Call `reduce`, and check what it returns the first time that it reduces so many tokens at a stage.

        To read the values of labels off the device takes time, and would break a graph that is compiled, traced or
        captured.

        Raises:
            TypeError, ValueError: The outcome breaks a rule, which the message names.
        """
        outcome = self.reduce(view)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return outcome
        checked: set[Any] = self.__dict__.setdefault("_checked", set())
        asked = (view.stage, view.training, view.tokens.shape[1], view.target)
        if asked in checked:
            return outcome
        grouping = getattr(outcome, "grouping", None)
        if not isinstance(grouping, Grouping):
            raise TypeError(f"method {self.name!r} must return an Outcome of a Grouping, not {outcome!r}")
        labels = grouping.labels
        on_paper = type(labels) is not Tensor or labels.device.type == "meta"
        if not on_paper and not (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
            if (rule := _broken_rule(self, view, outcome)) is not None:
                raise ValueError(f"method {self.name!r} breaks a rule at stage {view.stage}: {rule}")
            checked.add(asked)
        return outcome

    def remember(self, class_attention: Tensor, memory: Tensor | None) -> Tensor:
        """Return what to remember (B, T) of the tokens, for a method that `remembers`.

        Called without gradients, with the class token's attention (B, H, T), at every block from the one before the
        first reduction on; the memory of tokens that pass by stays.
        """
        raise NotImplementedError

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the options and their defaults; `inspect.Parameter.empty` where one must be given."""
        parameters = inspect.signature(cls).parameters.items()
        return {name: parameter.default for name, parameter in parameters if parameter.kind not in _CATCH_ALL}

    def options(self) -> dict[str, Any]:
        """Return the options of this instance: the attributes that are called like the constructor's arguments."""
        return {name: getattr(self, name) for name in self.defaults()}

    def __eq__(self, other: object) -> bool:
        if isinstance(self, nn.Module) or type(self) is not type(other):
            return self is other
        assert isinstance(other, Method)
        return self.options() == other.options()

    def __hash__(self) -> int:
        return object.__hash__(self) if isinstance(self, nn.Module) else hash(type(self))

    def __str__(self) -> str:
        """Return the text that `agglo.apply` reads: the name, and the options that are not the defaults."""
        options = {name: value for name, value in self.options().items() if value != self.defaults()[name]}
        return format_call(self.name, (), options)

    def __repr__(self) -> str:
        """Return the call that makes an equal one."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options().items())})"


def _broken_rule(method: Method, view: View, outcome: Outcome) -> str | None:
    batch, n_tokens, width = view.tokens.shape
    grouping, prefix, n_groups = outcome.grouping, view.prefix, outcome.grouping.n_groups
    if grouping.prefix != prefix:
        return f"the grouping's prefix must be view.prefix = {prefix}, not {grouping.prefix}"
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "grouping.labels": (grouping.labels, (batch, n_tokens)),
        "grouping.sizes": (grouping.sizes, (batch, n_groups)),
        "grouping.weights": (grouping.weights, (batch, n_tokens)),
        "grouping.counts": (grouping.counts, (batch,)),
        "grouping.chosen": (grouping.chosen, (batch, n_groups)),
        "tokens": (outcome.tokens, (batch, n_groups, width)),
        "policy": (outcome.policy, (batch, n_groups)),
        "processed": (outcome.processed, (batch, n_groups)),
        "weights": (outcome.weights, (batch, n_groups - prefix, n_tokens - prefix)),
        "loss": (outcome.loss, ()),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            return f"{name} must have the shape {shape}, not {tuple(tensor.shape)}"
        whole = name in ("grouping.labels", "grouping.counts", "grouping.chosen")
        if tensor is not None and not (tensor.dtype == torch.int64 if whole else tensor.is_floating_point()):
            return f"{name} must be {'int64' if whole else 'floating point'}, not {tensor.dtype}"
    # As many groups as `stages` promised, which is what is reported. Behind a mask, or while a method learns, all
    # tokens may stay.
    left, masked = n_groups - prefix, outcome.policy is not None or outcome.processed is not None
    masked = masked or (view.training and isinstance(method, nn.Module))
    as_many = view.target is None or left == view.target or (method.varies == "at_most" and left < view.target)
    if not (as_many or masked or method.varies == "about"):
        hint = "A method that cannot leave as many says so in reachable() or stages(), or by `varies`"
        return f"view.target = {view.target} patch tokens are to be left, not {left}. {hint}"
    return _broken_label(view, outcome) if view.tokens.isfinite().all() else None  # NaN in a model means NaN out of it


def _broken_label(view: View, outcome: Outcome) -> str | None:
    grouping, prefix, n_groups = outcome.grouping, view.prefix, outcome.grouping.n_groups
    labels, groups = grouping.labels, torch.arange(n_groups, device=grouping.labels.device)
    patches = labels[:, prefix:]
    if not (labels[:, :prefix] == groups[:prefix]).all():
        return f"the {prefix} prefix tokens must be groups 0 to {prefix - 1}, not {labels[0, :prefix].tolist()}"
    strange = (patches < prefix) | (patches >= n_groups)
    strange = strange & (patches != -1) if grouping.drops else strange
    if strange.any():
        dropped = ", or -1" if grouping.drops else "; -1 drops a token, in a grouping with drops=True"
        return f"patch labels must be from {prefix} to {n_groups - 1}{dropped}: one is {int(patches[strange][0])}"
    if outcome.weights is not None:
        return None
    filled = torch.zeros(len(labels), n_groups + 1, dtype=torch.bool, device=labels.device)
    filled = filled.scatter(1, labels % (n_groups + 1), True)[:, :-1]  # -1 becomes a column that is cut off
    padding = grouping.sizes == 0
    empty = ~filled if grouping.counts is None else ~filled & ~padding
    if empty.any():
        return "every group must have a token: of image {}, group {} has none".format(*empty.nonzero()[0].tolist())
    if grouping.chosen is not None and not ((labels.gather(1, grouping.chosen) == groups) | padding).all():
        return "the token that is chosen for a group must be one of its members"
    return None


class LearnedMethod(Method, nn.Module):
    """A method with parameters. `build` creates them; stage m of a view is entry m of the model's stages.

    >>> class Scored(agglo.methods.LearnedMethod):
    ...     name = "scored"
    ...
    ...     def build(self, shape):
    ...         self.score = torch.nn.Linear(shape.width, 1)
    ...
    ...     def reduce(self, view):
    ...         kept = self.score(view.patches)[..., 0].topk(view.target, dim=1).indices
    ...         return agglo.methods.Outcome(view.keep(kept))
    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), Scored(), keep_rate=0.5)
    >>> [name for name in model.state_dict() if "score" in name]
    ['agglo_method.score.weight', 'agglo_method.score.bias']
    """


def require_grid(method: Method, grid: Grid | None, n_tokens: int) -> Grid:
    """Return the grid of n_tokens patches; raise ValueError if they do not make one."""
    if grid is None or grid[0] * grid[1] != n_tokens:
        known = "in no order that the host knows" if grid is None else f"not {grid[0]} x {grid[1]}"
        raise ValueError(f"{method.name} needs a grid of patches: these {n_tokens} are {known}")
    return grid


@constant_result
def _is_exporting_onnx() -> bool:
    """Ask outside the graph, where torch.compile takes it for False, since the exporter compiles first."""
    return torch.onnx.is_in_onnx_export()


def refuse_onnx(operation: str) -> None:
    """Raise RuntimeError while a model is exported to ONNX, which has no operator for this operation."""
    if _is_exporting_onnx():
        raise RuntimeError(f"ONNX has no operator for {operation}; a model with method='tome' exports")


def square(n_tokens: int) -> Grid | None:
    """Return the square grid of n_tokens patches, if there is one."""
    side = isqrt(n_tokens)
    return (side, side) if side * side == n_tokens else None
