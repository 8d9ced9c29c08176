"""Top-k and mean average precision against their definitions, scikit-learn and torchmetrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import average_precision_score, top_k_accuracy_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from agglo.lab.tasks.classification.evaluation.grid import (
    average_precision,
    evaluate,
    mean_average_precision,
    ranks,
)

COLUMNS = st.integers(1, 30).flatmap(
    lambda n: st.tuples(
        # Few distinct values, so that ties are common.
        arrays(np.float32, n, elements=st.integers(-4, 4).map(float)),
        arrays(np.bool_, n),
    )
)


class Answers(nn.Module):
    """A classifier whose inputs are its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def accuracy(logits: Tensor, targets: Tensor, batch: int = 5) -> dict[str, Any]:
    found = evaluate(Answers(), DataLoader(TensorDataset(logits, targets), batch))
    assert found.pop("images") == len(logits) and found.pop("images_per_second") > 0
    return found


def test_one_pass_finds_what_the_model_answers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 9)).train()
    images, targets = torch.randn(23, 3, 2, 2), torch.randint(0, 9, (23,))
    done: list[int] = []
    loader = DataLoader(TensorDataset(images, targets), 5)
    found = evaluate(model, loader, advance=done.append, prepare=lambda inputs: 2 * inputs)
    with torch.no_grad():
        assert found["top1"] == pytest.approx(100 * float((model(2 * images).argmax(1) == targets).float().mean()))
    assert found["images"] == 23 and found["images_per_second"] > 0 and done == [5, 5, 5, 5, 3]
    assert model.training
    with pytest.raises(ValueError, match="no images"):
        evaluate(model, [])


@settings(max_examples=50)
@given(COLUMNS)
def test_average_precision_is_its_definition_with_ties_too(column: tuple[np.ndarray, np.ndarray]) -> None:
    scores, positive = column
    found = float(average_precision(torch.from_numpy(scores), torch.from_numpy(positive)))
    if not positive.any():
        assert np.isnan(found)
    else:
        # For every positive: among the images that score at least as high, the fraction that are positive.
        assert found == pytest.approx(np.mean([positive[scores >= own].mean() for own in scores[positive]]))
        assert found == pytest.approx(average_precision_score(positive, scores))


def test_mean_average_precision_is_that_of_torchmetrics() -> None:
    from torchmetrics.functional.classification import multilabel_average_precision

    logits, targets = torch.randn(200, 7), (torch.rand(200, 7) < 0.2).float()
    expected = multilabel_average_precision(logits.sigmoid(), targets.long(), num_labels=7, average="macro")
    assert accuracy(logits, targets, 64)["mAP"] == pytest.approx(100 * float(expected), abs=1e-4)


def test_a_class_without_positives_counts_as_zero_and_what_is_no_number_ranks_last() -> None:
    logits, targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert mean_average_precision(logits, targets) == 0.5
    assert mean_average_precision(torch.tensor([[torch.nan], [-1e30]]), torch.tensor([[1.0], [0.0]])) == 0.5
    assert accuracy(torch.full((2, 9), torch.nan), torch.tensor([0, 1])) == {"top1": 0.0, "top5": 0.0}


@settings(max_examples=20)
@given(st.integers(6, 12), st.integers(1, 20), st.integers(0, 2**31))
def test_top_k_is_that_of_scikit_learn(classes: int, images: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.rand(images, classes, generator=generator)
    targets = torch.randint(0, classes, (images,), generator=generator)
    for k in (1, 5):
        expected = top_k_accuracy_score(targets, logits.numpy(), k=k, labels=np.arange(classes))
        assert accuracy(logits, targets)[f"top{k}"] == pytest.approx(100 * expected)


def test_ties_go_to_the_lowest_class_as_argmax_does() -> None:
    assert ranks(torch.zeros(3, 8), torch.tensor([0, 4, 5])).tolist() == [0, 4, 5]
    # Top 5 of five classes would always be right.
    assert accuracy(torch.eye(5), torch.arange(5)) == {"top1": 100.0}


def test_some_logits_in_0_to_1_are_logits_too() -> None:
    """torchmetrics takes a batch within 0 to 1 for probabilities, and large logits are equal after its sigmoid."""
    logits, targets = torch.tensor([[0.55], [0.9], [40.0], [50.0]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    assert accuracy(logits, targets, 2) == {"mAP": pytest.approx(100 * (1 + 2 / 4) / 2)}
