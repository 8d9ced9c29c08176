"""Vision-language models: fewer tokens leave the vision tower, and the prompt has fewer placeholders."""

from agglo.hosts.vlm.applying import OUTPUTS, image_tokens, late_outlet, merged_plan, require_output, tower_outlet
from agglo.hosts.vlm.outlet import Outlet
from agglo.hosts.vlm.processors import AdaptedProcessor, adapted, restored
from agglo.hosts.vlm.registry import find, outlet_of, outlets

__all__ = [
    "OUTPUTS",
    "AdaptedProcessor",
    "Outlet",
    "adapted",
    "find",
    "image_tokens",
    "late_outlet",
    "merged_plan",
    "outlet_of",
    "outlets",
    "require_output",
    "restored",
    "tower_outlet",
]
