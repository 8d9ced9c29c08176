"""Hosts: the libraries whose models agglo makes faster."""

from agglo.hosts.common.swap import UnsupportedModelError

__all__ = ["UnsupportedModelError"]
