"""The models of the page: those that come with agglo, or the user's own in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.checks import choice
from agglo.embedded import detector as embedded_detector
from agglo.embedded import generator as embedded_generator
from agglo.hosts.diffusers.applying import denoisers
from agglo.lab.data.fashion_mnist import CLASSES
from agglo.lab.playground.detection import detect
from agglo.lab.playground.fronts import Fronts, without_folders
from agglo.lab.playground.images import FIRST, PHOTO, chosen_image, scenes
from agglo.lab.playground.settings import choose
from agglo.lab.playground.sharing import Locked
from agglo.lab.playground.tokens import EMBEDDED, Classifier, compare, open_classifier
from agglo.lab.tasks.detection.model.mask_rcnn import Detector
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator
from agglo.models.opening import ModelSpec
from agglo.utils.devices import require_device

LONGEST_PROMPT = 300  # characters
_STEPS, _STEPS_OF_PIPELINE = 25, 50
_TUNED_DETECTOR = "agglo_fashion_detector"  # what results of `agglo tune` call the embedded detector


@dataclass(frozen=True)
class Wanted:
    """The models that the user asked for."""

    classifier: ModelSpec = EMBEDDED
    pipeline: str | None = None  # a folder of diffusers; None is the embedded generator
    steps: int | None = None  # of denoising
    detector: str = embedded_detector.NAME  # as `open_detector` takes it
    tuned: Sequence[Path] = ()  # files of `agglo tune`
    device: str = "cpu"


class Models:
    """All models of the page, each opened when it is first used and used by one visitor at a time."""

    def __init__(self, wanted: Wanted = Wanted()) -> None:  # noqa: B008 it cannot change
        require_device(wanted.device)
        self.wanted = wanted
        self.fronts = Fronts(wanted.tuned)
        self.takes_prompts = wanted.pipeline is not None
        self.steps = wanted.steps or (_STEPS_OF_PIPELINE if self.takes_prompts else _STEPS)
        self.first_image = FIRST if wanted.classifier == EMBEDDED else PHOTO
        self.classifier_title = without_folders(wanted.classifier.name)
        self._denoisers: tuple[str, ...] = ()  # class names of the pipeline's denoisers, once it is open
        self.classifier: Locked[Classifier] = Locked(self._open_classifier)
        self.generator: Locked[Generator] = Locked(self._open_generator)
        self.detector: Locked[Opened] = Locked(self._open_detector)

    def tab_for_model(self, name: str) -> str | None:
        """Return the tab that runs the model of a result of `agglo tune`; None if no tab does.

        A result holds the model's name as it was typed, or the class of a model that was tuned in Python without one.
        """
        wanted = self.wanted
        own_detector = wanted.detector != embedded_detector.NAME
        names = {
            "tokens": (wanted.classifier.name,),
            "synthesis": (wanted.pipeline, *self._denoisers) if wanted.pipeline else (embedded_generator.NAME,),
            "detection": (wanted.detector, Detector.__name__) if own_detector else (_TUNED_DETECTOR,),
        }
        # As paths: a folder may be typed with a slash at its end or without.
        return next((tab for tab, known in names.items() if Path(name) in map(Path, known)), None)

    def _open_classifier(self) -> Classifier:
        classifier = open_classifier(self.wanted.classifier, self.wanted.device)
        # The first pass compiles the clustering and fills caches: no visitor is to see its time.
        compare(classifier, chosen_image(self.first_image), [choose("atc", "average", keep_rate=0.5)])
        return classifier

    def _open_generator(self) -> Generator:
        if self.wanted.pipeline is None:
            return EmbeddedGenerator(device=self.wanted.device, steps=self.steps)
        generator = PipelineGenerator(self.wanted.pipeline, device=self.wanted.device, steps=self.steps)
        self._denoisers = tuple(type(each).__name__ for each in denoisers(generator.reduced))
        return generator

    def _open_detector(self) -> Opened:
        opened = open_detector(self.wanted.detector)
        opened.model.to(self.wanted.device)
        detect(opened, scenes()[0].image, choose("atc", "average", keep_rate=0.5))
        return opened

    def request(self, what: str, seed: float) -> Request:
        """Return what a visitor wants drawn.

        A class of the embedded generator, or a prompt, which is the number of a class for a pipeline that takes
        classes.
        """
        if seed != int(seed):
            raise ValueError(f"seed={seed:g} must be a whole number")
        if not self.takes_prompts:
            choice("class", what[:40], CLASSES)
            return Request("image", what, CLASSES.index(what), int(seed))
        if not what.strip() or len(what) > LONGEST_PROMPT:
            raise ValueError(f"The prompt has {len(what)} characters; 1 to {LONGEST_PROMPT} are accepted.")
        return Request("image", what, int(what) if what.isdecimal() else 0, int(seed))

    def warm_up(self, *, only_own: bool = False) -> None:
        """Open all models, so that nobody waits for them; or the user's own, to find out what is wrong with them."""
        own: dict[Locked[Any], bool] = {
            self.classifier: self.wanted.classifier != EMBEDDED,
            self.detector: self.wanted.detector != embedded_detector.NAME,
            self.generator: self.takes_prompts,
        }
        for model, is_own in own.items():
            if is_own or not only_own:
                with model.use():
                    pass
