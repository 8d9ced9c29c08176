"""Features or distances to group labels: exact agglomerative clustering, batched, on every device.

One folder per operation, each with `reference.py` (the definition), `cpu`, `torch.py` and `triton.py` side by side as
far as there is one: `linkage` (any tokens), `grid` (tokens on a grid), `centres` (clusters around chosen tokens).
"""

# The function `linkage` takes the place of the subpackage of that name as an attribute of this package;
# `from agglo.clustering.linkage import ...` reaches the subpackage.
from agglo.clustering.api import cluster, cut, linkage
from agglo.clustering.dispatch import BackendStatus, backends

__all__ = ["BackendStatus", "backends", "cluster", "cut", "linkage"]
