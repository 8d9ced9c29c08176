"""What callers may pass to cluster, linkage and cut, what they get back, and what is refused."""

import doctest

import numpy as np
import pytest
import torch

import agglo
from agglo.clustering import api, gpu, operators
from agglo.clustering.distances import pairwise
from agglo.clustering.grid import windows
from tests.support.clusters import BACKENDS, FAST_BACKENDS, LINKAGES, distinct_distances, tokens


@pytest.mark.parametrize("module", [api, operators, windows])
def test_docstring_examples(module):
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_shapes_and_limits(linkage, backend):
    asked, features = {"linkage": linkage, "backend": backend}, tokens(3, 9)
    whole = agglo.cluster(features, 5, **asked)
    assert whole.shape == (3, 9) and whole.dtype == torch.int64
    assert torch.equal(agglo.cluster(features[0], 5, weights=torch.ones(9), **asked), whole[0])
    labels, counts = agglo.cluster(features[0], threshold=0.5, **asked)
    assert labels.shape == (9,) and counts.shape == ()
    for k in (9, 10**9):
        assert torch.equal(agglo.cluster(features, k, **asked), torch.arange(9).expand(3, 9))
    assert not agglo.cluster(features, 1, **asked).any()
    assert agglo.cluster(tokens(2, 1), 1, **asked).tolist() == [[0], [0]]
    assert agglo.cluster(tokens(0, 9), 3, **asked).shape == (0, 9)
    ks = [1, 5, 7]
    for form in (ks, tuple(ks), torch.tensor(ks), torch.tensor(ks, dtype=torch.int32)):
        labels = agglo.cluster(features, form, **asked)
        assert all(torch.equal(labels[b], agglo.cluster(features[b], k, **asked)) for b, k in enumerate(ks))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_input_of_any_strides_is_left_as_it_was_and_only_its_upper_triangle_counts(linkage, backend):
    distances, weights = distinct_distances(3, 30), 0.1 + torch.rand(3, 30, generator=torch.Generator().manual_seed(0))
    asked = {"k": 7, "linkage": linkage, "backend": backend}
    expected = agglo.cluster(distances=distances, weights=weights, **asked)
    strided, strided_weights = (torch.stack([x, x * 2], dim=-1)[..., 0] for x in (distances, weights))
    before = strided.clone(), strided_weights.clone()
    skewed = distances.triu(1) - distances.tril(-1)
    for given in (strided, strided.transpose(1, 2), skewed):
        assert torch.equal(agglo.cluster(distances=given, weights=strided_weights, **asked), expected)
    assert torch.equal(strided, before[0]) and torch.equal(strided_weights, before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype_is_clustered_in_float32(dtype):
    features, weights = tokens(2, 50).to(dtype), (0.1 + tokens(2, 50, 1)[..., 0].abs()).to(dtype)
    assert pairwise(features, "cosine").dtype == torch.float32
    expected = agglo.cluster(features.float(), 10, weights=weights.float())
    assert torch.equal(agglo.cluster(features, 10, weights=weights), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(agglo.cluster(features, 10, weights=weights), expected)
        assert torch.equal(pairwise(features, "cosine"), pairwise(features.float(), "cosine"))


def test_metrics_are_scikit_learns_at_any_scale():
    from sklearn.metrics.pairwise import cosine_distances, euclidean_distances

    features = tokens(1, 70, seed=4)
    for metric, oracle in (("cosine", cosine_distances), ("euclidean", euclidean_distances)):
        np.testing.assert_allclose(pairwise(features, metric)[0], oracle(features[0].double().numpy()), atol=2e-6)
    for scale in (1e-30, 1e-3, 1e30):
        assert torch.equal(agglo.cluster(features * scale, 9), agglo.cluster(features, 9))
    with_zero = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0]])
    assert agglo.cluster(with_zero, 2, metric="euclidean").tolist() == [0, 0, 1]


def test_trees_of_one_item_of_none_and_of_one_token_and_no_gradient():
    features, weights = tokens(3, 9).requires_grad_(), torch.ones(3, 9).requires_grad_()
    assert not agglo.cluster(features, 3, weights=weights).requires_grad
    assert torch.equal(agglo.linkage(features[0]), agglo.linkage(features, weights=weights)[0])
    assert agglo.linkage(tokens(2, 1)).shape == (2, 0, 4)
    assert agglo.linkage(tokens(0, 9)).shape == (0, 8, 4)


FEATURES, DISTANCES = tokens(2, 6), distinct_distances(2, 6)


def spoilt(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("named", "arguments"),  # single options of another kind: tests/test_options.py
    [
        ("k or threshold", {"k": None}),
        ("k or threshold", {"threshold": 0.1}),
        ("features or distances", {"features": None}),
        ("features or distances", {"distances": DISTANCES}),
        ("k=0", {"k": [2, 0]}),
        (r"\(3,\)", {"k": [2, 2, 2]}),
        ("float32", {"k": torch.tensor([1.0, 2.0])}),
        ("features must", {"features": torch.zeros(2, 0, 4)}),
        ("distances must", {"features": None, "distances": DISTANCES[:, :4]}),
        ("features of batch item 1 hold NaN", {"features": spoilt(FEATURES, (1, 2, 3), float("nan"))}),
        ("batch item 1 .* token 4", {"features": spoilt(FEATURES, (1, 4), 0.0)}),
        ("weights must", {"weights": torch.ones(2, 5)}),
        ("weights must", {"weights": torch.ones(2, 6, dtype=torch.int64)}),
        ("weights are on meta", {"weights": torch.ones(2, 6, device="meta")}),
    ],
)
def test_bad_arguments_are_named(named, arguments):
    with pytest.raises(ValueError, match=named):
        agglo.cluster(**{"features": FEATURES, "k": 2, **arguments})


def test_distances_that_are_not_finite_are_named():
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="distances of batch item 1 hold NaN"):
            agglo.linkage(distances=spoilt(DISTANCES, (1, 3, 2), value))


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_bad_weights_are_named(value):
    weights = spoilt(torch.ones(2, 6), (1, 4), value)
    for call in (
        lambda: agglo.cluster(FEATURES, 2, weights=weights),
        lambda: agglo.linkage(distances=DISTANCES, weights=weights),
        lambda: agglo.cluster(FEATURES, 3, weights=weights, grid=(2, 3), window=2),
    ):
        with pytest.raises(ValueError, match="weights of batch item 1 at token 4"):
            call()


def test_unchecked_bad_numbers_still_give_k_groups():
    for value in (float("nan"), float("inf"), -float("inf"), -1.0):
        spoilt_weights = {"features": FEATURES, "weights": spoilt(torch.ones(2, 6), (1, 4), value)}
        for backend in FAST_BACKENDS:
            for linkage in LINKAGES:
                for given in ({"distances": spoilt(DISTANCES, 1, value)}, spoilt_weights):
                    labels = agglo.cluster(**given, k=2, linkage=linkage, backend=backend, check=False)
                    assert [len(item.unique()) for item in labels] == [2, 2]


def test_choice_of_backend(monkeypatch):
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    assert [status.name for status in agglo.clustering.backends() if status.usable][:3] == list(BACKENDS)
    assert operators.choose("", cpu) == "cpu"
    assert operators.choose("", other) == "torch"
    monkeypatch.setattr(gpu, "why_not", lambda: "")
    assert operators.choose("", cuda) == "triton"
    monkeypatch.setattr(gpu, "why_not", lambda: "triton is not installed")
    assert operators.choose("", cuda) == "torch"
    with pytest.raises(ValueError, match=r"backend='triton' .* triton is not installed"):
        operators.choose("triton", cuda)
    with pytest.raises(ValueError, match="needs tensors on cpu, got cuda"):
        operators.choose("cpu", cuda)
    monkeypatch.setenv("AGGLO_BACKEND", "torch")
    assert operators.choose("", cpu) == "torch"
    assert operators.choose("cpu", cpu) == "cpu", "an argument wins over the variable"
    monkeypatch.setenv("AGGLO_BACKEND", "fast")
    with pytest.raises(ValueError, match="AGGLO_BACKEND='fast'"):
        agglo.cluster(FEATURES, 2)
