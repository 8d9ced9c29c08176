"""Classifiers without training: a model of images and texts, and a prompt for each class.

The logits of an image are those of the library's own model, image against text, where every class has one text. With
several templates a class is the mean of its texts' normalised embeddings, normalised again (as CLIP's authors do it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEMPLATE = "a photo of a {}."
OPENAI = "openai"  # the word for the names and templates that open_clip has of CLIP's authors
_TEXTS = 256  # embedded at a time


@dataclass(frozen=True)
class Prompts:
    """Class names in the order of the labels (None: those of the data), and templates with {} for a name."""

    class_names: tuple[str, ...] | None = None
    templates: tuple[str, ...] = (TEMPLATE,)

    def __post_init__(self) -> None:
        if not self.templates or any(template.count("{}") != 1 for template in self.templates):
            raise ValueError(f"templates={self.templates} must each have one {{}} for the class, as {TEMPLATE!r} has")
        if self.class_names is not None and not (self.class_names and all(name.strip() for name in self.class_names)):
            raise ValueError("class names are missing: every class needs one")


def read_prompts(class_names: str | None, templates: str | None) -> Prompts:
    """Read prompts from text files, one per line; "openai" is open_clip's list of CLIP's own for ImageNet."""
    names = None if class_names is None else _read(class_names, "IMAGENET_CLASSNAMES")
    return Prompts(names, (TEMPLATE,) if templates is None else _read(templates, "OPENAI_IMAGENET_TEMPLATES"))


def _read(path: str, name: str) -> tuple[str, ...]:
    """Return the lines of a file, or for "openai" open_clip's list of a name, whose templates are functions."""
    if path == OPENAI:
        import open_clip

        return tuple(entry if isinstance(entry, str) else entry("{}") for entry in getattr(open_clip, name))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path!r} is not a text file with one line for each: {error}") from error
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def imagenet_names() -> list[str]:
    """Return the names of ImageNet-1K's classes as the paper prompts them: all synonyms, the two cranes told apart."""
    return files("agglo.models").joinpath("imagenet_names.txt").read_text(encoding="utf-8").splitlines()


class ZeroShot(nn.Module):
    """A classifier of images (B, 3, H, W) by their similarity to normalised class embeddings (classes, C)."""

    def __init__(self, model: nn.Module, embeddings: Tensor) -> None:
        super().__init__()
        self.model = model
        self.num_classes = len(embeddings)
        self.embeddings: Tensor
        self.register_buffer("embeddings", embeddings)

    def forward(self, images: Tensor) -> Tensor:
        model: Any = self.model
        own = hasattr(model, "encode_image")
        found = model.encode_image(images) if own else _pooled(model.get_image_features(pixel_values=images))
        logits = model.logit_scale.exp() * F.normalize(found, dim=-1) @ self.embeddings.T
        bias = getattr(model, "logit_bias", None)
        return logits if bias is None else logits + bias


def zero_shot(
    model: nn.Module,
    tokenizer: Any,
    class_names: Sequence[str],
    templates: Sequence[str] = (TEMPLATE,),
) -> ZeroShot:
    """Make a classifier of a model of images and texts (open_clip's, or CLIP, SigLIP and the like of transformers).

    `agglo.apply`, `agglo.lab.evaluate` and `agglo.tune` accept it.

    Args:
        model: Of images and texts.
        tokenizer: `open_clip.get_tokenizer(name)`, or `transformers.AutoTokenizer.from_pretrained(path)`.
        class_names: In the order of the labels.
        templates: Prompts with {} for the class name; their embeddings are averaged.

    >>> import open_clip
    >>> from open_clip.model import CLIP
    >>> vision = {"image_size": 32, "patch_size": 8, "layers": 4, "width": 64}
    >>> clip = CLIP(embed_dim=16, vision_cfg=vision, text_cfg={"width": 64, "heads": 2, "layers": 1})
    >>> classifier = agglo.lab.zero_shot(clip, open_clip.get_tokenizer("ViT-B-32"), ["cat", "dog"])
    >>> agglo.apply(classifier, keep_rate=0.5)(torch.rand(3, 3, 32, 32)).shape
    torch.Size([3, 2])
    """
    prompts = Prompts(tuple(class_names), tuple(templates))
    has_texts = hasattr(model, "encode_text") or hasattr(model, "get_text_features")
    if not (has_texts and hasattr(model, "logit_scale")):
        raise ValueError(f"{type(model).__name__} does not compare images with texts: a CLIP-like model is needed")
    assert prompts.class_names is not None
    texts = [template.format(name) for name in prompts.class_names for template in prompts.templates]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = [_text_features(model, tokenizer, texts[n : n + _TEXTS]) for n in range(0, len(texts), _TEXTS)]
    model.train(was_training)
    each = F.normalize(torch.cat(parts), dim=-1).unflatten(0, (len(prompts.class_names), len(prompts.templates)))
    return ZeroShot(model, F.normalize(each.mean(dim=1), dim=-1))


def _text_features(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    device = next(model.parameters()).device
    if hasattr(model, "encode_text"):
        return model.encode_text(tokenizer(texts).to(device))
    config = model.config
    longest = getattr(config.text_config, "max_position_embeddings", None)
    # SigLIP was trained on texts that are padded to the full length, and sees the padding.
    padding: Any = "max_length" if config.model_type.startswith("siglip") else True
    tokens = tokenizer(texts, padding=padding, truncation=True, max_length=longest, return_tensors="pt")
    return _pooled(model.get_text_features(**tokens.to(device)))


def _pooled(answer: Any) -> Tensor:
    """Return the embedding, which transformers gives itself or as `pooler_output`."""
    return answer if isinstance(answer, Tensor) else answer.pooler_output
