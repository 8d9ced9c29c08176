"""Models by name, and weights from files."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.models.checkpoints import Checkpoint, load_method, read_checkpoint, split_method
from agglo.models.opening import ModelSpec, build

timm = pytest.importorskip("timm")
from safetensors.torch import save_file  # noqa: E402

NAME = "test_vit"


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(value) for name, value in timm.create_model(NAME).state_dict().items()}


class Runs:
    """Pickled, it runs a command when read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_every_kind_of_file_gives_the_same_weights(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pth")
    torch.save({"model": state, "epoch": 3}, tmp_path / "c.pt")
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "d.bin")
    for path in sorted(tmp_path.iterdir()):
        model = build(ModelSpec(NAME, checkpoint=path))
        assert not model.training
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()), path.name


def test_files_of_the_studys_trainer(state: dict[str, Tensor], tmp_path: Path) -> None:
    average = {name: value + 1 for name, value in state.items()}
    content = {
        "model": state,
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
        "model_ema": average,
        "args": Namespace(model="deit_tiny", lr=1e-3, resume="", dataset_keep=[0.5]),
    }
    for average_is_better, expected in ((False, state), (True, average)):
        torch.save({**content, "ema_best": average_is_better}, tmp_path / "checkpoint.pth")
        model = build(ModelSpec(NAME, checkpoint=tmp_path / "checkpoint.pth"))
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_weights_tell_the_classes_and_the_pooling(tmp_path: Path) -> None:
    averaging = timm.create_model(NAME, num_classes=11, global_pool="avg")
    assert "fc_norm.weight" in averaging.state_dict()
    torch.save({"model": averaging.state_dict()}, tmp_path / "a.pth")
    model = build(ModelSpec(NAME, checkpoint=tmp_path / "a.pth"))
    images = torch.rand(2, 3, 160, 160)
    torch.testing.assert_close(model(images), averaging.eval()(images))
    with pytest.raises(ValueError, match=r"mismatch for head.weight"):
        build(ModelSpec(NAME, checkpoint=tmp_path / "a.pth", num_classes=5))


def test_what_a_method_learned_is_apart_from_the_model(tmp_path: Path) -> None:
    reduced = agglo.apply(timm.create_model(NAME), "dynamicvit", keep_rate=0.5).eval()
    save_file(reduced.state_dict(), tmp_path / "a.safetensors")
    model = build(ModelSpec(NAME, checkpoint=tmp_path / "a.safetensors"))
    checkpoint = Checkpoint.read(tmp_path / "a.safetensors")
    own, learned = split_method(read_checkpoint(tmp_path / "a.safetensors"))
    assert set(own) == set(checkpoint.model) == set(model.state_dict()) and learned
    assert set(learned) == set(checkpoint.method) and checkpoint.head_classes == 1000
    assert checkpoint.fresh_names(reduced) == checkpoint.fresh_names(model) == []
    assert checkpoint.fresh_names(timm.create_model(NAME, num_classes=5)) == ["head.weight", "head.bias"]
    agglo.apply(model, "dynamicvit", keep_rate=0.5)
    images = torch.rand(2, 3, 160, 160)
    assert not torch.equal(model(images), reduced(images))
    load_method(model, learned, "a.safetensors")
    torch.testing.assert_close(model(images), reduced(images))
    with pytest.raises(ValueError, match="this method learns"):
        load_method(model, {}, "b")
    with pytest.raises(ValueError, match="another method"):
        load_method(model, {"agglo_method.other": torch.zeros(1)}, "b")
    load_method(agglo.remove(model), learned, "a.safetensors")


def test_files_that_hold_no_tensors_are_refused_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": torch.nn.Linear(1, 1)}, tmp_path / "pickled.pth")
    torch.save({"epoch": 3}, tmp_path / "nothing.pth")
    torch.save({"model": Runs()}, tmp_path / "runs.pth")
    torch.save({"model": Runs()}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "junk.pth").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    told = {
        **dict.fromkeys(("pickled", "runs", "old", "junk"), "cannot be read as plain tensors"),
        "nothing": "holds no state dict but keys epoch",
        "junk.safetensors": "cannot be read as safetensors",
        "absent": "is not a file",
    }
    for name, message in told.items():
        with pytest.raises(ValueError, match=message):
            build(ModelSpec(NAME, checkpoint=tmp_path / (name if "." in name else f"{name}.pth")))
    assert not (tmp_path / "ran").exists()


def test_another_image_size_resamples_positions_after_an_exact_load(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "a.safetensors")
    model = build(ModelSpec(NAME, checkpoint=tmp_path / "a.safetensors", image_size=(96, 160)))
    assert model.patch_embed.img_size == (96, 160)  # type: ignore[union-attr]
    assert model(torch.rand(1, 3, 96, 160)).shape == (1, 1000)
    with pytest.raises(ValueError, match=r"image_size=\(100, 160\)"):
        build(ModelSpec(NAME, image_size=(100, 160)))


def test_names_classes_and_options() -> None:
    assert build(ModelSpec(NAME, num_classes=5)).get_classifier().out_features == 5
    for name, named in (("test_vitt", "mean 'test_vit'"), ("test_vit.bogus", r"test_vit\.bogus")):
        with pytest.raises(ValueError, match=named):
            build(ModelSpec(name))
    for option in ({"global_pool": "foo"}, {"embed_dim": 65}, {"pooling": "avg"}):
        ((name, value),) = option.items()
        with pytest.raises(ValueError, match=f"num_classes=5, {name}={value!r}: .+"):
            build(ModelSpec(NAME, num_classes=5, options=option))


def test_torchvisions_vision_transformers_become_timms_to_the_logit(tmp_path: Path) -> None:
    vision_transformer = pytest.importorskip("torchvision.models.vision_transformer")
    torch.manual_seed(0)
    theirs = vision_transformer.VisionTransformer(48, 16, num_layers=2, num_heads=3, hidden_dim=192, mlp_dim=768)
    torch.nn.init.normal_(theirs.heads.head.weight)  # all zero otherwise, and every logit with it
    new = theirs.eval().state_dict()
    old = {n.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for n, v in new.items()}
    pixels = torch.randn(2, 3, 48, 48)
    for state in (new, old):  # today's names, and those of old files
        torch.save(state, tmp_path / "swag.pth")
        ours = build(ModelSpec("vit_tiny_patch16_224", tmp_path / "swag.pth", options={"img_size": 48, "depth": 2}))
        with torch.inference_mode():
            assert torch.allclose(ours(pixels), theirs(pixels), atol=1e-4)
