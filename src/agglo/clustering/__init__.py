"""Features or distances to group labels: exact agglomerative clustering, batched, on every device."""

from agglo.clustering.api import cluster, cut, linkage
from agglo.clustering.dispatch import BackendStatus, backends

__all__ = ["BackendStatus", "backends", "cluster", "cut", "linkage"]
