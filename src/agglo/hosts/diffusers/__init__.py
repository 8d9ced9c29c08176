"""Token merging for the models and pipelines of diffusers.

Around each self-attention the image tokens are grouped, attention runs with one token per group, and every member gets
a copy of its group's output.
"""

from agglo.hosts.diffusers.applying import Level, applied, apply, counted, is_diffusion, remove
from agglo.hosts.diffusers.state import AttentionStep, Site, generation

__all__ = ["AttentionStep", "Level", "Site", "applied", "apply", "counted", "generation", "is_diffusion", "remove"]
