"""Top-1 accuracy off the shelf: a DeiT-Tiny that was never trained with fewer tokens, evaluated with them.

    python benchmarks/accuracy.py --checkpoint deit_tiny_patch16_224.safetensors --images imagenet-val

The images lie in class folders whose sorted order is the class index. Results are written after every row.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timm.data import ImageDataset, create_transform
from torch.utils.data import DataLoader

import agglo
from agglo.study.model_loading import ModelSpec, build
from agglo.study.progress import progress
from agglo.study.records import machine, write_json

VARIANTS = (("single", "atc"), ("average", "atc"), ("complete", "atc"), (None, "tome"))


@dataclass(frozen=True)
class Result:
    method: str
    linkage: str | None
    keep_rate: float
    tokens: list[int]
    top1: float
    images: int


def accuracy(model: torch.nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    right = total = 0
    with torch.inference_mode():
        for images, targets in batches:
            right += int((model(images).argmax(dim=1) == targets).sum())
            total += len(targets)
    return 100 * right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--keep-rate", nargs="+", type=float, default=[0.9, 0.7, 0.5, 0.25])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/accuracy.json"))
    arguments = parser.parse_args()

    model = build(ModelSpec(arguments.model, arguments.checkpoint))
    # DeiT's own protocol, 256 / 224; timm's default for it crops a little less and costs half a point.
    transform = create_transform(224, interpolation="bicubic", crop_pct=0.875)
    dataset = ImageDataset(str(arguments.images), transform=transform)
    batches = list(DataLoader(dataset, batch_size=100, num_workers=2))
    results = [Result("dense", None, 1.0, [], accuracy(model, batches), len(dataset))]
    with progress(len(VARIANTS) * len(arguments.keep_rate), "evaluated") as advance:
        for keep_rate in arguments.keep_rate:
            for linkage, method in VARIANTS:
                options = {} if linkage is None else {"linkage": linkage}
                try:
                    agglo.apply(model, method, keep_rate=keep_rate, **options)
                except ValueError as error:  # ToMe cannot leave less than half at a stage
                    advance(f"{method} at {keep_rate:g} cannot: {error}")
                    continue
                counts = sorted(set(agglo.reduction(model).counts), reverse=True)
                top1 = accuracy(model, batches)
                results.append(Result(method, linkage, keep_rate, counts, top1, len(dataset)))
                write_json(arguments.output, {"machine": machine(), "results": [asdict(result) for result in results]})
                advance(f"{method} {linkage or ''} at {keep_rate:g}: {top1:.2f} %")
                agglo.remove(model)

    print("| keep rate | dense | ATC single | ATC average | ATC complete | ToMe |\n|---|---|---|---|---|---|")
    print(f"| 100 % | {results[0].top1:.2f} | | | | |")
    for keep_rate in arguments.keep_rate:
        found = {(result.linkage, result.method): result.top1 for result in results if result.keep_rate == keep_rate}
        cells = [f"{found[variant]:.2f}" if variant in found else "cannot" for variant in VARIANTS]
        print(f"| {keep_rate:.0%} | | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
