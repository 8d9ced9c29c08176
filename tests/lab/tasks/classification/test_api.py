"""agglo.lab.evaluate and agglo.lab.finetune with model objects of every library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import agglo
from agglo.models.checkpoints import read_checkpoint
from agglo.models.outputs import logits_in
from tests.support import tiny_models
from tests.support.tiny_models import NAMES, SIDE, stirred

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")
open_clip = pytest.importorskip("open_clip")

QUICK = {"epochs": 2, "batch_size": 4, "warmup_epochs": 0.0, "mixup": 0.0, "cutmix": 0.0, "workers": 0, "lr_batch": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_images(tmp_path_factory.mktemp("data"))


def transformers_vit(classes: int = 3) -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**tiny_models.VISION, image_size=SIDE, patch_size=8, num_labels=classes)
    return stirred(transformers.ViTForImageClassification(config))


def torchvision_vit(classes: int = 3) -> Any:
    torch.manual_seed(0)
    shape = {"image_size": SIDE, "patch_size": 8, "num_layers": 4, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 48}
    return stirred(torchvision.models.VisionTransformer(**shape, num_classes=classes))


def timm_vit(classes: int = 3) -> Any:
    torch.manual_seed(0)
    return stirred(timm.create_model("test_vit", num_classes=classes, img_size=SIDE, patch_size=8))


BUILDERS = {"transformers": transformers_vit, "torchvision": torchvision_vit, "timm": timm_vit}


@pytest.mark.parametrize("library", BUILDERS)
def test_batches_give_the_share_that_is_right(library: str, data: Path) -> None:
    model = BUILDERS[library]()
    images = torch.randn(11, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        answers = logits_in(model(images)).argmax(dim=1)
        labels = answers.clone()
        labels[:4] = (labels[:4] + 1) % 3
        loader = DataLoader(TensorDataset(images, labels), batch_size=4)
        found = agglo.lab.evaluate(model, loader, quiet=True)
        assert found["top1"] == pytest.approx(100 * 7 / 11) and found["images"] == 11 and "top5" not in found
        # As it is now: reduced, it answers otherwise.
        agglo.apply(model, keep_rate=0.5)
        reduced = logits_in(model(images)).argmax(dim=1)
        share = 100 * float((reduced == labels).float().mean())
        assert agglo.lab.evaluate(model, loader, quiet=True)["top1"] == pytest.approx(share)
    found = agglo.lab.evaluate(model, data, workers=0, quiet=True)
    assert found["images"] == 12 and found["images_per_second"] > 0


def test_names_and_zero_shot(data: Path, tmp_path: Path) -> None:
    name = f"hf:{tiny_models.vit_folder(tmp_path)}"
    own = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    found = [agglo.lab.evaluate(each, str(data), workers=0, quiet=True) for each in (name, own, nn.DataParallel(own))]
    assert len({each["top1"] for each in found}) == 1
    clip = stirred(open_clip.create_model(tiny_models.open_clip_config(tmp_path)))
    classifier = agglo.lab.zero_shot(clip, open_clip.get_tokenizer(tiny_models.OPEN_CLIP), sorted(NAMES))
    with pytest.raises(ValueError, match="Linear"):
        agglo.lab.evaluate(nn.Linear(3, 3), data, workers=0)
    assert agglo.lab.evaluate(classifier, data, workers=0, quiet=True)["images"] == 12


def test_what_evaluate_refuses(data: Path) -> None:
    model = timm_vit(4)
    with pytest.raises(ValueError, match="4 classes, folder has 3"):
        agglo.lab.evaluate(model, data)
    with pytest.raises(ValueError, match="images"):
        agglo.lab.evaluate(model, [], images=3)
    with pytest.raises(ValueError, match="model=None"):
        agglo.lab.evaluate(None, data)  # type: ignore[arg-type]


def test_a_model_object_learns_and_ends_with_the_best_weights(data: Path, tmp_path: Path) -> None:
    """Of other classes than the data, so that it gets a new head; reduced while it learns."""
    model = torchvision_vit(7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    best = agglo.lab.finetune(model, data, tmp_path / "run", method="atc", keep_rate=0.5, **QUICK)
    assert agglo.report(model) is not None
    learned = model.state_dict()
    saved = read_checkpoint(tmp_path / "run" / "best" / "model.safetensors")
    assert learned.keys() == saved.keys() and all(torch.equal(learned[name], saved[name]) for name in saved)
    moved = [name for name, value in learned.items() if value.shape == before[name].shape]
    assert any(not torch.equal(learned[name], before[name]) for name in moved)
    again = agglo.lab.evaluate(model, data, workers=0, quiet=True)
    assert again["top1"] == pytest.approx(best["best_metric"])


def test_what_finetune_refuses(data: Path, tmp_path: Path) -> None:
    for given, message in (
        ({"checkpoint": "w.pth"}, "checkpoint='w.pth'"),
        ({"drop_path": 0.1}, "drop_path=0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            agglo.lab.finetune(transformers_vit(), data, tmp_path / "other", **given)
    reduced = agglo.apply(transformers_vit(), keep_rate=0.5)
    with pytest.raises(ValueError, match="reduced already"):
        agglo.lab.finetune(reduced, data, tmp_path / "other", **QUICK)
    with pytest.raises(ValueError, match="model=3"):
        agglo.lab.finetune(3, data, tmp_path)  # type: ignore[arg-type]
