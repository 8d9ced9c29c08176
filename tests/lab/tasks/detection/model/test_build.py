from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

from agglo.lab.tasks.detection import vit_adapter
from agglo.lab.tasks.detection.model.settings import HeadSettings
from agglo.lab.tasks.detection.model.vit import load_vit, plain_vit
from tests.lab.tasks.detection.model.test_published import whole
from tests.lab.tasks.detection.model.tiny import rectangles
from tests.support.data import data_path

DEIT = "deit_tiny_patch16_224.safetensors"
SMALL = HeadSettings(width=16, box_width=32, mask_convolutions=2)


def small_vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, embed_dim=24, depth=4, num_heads=2, num_classes=5, **options
    )
    return model


@pytest.mark.parametrize(("size", "millions", "with_unused"), [("tiny", 28.06, 28.08), ("small", 47.79, 47.82)])
def test_parameters_are_counted_as_in_the_published_checkpoints(size: str, millions: float, with_unused: float) -> None:
    """As many as there are in tensors of those names, but for the unused position of a class token.

    with_unused: with the class token, last norm and head of 80 classes that ATC's detectors carry along."""
    with torch.device("meta"):
        detector = vit_adapter(size)
    width = detector.backbone.out_channels
    counted = sum(parameter.numel() for parameter in detector.parameters())
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    shapes = [shape for name, shape in whole(width, "dense") if not name.endswith(statistics)]
    assert counted == sum(torch.Size(shape).numel() for shape in shapes) - width
    assert round(counted / 1e6, 2) == millions
    assert round((counted + width + 2 * width + 80 * width + 80) / 1e6, 2) == with_unused


@pytest.mark.parametrize("class_token", [False, True])
def test_the_real_deit_loads_with_every_tensor_accounted_for(class_token: bool) -> None:
    path = data_path(DEIT)
    state, detector = load_file(path), vit_adapter("tiny", class_token=class_token, weights=path)
    unused = {"norm.weight", "norm.bias", "head.weight", "head.bias"} | (set() if class_token else {"cls_token"})
    held = detector.backbone.vit.state_dict()
    assert held.keys() == state.keys() - unused
    for name, value in held.items():
        assert torch.equal(value, state[name][:, 1:] if name == "pos_embed" and not class_token else state[name])


def test_any_plain_vit_can_serve_and_trains() -> None:
    detector = vit_adapter(small_vit(init_values=0.1, reg_tokens=2), n_classes=3, heads=SMALL, deform_heads=2)
    images = [torch.randn(3, 60, 70), torch.randn(3, 32, 33)]
    targets = [rectangles([[4, 4, 40, 50]], [2], (60, 70)), rectangles([], [], (32, 33))]
    losses = detector(images, targets)
    sum(losses.values()).backward()
    without = [name for name, parameter in detector.named_parameters() if parameter.grad is None]
    assert not without
    with torch.no_grad():
        found = detector.eval()(images)
    assert [result["masks"].shape[1:] for result in found] == [(60, 70), (32, 33)]


def test_a_detector_of_our_own_loads_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = vit_adapter(small_vit(), n_classes=3, heads=SMALL, deform_heads=2)
    path = tmp_path / "detector.pth"
    torch.save(first.state_dict(), path)
    second = vit_adapter(small_vit(), n_classes=3, heads=SMALL, deform_heads=2, weights=path)
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match=r"roi\.box\.classes\.weight"):
        vit_adapter(small_vit(), n_classes=4, heads=SMALL, deform_heads=2, weights=path)


def test_files_of_other_vits(tmp_path: Path) -> None:
    """Distilled: both first tokens go, or the second one. Registers stay, and a larger image brings its grid."""
    path = tmp_path / "vit.pth"
    distilled = timm.create_model("deit_tiny_distilled_patch16_224")
    without, with_token = (plain_vit("tiny", class_token=token) for token in (False, True))
    for vit in (without, with_token):
        load_vit(vit, distilled.state_dict(), "distilled")
    assert torch.equal(without.pos_embed, distilled.pos_embed[:, 2:])
    assert torch.equal(with_token.pos_embed, torch.cat([distilled.pos_embed[:, :1], distilled.pos_embed[:, 2:]], 1))
    registers = small_vit(reg_tokens=2)
    torch.save(registers.state_dict(), path)
    expected = registers.pos_embed[:, 1:].clone()
    loaded = vit_adapter(small_vit(reg_tokens=2), deform_heads=2, heads=SMALL, weights=path)
    assert torch.equal(loaded.backbone.vit.pos_embed, expected)
    torch.save(timm.create_model("vit_small_patch16_384").state_dict(), path)
    assert vit_adapter("small", weights=path).backbone.vit.patch_embed.grid_size == (24, 24)
    with pytest.raises(ValueError, match="of another shape"):
        vit_adapter("tiny", weights=path)


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size="):
        vit_adapter("huge")


def test_importing_the_room_stays_light() -> None:
    import subprocess
    import sys

    code = "import sys, agglo, agglo.lab.tasks.detection; print('torchvision' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
