"""A grid of reductions: resumable, the same for any number of processes, refused with other settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agglo
from agglo import ReductionConfig
from agglo.embedded import generator as embedded
from agglo.lab.cli import main
from agglo.lab.tasks.synthesis.data.requests import Request, fashion_requests, imagenet_requests
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator, PipelineGenerator
from agglo.lab.tasks.synthesis.evaluation.grid import GenerationCell, cells_of, generate
from tests.support.diffusion import save_dit_pipeline, save_prompted_pipeline
from tests.support.generation import random_weights
from tests.support.processes import in_two_processes

pytest.importorskip("diffusers")
Image = pytest.importorskip("PIL.Image")

REQUESTS = fashion_requests(1, classes=range(4))
CELLS = cells_of(["dense", "tomesd", "atc"], [0.5])


SMALL = {"num_layers": 2}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "SHAPE", {**embedded.SHAPE, **SMALL})
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_weights(tmp_path_factory.mktemp("weights") / "random.safetensors")


@pytest.fixture
def generator(weights: Path) -> EmbeddedGenerator:
    return EmbeddedGenerator(weights=weights, steps=2, guidance=1.5)


def pixels(folder: Path) -> dict[str, np.ndarray]:
    return {str(path.relative_to(folder)): np.asarray(Image.open(path)) for path in sorted(folder.rglob("*.png"))}


def require_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_every_cell_gets_every_image(generator: EmbeddedGenerator, tmp_path: Path) -> None:
    made = generate(generator, CELLS, REQUESTS, tmp_path, batch_size=3)
    assert [cell.name for cell in CELLS] == ["dense", "tomesd_keep0.5", "atc_keep0.5"]
    found = pixels(tmp_path)
    assert len(found) == len(CELLS) * len(REQUESTS)
    seeds = [request.seed for request in REQUESTS[:3]]
    dense = embedded.sample(generator.reduced, [0, 1, 2], seeds, steps=2, guidance=1.5)
    for number in range(3):
        assert np.array_equal(found[f"dense/{number}_0.png"], dense[number, 0].numpy())
    assert not np.array_equal(found["tomesd_keep0.5/0_0.png"], found["atc_keep0.5/0_0.png"])
    assert list(made.values()) == json.loads((tmp_path / "record.json").read_text())["results"]
    assert made["dense"]["images"] == 4 and made["dense"]["seconds_mean"] > 0
    about = Image.open(tmp_path / "dense" / "3_0.png").info
    assert (about["prompt"], about["seed"]) == ("Dress", "30") and float(about["seconds"]) > 0
    assert agglo.report(generator.reduced) is None


def test_a_stopped_run_goes_on_to_the_same_images(
    generator: EmbeddedGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    generate(generator, CELLS, REQUESTS, whole, batch_size=2)
    plain = EmbeddedGenerator.__call__
    batches = iter(range(3))  # then one of tomesd is missing

    def stopping(self: EmbeddedGenerator, requests: Sequence[Request]) -> Any:
        if next(batches, None) is None:
            raise KeyboardInterrupt
        return plain(self, requests)

    monkeypatch.setattr(EmbeddedGenerator, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        generate(generator, CELLS, REQUESTS, stopped, batch_size=2)
    # As if killed between the two images of a batch, and while a third was written.
    (stopped / "tomesd_keep0.5" / "1_0.png").unlink()
    (stopped / "tomesd_keep0.5" / "1_0.png.unfinished").write_bytes(b"half")
    kept = (stopped / "tomesd_keep0.5" / "0_0.png").stat().st_mtime_ns
    monkeypatch.undo()
    generate(generator, CELLS, REQUESTS, stopped, batch_size=2)
    assert (stopped / "tomesd_keep0.5" / "0_0.png").stat().st_mtime_ns == kept
    assert not list(stopped.rglob("*.unfinished"))
    require_equal(pixels(stopped), pixels(whole))


def test_another_run_in_the_same_folder_is_refused(generator: EmbeddedGenerator, weights: Path, tmp_path: Path) -> None:
    generate(generator, CELLS[:2], REQUESTS[:1], tmp_path)
    other = EmbeddedGenerator(weights=weights, steps=3, guidance=1.5)
    changed = GenerationCell("tomesd_keep0.5", ReductionConfig.of("tomesd", keep_rate=0.5, use_rand=False))
    for arguments, named in (
        ((other, CELLS[:1], REQUESTS[:1]), "settings.steps"),
        ((generator, CELLS[:1], REQUESTS[:2]), "settings.requests"),
        ((generator, [changed], REQUESTS[:1]), "config"),
    ):
        with pytest.raises(ValueError, match=named):
            generate(*arguments, tmp_path)
    made = generate(generator, CELLS[2:], REQUESTS[:1], tmp_path)  # cells are added
    assert set(made) == {cell.name for cell in CELLS}
    with pytest.raises(ValueError, match="tomesd"):  # what cannot be applied raises before any work
        generate(generator, cells_of(["dense", "tomesd"], [0.2]), REQUESTS[:1], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_grid() -> None:
    paper = "atc:linkage=single,features=tokens,proportional=false"
    cells = cells_of(["dense", paper, "tomesd:use_rand=false,every=2", paper], [0.9, 0.5])
    assert [cell.name for cell in cells[:3]] == [
        "dense",
        "atc-linkage=single-features=tokens-proportional=false_keep0.9",
        "tomesd-use_rand=false-every=2_keep0.9",
    ]
    assert len({cell.name for cell in cells}) == len(cells) == 5
    options = {"linkage": "single", "features": "tokens", "proportional": False}
    assert cells[1].config == ReductionConfig.of("atc", keep_rate=0.9, **options)
    assert cells[2].config == ReductionConfig.of("tomesd", keep_rate=0.9, every=2, use_rand=False)
    for methods, rates, named in (
        (["atc:stride=3"], [0.5], "stride"),
        (["atc:3"], [0.5], "atc:3"),
    ):
        with pytest.raises(ValueError, match=named):
            cells_of(methods, rates)


def test_the_command(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "embedded", "--weights", str(weights), "--steps", "1", "--classes", "0", "--sheet", "1"]
    arguments += ["--per-class", "1", "--output", str(tmp_path / "out"), "--keep-rate", "0.5"]
    assert main([*arguments, "--method", "dense", "atc:features=tokens"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "sheet.png")
    assert len(pixels(tmp_path / "out")) == 3
    for words, named in (
        ([*arguments[1:], "--method", "atc", "--steps", "2"], "settings.steps"),
        (["embedded", "--imagenet", "--output", str(tmp_path)], "--imagenet"),
        (["embedded", "--weights", "absent.pt", "--output", str(tmp_path / "other")], "absent.pt"),
        (["some-model", "--output", str(tmp_path)], "say what to generate"),
    ):
        assert main(["generate", *words]) == 2
        assert named in capsys.readouterr().err


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    pipeline = save_dit_pipeline(tmp_path / "pipeline")
    generator = PipelineGenerator(str(pipeline), steps=2, guidance=4.0, scheduler="DPMSolverMultistepScheduler")
    assert generator.about["scheduler"] == "DPMSolverMultistepScheduler"
    requests = imagenet_requests(1, classes=[18, 412])
    generate(generator, cells_of(["dense", "atc"], [0.5]), requests, tmp_path / "out")
    found = pixels(tmp_path / "out")
    assert sorted(found) == [f"{cell}/{name}.png" for cell in ("atc_keep0.5", "dense") for name in ("18_0", "412_0")]
    again = generator.reduced(
        class_labels=[412], generator=torch.Generator().manual_seed(4120), num_inference_steps=2, guidance_scale=4.0
    ).images[0]
    assert np.array_equal(found["dense/412_0.png"], np.asarray(again))
    steps: list[int] = []
    generator(requests, steps.append)
    generator(requests)  # without a hook
    assert steps == [1, 2]
    with pytest.raises(ValueError, match="scheduler='AutoencoderKL'"):
        PipelineGenerator(str(pipeline), scheduler="AutoencoderKL")


def test_prompts_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompted = save_prompted_pipeline(tmp_path)
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    arguments = ["generate", str(prompted), "--prompts", str(tmp_path / "prompts.txt"), "--per-class", "1"]
    arguments += ["--steps", "3", "--size", "16", "16", "--method", "dense", "atc", "--keep-rate", "0.5"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    found = pixels(tmp_path / "out")
    assert found["dense/0_0.png"].shape == (16, 16, 3)
    assert not np.array_equal(found["dense/0_0.png"], found["dense/1_0.png"])
    assert not np.array_equal(found["dense/0_0.png"], found["atc_keep0.5/0_0.png"])
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["settings"]["scheduler"] == "PNDMScheduler" and record["settings"]["guidance"] == 7.5


def in_small(command: list[str]) -> int:
    embedded.SHAPE.update(SMALL)
    return main(command)


def test_two_processes_make_the_images_of_one(weights: Path, tmp_path: Path) -> None:
    command = ["generate", "embedded", "--weights", str(weights), "--steps", "1", "--classes", "0", "1"]
    command += ["--per-class", "1", "--method", "tomesd", "--sheet", "0", "--output"]
    in_two_processes(tmp_path / "rendezvous", in_small, [*command, str(tmp_path / "two")])
    assert main([*command, str(tmp_path / "one")]) == 0
    require_equal(pixels(tmp_path / "two"), pixels(tmp_path / "one"))
    assert len(pixels(tmp_path / "two")) == 2
