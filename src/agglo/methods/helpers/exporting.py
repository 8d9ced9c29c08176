"""Methods that an exported file cannot hold say so, in place of an exporter's own complaint."""

from __future__ import annotations

import torch

from agglo.compiling import constant_result


@constant_result
def _is_becoming_onnx() -> bool:
    """Asked outside the graph, where torch.compile takes it for False, since the exporter tries that road too."""
    return torch.onnx.is_in_onnx_export()


def refuse_onnx(what: str) -> None:
    """RuntimeError while a model becomes an ONNX file. what: the thing that such a file has no operator for."""
    if _is_becoming_onnx():
        raise RuntimeError(f"ONNX has no operator for {what}; a model with method='tome' exports")
