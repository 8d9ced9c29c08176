"""Models by name, and weights from files."""

from __future__ import annotations

import os
import pickle
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


@pytest.mark.parametrize("average_is_better", [False, True])
def test_files_of_the_studys_trainer(state: dict[str, Tensor], tmp_path: Path, average_is_better: bool) -> None:
    average = {name: value + 1 for name, value in state.items()}
    content = {
        "model": state,
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
        "lr_scheduler": {"t_initial": 30},
        "epoch": 29,
        "model_ema": average,
        "scaler": {"scale": 65536.0},
        "args": Namespace(model="deit_tiny", lr=1e-3, resume="", dataset_keep=[0.5]),
        "ema_best": average_is_better,
    }
    torch.save(content, tmp_path / "checkpoint.pth")
    model = build(ModelSpec(NAME, checkpoint=tmp_path / "checkpoint.pth"))
    expected = average if average_is_better else state
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    torch.save({**content, "model_ema": None, "ema_best": True}, tmp_path / "lost.pth")
    with pytest.raises(ValueError, match="says ema_best but holds no model_ema"):
        build(ModelSpec(NAME, checkpoint=tmp_path / "lost.pth"))


def test_weights_tell_the_classes_and_the_pooling(tmp_path: Path) -> None:
    averaging = timm.create_model(NAME, num_classes=11, global_pool="avg")
    assert "fc_norm.weight" in averaging.state_dict()
    torch.save({"model": averaging.state_dict()}, tmp_path / "a.pth")
    model = build(ModelSpec(NAME, checkpoint=tmp_path / "a.pth"))
    images = torch.rand(2, 3, 160, 160)
    torch.testing.assert_close(model(images), averaging.eval()(images))
    with pytest.raises(ValueError, match=r"head.weight \(11, 64\) where the model has \(5, 64\)"):
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
    with pytest.raises(ValueError, match="this method learns, and b holds no weights of it"):
        load_method(model, {}, "b")
    with pytest.raises(ValueError, match="agglo_method"):
        load_method(model, {"agglo_method.other": torch.zeros(1)}, "b")
    load_method(agglo.remove(model), learned, "a.safetensors")


def test_a_mismatch_lists_the_keys_and_stops(state: dict[str, Tensor], tmp_path: Path) -> None:
    changed = {name: value for name, value in state.items() if name != "norm.bias"}
    changed["extra"] = torch.zeros(1)
    changed["head.bias"] = torch.zeros(7)
    save_file(changed, tmp_path / "a.safetensors")
    expected = (
        r"missing: norm.bias; unexpected: extra; of another shape: head.bias \(7,\) where the model has \(1000,\)"
    )
    with pytest.raises(ValueError, match=expected):
        build(ModelSpec(NAME, checkpoint=tmp_path / "a.safetensors"))
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(ValueError, match=rf"and {len(state) - 6} more"):
        build(ModelSpec(NAME, checkpoint=tmp_path / "empty.safetensors"))


def test_files_that_hold_no_tensors_are_refused_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": torch.nn.Linear(1, 1)}, tmp_path / "pickled.pth")
    torch.save({"epoch": 3}, tmp_path / "nothing.pth")
    torch.save({"model": Runs()}, tmp_path / "runs.pth")
    torch.save({"model": Runs()}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "junk.pth").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "empty.pth").touch()
    (tmp_path / "text.pth").write_text("hello, these are words\n")
    (tmp_path / "page.pth").write_text("<!DOCTYPE html><html>not found</html>")
    (tmp_path / "pickle.pth").write_bytes(pickle.dumps({"a": (1, 2, 3)}, protocol=2))
    whole = (tmp_path / "nothing.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])
    code = "cannot be read as plain tensors: it holds {} besides, which could run code when read; save the state dict"
    no_file = "cannot be read as plain tensors: it is not a whole file of tensors as torch.save writes them"
    told = {
        "pickled.pth": code.format("torch.nn.modules.linear.Linear"),
        "runs.pth": code.format("posix.system|nt.system"),
        "old.pth": code.format("posix.system|nt.system"),
        "nothing.pth": "holds no state dict but keys epoch",
        **dict.fromkeys(("junk.pth", "empty.pth", "text.pth", "page.pth", "pickle.pth", "cut.pth"), no_file),
        "junk.safetensors": "cannot be read as safetensors",
        "absent.pth": "is not a file",
    }
    for name, message in told.items():
        with pytest.raises(ValueError, match=message) as caught:
            build(ModelSpec(NAME, checkpoint=tmp_path / name))
        assert str(caught.value).isprintable() and "weights_only" not in str(caught.value), name
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*TorchScript")
def test_a_program_is_no_checkpoint(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "program.pth")
    with pytest.raises(ValueError, match="TorchScript"):
        read_checkpoint(tmp_path / "program.pth")


def test_another_image_size_resamples_positions_after_an_exact_load(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "a.safetensors")
    model = build(ModelSpec(NAME, checkpoint=tmp_path / "a.safetensors", image_size=(96, 160)))
    assert model.patch_embed.img_size == (96, 160)  # type: ignore[union-attr]
    assert model(torch.rand(1, 3, 96, 160)).shape == (1, 1000)
    with pytest.raises(ValueError, match=r"image_size=\(100, 160\)"):
        build(ModelSpec(NAME, image_size=(100, 160)))


def test_names_and_classes() -> None:
    assert build(ModelSpec(NAME, num_classes=5)).get_classifier().out_features == 5
    with pytest.raises(ValueError, match="close to it: test_vit"):
        build(ModelSpec("test_vitt"))
    with pytest.raises(ValueError, match=r"test_vit\.bogus"):
        build(ModelSpec("test_vit.bogus"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # timm asserts this without a word.
        ({"global_pool": "foo"}, "cannot be built with num_classes=5, global_pool='foo': AssertionError$"),
        ({"embed_dim": 65}, "cannot be built with num_classes=5, embed_dim=65: dim should be divisible by num_heads"),
        ({"pooling": "avg"}, "with num_classes=5, pooling='avg': .*unexpected keyword argument 'pooling'"),
        ({"drop_path_rate": "much"}, "with num_classes=5, drop_path_rate='much': linspace"),
    ],
)
def test_options_that_a_model_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(ModelSpec(NAME, num_classes=5, options=options))
    assert "\n" not in str(caught.value)
