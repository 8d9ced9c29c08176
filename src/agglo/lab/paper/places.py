"""Where data and weights are, from what a person typed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from agglo.lab.paper.study import Need, Study

WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".bin", ".torch", ".npz", ".onnx")


def data_places(typed: Sequence[str], items: Iterable[Study], *, miniature: bool) -> dict[str, Path]:
    """`NAME=DIR`, a folder that holds folders of these names, or the folder of the one data set that is needed."""
    names = _names(items, "data", miniature)
    found = standard_places() if miniature else {}
    for text in typed:
        name, path = _split(text, names, "data")
        if not path.exists():
            raise ValueError(f"--data {text!r}: {str(path)!r} does not exist")
        inside = {other: path / other for other in names if (path / other).exists()}
        if name is not None:
            found[name] = path
        elif inside:
            found |= inside
        elif len(names) == 1:
            found[names[0]] = path
        else:
            raise ValueError(f"--data {text!r} holds no folder called {_listed(names)}; NAME=DIR says what a folder is")
    return found


def weight_places(typed: Sequence[str], items: Iterable[Study], *, miniature: bool) -> dict[str, Path]:
    """`NAME=FILE`, a file or a folder that is called NAME, or a folder of such."""
    names = _names(items, "weights", miniature)
    found = {name: path for name, path in standard_weights().items() if name in names}
    for text in typed:
        name, path = _split(text, names, "weights")
        if not path.exists():
            raise ValueError(f"--weights {text!r}: {str(path)!r} does not exist")
        if name is not None:
            found[name] = path
        elif path.is_dir() and path.name in names:
            found[path.name] = path
        elif path.is_dir():
            found |= {other: path / other for other in names if (path / other).is_dir()}
            files = [(other, path / f"{other}{ending}") for other in names for ending in reversed(WEIGHT_FILES)]
            found |= {other: file for other, file in files if file.exists()}
        elif path.name.removesuffix(path.suffix) in names:
            found[path.name.removesuffix(path.suffix)] = path
        else:
            raise ValueError(f"--weights {text!r} is called like none of {_listed(names)}; NAME=FILE says what it is")
    return found


def standard_places() -> dict[str, Path]:
    """Data of miniatures that is where a system's package put it."""
    from agglo.embedded.classifier import FULL

    return {"fashion-mnist": FULL} if FULL.exists() else {}


def standard_weights() -> dict[str, Path]:
    """Weights that an installed package holds."""
    from agglo.lab.tasks.synthesis.evaluation.features import installed_inception

    found = installed_inception()
    return {} if found is None else {"inception": found}


def _names(items: Iterable[Study], kind: str, miniature: bool) -> list[str]:
    needs: list[Need] = [need for item in items for need in item.needs(miniature) if need.kind == kind]
    return list(dict.fromkeys(need.name for need in needs))


def _split(text: str, names: Sequence[str], option: str) -> tuple[str | None, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        return None, Path(text).expanduser()
    if name not in names:
        raise ValueError(f"--{option} {text!r}: {name!r} is not needed; accepted: {_listed(names)}")
    return name, Path(path).expanduser()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
