"""The models of the page: those that come with agglo, or the user's own in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.detection.model.mask_rcnn import Detector
from agglo.detection.specs import Opened, open_detector
from agglo.embedded import detector as embedded_detector
from agglo.embedded import generator as embedded_generator
from agglo.experiments.devices import require_device
from agglo.experiments.fashion_mnist import CLASSES
from agglo.experiments.models import ModelSpec
from agglo.hosts.diffusion.applying import denoisers
from agglo.playground.belonging import DETECTION, DETECTOR, SYNTHESIS, TOKENS
from agglo.playground.classifiers import EMBEDDED, Classifier, open_classifier
from agglo.playground.detection import detect
from agglo.playground.examples import FIRST, PHOTO, picture, scenes
from agglo.playground.fronts import Fronts
from agglo.playground.lending import Lent
from agglo.playground.naming import without_folders
from agglo.playground.settings import choose
from agglo.playground.tokens import compare
from agglo.synthesis.data.requests import Request
from agglo.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator

LONGEST_PROMPT = 300  # characters
_STEPS, _STEPS_OF_PIPELINE = 25, 50


@dataclass(frozen=True)
class Wanted:
    """What the user said. pipeline: a folder of diffusers. detector: as `open_detector` takes it. tuned: files of
    `agglo tune`."""

    classifier: ModelSpec = EMBEDDED
    pipeline: str | None = None
    steps: int | None = None
    detector: str = embedded_detector.NAME
    tuned: Sequence[Path] = ()
    device: str = "cpu"


class Models:
    """Each is made when it is first wanted, and lent to one visitor at a time."""

    def __init__(self, wanted: Wanted = Wanted()) -> None:  # noqa: B008 it cannot change
        require_device(wanted.device)
        self.wanted = wanted
        self.fronts = Fronts(wanted.tuned)
        self._denoisers: tuple[str, ...] = ()  # classes of the pipeline's, once it is made
        self.classifier: Lent[Classifier] = Lent(self._classifier)
        self.generator: Lent[Generator] = Lent(self._generator)
        self.detector: Lent[Opened] = Lent(self._detector)

    @property
    def classifier_name(self) -> str:
        return self.wanted.classifier.name

    @property
    def classifier_title(self) -> str:
        """For the page, which names no folder of the machine."""
        return without_folders(self.classifier_name)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """By tab, what results of `agglo tune` call the model that is open there: its name as typed, or the class of
        one that was tuned in Python without a name."""
        own_detector = self.wanted.detector != embedded_detector.NAME
        return {
            TOKENS: (self.classifier_name,),
            SYNTHESIS: (self.wanted.pipeline, *self._denoisers) if self.wanted.pipeline else (embedded_generator.NAME,),
            DETECTION: (self.wanted.detector, Detector.__name__) if own_detector else (DETECTOR,),
        }

    @property
    def steps(self) -> int:
        """Of denoising."""
        return self.wanted.steps or (_STEPS_OF_PIPELINE if self.takes_prompts else _STEPS)

    @property
    def first_picture(self) -> str:
        """The example that a classifier is shown first."""
        return FIRST if self.wanted.classifier == EMBEDDED else PHOTO

    def _classifier(self) -> Classifier:
        classifier = open_classifier(self.wanted.classifier, self.wanted.device)
        # The first pass compiles the clustering and fills caches: no visitor is to see its time.
        compare(classifier, picture(self.first_picture), [choose("atc", "average", keep_rate=0.5)])
        return classifier

    def _generator(self) -> Generator:
        if self.wanted.pipeline is None:
            return EmbeddedGenerator(device=self.wanted.device, steps=self.steps)
        generator = PipelineGenerator(self.wanted.pipeline, device=self.wanted.device, steps=self.steps)
        self._denoisers = tuple(type(each).__name__ for each in denoisers(generator.reduced))
        return generator

    def _detector(self) -> Opened:
        opened = open_detector(self.wanted.detector)
        opened.model.to(self.wanted.device)
        detect(opened, picture(scenes()[0].value), choose("atc", "average", keep_rate=0.5))
        return opened

    @property
    def takes_prompts(self) -> bool:
        return self.wanted.pipeline is not None

    def request(self, what: str, seed: float) -> Request:
        """What a visitor wants drawn: a class of the embedded generator, or a prompt (the number of a class for a
        pipeline that takes classes)."""
        if seed != int(seed):
            raise ValueError(f"seed={seed:g} must be a whole number")
        if not self.takes_prompts:
            if what not in CLASSES:
                raise ValueError(f"class={what[:40]!r} is not known; accepted: {', '.join(CLASSES)}")
            return Request("picture", what, CLASSES.index(what), int(seed))
        if not what.strip() or len(what) > LONGEST_PROMPT:
            raise ValueError(f"The prompt has {len(what)} characters; 1 to {LONGEST_PROMPT} are accepted.")
        return Request("picture", what, int(what) if what.isdecimal() else 0, int(seed))

    def open_own(self) -> None:
        """Make the user's own models now, so that what is wrong with them is told before the page opens."""
        if self.wanted.classifier != EMBEDDED:
            with self.classifier.borrowed():
                pass
        if self.wanted.pipeline is not None:
            with self.generator.borrowed():
                pass
        if self.wanted.detector != embedded_detector.NAME:
            with self.detector.borrowed():
                pass

    def warm_up(self) -> None:
        """Make all models, so that nobody waits for them."""
        lent: tuple[Lent[Any], ...] = (self.classifier, self.detector, self.generator)
        for each in lent:
            with each.borrowed():
                pass
