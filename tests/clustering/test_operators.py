"""torch.compile, torch.export and operator checks pass over the clustering."""

import pytest
import torch

import agglo
from agglo.clustering import ops
from tests.support.clusters import LINKAGES, distinct_distances, tokens


class Clusterer(torch.nn.Module):
    def __init__(self, linkage: str = "average", threshold: float | None = None) -> None:
        super().__init__()
        self.linkage, self.threshold = linkage, threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if self.threshold is not None:
            labels, counts = agglo.cluster(x, linkage=self.linkage, threshold=self.threshold)
            return labels + counts.unsqueeze(1)
        return agglo.cluster(x, x.shape[1] // 2, self.linkage) + 1


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("threshold", [None, 0.6])
def test_compile_full_graph(linkage, threshold):
    model = Clusterer(linkage, threshold)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for shape in ((2, 20), (3, 31)):
        x = tokens(*shape)
        assert torch.equal(compiled(x), model(x))


def test_compile_tree_and_cut():
    def cut_tree(x: torch.Tensor) -> torch.Tensor:
        return agglo.cut(agglo.linkage(x), 4)

    x = tokens(2, 20)
    assert torch.equal(torch.compile(cut_tree, fullgraph=True, backend="aot_eager")(x), cut_tree(x))


def test_export_with_dynamic_batch():
    model = Clusterer()
    program = torch.export.export(model, (tokens(2, 20),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}})
    x = tokens(5, 20)
    assert torch.equal(program.module()(x), model(x))


def test_operators_keep_their_contract():
    features, distances = tokens(2, 8), distinct_distances(2, 8)
    for arguments in (
        (features, "cosine", "average", 3, None, None, True, "cpu"),
        (distances, "precomputed", "single", 1, torch.tensor([2, 5]), None, True, "torch"),
        (distances, "precomputed", "complete", 1, None, 0.3, False, "cpu"),
    ):
        torch.library.opcheck(ops.cluster, arguments)
    torch.library.opcheck(ops.linkage, (features, "euclidean", "complete", True, "cpu"))
