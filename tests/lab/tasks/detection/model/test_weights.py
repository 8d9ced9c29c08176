"""Weights of detectors: the published ones, by names and shapes as in the authors' public code, and others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import agglo
from agglo.lab.tasks.detection import vit_adapter
from agglo.lab.tasks.detection.model.heads import HeadSettings
from agglo.lab.tasks.detection.model.published import ENCODER_LAYER_EPS, from_published, gates
from agglo.lab.tasks.detection.specs import method_weights
from agglo.models.checkpoints import load_method
from tests.lab.tasks.detection.model.references import rectangles
from tests.support.data import data_path

Shape = tuple[int, ...]


def layer(name: str, *shape: int, bias: bool = True) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", (shape[0],)


def norm(name: str, width: int, batch: bool = False) -> Iterator[tuple[str, Shape]]:
    yield from layer(name, width)
    if batch:
        yield f"{name}.running_mean", (width,)
        yield f"{name}.running_var", (width,)
        yield f"{name}.num_batches_tracked", ()


def deformable(name: str, width: int, levels: int) -> Iterator[tuple[str, Shape]]:
    yield from layer(f"{name}.sampling_offsets", 6 * levels * 4 * 2, width)
    yield from layer(f"{name}.attention_weights", 6 * levels * 4, width)
    yield from layer(f"{name}.value_proj", width, width)
    yield from layer(f"{name}.output_proj", width, width)


def extractor(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    for part in ("query_norm", "feat_norm", "ffn_norm"):
        yield from norm(f"{name}.{part}", width)
    yield from deformable(f"{name}.attn", width, 1)
    yield from layer(f"{name}.ffn.fc1", width // 4, width)
    yield from layer(f"{name}.ffn.dwconv.dwconv", width // 4, 1, 3, 3)
    yield from layer(f"{name}.ffn.fc2", width, width // 4)


def block(name: str, width: int, kind: str) -> Iterator[tuple[str, Shape]]:
    if kind == "svit":
        name += ".TransformerEncoderLayer"
        yield f"{name}.self_attn.in_proj_weight", (3 * width, width)
        yield f"{name}.self_attn.in_proj_bias", (3 * width,)
        names = ("self_attn.out_proj", "linear1", "linear2")
    else:
        yield from layer(f"{name}.attn.qkv", 3 * width, width)
        names = ("attn.proj", "mlp.fc1", "mlp.fc2")
    shapes = ((width, width), (4 * width, width), (width, 4 * width))
    for part, shape in zip(names, shapes, strict=True):
        yield from layer(f"{name}.{part}", *shape)
    yield from norm(f"{name}.norm1", width)
    yield from norm(f"{name}.norm2", width)


def backbone(width: int, kind: str) -> Iterator[tuple[str, Shape]]:
    yield "backbone.pos_embed", (1, 197, width)
    yield from layer("backbone.patch_embed.proj", width, 3, 16, 16)
    for i in range(12):
        yield from block(f"backbone.blocks.{i}", width, kind)
    yield "backbone.level_embed", (3, width)
    for index, before in ((0, 3), (3, 64), (6, 64)):
        yield from layer(f"backbone.spm.stem.{index}", 64, before, 3, 3, bias=False)
        yield from norm(f"backbone.spm.stem.{index + 1}", 64, batch=True)
    for number, before, after in ((2, 64, 128), (3, 128, 256), (4, 256, 256)):
        yield from layer(f"backbone.spm.conv{number}.0", after, before, 3, 3, bias=False)
        yield from norm(f"backbone.spm.conv{number}.1", after, batch=True)
    for number, before in ((1, 64), (2, 128), (3, 256), (4, 256)):
        yield from layer(f"backbone.spm.fc{number}", width, before, 1, 1)
    for i in range(4):
        name = f"backbone.interactions.{i}"
        yield f"{name}.injector.gamma", (width,)
        yield from norm(f"{name}.injector.query_norm", width)
        yield from norm(f"{name}.injector.feat_norm", width)
        yield from deformable(f"{name}.injector.attn", width, 3)
        yield from extractor(f"{name}.extractor", width)
    for i in range(2):
        yield from extractor(f"backbone.interactions.3.extra_extractors.{i}", width)
    yield from layer("backbone.up", width, width, 2, 2)
    for i in range(1, 5):
        yield from norm(f"backbone.norm{i}", width, batch=True)
    if kind == "atc":
        yield "backbone.cls_token", (1, 1, width)
        yield from norm("backbone.norm", width)
        yield from layer("backbone.head", 1000, width)
    if kind == "svit":
        for i in range(9):
            yield from norm(f"backbone.selective_modules.{i}.norm", width)
            yield from layer(f"backbone.selective_modules.{i}.mlp.fc1", width // 4, width)
            yield from layer(f"backbone.selective_modules.{i}.mlp.fc2", 2, width // 4)


def whole(width: int, kind: str) -> Iterator[tuple[str, Shape]]:
    yield from backbone(width, kind)
    for i in range(4):
        yield from layer(f"neck.lateral_convs.{i}.conv", 256, width, 1, 1)
        yield from layer(f"neck.fpn_convs.{i}.conv", 256, 256, 3, 3)
    yield from layer("rpn_head.rpn_conv", 256, 256, 3, 3)
    yield from layer("rpn_head.rpn_cls", 3, 256, 1, 1)
    yield from layer("rpn_head.rpn_reg", 12, 256, 1, 1)
    yield from layer("roi_head.bbox_head.fc_cls", 81, 1024)
    yield from layer("roi_head.bbox_head.fc_reg", 320, 1024)
    yield from layer("roi_head.bbox_head.shared_fcs.0", 1024, 256 * 49)
    yield from layer("roi_head.bbox_head.shared_fcs.1", 1024, 1024)
    for i in range(4):
        yield from layer(f"roi_head.mask_head.convs.{i}.conv", 256, 256, 3, 3)
    yield from layer("roi_head.mask_head.upsample", 256, 256, 2, 2)
    yield from layer("roi_head.mask_head.conv_logits", 80, 256, 1, 1)


def state_dict(width: int, kind: str, device: str = "meta") -> dict[str, Tensor]:
    state = {}
    for number, (name, shape) in enumerate(whole(width, kind)):
        assert name not in state
        # A value of its own in every tensor, so that two of one shape cannot change places.
        state[name] = torch.full(shape, float(number), device=device)
        if device != "meta" and shape:
            state[name].view(-1)[0] = -number
    return state


@pytest.mark.parametrize("kind", ["dense", "svit", "atc"])
def test_every_published_tensor_is_accounted_for(kind: str) -> None:
    for size, width, millions in (("tiny", 192, 28.06), ("small", 384, 47.79)):
        state = state_dict(width, kind)
        with torch.device("meta"):
            detector = vit_adapter(size)
            with_token = vit_adapter(size, class_token=True).state_dict()
        plain = detector.state_dict()
        found = from_published(state, plain)
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in plain.items()}
        assert len(gates(state)) == (9 * 6 if kind == "svit" else 0)
        unused = 5 if kind == "atc" else 0  # class token, last norm and head
        assert len(found) + len(gates(state)) + unused == len(state)
        if kind == "atc":
            found = from_published(state, with_token)
            assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in with_token.items()}
        assert round(sum(parameter.numel() for parameter in detector.parameters()) / 1e6, 2) == millions


def test_a_published_file_lands_where_it_should_with_svits_gates_and_epsilon(tmp_path: Path) -> None:
    state = state_dict(192, "svit", "cpu")
    path = tmp_path / "published.pth"
    torch.save({"meta": {"epoch": 36, "CLASSES": ("person",)}, "state_dict": state}, path)
    detector = vit_adapter("tiny", weights=path)
    body = detector.backbone
    extractors, layer = body.interactions[3].extractors, "blocks.11.TransformerEncoderLayer"
    for ours, theirs in [
        (extractors[2].ffn.convolution.bias, "interactions.3.extra_extractors.1.ffn.dwconv.dwconv.bias"),
        (body.interactions[1].injector.norm_tokens.weight, "interactions.1.injector.query_norm.weight"),
        (body.interactions[1].extractors[0].norm_tokens.weight, "interactions.1.extractor.feat_norm.weight"),
        (body.prior.stages[2][1].running_var, "spm.conv4.1.running_var"),
        (body.prior.projections[3].weight, "spm.fc4.weight"),
        (body.norms[3].weight, "norm4.weight"),
        (body.vit.blocks[11].mlp.fc2.bias, f"{layer}.linear2.bias"),
        (body.vit.blocks[11].attn.qkv.weight, f"{layer}.self_attn.in_proj_weight"),
    ]:
        assert torch.equal(ours, state[f"backbone.{theirs}"])
    assert torch.equal(body.vit.pos_embed, state["backbone.pos_embed"][:, 1:])
    assert torch.equal(detector.roi.box.differences.weight, state["roi_head.bbox_head.fc_reg.weight"])
    assert torch.equal(detector.rpn.objectness.bias, state["rpn_head.rpn_cls.bias"])
    norms = [m.eps for m in body.vit.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 24 and set(norms) == {ENCODER_LAYER_EPS}
    learned = method_weights(path)
    assert len(learned) == 54
    agglo.apply(detector, method="svit", keep_rate=0.7)
    load_method(detector, learned, str(path))
    gate = detector.state_dict()["backbone.agglo_method.gates.8.decide.2.bias"]
    assert torch.equal(gate, state["backbone.selective_modules.8.mlp.fc2.bias"])


SMALL = HeadSettings(width=16, box_width=32, mask_convolutions=2)


def small_vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 64, "embed_dim": 24, "depth": 4, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **shape, **options)


@pytest.mark.parametrize("class_token", [False, True])
def test_the_real_deit_loads_with_every_tensor_accounted_for(class_token: bool) -> None:
    path = data_path("deit_tiny_patch16_224.safetensors")
    state, detector = load_file(path), vit_adapter("tiny", class_token=class_token, weights=path)
    unused = {"norm.weight", "norm.bias", "head.weight", "head.bias"} | (set() if class_token else {"cls_token"})
    held = detector.backbone.vit.state_dict()
    assert held.keys() == state.keys() - unused
    for name, value in held.items():
        assert torch.equal(value, state[name][:, 1:] if name == "pos_embed" and not class_token else state[name])


def test_any_plain_vit_trains_and_its_detector_loads_exactly(tmp_path: Path) -> None:
    vit = {"init_values": 0.1, "reg_tokens": 2}
    detector = vit_adapter(small_vit(**vit), n_classes=3, heads=SMALL, deform_heads=2)
    images = [torch.randn(3, 60, 70), torch.randn(3, 32, 33)]
    losses = detector(images, [rectangles([[4, 4, 40, 50]], [2], (60, 70)), rectangles([], [], (32, 33))])
    sum(losses.values()).backward()
    assert not [name for name, parameter in detector.named_parameters() if parameter.grad is None]
    path = tmp_path / "detector.pth"
    torch.save(detector.state_dict(), path)
    again = vit_adapter(small_vit(**vit), n_classes=3, heads=SMALL, deform_heads=2, weights=path)
    pairs = zip(detector.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match=r"roi\.box\.classes\.weight"):
        vit_adapter(small_vit(**vit), n_classes=4, heads=SMALL, deform_heads=2, weights=path)


def test_files_of_other_vits(tmp_path: Path) -> None:
    """Registers stay, and a larger image brings its grid."""
    path = tmp_path / "vit.pth"
    registers = small_vit(reg_tokens=2)
    torch.save(registers.state_dict(), path)
    expected = registers.pos_embed[:, 1:].clone()
    loaded = vit_adapter(small_vit(reg_tokens=2), deform_heads=2, heads=SMALL, weights=path)
    assert torch.equal(loaded.backbone.vit.pos_embed, expected)
    torch.save(timm.create_model("vit_tiny_patch16_384").state_dict(), path)
    assert vit_adapter("tiny", weights=path).backbone.vit.patch_embed.grid_size == (24, 24)
    with pytest.raises(ValueError, match="pos_embed"):
        vit_adapter("small", weights=path)
