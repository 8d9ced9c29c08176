"""What a person types: results, and errors on one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import agglo
from agglo.lab.bench import model as benchmark_model
from agglo.lab.cli import main
from agglo.models.opening import ModelSpec, build
from agglo.utils.devices import best_device

pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")

MODEL = ["--model", "test_vit"]


@pytest.fixture
def photo(tmp_path: Path) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 260, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def exit_code(*arguments: str) -> int:
    """As a shell sees it: argparse leaves by SystemExit."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"agglo {agglo.__version__}\n"
    for command in ([], ["visualize"], ["bench"]):
        assert exit_code(*command, "--help") == 0
        assert f"usage: {' '.join(['agglo', *command])}" in capsys.readouterr().out


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("backends") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["backend", *(status.name for status in agglo.clustering.backends())]


def test_python_m_agglo() -> None:
    done = subprocess.run([sys.executable, "-m", "agglo", "backends", "--dtype"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("agglo: error: unrecognized arguments: --dtype") and done.stderr.count("\n") == 1


def test_visualize_writes_a_row_for_every_image_and_a_panel_for_every_reduction(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []
    several = ["--linkage", "single", "complete", "--method", "atc", "tome"]
    for number, arguments in enumerate(([photo], [photo, photo], [photo, *several], [photo, "--after", "2"])):
        output = tmp_path / f"{number}.png"
        assert exit_code("visualize", *arguments, *MODEL, "--keep-rate", "0.5", "-o", str(output)) == 0
        assert capsys.readouterr().out == f"{output}\n"
        sizes.append(Image.open(output).size)
    one, two, methods, after = sizes
    assert two[0] == one[0] and 1.8 * one[1] < two[1] < 2 * one[1]
    assert methods[0] == one[0]  # three stages of one method, three methods
    assert after[0] < 0.8 * one[0]  # the first of two stages


def test_visualize_warns_about_a_method_that_was_never_trained(
    photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = build(ModelSpec("test_vit"))
    torch.save(model.state_dict(), tmp_path / "ordinary.pth")
    agglo.apply(model, "dynamicvit", keep_rate=0.5)
    torch.save(model.state_dict(), tmp_path / "tuned.pth")
    said, drawn = {}, {}
    for seed, checkpoint, method in (
        (1, "ordinary", "dynamicvit"),
        (2, "tuned", "dynamicvit"),
        (3, "tuned", "dynamicvit"),
        (4, "ordinary", "tome"),
    ):
        torch.manual_seed(seed)
        more = ["--checkpoint", str(tmp_path / f"{checkpoint}.pth"), "--method", method]
        assert exit_code("visualize", photo, *MODEL, *more, "-o", str(tmp_path / "a.png")) == 0
        said[seed], drawn[seed] = capsys.readouterr().err, (tmp_path / "a.png").read_bytes()
    assert said[1].startswith("agglo: dynamicvit")
    assert said[1].count("\n") == 1 and said[2] == said[3] == said[4] == ""
    assert drawn[2] == drawn[3] != drawn[1], "what the checkpoint learned is drawn, not chance"


def test_bench_model_writes_table_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(benchmark_model, "_LEAST_SECONDS", 0.0)
    small = ["--batch-size", "1", "--repeats", "1", "--keep-rate", "0.5", "--image-size", "64", "96"]
    files = [tmp_path / "a.json", tmp_path / "a.png"]
    assert exit_code("bench", "model", *MODEL, *small, "--json", str(files[0]), "--plot", str(files[1])) == 0
    assert "atc average" in capsys.readouterr().out
    assert json.loads(files[0].read_text())["runs"][0]["results"][0]["counts"][0] == 24
    assert files[1].stat().st_size > 1000


ERRORS = {
    "unknown command": (["vis"], "'vis'"),
    "abbreviated option": (["visualize", "PHOTO", "-o", "a.png", "--keep", "0.5"], "--keep"),
    "no output": (["visualize", "PHOTO"], "-o/--output"),
    "not an image": (["visualize", __file__, "-o", "OUT"], "cannot be read"),
    "output of another kind": (["visualize", "PHOTO", "-o", "a.txt"], "output='a.txt'"),
    "method": (["visualize", "PHOTO", "-o", "OUT", "--method", "x"], "method='x'"),
    "animation of two": (["visualize", "PHOTO", "PHOTO", "-o", "a.gif"], "2 images"),
    "animation by threshold": (["visualize", "PHOTO", "-o", "a.gif", "--threshold", "0.1"], "--threshold"),
    "after too early a block": (["visualize", "PHOTO", "-o", "OUT", *MODEL, "--after", "0"], "after=0"),
    "no number": (["visualize", "PHOTO", "-o", "OUT", "--keep-rate", "half"], "--keep-rate: 'half'"),
    "blocks": (["visualize", "PHOTO", "-o", "OUT", *MODEL, "--blocks", "9"], "blocks=[9]"),
    "both": (["visualize", "PHOTO", "-o", "OUT", "--keep-rate", "1", "--threshold", "1"], "--threshold"),
    "model": (["visualize", "PHOTO", "-o", "OUT", "--model", "deit_tny_patch16_224"], "deit_tiny_patch16_224"),
    "a model without blocks": (["bench", "model", "--model", "test_resnet"], "timm.VisionTransformer"),
    "checkpoint": (["bench", "model", "--checkpoint", "absent.pth"], "checkpoint='absent.pth'"),
    "image sizes": (["bench", "model", "--image-size", "1", "2", "3"], "--image-size 1 2 3"),
    "batch size": (["bench", "model", "--batch-size", "0"], "batch_size=0"),
    "plot of another kind": (["bench", "model", "--plot", "a.doc"], "plot='a.doc'"),
    "json is a folder": (["bench", "model", "--json", "."], "'.' is no regular file"),
    "import of nothing": (["bench", "model", "--import", "no_such"], "'no_such'"),
}


NOTICES = ("agglo: weights are random", "agglo: running on ")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_that_names_the_value(
    name: str, photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, named = ERRORS[name]
    places = {"PHOTO": photo, "OUT": str(tmp_path / "out.png")}
    assert exit_code(*(places.get(argument, argument) for argument in arguments)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(NOTICES)]
    assert len(errors) == 1
    assert errors[0].startswith("agglo: error: ")
    assert named in errors[0]
    assert not (tmp_path / "out.png").exists()


def test_tracebacks_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGGLO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="is not a file"):
        main(["bench", "model", "--checkpoint", "absent.pth"])


def test_the_device_is_said_unless_it_was_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_model, "_LEAST_SECONDS", 0.0)
    small = ["bench", "model", *MODEL, "--batch-size", "1", "--repeats", "1", "--method", "tome", "--keep-rate", "0.5"]
    found = best_device()
    assert exit_code(*small) == 0
    assert f"agglo: running on {found}; --device chooses another\n" in capsys.readouterr().err
    assert exit_code(*small, "--device", "cpu") == 0
    assert "running on" not in capsys.readouterr().err


MODULE = """
import torch
import agglo

@agglo.register
class FirstFew(agglo.Method):
    \"\"\"The first tokens stay.\"\"\"
    name = "first_few"
    kind = "prunes"

    def reduce(self, view):
        left = view.prefix + view.target
        labels = torch.arange(view.tokens.shape[1]).clamp(max=left - 1).expand(view.tokens.shape[:2])
        sizes = torch.ones(len(labels), left)
        return agglo.methods.Outcome(agglo.grouping.Grouping(labels, sizes, view.prefix), tokens=view.tokens[:, :left])
"""


def test_a_method_of_ones_own_is_imported(photo: str, tmp_path: Path) -> None:
    """By a shell, in the folder of the module, which is not on Python's path when the command `agglo` runs."""
    (tmp_path / "my_methods.py").write_text(MODULE)
    draw = ["visualize", photo, *MODEL, "--method", "first_few", "atc", "-o", str(tmp_path / "a.png")]
    show = ["finetune", "deit", "--show", "--method", "first_few", "--keep-rate", "0.5"]
    code = f"""
import sys
sys.path.remove("")
from agglo.lab.cli import main
assert main({show}) == 2
assert main({draw} + ["--import", "my_methods"]) == 0
assert main({show} + ["--import", "my_methods"]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "method='first_few'" in done.stderr
    assert 'method = "first_few"' in done.stdout and (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [("raise RuntimeError('half done')", "RuntimeError: half done"), ("import no_such", "no_such"), ("def", "Syntax")],
)
def test_a_module_that_cannot_be_imported_is_named(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{len(content)}"
    (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert exit_code("finetune", "deit", "--import", name) == 2
    error = capsys.readouterr().err
    assert f"agglo: error: module {name!r}" in error and message in error
