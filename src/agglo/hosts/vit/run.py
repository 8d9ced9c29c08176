"""The loop over transformer blocks with fewer and fewer tokens: the same for every host and every method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.swap import PassSetup
from agglo.hosts.vit.base import Parts
from agglo.hosts.vit.passing import Call, Inject, Pass
from agglo.hosts.vit.passing import checkpointed as checkpointed
from agglo.hosts.vit.passing import directly as directly
from agglo.hosts.vit.reading import are_watched
from agglo.hosts.vit.relative import RelativeBias
from agglo.hosts.vit.restoring import Run as Run
from agglo.hosts.vit.rotary import Positions
from agglo.methods import Grid

Look = Callable[[Tensor], None]
_NOTHING: Mapping[int, Any] = MappingProxyType({})


def with_gain(x: Tensor, gain: Tensor, prefix: int) -> Tensor:
    """Tokens x (B, T, C) whose patches gained (B, T - prefix, C)."""
    return x + (F.pad(gain, (0, 0, prefix, 0)) if prefix else gain)


def run_blocks(
    setup: PassSetup,
    blocks: Sequence[nn.Module],
    x: Tensor,
    *,
    parts: Parts,
    prefix: int,
    training: bool,
    suffix: int = 0,
    depth: int | None = None,
    rotary: Positions | None = None,
    bias: RelativeBias | None = None,
    call: Call = directly,
    keep: Collection[int] = (),
    grid: Grid | None = None,
    inject: Mapping[int, Inject] = _NOTHING,
    look: Mapping[int, Look] = _NOTHING,
    between: Mapping[int, Inject] = _NOTHING,
    real: Tensor | None = None,
) -> Run:
    """Run tokens x (B, T, C), prefix tokens first and suffix tokens last, through the blocks, reducing by the plan
    and the method that the pass began with.

    The loop pauses where others have a say. They see every patch (B, T - prefix, C), in the original number and order:
    that of its group, or its last value if it was dropped or passes by.

    Where the caller of the pass reads tokens in front alone (`reading.py`), the last block runs for these alone, unless
    somebody would notice. They are then all that comes out.

    suffix: tokens at the end that are never merged. In traces and in `Run.reduced` they follow the prefix tokens.
    depth: blocks the schedule counts, where fewer are run.
    rotary: the tables of rotary position embeddings.
    bias: the tables of relative position bias.
    call: `directly`, or `checkpointed` for gradient checkpointing. The decision what to merge is never inside, so that
        it is taken once.
    keep: blocks after which full-length tokens are wanted.
    grid: (rows, columns) of the patches, for methods that ask where they are.
    inject: by the block before which it is called: what every patch gains, (B, T - prefix, C). The token of a group
        gains the size-weighted mean over its members; what was dropped gains its own.
    look: by the block after which it is called.
    between: by the block before which it is called, with all tokens (B, T, C): what every token gains, prefix and
        suffix tokens too, (B or 1, T, C). Merged and dropped tokens gain as above.
    real: (B, T - prefix) bool, patches of a padded batch that show some of an image, which never merge with those that
        show padding alone (`padding.py`). None where all do, or where it does not matter.
    """
    run = Pass(
        setup,
        parts,
        x,
        depth=len(blocks) if depth is None else depth,
        prefix=prefix,
        suffix=suffix,
        training=training,
        rotary=rotary,
        bias=bias,
        call=call,
        grid=grid,
        real=real,
    )
    last = len(blocks) - 1
    n_front = run.front(setup.front_only, bool(setup.traces), last)
    if n_front is not None and (last in keep or last in look or are_watched(blocks[last].modules())):
        n_front = None
    kept: list[Tensor] = []
    for index, block in enumerate(blocks):
        if index in inject:
            run.gain(inject[index])
        if index in between:
            run.add(between[index](run.full()))
        run.block(index, block, n_front if index == last else None)
        if index in look:
            look[index](run.patches())
        if index in keep:
            kept.append(run.full())
    for trace in setup.traces:
        trace.record(run.steps)
    return run.result(kept)
