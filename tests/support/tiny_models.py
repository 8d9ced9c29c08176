"""Small random models in the folders that their libraries write, and images to show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIDE, CLASSES = 48, 3
OPEN_CLIP = "agglo-tiny"  # known to open_clip once `open_clip_config` ran
VISION = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
NAMES = ("tench", "tree_frog", "hen")


def write_images(root: Path, names: tuple[str, ...] = NAMES, each: int = 4) -> Path:
    """Class folders in train/ and val/, of images that are wider than high and have odd sides."""
    from PIL import Image

    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in names:
            (root / split / name).mkdir(parents=True)
            for number in range(each):
                pixels = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
                image = Image.fromarray(pixels).resize((91, 67), Image.Resampling.BICUBIC)
                image.save(root / split / name / f"{number}.png")
    return root


def stirred(model: Any, seed: int = 0) -> Any:
    """The model with weights large enough for answers to depend on the image, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25, generator=generator)
    return model.eval()


def vit_folder(folder: Path, classes: int = CLASSES, **processor: Any) -> Path:
    """A ViT classifier and its image processor, as `save_pretrained` writes them."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    labels = dict(enumerate(NAMES)) if classes == len(NAMES) else None
    more = {"num_labels": classes} if labels is None else {"id2label": labels}
    config = ViTConfig(**VISION, image_size=SIDE, patch_size=8, **more)
    stirred(ViTForImageClassification(config)).save_pretrained(folder)
    given = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.4, 0.5, 0.6], **processor}
    ViTImageProcessor(**given).save_pretrained(folder)
    return folder


def contrastive_folder(folder: Path, kind: str) -> Path:
    """A CLIP or SigLIP with image processor and tokenizer."""
    import transformers

    words = ["<pad>", "<unk>", "<eos>", "a", "photo", "of", ".", "the", "tench", "tree", "frog", "hen", "sketch"]
    text = {**VISION, "num_hidden_layers": 2, "vocab_size": len(words), "max_position_embeddings": 9}
    text |= {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 2}
    vision = {**VISION, "image_size": SIDE, "patch_size": 8}
    if kind == "clip":
        config: Any = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        model: Any = transformers.CLIPModel(config)
        processor: Any = transformers.CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        )
    else:
        config = transformers.SiglipConfig(text_config={**text, "projection_size": 32}, vision_config=vision)
        model = transformers.SiglipModel(config)
        processor = transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    stirred(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    _tokenizer(words).save_pretrained(folder)
    return folder


def _tokenizer(words: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=9, **names)


def timm_folder(folder: Path, classes: int = CLASSES) -> Path:
    """A model of timm as it goes to the hub."""
    import timm
    from timm.models import save_for_hf

    model = stirred(timm.create_model("test_vit", num_classes=classes))
    model.pretrained_cfg |= {
        "num_classes": classes,
        "crop_pct": 0.8,
        "interpolation": "bilinear",
        "mean": (0.4, 0.5, 0.6),
    }
    save_for_hf(model, str(folder), model_config={"num_classes": classes})
    return folder


def open_clip_config(folder: Path) -> str:
    """Make a small model known to open_clip; its name."""
    import open_clip

    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": SIDE, "layers": 4, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    }
    (folder / f"{OPEN_CLIP}.json").write_text(json.dumps(config), encoding="utf-8")
    open_clip.add_model_config(folder / f"{OPEN_CLIP}.json")
    return OPEN_CLIP


def open_clip_folder(folder: Path) -> Path:
    """The same with weights and a configuration of its own, for open_clip's `local-dir:`."""
    import open_clip
    from safetensors.torch import save_file

    model = stirred(open_clip.create_model(open_clip_config(folder)))
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    config = json.loads((folder / f"{OPEN_CLIP}.json").read_text(encoding="utf-8"))
    prepared = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25], "interpolation": "bilinear", "resize_mode": "squash"}
    content = {"model_cfg": config, "preprocess_cfg": prepared}
    (folder / "open_clip_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
