"""Classifiers by prompts: the logits that each library computes itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import agglo
from agglo.models.libraries import class_names
from agglo.models.opening import ModelSpec, build
from agglo.models.zero_shot import TEMPLATE, Prompts, read_prompts
from tests.support import tiny_models
from tests.support.tiny_models import SIDE

transformers = pytest.importorskip("transformers")
open_clip = pytest.importorskip("open_clip")

NAMES = ("tench", "tree frog", "hen")
TEMPLATES = ("a photo of a {}.", "the {}", "a sketch of the {}")
IMAGES = torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.inference_mode()
def test_one_template_gives_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    tiny_models.contrastive_folder(tmp_path, kind)
    classifier = build(ModelSpec(f"hf:{tmp_path}", prompts=Prompts(NAMES)))
    own = transformers.AutoModel.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    padding = "max_length" if kind == "siglip" else True
    tokens = tokenizer([TEMPLATE.format(name) for name in NAMES], padding=padding, return_tensors="pt")
    expected = own(**tokens, pixel_values=IMAGES).logits_per_image
    assert expected.std() > 1e-3
    torch.testing.assert_close(classifier(IMAGES), expected)
    assert class_names(classifier) == list(NAMES)
    other = tiny_models.stirred(own, seed=5)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    classifier = build(ModelSpec(f"hf:{tmp_path}", tmp_path / "other.pth", prompts=Prompts(NAMES)))
    assert torch.equal(classifier(IMAGES), agglo.lab.zero_shot(other, tokenizer, NAMES)(IMAGES))


@torch.inference_mode()
def test_several_templates_are_averaged_as_open_clip_does_it(tmp_path: Path) -> None:
    name = f"local-dir:{tiny_models.open_clip_folder(tmp_path)}"
    classifier = build(ModelSpec(f"open_clip:{name}", prompts=Prompts(NAMES, TEMPLATES)))
    own = open_clip.create_model(name).eval()
    tokenizer = open_clip.get_tokenizer(name)
    weights = open_clip.build_zero_shot_classifier(own, tokenizer, NAMES, TEMPLATES)
    expected = own.logit_scale.exp() * own.encode_image(IMAGES, normalize=True) @ weights
    assert expected.std() > 1e-3
    torch.testing.assert_close(classifier(IMAGES), expected)


@torch.inference_mode()
def test_a_model_object_with_a_bias_and_reduced(tmp_path: Path) -> None:
    name = tiny_models.open_clip_config(tmp_path)
    torch.manual_seed(0)
    own = tiny_models.stirred(open_clip.create_model(name, init_logit_bias=-3.0))
    tokenizer = open_clip.get_tokenizer(name)
    classifier = agglo.lab.zero_shot(own, tokenizer, NAMES)
    texts = tokenizer([TEMPLATE.format(each) for each in NAMES])
    torch.testing.assert_close(classifier(IMAGES), own.get_logits(IMAGES, texts)[0])
    dense = classifier(IMAGES)
    agglo.apply(classifier, keep_rate=0.5)
    assert classifier(IMAGES).shape == dense.shape and not torch.equal(classifier(IMAGES), dense)
    agglo.remove(classifier)
    assert torch.equal(classifier(IMAGES), dense)


def test_prompts_of_files(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("tench\n\n tree frog \n", encoding="utf-8")
    (tmp_path / "templates.txt").write_text("a {}\nthe {}!\n", encoding="utf-8")
    found = read_prompts(str(tmp_path / "names.txt"), str(tmp_path / "templates.txt"))
    assert found == Prompts(("tench", "tree frog"), ("a {}", "the {}!"))
    assert read_prompts(None, None) == Prompts(None, (TEMPLATE,))
    openai = read_prompts("openai", "openai")
    assert openai.class_names is not None and len(openai.class_names) == 1000 and len(openai.templates) == 80
    assert openai.templates[0] == "a bad photo of a {}." and openai.class_names[0] == "tench"
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    for name in ("empty.txt", "lost.txt"):
        with pytest.raises(ValueError, match=r"class names|lost.txt"):
            read_prompts(str(tmp_path / name), None)


def test_what_is_refused(tmp_path: Path) -> None:
    for template in ("a photo", "{} and {}"):
        with pytest.raises(ValueError, match="templates="):
            Prompts(NAMES, (template,))
    with pytest.raises(ValueError, match="class names"):
        Prompts(("tench", " "))
    with pytest.raises(ValueError, match="Linear"):
        agglo.lab.zero_shot(nn.Linear(1, 1), None, NAMES)
    with pytest.raises(ValueError, match="zero-shot"):
        build(ModelSpec("test_vit", prompts=Prompts(NAMES)))
    with pytest.raises(ValueError, match="a vit"):
        build(ModelSpec(f"hf:{tiny_models.vit_folder(tmp_path)}", prompts=Prompts(NAMES)))
