"""Compare what reduced models compute with another commit: a refactoring changes nothing here.

    git worktree add --detach ../before COMMIT
    PYTHONPATH=../before/src python -m tools.snapshot write before.pt
    python -m tools.snapshot compare before.pt

Every family of tests/support/families.py runs with every method at keep rate 0.5. A snapshot holds the outputs, the
keys of the state dict and, for a timm model, how many graphs `torch.compile` makes of a pass.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import agglo
from agglo.testing import tensors
from tests.support.families import FAMILIES, Family

TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file")
    arguments = parser.parse_args()
    now = snapshot()
    if arguments.action == "write":
        torch.save(now, arguments.file)
        return 0
    then = torch.load(arguments.file)
    problems = [f"{cell}: {what}" for cell in {**then, **now} if (what := difference(then.get(cell), now.get(cell)))]
    print("\n".join(problems) or f"all {len(now)} cells are the same")
    return 1 if problems else 0


def snapshot() -> dict[str, Any]:
    """Return outputs and state dict's keys of every family with every method, or the error that it is refused with."""
    timm_vit = next(family for family in FAMILIES if family.library == "timm")
    explained = torch._dynamo.explain(agglo.apply(timm_vit.fresh(), keep_rate=0.5))(timm_vit.inputs())
    found: dict[str, Any] = {"compile": f"{explained.graph_count} graphs, {explained.graph_break_count} breaks"}
    for family in FAMILIES:
        for info in agglo.list_methods():
            try:
                found[f"{family.id}/{info.name}"] = run(family, info.name)
            except Exception as error:  # what a method refuses must stay the same too
                found[f"{family.id}/{info.name}"] = type(error).__name__
        print(family.id, file=sys.stderr)
    return found


@torch.no_grad()
def run(family: Family, method: str) -> tuple[list[str], list[torch.Tensor]]:
    model = family.fresh()
    torch.manual_seed(0)
    agglo.apply(model, method, keep_rate=0.5)
    outputs = [tensor.float().clone() for tensor in tensors(family.run(model, family.inputs()))]
    return list(model.state_dict()), outputs


def difference(then: Any, now: Any) -> str | None:
    """Return what differs between two cells of a snapshot, if anything does."""
    if not (isinstance(then, tuple) and isinstance(now, tuple)):
        return None if then == now else f"{then} before, {now} now"
    shapes = [[tuple(tensor.shape) for tensor in outputs] for _, outputs in (then, now)]
    if then[0] != now[0] or shapes[0] != shapes[1]:
        return "other keys of the state dict" if then[0] != now[0] else f"shapes {shapes[0]} before, {shapes[1]} now"
    gap = max((float((a - b).abs().nan_to_num().max()) for a, b in zip(then[1], now[1], strict=True)), default=0.0)
    return f"outputs differ by {gap:.1e}" if gap > TOLERANCE else None


if __name__ == "__main__":
    sys.exit(main())
