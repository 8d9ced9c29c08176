"""Search the ready-made results of `agglo tune` that come with the package, and summarise what they are worth.

    make ready-made CHECKPOINT=deit_tiny_patch16_224.safetensors IMAGES=imagenet DATA=fashion-mnist

DeiT-Tiny is searched for a speed and for GFLOPs, the embedded classifier for GFLOPs. Speed is that of one pass over the
whole batch, for the dense model and the reduced ones alike (AGGLO_SLICES=0).

Results go to src/agglo/tuned/, the logs of the searches, fronts and reports to results/tuned/, a summary into
docs/tune.md. A search that was stopped continues with its log; delete the log to search again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agglo import ReductionConfig, tuned
from agglo.embedded import classifier
from agglo.lab.paper.output import replace_between_marks
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings
from agglo.lab.tasks.classification.tuning import tune_on_folder
from agglo.models.opening import ModelSpec
from agglo.tuning import Tuned
from agglo.tuning.result import Quality
from agglo.utils.files import write_json
from agglo.utils.tables import Column, Table

PACKAGE = Path(tuned.__file__).parent
RESULTS = Path(__file__).parents[1] / "results" / "tuned"
PAGE = Path(__file__).parents[1] / "docs" / "tune.md"
NAME = "ready-made"
DEIT = "deit_tiny_patch16_224"
_SEED = 0


def deit(paths: argparse.Namespace, path: Path, **how: Any) -> Tuned:
    settings = EvaluationSettings(ModelSpec(DEIT, paths.checkpoint), paths.images, images=2000)
    return tune_on_folder(settings, path=path, **how)


def fashion_classifier(paths: argparse.Namespace, path: Path, **how: Any) -> Tuned:
    settings = EvaluationSettings(ModelSpec(classifier.NAME, pretrained=True), paths.data, images=2000)
    return tune_on_folder(settings, path=path, **how)


SEARCHES: dict[str, tuple[Callable[..., Tuned], dict[str, Any]]] = {
    f"{DEIT}-2.2x": (deit, {"speedup": 2.2, "minutes": 10}),
    f"{DEIT}-half": (deit, {"gflops": 0.5, "minutes": 10}),
    f"{classifier.NAME}-half": (fashion_classifier, {"gflops": 0.5, "minutes": 4}),
}


def summary() -> str:
    """Return a table of the ready-made results, each with the best of the other methods beside it."""
    columns = [Column("name", left=True), Column("method", left=True), Column("GFLOPs", ".3f"), Column("speed")]
    columns += [Column("distance"), Column("points lost")]
    rows: list[list[Any]] = []
    for name in tuned.names():
        content = tuned.read(name)
        for row in (content["chosen"], *content["beside"]):
            quality, config = Quality(**row["confirmation"]), ReductionConfig.from_dict(row["config"])
            linkage = config.create_method().options().get("linkage", "")
            shown = f"`{name}`" if row is content["chosen"] else "beside it"
            distance = f"{content['settings']['objective']} {quality.distance:.4f}"
            lost = "" if quality.drop is None else f"{quality.drop.points:.1f} +- {quality.drop.error:.1f}"
            speed = f"{row['speed']['median']:.2f}x"
            rows.append([shown, f"{config.method} {linkage}".strip(), row["gflops"], speed, distance, lost])
    machines = [tuned.read(name)["machine"] for name in tuned.names()]
    ran = " and ".join(sorted({machine["cpu"] for machine in machines}))
    dates = " and ".join(sorted({machine["date"][:10] for machine in machines}))
    head = f"`make ready-made`, {ran}, {dates}; distances and points lost are of images that the search did not see."
    return f"{head}\n\n{Table(columns, rows).markdown()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="of DeiT-Tiny")
    parser.add_argument("--images", type=Path, required=True, help="folder of ImageNet's validation images")
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's four idx files")
    parser.add_argument("--only", nargs="+", choices=SEARCHES, default=list(SEARCHES), metavar="NAME")
    arguments = parser.parse_args()
    os.environ["AGGLO_SLICES"] = "0"
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        run, how = SEARCHES[name]
        torch.manual_seed(_SEED)
        found = run(arguments, RESULTS / f"{name}.json", **how)
        if found.speedup <= 1:
            raise SystemExit(
                f"{name} is {found.speedup:.2f} times as fast as dense, which is worth no place in the package"
            )
        write_json(PACKAGE / f"{name}.json", {part: found.content[part] for part in found.content if part != "steps"})
        found.plot(RESULTS / f"{name}.png")
        (RESULTS / f"{name}.txt").write_text(f"{found.report()}\n", encoding="utf-8")
        print(found.report(), end="\n\n")
    PAGE.write_text(replace_between_marks(PAGE.read_text(encoding="utf-8"), NAME, summary()), encoding="utf-8")


if __name__ == "__main__":
    main()
