"""Faster vision transformers by exact agglomerative token clustering."""

from agglo.clustering import backends, cluster, cut, linkage

__version__ = "0.1.0"
__all__ = ["backends", "cluster", "cut", "linkage"]
