"""Not in the paper: what padding does to AP: a scene alone, and the same scene beside a wider one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from agglo.detection.data import make_scenes, transforms_for
from agglo.detection.evaluation.matches import interval
from agglo.detection.evaluation.one_pass import KINDS, Images, evaluate
from agglo.detection.specs import open_detector
from agglo.experiments.tables import Column, Table
from agglo.patching import apply, remove
from agglo.reproduce.classifiers import DENSE, FASHION, data_need
from agglo.reproduce.detectors import HeldImages, is_kept, keeping, samples_in
from agglo.reproduce.estimates import Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.items.beyond import BEYOND

CASES = ((DENSE, None), ("atc", 0.5), ("atc", 0.25), ("tome", 0.5))
_SCENE = 3 * (3e8 + Size(64, 12).multiply_adds())  # with the wider picture beside it
ALONE, APART, MERGED = "alone", "padded, apart", "padded, merged"


class Beside(nn.Module):
    """A detector that sees a picture of twice the width beside every image, whose detections are left out."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: list[Tensor], original_sizes: list[tuple[int, int]]) -> list[Any]:
        [image] = images
        wide = torch.cat([image, image.flip(-1)], dim=-1)
        found: list[Any] = self.detector([image, wide], original_sizes=[*original_sizes, wide.shape[-2:]])
        return found[:1]


class Padding(Item):
    name = "padding"
    shows = BEYOND
    about = (
        "AP of the embedded detector on scenes alone and beside a picture of twice their width, which pads them: half "
        "of the patches then show nothing, and are merged apart (agglo's default) or like everything else (as in the "
        "released detectors)"
    )
    in_full = False

    def __init__(self, scenes: int = 150, resamples: int = 500) -> None:
        self._scenes, self._resamples = scenes, resamples

    def needs(self, miniature: bool) -> Sequence[Need]:
        return (data_need(FASHION),)

    def cells(self, settings: Settings) -> Sequence[Cell]:
        return [
            Cell({"method": method, "keep_rate": rate, "way": way}, (FASHION,), self._scenes * _SCENE)
            for method, rate in CASES
            for way in (ALONE, APART, MERGED)
            if way != MERGED or rate is not None
        ]

    def open(self, settings: Settings) -> RunCell:
        opened = open_detector("embedded")
        detector: Any = opened.model

        @cache
        def images() -> Images:
            scenes = make_scenes(settings.data[FASHION], self._scenes, 0, "val")
            return HeldImages(scenes, transforms_for(opened.spec.image_size)[1])

        def judge(about: Mapping[str, Any]) -> dict[str, Any]:
            remove(detector)
            detector.backbone.padding = "merge" if about["way"] == MERGED else "apart"
            if about["keep_rate"] is not None:
                apply(detector, about["method"], keep_rate=about["keep_rate"])
            folder = settings.run_folder(self.name, _folder(about))
            model = detector if about["way"] == ALONE else Beside(detector)
            return evaluate(model, images(), keep=keeping(images(), folder))

        def run(cell: Cell) -> dict[str, Any]:
            about = dict(cell.about)
            found = judge(about)
            alone = {**about, "way": ALONE}
            folders = [settings.run_folder(self.name, _folder(each)) for each in (about, alone)]
            if not is_kept(folders[1]):
                judge(alone)
            ours, others = (samples_in(folder, self._resamples) for folder in folders)
            counted = {"scenes": self._scenes, "resamples": self._resamples}
            aps = {f"{kind}_AP": found[f"{kind}_AP"] for kind in KINDS.values()}
            return {
                **aps,
                "to_alone": {kind: interval(ours[kind] - others[kind]) for kind in KINDS.values()},
                **counted,
            }

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        if not results:
            return []
        columns = [Column("reduced", left=True), Column("scenes", left=True)]
        columns += [Column(f"{kind} AP") for kind in KINDS.values()]
        rows = []
        for result in results:
            rate = "" if result["keep_rate"] is None else f" {result['keep_rate']:.0%}"
            rows.append([f"{result['method']}{rate}", _way(result), *(_told(result, kind) for kind in KINDS.values())])
        text = (
            f"{results[0]['scenes']} scenes; in brackets the 95 % interval of the difference to the scenes alone, over "
            "resampled scenes."
        )
        return [Section("AP by way of padding", Table(columns, rows), text)]


def _folder(about: Mapping[str, Any]) -> str:
    return f"{about['method']}-{about['keep_rate']}-{about['way'].replace(', ', '-')}"


def _way(result: Result) -> str:
    return "padded" if result["keep_rate"] is None and result["way"] == APART else str(result["way"])


def _told(result: Result, kind: str) -> str:
    told = f"{result[f'{kind}_AP']:.1f}"
    if result["way"] == ALONE:
        return told
    low, high = result["to_alone"][kind]
    return f"{told} [{low:+.1f}, {high:+.1f}]"


ITEMS = (Padding(),)
