"""The training loss: a classification loss, a method's own losses, and distillation from a dense teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agglo.lab.tasks.classification.training.settings import TrainingSettings
from agglo.lab.training.reduction import method_loss, trace_if_reduced
from agglo.models.outputs import logits_in
from agglo.tracing import Trace


class Objective:
    """The loss of one batch, a mean over its images.

    Args:
        settings: Settings of the run.
        model: The bare model, whose reduction is traced and whose last norm is hooked.
        classes: Number of classes of the head.
        multi_label: Whether an image has several classes.
        teacher: A dense model for distillation, for methods that report a policy.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        model: nn.Module,
        classes: int,
        multi_label: bool,
        teacher: nn.Module | None = None,
    ) -> None:
        if multi_label and (settings.mixup or settings.cutmix):
            raise ValueError(
                f"mixup={settings.mixup:g} and cutmix={settings.cutmix:g} mix single labels; "
                "for data with several labels an image both must be 0"
            )
        self.model, self.teacher, self.multi_label = model, teacher, multi_label
        self.mixup = None if multi_label else _mixup(settings, classes)
        self.criterion = _criterion(settings, multi_label, mixed=self.mixup is not None)

    def __call__(self, forward: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of forward(inputs), where `forward` is the model, perhaps wrapped by Accelerate."""
        if self.mixup is not None:
            inputs, targets = self.mixup(inputs, targets)
        with (
            trace_if_reduced(self.model) as record,
            _final_tokens(self.model, wanted=self.teacher is not None) as tokens,
        ):
            logits = logits_in(forward(inputs)).float()
        loss: Tensor = self.criterion(logits, targets)
        if (extra := method_loss(record)) is not None:
            loss = loss + extra
        if self.teacher is not None and record is not None:
            loss = loss + self._distillation(record, inputs, logits, tokens[0])
        return loss

    def _distillation(self, record: Trace, inputs: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        from agglo.methods.dynamic_vit import distillation_loss

        assert self.teacher is not None
        policy = record.steps[-1].outcome.policy
        if policy is None:
            raise ValueError("distill=true goes with methods that mask tokens in training (dynamicvit)")
        with torch.no_grad(), _final_tokens(self.teacher, wanted=True) as teacher_tokens:
            teacher_logits = logits_in(self.teacher(inputs))
        prefix = self.model.num_prefix_tokens
        assert isinstance(prefix, int)
        return distillation_loss(
            logits, teacher_logits, tokens[:, prefix:], teacher_tokens[0][:, prefix:], policy[:, prefix:]
        )


def _mixup(settings: TrainingSettings, classes: int) -> Any:
    if not settings.mixup and not settings.cutmix:
        return None
    from timm.data import Mixup

    if settings.batch_size % 2:
        raise ValueError(f"batch_size={settings.batch_size} must be even with mixup or cutmix")
    return Mixup(
        mixup_alpha=settings.mixup,
        cutmix_alpha=settings.cutmix,
        prob=settings.mixup_probability,
        switch_prob=settings.mixup_switch,
        mode="batch",
        label_smoothing=settings.label_smoothing,
        num_classes=classes,
    )


def _criterion(settings: TrainingSettings, multi_label: bool, mixed: bool) -> Any:
    from timm.loss import AsymmetricLossMultiLabel, SoftTargetCrossEntropy

    if multi_label:
        asymmetric = AsymmetricLossMultiLabel(gamma_neg=4, gamma_pos=0, clip=0.05, eps=1e-8)
        # The paper sums over images; AdamW does not see the difference, but accumulation and processes would.
        return lambda logits, targets: asymmetric(logits, targets) / len(logits)
    return SoftTargetCrossEntropy() if mixed else nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)


@contextmanager
def _final_tokens(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """Yield a list that holds the tokens (B, T, C) after the last norm once the model has run."""
    seen: list[Tensor] = []
    if not wanted:
        yield seen
        return
    if not isinstance(getattr(model, "norm", None), nn.Module):
        raise ValueError(
            f"distill=true needs a model whose last norm is called `norm`; {type(model).__name__} has none"
        )
    handle = model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))  # type: ignore[union-attr]
    try:
        yield seen
    finally:
        handle.remove()
