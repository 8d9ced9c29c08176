"""torch.compile, torch.export and operator checks pass over the clustering."""

import pytest
import torch

import agglo
from agglo.clustering import local, ops
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


def test_compile_and_export_with_weights():
    class Weighted(torch.nn.Module):
        def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return agglo.cluster(x * 2, x.shape[1] // 2, weights=weights.half() + 1) + 1

    model, weights = Weighted(), 50 * torch.rand(5, 20, generator=torch.Generator().manual_seed(0))
    x = tokens(5, 20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weights), model(x, weights))
    assert not torch.equal(model(x, weights), model(x, torch.zeros(5, 20)))
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (x[:2], weights[:2]), dynamic_shapes=({0: batch}, {0: batch}))
    assert torch.equal(program.module()(x, weights), model(x, weights))


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


def test_operators_keep_their_contract_with_weights():
    features, weights = tokens(2, 12), torch.rand(2, 12, generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(ops.cluster, (features, "cosine", "average", 3, None, None, True, "cpu", weights))
    torch.library.opcheck(ops.linkage, (features, "euclidean", "complete", True, "cpu", weights))
    for window in ([2, 2], []):
        arguments = (features, "cosine", "average", 3, 4, window, "even", 6, None, None, True, "", weights)
        torch.library.opcheck(local.cluster_local, arguments)
