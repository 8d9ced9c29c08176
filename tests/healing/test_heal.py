"""`agglo.heal` on real models: what it gives on images it never saw, and that everything can be put back."""

from __future__ import annotations

import copy
import json
import signal
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import agglo
from agglo.embedded import classifier
from agglo.healing import training
from agglo.healing.result import Healed
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.tasks.detection.specs import DetectorSpec
from agglo.models.checkpoints import HEALED_FOR
from agglo.models.opening import ModelSpec, build
from agglo.tuning import submodule_output
from agglo.tuning.subject import distances
from tests.support.detection import SMALL_MODEL
from tests.support.killing import die_at_replacement, require_equal
from tests.support.processes import FORKSERVER, in_two_processes

timm = pytest.importorskip("timm")

CONFIG = agglo.ReductionConfig("pool", keep_rate=0.25)  # which costs this model much
FEW: dict[str, Any] = {"steps": 3, "batch_size": 8, "quiet": True}


@cache
def fashion() -> tuple[Tensor, Tensor]:
    """The 1000 embedded images, normalised, and their classes."""
    pixels, labels = read_split(classifier.IMAGES, "val")
    return (torch.tensor(pixels).unsqueeze(1) / 255 - 0.2860) / 0.3530, torch.tensor(labels).long()


def vit(**options: Any) -> Any:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=64, depth=4, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.1)
    return agglo.apply(model, keep_rate=0.5)


def noise(count: int = 24) -> Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a healing may touch: values, which of them have gradients, the gradients, and modes."""
    parameters = dict(model.named_parameters())
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "needed": {name: parameter.requires_grad for name, parameter in parameters.items()},
        "gradients": {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None},
        "modes": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "classes": {name: type(module).__qualname__ for name, module in model.named_modules()},
    }


def test_a_reduced_model_comes_nearer_to_the_dense_one_on_images_it_never_saw(tmp_path: Path) -> None:
    images, labels = fashion()
    dense = timm.create_model(classifier.NAME, pretrained=True).eval()
    model = agglo.apply(copy.deepcopy(dense), CONFIG)
    unseen = images[600:800]
    with torch.no_grad():
        expected, before = dense(unseen), model(unseen)
        healed = agglo.heal(model, [(images[:600], labels[:600])], steps=24, batch_size=16, quiet=True)
        after = model(unseen)
    change = distances("kl", expected, after) - distances("kl", expected, before)
    assert change.mean() < -4 * change.std() / len(change) ** 0.5
    assert healed.after.distance < healed.before.distance - 2 * healed.error
    assert healed.after.images == 75 and healed.after.drop is not None and healed.steps == 24
    assert healed.curve[0][0] == 0 and min(d for _, d in healed.curve) < healed.curve[0][1]
    assert agglo.report(model) is not None and not model.training
    for part in ("kl distance", "points of accuracy lost", "24 steps"):
        assert part in healed.report()
    healed.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_what_is_reported_is_what_the_images_kept_apart_show() -> None:
    model, images = vit(), noise()
    dense = agglo.remove(copy.deepcopy(model)).eval()
    start = copy.deepcopy(model).eval()
    healed = agglo.heal(model, images, **FEW)
    apart = images[training.Parts.of(len(images), 0).reporting]
    with torch.no_grad():
        before, after = (distances("kl", dense(apart), each(apart)).double() for each in (start, model.eval()))
    assert healed.before.distance == pytest.approx(float(before.mean()), rel=1e-4)
    assert healed.after.distance == pytest.approx(float(after.mean()), rel=1e-4)
    assert healed.error == pytest.approx(float((after - before).std()) / len(apart) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("which", ["norms", "biases", "all"])
def test_remove_puts_everything_back(which: Any) -> None:
    plain = agglo.remove(vit()).train()
    plain.norm.eval()
    plain.blocks[0].norm1.weight.requires_grad_(False)
    plain(noise(2)).sum().backward()
    before = everything(plain)
    model = agglo.apply(plain, keep_rate=0.5)
    applied = everything(model)
    healed = agglo.heal(model, noise(), parameters=which, **FEW)
    after = everything(model)
    changed = {name for name, value in after["values"].items() if not torch.equal(value, before["values"][name])}
    assert changed == healed.parameters.keys()
    names = {"norms": lambda n: "norm" in n, "biases": lambda n: "norm" in n or "bias" in n, "all": lambda n: True}
    assert changed and all(names[which](name) for name in changed)
    for what in ("needed", "gradients", "modes", "classes"):
        require_equal(after[what], applied[what], what)
    once = copy.deepcopy(model)
    agglo.heal(model, noise(), parameters=which, lr=1e-5, **FEW)  # a second time, from there
    for each in (model, once):
        agglo.remove(each)
        expected = before if each is model else {**before, "gradients": {}}  # copies have none
        require_equal(everything(each), expected)


def test_a_model_is_never_worse_than_it_was() -> None:
    model = vit()
    before = everything(model)
    with pytest.warns(UserWarning, match="gained nothing"):
        healed = agglo.heal(model, noise(), lr=1e4, **{**FEW, "steps": 24})
    require_equal(everything(model), before)
    assert healed.after == healed.before and healed.error == 0 and not healed.parameters
    assert healed.steps < 24, "it stops once nothing is gained any more"


def test_an_error_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit()
    before = everything(model)
    step = training.Training._step

    def failing(self: Any, number: int, total: int) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return step(self, number, total)

    monkeypatch.setattr(training.Training, "_step", failing)
    with pytest.raises(KeyboardInterrupt):
        agglo.heal(model, noise(), **FEW)
    require_equal(everything(model), before)


def heal_and_die(folder: Path, replacement: int) -> None:
    torch.set_num_threads(1)
    die_at_replacement(replacement)
    agglo.heal(vit(), noise(), checkpoint=folder / "state.pt", **{**FEW, "steps": 24})


@pytest.mark.parametrize("replacement", [1, 4])
def test_a_killed_run_goes_on_to_the_same_end(tmp_path: Path, replacement: int) -> None:
    process = FORKSERVER.Process(target=heal_and_die, args=(tmp_path, replacement))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "state.pt").exists() == (replacement > 1)
    whole, resumed = vit(), vit()
    settings = {**FEW, "steps": 24}
    expected = agglo.heal(whole, noise(), **settings)
    found = agglo.heal(resumed, noise(), checkpoint=tmp_path / "state.pt", **settings)
    require_equal(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert (found.curve, found.before, found.after) == (expected.curve, expected.before, expected.after)
    with pytest.raises(ValueError, match=r"lr: .* there"):
        agglo.heal(vit(), noise(), checkpoint=tmp_path / "state.pt", lr=1e-6, **settings)


def test_healed_weights_load_into_the_plain_model_and_know_their_config(tmp_path: Path) -> None:
    model = vit()
    healed = agglo.heal(model, noise(), **FEW)
    healed_state = {name: value.clone() for name, value in model.state_dict().items()}
    agglo.remove(model)
    healed.save(path := tmp_path / "healed.safetensors")
    plain = timm.create_model("test_vit", img_size=64, depth=4)
    plain.load_state_dict(load_file(path), strict=True)
    require_equal(dict(plain.state_dict()), healed_state)
    with safe_open(path, framework="pt") as file:
        assert agglo.ReductionConfig.from_dict(json.loads(file.metadata()[HEALED_FOR])) == healed.config

    opened = build(ModelSpec("test_vit", path, options={"img_size": 64, "depth": 4}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agglo.apply(opened, healed.config)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"healed for atc:keep_rate=0\.5, not for atc:keep_rate=0\.7"):
            agglo.apply(opened, keep_rate=0.7)
        agglo.remove(opened)
    require_equal(dict(opened.state_dict()), healed_state)
    with pytest.raises(ValueError, match="healed before"):
        agglo.heal(agglo.apply(opened, healed.config), noise(), **FEW)


def test_a_model_that_was_healed_in_place_warns_too() -> None:
    model = vit()
    agglo.heal(model, noise(), **FEW)
    with pytest.warns(UserWarning, match="were healed for"):
        agglo.apply(model, "tome", keep_rate=0.5)


def nearer(healed: Healed) -> bool:
    return bool(healed.after.distance < healed.before.distance)


def test_any_outputs() -> None:
    """Several tensors, images of several sizes, batches of arguments, and mixed precision."""

    def features(model: Any, images: Tensor) -> list[Tensor]:
        return list(model.forward_intermediates(images, indices=[1, 3], intermediates_only=True))

    healed = agglo.heal(vit(), noise(), output=features, **{**FEW, "steps": 24})
    assert healed.objective == "relative" and nearer(healed)
    dicts = [{"x": part} for part in noise(40).split(4)]
    assert nearer(agglo.heal(vit(), dicts, **{**FEW, "steps": 24}))
    assert nearer(agglo.heal(vit(), noise(), autocast=torch.bfloat16, **{**FEW, "steps": 24}))
    half = vit().bfloat16()
    assert nearer(agglo.heal(half, noise(), **{**FEW, "steps": 24}))
    assert half.norm.weight.dtype == torch.bfloat16


def test_a_detector_is_healed_at_its_feature_pyramid() -> None:
    torch.manual_seed(0)
    parts = ("backbone_options", "adapter_options", "head_options")
    options = {part: SMALL_MODEL[part] for part in parts}
    detector = agglo.apply(DetectorSpec(SMALL_MODEL["model"], 2, **options, image_size=64).build(), keep_rate=0.5)
    images = [torch.rand(3, 48 + 16 * (number % 2), 64) for number in range(16)]
    before = everything(agglo.remove(copy.deepcopy(detector)))
    healed = agglo.heal(detector, images, output=submodule_output("neck"), **{**FEW, "steps": 12})
    assert healed.objective == "relative" and nearer(healed)
    require_equal(everything(agglo.remove(detector)), before)


def test_a_diffusion_transformer_is_healed() -> None:
    pytest.importorskip("diffusers")
    from tests.support.diffusion import dit

    model, inputs = dit()
    latents = torch.randn(24, *inputs["hidden_states"].shape)
    agglo.apply(model, keep_rate=0.2)
    before = everything(agglo.remove(copy.deepcopy(model)))
    batches = [{**inputs, "hidden_states": each} for each in latents]
    with pytest.raises(ValueError, match=r"parameters='norms'.*biases"):  # its norms have no scales of their own
        agglo.heal(model, batches, **FEW)
    healed = agglo.heal(model, batches, parameters="biases", **{**FEW, "steps": 36})
    assert healed.objective == "relative" and nearer(healed)
    require_equal(everything(agglo.remove(model)), before)


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    in_two_processes(tmp_path / "rendezvous", heal_a_share, tmp_path)
    model = vit()
    alone = agglo.heal(model, noise(), **FEW)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-4)
        assert found["after"] == pytest.approx(alone.after.distance, rel=1e-2)


def heal_a_share(folder: Path) -> None:
    model = vit()
    healed = agglo.heal(model, noise(), **FEW)
    state = {"state": dict(model.state_dict()), "after": healed.after.distance}
    torch.save(state, folder / f"{torch.distributed.get_rank()}.pt")


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is applied"):
        agglo.heal(agglo.remove(vit()), noise())
    with pytest.raises(ValueError, match="parameters='some'"):
        agglo.heal(vit(), noise(), parameters="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few"):
        agglo.heal(vit(), noise(2))
