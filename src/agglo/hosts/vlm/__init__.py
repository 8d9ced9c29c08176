"""Vision-language models: fewer tokens leave the vision tower, and the prompt has fewer placeholders."""

from agglo.hosts.vlm.applying import image_tokens, late_reduction, tower_reduction
from agglo.hosts.vlm.families import find
from agglo.hosts.vlm.processors import AdaptedProcessor, adapted, restored
from agglo.hosts.vlm.reduction import VLMReduction, reduced_vlms, vlm_reduction_of

__all__ = [
    "AdaptedProcessor",
    "VLMReduction",
    "adapted",
    "find",
    "image_tokens",
    "late_reduction",
    "reduced_vlms",
    "restored",
    "tower_reduction",
    "vlm_reduction_of",
]
