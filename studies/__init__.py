"""Studies that are no item of the paper.

Run from the repository, by `python -m studies NAME`, with the options of `agglo reproduce`. They are not part of the
package.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module

from agglo.lab.paper.study import Study

_MODULES = ("atc", "recipe", "healing", "diffusion", "terrain", "nuclei")
study = partial(Study, command="python -m studies", shows="beyond the paper", gpu_hours="under 0.1")


@cache
def studies() -> dict[str, Study]:
    """Return all studies by name."""
    found = [item for module in _MODULES for item in import_module(f"studies.{module}").ITEMS]
    return {item.name: item for item in found}
