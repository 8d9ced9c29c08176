"""Hosts: the libraries whose models agglo makes faster."""

from agglo.hosts.base import UnsupportedModelError

__all__ = ["UnsupportedModelError"]
