"""What callers may pass to cluster, linkage and cut, what they get back, and what is refused."""

import doctest

import numpy as np
import pytest
import torch

import agglo
from agglo.clustering import api, dispatch
from agglo.clustering.distances import pairwise
from tests.support.clusters import (
    BACKENDS,
    FAST_BACKENDS,
    LINKAGES,
    distinct_distances,
    sklearn_labels,
    symmetric,
    tokens,
)


@pytest.mark.parametrize("module", [api, dispatch])
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0


# --- shapes and counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_one_set_is_a_batch_of_one(linkage, backend):
    features = tokens(1, 20)
    whole = agglo.cluster(features, 5, linkage, backend=backend)
    assert whole.shape == (1, 20)
    assert whole.dtype == torch.int64
    assert torch.equal(agglo.cluster(features[0], 5, linkage, backend=backend), whole[0])
    labels, counts = agglo.cluster(features[0], linkage=linkage, threshold=0.5, backend=backend)
    assert labels.shape == (20,)
    assert counts.shape == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_limits_of_k(backend):
    features = tokens(3, 9)
    for k in (9, 10, 10**9):
        assert torch.equal(agglo.cluster(features, k, backend=backend), torch.arange(9).expand(3, 9))
    assert torch.equal(agglo.cluster(features, 1, backend=backend), torch.zeros(3, 9, dtype=torch.int64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_one_token_and_empty_batch(linkage, backend):
    assert agglo.cluster(tokens(2, 1), 1, linkage, backend=backend).tolist() == [[0], [0]]
    assert agglo.linkage(tokens(2, 1), linkage, backend=backend).shape == (2, 0, 4)
    assert agglo.cluster(tokens(0, 7), 3, linkage, backend=backend).shape == (0, 7)
    assert agglo.linkage(tokens(0, 7), linkage, backend=backend).shape == (0, 6, 4)
    labels, counts = agglo.cluster(tokens(0, 7), linkage=linkage, threshold=0.1, backend=backend)
    assert (labels.shape, counts.shape) == ((0, 7), (0,))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_one_k_per_item(linkage, backend):
    distances = distinct_distances(4, 23)
    ks = [1, 7, 23, 40]
    for form in (ks, tuple(ks), torch.tensor(ks), torch.tensor(ks, dtype=torch.int32)):
        labels = agglo.cluster(distances=distances, k=form, linkage=linkage, backend=backend)
        for b, k in enumerate(ks):
            assert torch.equal(labels[b], agglo.cluster(distances=distances[b], k=k, linkage=linkage, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_input_is_left_as_it_was(backend):
    distances = distinct_distances(3, 30)
    strided = torch.stack([distances, distances * 2], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    before = strided.clone()
    expected = agglo.cluster(distances=distances, k=7, backend=backend)
    assert torch.equal(agglo.cluster(distances=strided, k=7, backend=backend), expected)
    assert torch.equal(agglo.cluster(distances=strided.transpose(1, 2), k=7, backend=backend), expected)
    assert torch.equal(strided, before)
    features = tokens(3, 30).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(agglo.cluster(features, 7, backend=backend), agglo.cluster(tokens(3, 30), 7, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_only_the_upper_triangle_counts(linkage, backend):
    distances = distinct_distances(2, 40)
    skewed = distances.triu(1) + distances.tril(-1) * (1 + 3e-5)
    labels = agglo.cluster(distances=skewed, k=11, linkage=linkage, backend=backend)
    assert torch.equal(labels, agglo.cluster(distances=distances, k=11, linkage=linkage, backend=backend))
    tree = agglo.linkage(distances=skewed, linkage=linkage, backend=backend)
    assert torch.equal(tree, agglo.linkage(distances=distances, linkage=linkage, backend=backend))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype_is_clustered_in_float32(dtype):
    features = tokens(2, 50).to(dtype)
    assert pairwise(features, "cosine").dtype == torch.float32
    assert torch.equal(agglo.cluster(features, 10), agglo.cluster(features.float(), 10))
    distances = symmetric(tokens(2, 50, 50).abs()).to(dtype)
    assert torch.equal(agglo.cluster(distances=distances, k=10), agglo.cluster(distances=distances.float(), k=10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_change_the_distances(dtype):
    features = tokens(2, 60)
    expected = pairwise(features, "cosine")
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(pairwise(features, "cosine"), expected)
        labels = agglo.cluster(features, 12)
    assert torch.equal(labels, agglo.cluster(features, 12))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_cosine_distance_ignores_the_scale_of_features(scale):
    features = tokens(2, 40)
    assert torch.equal(agglo.cluster(features * scale, 9), agglo.cluster(features, 9))


@pytest.mark.parametrize("linkage", LINKAGES)
def test_metrics_against_scikit_learns_own(linkage):
    from sklearn.metrics.pairwise import cosine_distances, euclidean_distances

    features = tokens(1, 70, seed=4)[0]
    for metric, oracle in (("cosine", cosine_distances), ("euclidean", euclidean_distances)):
        expected = oracle(features.double().numpy())
        np.testing.assert_allclose(pairwise(features[None], metric)[0].numpy(), expected, atol=2e-6)
        labels = agglo.cluster(features, 12, linkage, metric=metric)
        np.fill_diagonal(expected, 0)
        assert np.array_equal(labels.numpy(), sklearn_labels(expected, 12, linkage))


def test_euclidean_accepts_zero_vectors():
    features = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0]])
    assert agglo.cluster(features, 2, metric="euclidean").tolist() == [0, 0, 1]


def test_no_gradient_flows():
    features = tokens(1, 10).requires_grad_()
    assert not agglo.cluster(features, 3).requires_grad
    assert not agglo.linkage(features).requires_grad


@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_order_of_tokens_does_not_matter(linkage, backend):
    distances = distinct_distances(1, 45)[0]
    order = torch.randperm(45, generator=torch.Generator().manual_seed(1))
    labels = agglo.cluster(distances=distances, k=9, linkage=linkage, backend=backend)
    shuffled = agglo.cluster(distances=symmetric_permutation(distances, order), k=9, linkage=linkage, backend=backend)
    together = labels[order][:, None] == labels[order][None]
    assert torch.equal(shuffled[:, None] == shuffled[None], together)


def symmetric_permutation(distances, order):
    return distances[order][:, order]


# --- refusals ---------------------------------------------------------------------------------------------------------

FEATURES, DISTANCES = tokens(2, 6), distinct_distances(2, 6)


def spoilt(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": FEATURES}, "either k or threshold, not neither"),
        ({"features": FEATURES, "k": 2, "threshold": 0.1}, "either k or threshold, not both"),
        ({"k": 2}, "either features or distances, not neither"),
        ({"features": FEATURES, "distances": DISTANCES, "k": 2}, "either features or distances, not both"),
        ({"features": FEATURES, "k": 0}, "k=0 must be at least 1"),
        ({"features": FEATURES, "k": -3}, "k=-3 must be at least 1"),
        ({"features": FEATURES, "k": 2.5}, "k=2.5 must be an int"),
        ({"features": FEATURES, "k": True}, "k=True must be an int"),
        ({"features": FEATURES, "k": [2, 0]}, r"k=\[2, 0\] must be at least 1 for every item"),
        ({"features": FEATURES, "k": [2, 2, 2]}, r"one per batch item: shape \(2,\), got shape \(3,\)"),
        ({"features": FEATURES, "k": torch.tensor([1.0, 2.0])}, "k must hold ints, got dtype torch.float32"),
        ({"features": FEATURES, "threshold": float("nan")}, "threshold=nan"),
        (
            {"features": FEATURES, "k": 2, "linkage": "ward"},
            "linkage='ward' is not known; accepted: 'single', 'average'",
        ),
        ({"features": FEATURES, "k": 2, "metric": "l1"}, "metric='l1' is not known; accepted: 'cosine', 'euclidean'"),
        ({"features": FEATURES, "k": 2, "backend": "gpu"}, "backend='gpu' is not known; accepted: 'reference', 'cpu'"),
        ({"features": FEATURES[0, 0], "k": 2}, r"features must have shape \(B, N, D\) or \(N, D\), got \(16,\)"),
        (
            {"features": FEATURES.long(), "k": 2},
            "features must hold real floating point numbers, got dtype torch.int64",
        ),
        ({"features": FEATURES.numpy(), "k": 2}, "features must be a torch.Tensor, got ndarray"),
        ({"features": torch.zeros(2, 0, 4), "k": 2}, r"at least one token, got shape \(2, 0, 4\)"),
        ({"distances": DISTANCES[:, :4], "k": 2}, r"must be square, .* got \(2, 4, 6\)"),
        ({"features": spoilt(FEATURES, (1, 2, 3), float("nan")), "k": 2}, "features of batch item 1 hold NaN"),
        ({"features": spoilt(FEATURES, (0, 2, 3), float("inf")), "k": 2}, "features of batch item 0 hold NaN or inf"),
        ({"features": spoilt(FEATURES, (1, 4), 0.0), "k": 2}, "batch item 1 hold a zero vector at token 4"),
        ({"distances": spoilt(DISTANCES, (1, 2, 3), float("nan")), "k": 2}, "distances of batch item 1 hold NaN"),
        ({"distances": spoilt(DISTANCES, (1, 3, 2), float("nan")), "k": 2}, "distances of batch item 1 hold NaN"),
        (
            {"distances": spoilt(DISTANCES, (0, 2, 3), -float("inf")), "k": 2},
            "distances of batch item 0 hold NaN or inf",
        ),
        ({"distances": spoilt(DISTANCES, (1, 2, 3), 9.0), "k": 2}, "distances of batch item 1 are not symmetric"),
        ({"distances": spoilt(DISTANCES, (1, 2, 3), DISTANCES[1, 2, 3] + 3e-4), "k": 2}, "item 1 are not symmetric"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        agglo.cluster(**arguments)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_bad_numbers_are_found_wherever_they_stand(backend):
    inspect = dispatch.module(backend).inspect
    for n in (3, 17, 64, 200):
        for place in ((0, 0), (0, n - 1), (n - 1, 0), (n - 1, n - 1), (n // 2, n // 3)):
            for value in (float("nan"), float("inf"), -float("inf")):
                distances = distinct_distances(3, n)
                distances[1][place] = value
                finite, _, _ = inspect(distances)
                assert finite.tolist() == [True, False, True], (n, place, value)


def test_asymmetry_is_measured_where_there_is_any_and_symmetry_passes():
    inspect = dispatch.module("cpu").inspect
    for n in (2, 33, 300, 1500):
        distances = distinct_distances(1, n)
        assert inspect(distances) is None, "symmetric beyond doubt"
        distances[0, 0, 1] += 0.5
        _, asymmetry, scale = inspect(distances)
        assert float(asymmetry) == pytest.approx(0.5, rel=1e-5)
        assert float(scale) == float(distances.abs().max())


def test_unchecked_bad_numbers_still_give_k_groups():
    for value in (float("nan"), float("inf"), -float("inf")):
        distances = spoilt(DISTANCES, 1, value)
        for backend in FAST_BACKENDS:
            for linkage in LINKAGES:
                labels = agglo.cluster(distances=distances, k=2, linkage=linkage, check=False, backend=backend)
                expected = agglo.cluster(distances=DISTANCES[0], k=2, linkage=linkage, backend=backend)
                assert torch.equal(labels[0], expected)
                assert len(labels[1].unique()) == 2


def test_linkage_and_cut_refuse_too():
    with pytest.raises(ValueError, match="linkage='ward'"):
        agglo.linkage(FEATURES, "ward")
    tree = agglo.linkage(FEATURES)
    with pytest.raises(ValueError, match="k=0"):
        agglo.cut(tree, 0)
    with pytest.raises(ValueError, match=r"result of agglo.linkage.*\(2, 6, 16\)"):
        agglo.cut(FEATURES, 2)


# --- backends ---------------------------------------------------------------------------------------------------------


def test_backends_say_why_not():
    statuses = {status.name: status for status in agglo.backends()}
    assert statuses["reference"].usable
    assert statuses["cpu"].usable
    assert statuses["torch"].usable
    if not torch.cuda.is_available():
        assert not statuses["triton"].usable
        assert "CUDA" in statuses["triton"].note


def test_choice_of_backend(monkeypatch):
    cpu, gpu, other = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    assert dispatch.choose(None, cpu) == "cpu"
    assert dispatch.choose(None, other) == "torch"
    monkeypatch.setattr(dispatch, "_triton_status", lambda: (True, ""))
    assert dispatch.choose(None, gpu) == "triton"
    monkeypatch.setattr(dispatch, "_triton_status", lambda: (False, "triton is not installed"))
    assert dispatch.choose(None, gpu) == "torch"
    with pytest.raises(ValueError, match="backend='triton' cannot run here: triton is not installed"):
        dispatch.choose("triton", gpu)


def test_variable_forces_a_backend(monkeypatch):
    monkeypatch.setenv("AGGLO_BACKEND", "torch")
    assert dispatch.choose(None, torch.device("cpu")) == "torch"
    assert dispatch.choose("cpu", torch.device("cpu")) == "cpu", "an argument wins over the variable"
    monkeypatch.setenv("AGGLO_BACKEND", "fast")
    with pytest.raises(ValueError, match="AGGLO_BACKEND='fast' is not known"):
        agglo.cluster(FEATURES, 2)
    with pytest.raises(ValueError, match="needs tensors on cpu, got cuda"):
        dispatch.choose("cpu", torch.device("cuda"))
