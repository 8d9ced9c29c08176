"""Features or distances to group labels: exact agglomerative clustering, batched, on every device.

`linkage` (any tokens) and `grid` (tokens on a grid) have a definition, `reference.py`, and fast implementations;
`centres.py` has clusters around chosen tokens.
"""

# The function `linkage` takes the place of the subpackage of that name as an attribute of this package;
# `from agglo.clustering.linkage import ...` reaches the subpackage.
from agglo.clustering.api import cluster, cut, linkage
from agglo.clustering.operators import BackendStatus, backends

__all__ = ["BackendStatus", "backends", "cluster", "cut", "linkage"]
