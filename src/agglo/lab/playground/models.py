"""The models of the page: those that come with agglo, or the user's own in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from agglo import embedded, tuned
from agglo.checks import choice
from agglo.config import ReductionConfig
from agglo.embedded import generator as embedded_generator
from agglo.lab.data.fashion_mnist import CLASSES
from agglo.lab.options import EMBEDDED
from agglo.lab.playground.detection import detect
from agglo.lab.playground.images import FIRST, PHOTO, chosen_image, scenes
from agglo.lab.playground.settings import choose
from agglo.lab.playground.tokens import Classifier, compare, open_classifier
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.lab.tasks.synthesis.data.requests import Request
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator, Generator, PipelineGenerator
from agglo.models.opening import ModelSpec
from agglo.utils.devices import require_device

T = TypeVar("T")
_TUNED_DETECTOR = "agglo_fashion_detector"  # what results of `agglo tune` call the embedded detector


class Locked(Generic[T]):
    """A value that is made when it is first used, and used by one thread at a time.

    A reduction is applied to the model itself: without the lock, a visitor's pass could begin with what another visitor
    applied a moment later. It also keeps passes of one model from slowing each other down while they are timed.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._made, self._lock = cache(make), threading.Lock()

    @contextmanager
    def use(self) -> Iterator[T]:
        with self._lock:
            yield self._made()


@dataclass
class Models:
    """All models of the page, each opened when it is first used and used by one visitor at a time."""

    spec: ModelSpec = EMBEDDED  # the classifier
    pipeline: str | None = None  # a folder of diffusers; None is the embedded generator
    steps: int | None = None  # of denoising; None is the generator's default
    detector_name: str = embedded.DETECTOR  # as `open_detector` takes it
    tuned_files: Sequence[Path] = ()  # results of `agglo tune`, beside the ready-made ones
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_device(self.device)
        self._tuned = {name: tuned.read(name) for name in tuned.names()}
        self._tuned |= {path.stem: tuned.read(path) for path in self.tuned_files}
        self.first_image = FIRST if self.spec == EMBEDDED else PHOTO
        self.classifier: Locked[Classifier] = Locked(self._open_classifier)
        self.generator: Locked[Generator] = Locked(self._open_generator)
        self.detector: Locked[Opened] = Locked(self._open_detector)

    def tuned_for(self, tab: str) -> list[tuple[str, str]]:
        """Return the results of `agglo tune` for the model of a tab, as choices of a menu: name, and config as text."""
        model = {
            "tokens": self.spec.name,
            "synthesis": self.pipeline or embedded_generator.NAME,
            "detection": _TUNED_DETECTOR if self.detector_name == embedded.DETECTOR else self.detector_name,
        }[tab]
        # Names are compared as paths: a folder may be typed with a slash at its end or without.
        return [
            (f"tuned: {name}", str(ReductionConfig.from_dict(result["config"])))
            for name, result in self._tuned.items()
            if result["config"] is not None and Path(result["model"]["name"]) == Path(model)
        ]

    def request(self, what: str, seed: int) -> Request:
        """Return what a visitor wants drawn: a class of the embedded generator, or the prompt of a pipeline.

        The prompt of a pipeline that takes classes is the number of one.
        """
        if self.pipeline is None:
            label = CLASSES.index(choice("class", what, CLASSES))
        else:
            label = int(what) if what.isdecimal() else 0
        return Request("image", what, label, seed)

    def open_first(self) -> None:
        """Open the classifier, which the page shows first, and the user's own models, which may be wrong."""
        own_detector = nullcontext() if self.detector_name == embedded.DETECTOR else self.detector.use()
        own_generator = nullcontext() if self.pipeline is None else self.generator.use()
        with self.classifier.use(), own_detector, own_generator:
            pass

    def _open_classifier(self) -> Classifier:
        classifier = open_classifier(self.spec, self.device)
        # The first pass compiles the clustering and fills caches: no visitor is to see its time.
        compare(classifier, chosen_image(self.first_image), [choose("atc", keep_rate=0.5)])
        return classifier

    def _open_generator(self) -> Generator:
        given: dict[str, Any] = {"device": self.device, **({} if self.steps is None else {"steps": self.steps})}
        return EmbeddedGenerator(**given) if self.pipeline is None else PipelineGenerator(self.pipeline, **given)

    def _open_detector(self) -> Opened:
        opened = open_detector(self.detector_name)
        opened.model.to(self.device)
        detect(opened, scenes()["scene 1"], choose("atc", keep_rate=0.5))
        return opened
