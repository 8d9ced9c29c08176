"""The embedded detector: garments in scenes made from Fashion-MNIST, boxes and masks; 1.5 million parameters.

Its weights are part of the package in half precision, trained by `make mini-detection`. The file says what detector
they are of: `agglo.lab.tasks.detection.specs.open_detector("embedded")` builds it.
"""

from __future__ import annotations

from pathlib import Path

NAME = "embedded"
WEIGHTS = Path(__file__).with_name("agglo_fashion_detector.safetensors")
