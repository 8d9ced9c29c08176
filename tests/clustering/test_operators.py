"""torch.compile, torch.export and operator checks pass over the clustering."""

import pytest
import torch

import agglo
from agglo.clustering import operators
from tests.support.clusters import distinct_distances, tokens

ONE_SET = [
    {"linkage": "complete", "k": None, "threshold": 0.6},
    {"grid": (4, 5), "window": 3, "spread": "need"},
]


@pytest.mark.parametrize("asked", ONE_SET, ids=str)
def test_compile_and_export_pass_over_the_clustering(asked):
    class Clusterer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            found = agglo.cluster(x * 2, **{"k": x.shape[1] // 2, "weights": weights.half() + 1, **asked})
            return found[0] + found[1].unsqueeze(1) if isinstance(found, tuple) else found + 1

    model, weights = Clusterer(), 50 * torch.rand(5, 20, generator=torch.Generator().manual_seed(0))
    x = tokens(5, 20)
    expected = model(x, weights)
    assert not torch.equal(expected, model(x, torch.zeros(5, 20)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weights), expected)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (x[:2], weights[:2]), dynamic_shapes=({0: batch}, {0: batch}))
    assert torch.equal(program.module()(x, weights), expected)


def test_compile_with_other_shapes_and_tree_and_cut():
    def cut_tree(x: torch.Tensor) -> torch.Tensor:
        return agglo.clustering.cut(agglo.linkage(x), x.shape[1] // 2) + agglo.cluster(x, x.shape[1] // 2)

    compiled = torch.compile(cut_tree, fullgraph=True, backend="aot_eager")
    for shape in ((2, 20), (3, 31)):
        x = tokens(*shape)
        assert torch.equal(compiled(x), cut_tree(x))


def test_operators_keep_their_contract():
    features, distances = tokens(2, 12), distinct_distances(2, 12)
    weights, ks = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 5])
    for arguments in (
        (features, "cosine", "average", 3, None, None, True, "cpu", weights),
        (distances, "precomputed", "single", None, ks, None, True, "torch", None),
        (distances, "precomputed", "complete", None, None, 0.3, False, "cpu", None),
    ):
        for grid in ([], [3, 4]):
            torch.library.opcheck(operators.cluster, (*arguments, grid, [], "even"))
    in_windows = (features, "cosine", "average", 6, None, None, True, "", None, [3, 4], [2, 2], "need")
    torch.library.opcheck(operators.cluster, in_windows)
    torch.library.opcheck(operators.tree, (features, "euclidean", "complete", True, weights))
