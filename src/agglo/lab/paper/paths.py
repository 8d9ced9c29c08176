"""Where data and weights are, from what a person typed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from agglo.embedded.classifier import FULL as FASHION_MNIST
from agglo.lab.paper.study import Study

WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".bin", ".torch", ".npz", ".onnx")


def find_data(typed: Sequence[str], items: Iterable[Study], *, miniature: bool) -> dict[str, Path]:
    """Return the folder of each data set: `NAME=DIR`, or a folder that holds folders of these names.

    In miniature, Fashion-MNIST is also looked for where a system's package puts it.
    """
    installed = {"fashion-mnist": FASHION_MNIST} if miniature and FASHION_MNIST.exists() else {}
    return installed | _find("data", typed, items, miniature, [""])


def find_weights(typed: Sequence[str], items: Iterable[Study], *, miniature: bool) -> dict[str, Path]:
    """Return the file or folder of each set of weights: `NAME=FILE`, a file that is called NAME, or a folder of such.

    Inception is also looked for in an installed package.
    """
    from agglo.lab.tasks.synthesis.evaluation.fid import installed_inception

    inception = installed_inception()
    installed = {} if inception is None else {"inception": inception}
    return installed | _find("weights", typed, items, miniature, ["", *WEIGHT_FILES])


def _find(
    kind: str, typed: Sequence[str], items: Iterable[Study], miniature: bool, endings: Sequence[str]
) -> dict[str, Path]:
    names = dict.fromkeys(need.name for item in items for need in item.needs(miniature) if need.kind == kind)
    accepted = ", ".join(names) or "nothing"
    found: dict[str, Path] = {}
    for text in typed:
        name, equals, value = text.rpartition("=")
        path = Path(value).expanduser()
        if equals and name not in names:
            raise ValueError(f"--{kind} {text!r}: {name!r} is not needed; accepted: {accepted}")
        if not path.exists():
            raise ValueError(f"--{kind} {text!r}: {str(path)!r} does not exist")
        files = {f"{name}{ending}": name for name in names for ending in reversed(endings)}
        here = {files[path.name]: path} if path.name in files else {}
        here = here or {name: path / file for file, name in files.items() if (path / file).exists()}
        if equals:
            here = {name: path}
        if not here:
            raise ValueError(f"--{kind} {text!r} is and holds none of {accepted}; NAME=PATH says what it is")
        found |= here
    return found
