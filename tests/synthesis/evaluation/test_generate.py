"""A grid of reductions: resumable, the same for any number of processes, refused with other settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agglo
from agglo.cli import main
from agglo.embedded import generator as embedded
from agglo.synthesis.data.requests import Request, fashion_requests
from agglo.synthesis.evaluation.cells import Cell, cells_of
from agglo.synthesis.evaluation.errors import prediction_errors, relative_errors
from agglo.synthesis.evaluation.generators import EmbeddedGenerator, PipelineGenerator
from agglo.synthesis.evaluation.grid import Workers, generate
from agglo.synthesis.evaluation.sheets import contact_sheet, groups_sheet, panel_pixels
from tests.support.diffusion import save_dit_pipeline, save_prompted_pipeline
from tests.support.generation import random_weights

pytest.importorskip("diffusers")
Image = pytest.importorskip("PIL.Image")

REQUESTS = fashion_requests(1, classes=range(4))
CELLS = cells_of(["dense", "tome", "atc"], [0.5])


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
    record = generate(generator, CELLS, REQUESTS, tmp_path, batch_size=3)
    assert [cell.name for cell in CELLS] == ["dense", "tome_keep0.5", "atc-average_keep0.5"]
    found = pixels(tmp_path)
    assert len(found) == len(CELLS) * len(REQUESTS)
    seeds = [request.seed for request in REQUESTS[:3]]
    dense = embedded.sample(generator.reduced, [0, 1, 2], seeds, steps=2, guidance=1.5)
    for number in range(3):
        assert np.array_equal(found[f"dense/{number}_0.png"], dense[number, 0].numpy())
    assert not np.array_equal(found["dense/0_0.png"], found["atc-average_keep0.5/0_0.png"])
    assert not np.array_equal(found["tome_keep0.5/0_0.png"], found["atc-average_keep0.5/0_0.png"])
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert record["cells"]["dense"]["images"] == 4 and record["cells"]["dense"]["seconds_mean"] > 0
    about = Image.open(tmp_path / "dense" / "3_0.png").info
    assert (about["prompt"], about["seed"]) == ("Dress", "30") and float(about["seconds"]) > 0
    assert agglo.reduction(generator.reduced) is None


def test_a_stopped_run_goes_on_to_the_same_images(generator: EmbeddedGenerator, tmp_path: Path) -> None:
    generate(generator, CELLS, REQUESTS, tmp_path / "whole", batch_size=2)
    calls: list[Sequence[Request]] = []
    plain = EmbeddedGenerator.__call__

    class Stopping(EmbeddedGenerator):
        def __call__(self, requests: Sequence[Request]) -> Any:
            if len(calls) == 3:
                raise KeyboardInterrupt
            calls.append(requests)
            return plain(self, requests)

    stopping = Stopping.__new__(Stopping)
    vars(stopping).update(vars(generator))
    with pytest.raises(KeyboardInterrupt):
        generate(stopping, CELLS, REQUESTS, tmp_path / "stopped", batch_size=2)
    # As if killed between the two images of a batch, and while a third was written.
    (tmp_path / "stopped" / "tome_keep0.5" / "1_0.png").unlink()
    (tmp_path / "stopped" / "tome_keep0.5" / "1_0.png.unfinished").write_bytes(b"half")
    kept = (tmp_path / "stopped" / "tome_keep0.5" / "0_0.png").stat().st_mtime_ns
    calls.clear()
    calls_left = Stopping.__new__(Stopping)
    vars(calls_left).update(vars(generator))
    with pytest.raises(KeyboardInterrupt):  # three more batches: the rest of tome, the first of atc
        generate(calls_left, CELLS, REQUESTS, tmp_path / "stopped", batch_size=2)
    generate(generator, CELLS, REQUESTS, tmp_path / "stopped", batch_size=2)
    assert (tmp_path / "stopped" / "tome_keep0.5" / "0_0.png").stat().st_mtime_ns == kept
    assert not list((tmp_path / "stopped").rglob("*.unfinished"))
    require_equal(pixels(tmp_path / "stopped"), pixels(tmp_path / "whole"))


def test_processes_share_the_images(generator: EmbeddedGenerator, tmp_path: Path) -> None:
    generate(generator, CELLS[1:2], REQUESTS, tmp_path / "one", batch_size=1)

    class Told(Workers):
        def wait(self) -> None: ...

    # Process 1 first: process 0 sums up what all have done.
    with pytest.raises(FileNotFoundError):
        generate(generator, CELLS[1:2], REQUESTS, tmp_path / "two", batch_size=1, workers=Told(2, 0))
    assert sorted(pixels(tmp_path / "two")) == ["tome_keep0.5/0_0.png", "tome_keep0.5/2_0.png"]
    generate(generator, CELLS[1:2], REQUESTS, tmp_path / "two", batch_size=1, workers=Told(2, 1))
    generate(generator, CELLS[1:2], REQUESTS, tmp_path / "two", batch_size=1, workers=Told(2, 0))
    require_equal(pixels(tmp_path / "two"), pixels(tmp_path / "one"))


def test_another_run_in_the_same_folder_is_refused(generator: EmbeddedGenerator, weights: Path, tmp_path: Path) -> None:
    first = CELLS[:1]
    generate(generator, first, REQUESTS[:1], tmp_path)
    with pytest.raises(ValueError, match=r"images of other steps \(2 then, 3 now\)"):
        generate(EmbeddedGenerator(weights=weights, steps=3, guidance=1.5), first, REQUESTS[:1], tmp_path)
    with pytest.raises(ValueError, match=r"images of other batch_size \(1 then, 2 now\)"):
        generate(generator, first, REQUESTS[:1], tmp_path, batch_size=2)
    with pytest.raises(ValueError, match="images of other requests; give another folder"):
        generate(generator, first, REQUESTS[:2], tmp_path)
    generator.fingerprint = "others"
    with pytest.raises(ValueError, match="images of other weights"):
        generate(generator, first, REQUESTS[:1], tmp_path)


def test_cells_are_added_but_not_changed(generator: EmbeddedGenerator, tmp_path: Path) -> None:
    generate(generator, CELLS[:2], REQUESTS[:1], tmp_path)
    record = generate(generator, CELLS[2:], REQUESTS[:1], tmp_path)
    assert set(record["cells"]) == {cell.name for cell in CELLS}
    changed = Cell("tome_keep0.5", {**CELLS[1].options, "use_rand": False})
    with pytest.raises(ValueError, match=r"holds tome_keep0\.5 with options"):
        generate(generator, [changed], REQUESTS[:1], tmp_path)


def test_an_impossible_cell_raises_before_any_work(generator: EmbeddedGenerator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tome"):
        generate(generator, cells_of(["dense", "tome"], [0.2]), REQUESTS[:1], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_grid() -> None:
    cells = cells_of(
        ["dense", "atc", "tome", "atc"],
        [0.9, 0.5],
        linkages=["single", "average"],
        variants=["paper", "own"],
        common={"every": 2},
        of_method={"use_rand": False},
    )
    assert [cell.name for cell in cells[:6]] == [
        "dense",
        "atc-single-paper_keep0.9",
        "atc-average-paper_keep0.9",
        "atc-single_keep0.9",
        "atc-average_keep0.9",
        "tome_keep0.9",
    ]
    assert len(cells) == 11 and len({cell.name for cell in cells}) == 11
    assert cells[1].options == {
        "method": "atc",
        "keep_rate": 0.9,
        "every": 2,
        "linkage": "single",
        "variant": "paper",
    }
    assert cells[5].options == {"method": "tome", "keep_rate": 0.9, "every": 2, "use_rand": False}
    with pytest.raises(ValueError, match="stride=3 goes with none of the methods 'atc'"):
        cells_of(["atc"], [0.5], of_method={"stride": 3})
    with pytest.raises(ValueError, match="variant='released' is not known"):
        cells_of(["atc"], [0.5], variants=["released"])
    with pytest.raises(ValueError, match="need keep rates"):
        cells_of(["dense", "atc"])


def test_errors_against_dense(generator: EmbeddedGenerator) -> None:
    noisy, steps, classes = torch.randn(2, 1, 32, 32), torch.tensor([300, 600]), torch.tensor([1, 2])
    model = generator.reduced
    dense = model(noisy, steps, classes).sample.detach()
    rates = [1.0, 0.8, 0.3]
    found = prediction_errors(model, cells_of(["atc"], rates), [lambda: model(noisy, steps, classes).sample])
    errors = [found[f"atc-average_keep{rate:g}"][0] for rate in rates]
    assert errors[0] < 1e-5 < errors[1] < errors[2]
    agglo.apply(model, keep_rate=0.8)
    with torch.no_grad():
        reduced = model(noisy, steps, classes).sample
    agglo.remove(model)
    by_hand = [float((a - b).square().sum() / b.square().sum()) ** 0.5 for a, b in zip(reduced, dense, strict=True)]
    assert errors[1] == pytest.approx(sum(by_hand) / 2, rel=1e-4)
    torch.testing.assert_close(relative_errors(2 * dense, dense), torch.ones(2))


def test_sheets(generator: EmbeddedGenerator, tmp_path: Path) -> None:
    generate(generator, CELLS, REQUESTS[:2], tmp_path)
    sheet = contact_sheet(tmp_path, CELLS, REQUESTS[:2])
    first = panel_pixels(Image.open(tmp_path / "dense" / "0_0.png"))
    assert first.shape == (112, 112, 3)
    whole = np.asarray(sheet)
    lines = np.lib.stride_tricks.sliding_window_view(whole[..., 0], 112, axis=1)
    places = np.argwhere((lines == first[0, :, 0]).all(axis=-1))
    assert any(np.array_equal(whole[top : top + 112, left : left + 112], first) for top, left in places)
    wide = panel_pixels(Image.new("RGB", (1024, 512)))
    assert wide.shape == (128, 256, 3)


def test_groups_of_a_step(generator: EmbeddedGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    from agglo.synthesis.evaluation import sheets

    plain = sheets.group_rows
    monkeypatch.setattr(sheets, "group_rows", lambda trace, *a, **k: seen.append(trace) or plain(trace, *a, **k))
    groups_sheet(generator, CELLS[2], REQUESTS[:1], 1)
    steps = seen[0].steps
    assert [step.block for step in steps] == list(range(8))
    assert all(step.total.labels.shape == (1, 256) for step in steps)
    assert all(len(step.total.labels.unique()) == 128 for step in steps)
    # Those of the prompted half at the second step, by hand.
    agglo.apply(generator.reduced, **CELLS[2].options)
    with agglo.trace(generator.reduced, passes=generator.steps) as trace:
        generator(REQUESTS[:1])
    agglo.remove(generator.reduced)
    assert torch.equal(trace.passes[1][3].total.labels[1], steps[3].total.labels[0])
    with pytest.raises(ValueError, match="step 2 of 2 does not exist: 0 to 1"):
        groups_sheet(generator, CELLS[2], REQUESTS[:1], 2)
    with pytest.raises(ValueError, match="dense has no groups"):
        groups_sheet(generator, CELLS[0], REQUESTS[:1], 0)


def test_seeds_not_batches_decide(generator: EmbeddedGenerator) -> None:
    alone = embedded.sample(generator.reduced, [3], [7], steps=2)
    among = embedded.sample(generator.reduced, [1, 3, 5], [6, 7, 8], steps=2)
    assert (alone[0].int() - among[1].int()).abs().max() <= 1
    assert (among[0].int() - among[1].int()).abs().max() > 1
    guided = embedded.sample(generator.reduced, [3], [7], steps=2, guidance=1.5)
    assert not torch.equal(guided, alone)
    with pytest.raises(ValueError, match="2 classes and 1 seeds"):
        embedded.sample(generator.reduced, [3, 4], [7])


def test_the_command(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "embedded", "--weights", str(weights), "--steps", "1", "--classes", "0", "--sheet", "1"]
    arguments += ["--per-class", "1", "--output", str(tmp_path / "out"), "--keep-rate", "0.5", "--groups", "0"]
    assert main([*arguments, "--method", "dense", "atc", "--variant", "paper"]) == 0
    told = capsys.readouterr().out.split()
    assert [Path(path).name for path in told] == ["sheet.png", "atc-average-paper_keep0.5.png"]
    assert all(Path(path).exists() for path in told)
    assert main([*arguments, "--method", "atc", "--steps", "2"]) == 2
    assert "images of other steps (1 then, 2 now)" in capsys.readouterr().err
    assert main(["generate", "embedded", "--imagenet", "--output", str(tmp_path)]) == 2
    assert "--imagenet is for pipelines" in capsys.readouterr().err
    absent = str(tmp_path / "absent.safetensors")
    assert main(["generate", "embedded", "--weights", absent, "--output", str(tmp_path / "other")]) == 2
    assert "absent.safetensors' is not a file" in capsys.readouterr().err
    assert main(["generate", "some-model", "--output", str(tmp_path)]) == 2
    assert "say what to generate" in capsys.readouterr().err


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DiT pipeline of random weights, as diffusers saves it."""
    return save_dit_pipeline(tmp_path_factory.mktemp("pipeline"))


def test_a_pipeline_of_diffusers(pipeline: Path, tmp_path: Path) -> None:
    from agglo.synthesis.data.requests import imagenet_requests

    generator = PipelineGenerator(str(pipeline), steps=2, guidance=4.0, scheduler="DPMSolverMultistepScheduler")
    assert generator.about()["scheduler"] == "DPMSolverMultistepScheduler"
    cells = cells_of(["dense", "atc"], [0.5])
    requests = imagenet_requests(1, classes=[18, 412])
    generate(generator, cells, requests, tmp_path)
    found = pixels(tmp_path)
    assert sorted(found) == [
        f"{cell}/{name}.png" for cell in ("atc-average_keep0.5", "dense") for name in ("18_0", "412_0")
    ]
    again = generator.reduced(
        class_labels=[412], generator=torch.Generator().manual_seed(4120), num_inference_steps=2, guidance_scale=4.0
    ).images[0]
    assert np.array_equal(found["dense/412_0.png"], np.asarray(again))
    with pytest.raises(ValueError, match="scheduler='AutoencoderKL' is no scheduler of diffusers"):
        PipelineGenerator(str(pipeline), scheduler="AutoencoderKL")


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_prompted_pipeline(tmp_path_factory.mktemp("prompted"))


def test_prompts_by_the_command(prompted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    arguments = ["generate", str(prompted), "--prompts", str(tmp_path / "prompts.txt"), "--per-class", "1"]
    arguments += ["--steps", "3", "--size", "16", "16", "--method", "dense", "atc", "--keep-rate", "0.5"]
    assert main([*arguments, "--output", str(tmp_path / "out"), "--groups", "1"]) == 0, capsys.readouterr().err
    found = pixels(tmp_path / "out")
    assert found["dense/0_0.png"].shape == (16, 16, 3)
    assert not np.array_equal(found["dense/0_0.png"], found["dense/1_0.png"])
    assert not np.array_equal(found["dense/0_0.png"], found["atc-average_keep0.5/0_0.png"])
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["settings"]["scheduler"] == "PNDMScheduler" and record["settings"]["guidance"] == 7.5


def test_two_processes_make_the_images_of_one(weights: Path, tmp_path: Path) -> None:
    """As `accelerate launch` and `torchrun` start them."""
    command = ["-m", "agglo", "generate", "embedded", "--weights", str(weights), "--steps", "1", "--classes", "0", "1"]
    command += ["--per-class", "1", "--method", "tome", "--sheet", "0"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name, start in (("one", []), ("two", launch)):
        arguments = [sys.executable, *start, *command, "--output", str(tmp_path / name)]
        subprocess.run(arguments, check=True, env=environment, capture_output=True, timeout=300)
    require_equal(pixels(tmp_path / "two"), pixels(tmp_path / "one"))
    assert len(pixels(tmp_path / "two")) == 2
