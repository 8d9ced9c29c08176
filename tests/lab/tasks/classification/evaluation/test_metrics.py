"""Top-k and mean average precision against their definitions, scikit-learn and torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import average_precision_score, top_k_accuracy_score
from torch import Tensor

from agglo.lab.tasks.classification.evaluation.metrics import MeanAveragePrecision, TopK, average_precision, metric_for


def average_precision_by_counting(scores: np.ndarray, positive: np.ndarray) -> float:
    """For every positive: among the images that score at least as high, the fraction that are positive."""
    precisions = []
    for own in scores[positive]:
        above = scores >= own
        precisions.append(positive[above].sum() / above.sum())
    return float(np.mean(precisions))


COLUMNS = st.integers(1, 30).flatmap(
    lambda n: st.tuples(
        # Few distinct values, so that ties are common.
        arrays(np.float32, n, elements=st.integers(-4, 4).map(float)),
        arrays(np.bool_, n),
    )
)


@settings(max_examples=200)
@given(COLUMNS)
def test_average_precision_is_its_definition_with_ties_too(column: tuple[np.ndarray, np.ndarray]) -> None:
    scores, positive = column
    found = float(average_precision(torch.from_numpy(scores), torch.from_numpy(positive)))
    if not positive.any():
        assert np.isnan(found)
    else:
        assert found == pytest.approx(average_precision_by_counting(scores, positive))
        assert found == pytest.approx(average_precision_score(positive, scores))


def test_mean_average_precision_is_that_of_torchmetrics() -> None:
    from torchmetrics.functional.classification import multilabel_average_precision

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 7, generator=generator)
    targets = (torch.rand(200, 7, generator=generator) < 0.2).float()
    metric = MeanAveragePrecision()
    metric.update(logits, targets)
    expected = multilabel_average_precision(logits.sigmoid(), targets.long(), num_labels=7, average="macro")
    assert metric.compute()["mAP"] == pytest.approx(100 * float(expected), abs=1e-4)


def test_a_class_without_positives_counts_as_zero() -> None:
    metric = MeanAveragePrecision()
    metric.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert metric.compute() == {"mAP": 50.0}


def test_what_is_not_a_number_ranks_last_and_is_never_right() -> None:
    metric = MeanAveragePrecision()
    metric.update(torch.tensor([[torch.nan], [-1e30]]), torch.tensor([[1.0], [0.0]]))
    assert metric.compute() == {"mAP": 50.0}
    top = TopK()
    top.update(torch.full((2, 9), torch.nan), torch.tensor([0, 1]))
    assert top.compute() == {"top1": 0.0, "top5": 0.0}


@settings(max_examples=50)
@given(st.integers(6, 12), st.integers(1, 20), st.integers(0, 2**31))
def test_top_k_is_that_of_scikit_learn(classes: int, images: int, seed: int) -> None:
    logits, targets = some_answers(images, classes, seed)
    metric = TopK()
    metric.update(logits, targets)
    found = metric.compute()
    for k in (1, 5):
        expected = top_k_accuracy_score(targets, logits.numpy(), k=k, labels=np.arange(classes))
        assert found[f"top{k}"] == pytest.approx(100 * expected)
    assert found["top1"] == pytest.approx(100 * float((logits.argmax(1) == targets).float().mean()))


def some_answers(images: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.rand(images, classes, generator=generator)
    return logits, torch.randint(0, classes, (images,), generator=generator)


def test_ties_go_to_the_lowest_class_as_argmax_does() -> None:
    metric = TopK()
    metric.update(torch.zeros(3, 8), torch.tensor([0, 4, 5]))
    assert metric.compute() == {"top1": pytest.approx(100 / 3), "top5": pytest.approx(200 / 3)}
    # Top 5 of five classes would always be right.
    metric = TopK()
    metric.update(torch.eye(5), torch.arange(5))
    assert metric.compute() == {"top1": 100.0}


@pytest.mark.parametrize("multi_label", [False, True])
def test_batches_in_any_order_and_of_any_size_give_the_same(multi_label: bool) -> None:
    logits, targets = some_answers(23, 8, seed=3)
    logits = (logits * 5).round()  # ties, which an order could break
    if multi_label:
        targets = torch.nn.functional.one_hot(targets, 8).float()
    whole, parts = metric_for(multi_label), metric_for(multi_label)
    whole.update(logits, targets)
    for place in (slice(10, 23), slice(0, 3), slice(3, 10)):
        parts.update(logits[place], targets[place])
    assert parts.compute() == pytest.approx(whole.compute())


def test_some_logits_in_0_to_1_are_logits_too() -> None:
    """torchmetrics takes a batch within 0 to 1 for probabilities, and large logits are equal after its sigmoid."""
    logits, targets = torch.tensor([[0.55], [0.9], [40.0], [50.0]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    metric = MeanAveragePrecision()
    for place in (slice(0, 2), slice(2, 4)):
        metric.update(logits[place], targets[place])
    expected = average_precision_by_counting(logits[:, 0].numpy(), targets[:, 0].numpy().astype(bool))
    assert metric.compute() == {"mAP": pytest.approx(100 * expected)}
