"""The models and images that come with agglo: nothing here needs a download.

The detector finds garments in scenes made from Fashion-MNIST, boxes and masks, with 1.5 million parameters. Its weights
are in half precision, trained by `make mini-detection`, and their file says what detector they are of:
`agglo.lab.tasks.detection.specs.open_detector("embedded")` builds it.
"""

from pathlib import Path

DETECTOR = "embedded"
DETECTOR_WEIGHTS = Path(__file__).with_name("agglo_fashion_detector.safetensors")

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
