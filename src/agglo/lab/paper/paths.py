"""Where data and weights are, from what a person typed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from agglo.embedded.classifier import FULL as FASHION_MNIST
from agglo.lab.paper.study import Study

WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".bin", ".torch", ".npz", ".onnx")


def find(
    kind: Literal["data", "weights"], typed: Sequence[str], items: Iterable[Study], miniature: bool
) -> dict[str, Path]:
    """Return the folder of each data set, or the file or folder of each set of weights, by name.

    Typed is `NAME=PATH`, what is called NAME, but for the ending of weights, or a folder of such. Fashion-MNIST, in
    miniature, is also looked for where a system's package puts it, and Inception in an installed package.
    """
    from agglo.lab.tasks.synthesis.evaluation.fid import installed_inception

    endings, found = ["", *(WEIGHT_FILES if kind == "weights" else ())], dict[str, Path]()
    if kind == "weights" and (inception := installed_inception()):
        found["inception"] = inception
    elif kind == "data" and miniature and FASHION_MNIST.exists():
        found["fashion-mnist"] = FASHION_MNIST
    names = dict.fromkeys(need.name for item in items for need in item.needs(miniature) if need.kind == kind)
    accepted = ", ".join(names) or "nothing"
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
