"""Models of every library by name: the library's own answers, weights of files, and errors that say what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import agglo
from agglo.models.libraries import class_count, class_names
from agglo.models.libraries.base import known_of
from agglo.models.opening import ModelSpec, build
from agglo.models.outputs import features_in, logits_in
from tests.support import tiny_models
from tests.support.tiny_models import CLASSES, NAMES, SIDE, stirred

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")
open_clip = pytest.importorskip("open_clip")


def images(side: int = SIDE) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("vit", "clip", "siglip", "timm", "open_clip")}
    tiny_models.vit_folder(found["vit"])
    tiny_models.contrastive_folder(found["clip"], "clip")
    tiny_models.contrastive_folder(found["siglip"], "siglip")
    tiny_models.timm_folder(found["timm"])
    tiny_models.open_clip_folder(found["open_clip"])
    return found


def refused(name: str, **given: Any) -> str:
    with pytest.raises(ValueError) as caught:
        build(ModelSpec(name, **given))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_of_transformers(folders: dict[str, Path]) -> None:
    spec = ModelSpec(f"hf:{folders['vit']}")
    model = build(spec)
    own = transformers.AutoModelForImageClassification.from_pretrained(folders["vit"])
    assert not spec.has_random_weights and not model.training
    assert torch.equal(logits_in(model(images())), own(images()).logits)
    assert class_count(model) == CLASSES and class_names(model) == list(NAMES)


def test_a_model_of_images_and_texts_is_its_image_tower(folders: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("clip", "siglip"):
        model = build(ModelSpec(f"hf:{folders[kind]}"))
        own = transformers.AutoModel.from_pretrained(folders[kind])
        assert torch.equal(features_in(model(images())), own.vision_model(images()).pooler_output)
        assert class_count(model) == 0 and class_names(model) is None
    # It takes a checkpoint of the whole model, or its own.
    other = stirred(transformers.CLIPModel(transformers.CLIPConfig.from_pretrained(folders["clip"])), seed=7)
    for name, part in (("whole", other), ("tower", other.vision_model)):
        torch.save(part.state_dict(), tmp_path / f"{name}.pth")
        model = build(ModelSpec(f"hf:{folders['clip']}", tmp_path / f"{name}.pth"))
        assert torch.equal(features_in(model(images())), other.vision_model(images()).pooler_output), name


def test_a_tower_whose_pooler_nobody_trained_has_none(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**tiny_models.VISION, image_size=SIDE, patch_size=8)
    own = stirred(transformers.ViTModel(config, add_pooling_layer=False))
    own.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(tmp_path)
    answer = build(ModelSpec(f"hf:{tmp_path}"))(images())
    assert torch.equal(features_in(answer), own(images()).last_hidden_state) and answer.pooler_output is None


def test_a_model_of_torchvision() -> None:
    assert ModelSpec("torchvision:vit_b_32").has_random_weights
    assert not ModelSpec("torchvision:vit_b_32:IMAGENET1K_V1").has_random_weights
    torch.manual_seed(0)
    model = build(ModelSpec("torchvision:shufflenet_v2_x0_5"))
    torch.manual_seed(0)
    own = torchvision.models.shufflenet_v2_x0_5().eval()
    assert torch.equal(model(images(224)), own(images(224)))
    names = class_names(model)
    assert names is not None and len(names) == 1000 and names[:2] == ["tench", "goldfish"]


def test_open_clip_by_name_and_in_a_folder(folders: dict[str, Path]) -> None:
    torch.manual_seed(0)
    model = build(ModelSpec(f"open_clip:{tiny_models.OPEN_CLIP}"))
    torch.manual_seed(0)
    own = open_clip.create_model(tiny_models.OPEN_CLIP).eval()
    assert torch.equal(model(images()), own.encode_image(images()))
    name = f"local-dir:{folders['open_clip']}"
    model = build(ModelSpec(f"open_clip:{name}"))
    assert torch.equal(model(images()), open_clip.create_model(name).eval().encode_image(images()))
    assert class_count(model) == 0
    assert "num_classes=5" in refused(f"open_clip:{name}", num_classes=5)


@pytest.mark.parametrize("name", ["hf", "torchvision", "timm"])
def test_a_checkpoint_of_every_library_and_its_head(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    """A checkpoint's head says how many classes there are, and nothing of the folder's own weights is left."""
    spelled = {
        "hf": f"hf:{folders['vit']}",
        "torchvision": "torchvision:shufflenet_v2_x0_5",  # the smallest, and its head is called otherwise
        "timm": f"local-dir:{folders['timm']}",
    }[name]
    other = stirred(build(ModelSpec(spelled, num_classes=5, new_head=True, from_scratch=True)), seed=3)
    save_file({key: value.clone() for key, value in other.state_dict().items()}, tmp_path / "other.safetensors")
    model = build(ModelSpec(spelled, checkpoint=tmp_path / "other.safetensors"))
    assert class_count(model) == 5
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    shape = {"timm": 160, "torchvision": 224}.get(name, SIDE)
    assert logits_in(model(images(shape))).shape == (2, 5)
    if name != "torchvision":
        agglo.apply(model, keep_rate=0.5)
        assert torch.isfinite(logits_in(model(images(shape)))).all()
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert "x.safetensors' does not fit" in refused(spelled, checkpoint=tmp_path / "x.safetensors")


def test_a_new_head_keeps_the_rest(folders: dict[str, Path], tmp_path: Path) -> None:
    name = f"hf:{folders['vit']}"
    same, other = build(ModelSpec(name)), build(ModelSpec(name, num_classes=5, new_head=True))
    assert known_of(other).num_pretrained_classes == CLASSES
    for key, value in other.state_dict().items():
        assert key.startswith("classifier.") or torch.equal(value, same.state_dict()[key])
    assert "classifier.bias, classifier.weight" in refused(name, num_classes=5)
    save_file(same.state_dict(), tmp_path / "three.safetensors")
    third = build(ModelSpec(name, tmp_path / "three.safetensors", num_classes=5, new_head=True))
    body = "vit.embeddings.cls_token"
    assert torch.equal(third.state_dict()[body], same.state_dict()[body]) and class_count(third) == 5


def test_open_clip_at_another_size(folders: dict[str, Path], tmp_path: Path) -> None:
    whole = open_clip.create_model(f"local-dir:{folders['open_clip']}")
    save_file(whole.state_dict(), tmp_path / "whole.safetensors")
    # A checkpoint of the whole model, texts too, is fine for its image tower.
    spec = ModelSpec(f"open_clip:{tiny_models.OPEN_CLIP}", tmp_path / "whole.safetensors", image_size=(64, 64))
    own = open_clip.create_model(f"local-dir:{folders['open_clip']}", force_image_size=64).eval()
    assert torch.equal(build(spec)(images(64)), own.encode_image(images(64)))
    for name in ("torchvision:vit_b_32", f"hf:{folders['vit']}"):
        assert "image_size=(96, 96)" in refused(name, image_size=(96, 96))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("google/vit-base-patch16-224", "hf-hub:NAME .* hf:PATH"),
        ("hf:/nowhere", "hf:/nowhere"),
        ("local-dir:/nowhere", "/nowhere/config.json"),
        ("torchvision:vit_b_17", "mean .*'vit_b_16'"),
        ("torchvision:vit_b_16:V9", "'V9' .*accepted: 'IMAGENET1K_V1'"),
        ("open_clip:ViT-B-33", "mean .*'ViT-B-32'"),
        ("open_clip:ViT-B-32:best", "'best' .*accepted: 'openai'"),
    ],
)
def test_names_that_do_not_exist(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(ModelSpec(name))


def test_what_a_library_does_not_have(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in (f"hf:{folders['vit']}", "torchvision:vit_b_32", f"open_clip:{tiny_models.OPEN_CLIP}"):
        assert "drop_path_rate=0.1" in refused(name, options={"drop_path_rate": 0.1})
    assert "'openai'" in refused("open_clip:ViT-B-32", pretrained=True)
    assert "config" in refused(f"hf:{tmp_path}")


def test_answers_that_are_no_logits() -> None:
    with pytest.raises(ValueError, match="BaseModelOutputWithPooling"):
        logits_in(transformers.modeling_outputs.BaseModelOutputWithPooling(last_hidden_state=torch.zeros(1, 2, 3)))
    with pytest.raises(ValueError, match=r"\(1, 2, 3\)"):
        logits_in(torch.zeros(1, 2, 3))
    assert logits_in({"logits": torch.ones(1, 2)}).sum() == 2
    assert class_count(nn.Linear(2, 3)) == 0
