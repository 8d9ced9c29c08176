"""Compare what reduced models compute with another commit: a refactoring changes nothing here.

    git worktree add --detach ../before COMMIT
    PYTHONPATH=../before/src python -m tools.snapshot write before.safetensors
    python -m tools.snapshot compare before.safetensors

Every family of tests/support/families.py runs with every method at keep rate 0.5. A snapshot holds the outputs, the
keys of the state dict and, for a timm model, how many graphs `torch.compile` makes of a pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import agglo
from agglo.testing import tensors
from tests.support.families import FAMILIES, Family

TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    outputs, facts = snapshot()
    if arguments.action == "write":
        save_file(outputs, arguments.file, metadata={"facts": json.dumps(facts)})
        print(f"{len(outputs)} tensors of {len(facts)} cells written to {arguments.file}")
        return 0
    problems = differences(outputs, facts, arguments.file)
    print("\n".join(problems) or f"all {len(outputs)} tensors of {len(facts)} cells are the same")
    return 1 if problems else 0


def snapshot() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the outputs of every family with every method, and one line of facts about each."""
    outputs: dict[str, Tensor] = {}
    facts: dict[str, str] = {"compile": graphs()}
    for family in FAMILIES:
        for info in agglo.list_methods():
            cell = f"{family.id}/{info.name}"
            try:
                found, facts[cell] = run(family, info.name)
            except Exception as error:  # what a method refuses must stay the same too
                facts[cell] = type(error).__name__
                continue
            outputs |= {f"{cell}/{index}": tensor for index, tensor in enumerate(found)}
        print(family.id, file=sys.stderr)
    return outputs, facts


@torch.no_grad()
def run(family: Family, method: str) -> tuple[list[Tensor], str]:
    model = family.fresh()
    torch.manual_seed(0)
    agglo.apply(model, method, keep_rate=0.5)
    found = [tensor.float().clone().contiguous() for tensor in tensors(family.run(model, family.inputs()))]
    return found, f"state dict of {hash_of(list(model.state_dict()))}"


def hash_of(names: list[str]) -> str:
    return f"{len(names)} keys, {sum(ord(letter) * (i + 1) for i, letter in enumerate(','.join(names))) % 10**9}"


def graphs() -> str:
    """Return how many graphs and graph breaks `torch.compile` makes of a reduced timm model."""
    timm_vit = next(family for family in FAMILIES if family.library == "timm")
    model = agglo.apply(timm_vit.fresh(), keep_rate=0.5)
    explained = torch._dynamo.explain(model)(timm_vit.inputs())
    return f"{explained.graph_count} graphs, {explained.graph_break_count} breaks"


def differences(outputs: dict[str, Tensor], facts: dict[str, str], before: Path) -> list[str]:
    with safe_open(before, "pt") as file:
        then = json.loads(file.metadata()["facts"])
        problems = [
            f"{cell}: {then.get(cell)} before, {now} now" for cell, now in facts.items() if then.get(cell) != now
        ]
        problems += [f"{cell} is gone" for cell in then if cell not in facts]
        for name, now in outputs.items():
            if name not in file.keys():  # noqa: SIM118 it is no dict
                continue
            old = file.get_tensor(name)
            if old.shape != now.shape:
                problems.append(f"{name}: shape {tuple(old.shape)} before, {tuple(now.shape)} now")
            elif (gap := float((old - now).abs().nan_to_num().max())) > TOLERANCE:
                problems.append(f"{name}: outputs differ by {gap:.1e}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
