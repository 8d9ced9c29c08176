"""The training loss: a classification loss, a method's own losses, and distillation from a dense teacher."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from agglo.lab.tasks.classification.training.settings import TrainingSettings
from agglo.lab.training.settings import method_loss, trace_if_reduced
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
        from timm.data import Mixup
        from timm.loss import AsymmetricLossMultiLabel, SoftTargetCrossEntropy

        mixup, cutmix, smoothing = settings.mixup, settings.cutmix, settings.label_smoothing
        if multi_label and (mixup or cutmix):
            raise ValueError(
                f"{mixup=:g} and {cutmix=:g} mix single labels; for data with several labels per image both must be 0"
            )
        if (mixup or cutmix) and settings.batch_size % 2:
            raise ValueError(f"batch_size={settings.batch_size} must be even with mixup or cutmix")
        if teacher is not None and not isinstance(getattr(model, "norm", None), nn.Module):
            raise ValueError(f"distill=true needs a model whose last norm is called `norm`, not {type(model).__name__}")
        self.model, self.teacher = model, teacher
        self.mixup: Any = None
        self.criterion: Any = nn.CrossEntropyLoss(label_smoothing=smoothing)
        if multi_label:
            asymmetric = AsymmetricLossMultiLabel(gamma_neg=4, gamma_pos=0, clip=0.05, eps=1e-8)
            # The paper sums over images; AdamW does not see the difference, but accumulation and processes would.
            self.criterion = lambda logits, targets: asymmetric(logits, targets) / len(logits)
        elif mixup or cutmix:
            self.criterion = SoftTargetCrossEntropy()
            self.mixup = Mixup(mixup, cutmix, label_smoothing=smoothing, num_classes=classes)

    def __call__(self, forward: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of forward(inputs), where `forward` is the model, perhaps wrapped by Accelerate."""
        if self.mixup is not None:
            inputs, targets = self.mixup(inputs, targets)
        tokens: list[Tensor] = []  # (B, T, C) after the last norm
        norm: Any = getattr(self.model, "norm", None)
        watched = self.teacher and norm.register_forward_hook(lambda _module, _inputs, output: tokens.append(output))
        with trace_if_reduced(self.model) as record, watched or nullcontext():
            logits = logits_in(forward(inputs)).float()
        loss: Tensor = self.criterion(logits, targets)
        if (extra := method_loss(record)) is not None:
            loss = loss + extra
        if self.teacher is not None and record is not None:
            loss = loss + self._distillation(self.teacher, record, inputs, logits, tokens[0])
        return loss

    def _distillation(self, teacher: Any, record: Trace, inputs: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        from agglo.methods.dynamic_vit import distillation_loss

        policy = record.steps[-1].outcome.policy
        if policy is None:
            raise ValueError("distill=true goes with methods that mask tokens in training (dynamicvit)")
        with torch.no_grad():
            teacher_tokens = teacher.forward_features(inputs)
            teacher_logits = teacher.forward_head(teacher_tokens)
        prefix: Any = self.model.num_prefix_tokens
        patches = (part[:, prefix:] for part in (tokens, teacher_tokens, policy))
        return distillation_loss(logits, teacher_logits, *patches)
