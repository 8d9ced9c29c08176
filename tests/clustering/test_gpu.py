"""What a GPU is asked for, counted on fake CUDA tensors, and what happens where its kernels cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import agglo
from agglo.clustering import gpu, operators
from agglo.clustering.distances import _cosine

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tools.gpu import check
from tools.gpu.launches import DEVICE, Counts, count_clustering, count_pass, fake_gpu

FEATURES = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))


def clean(counts: Counts) -> bool:
    return not counts.copies and not counts.waits


@pytest.mark.parametrize(
    ("method", "dtype", "launches"),
    [
        (None, torch.float16, 125),
        ("atc", torch.float16, 176),
        ("atc", torch.float32, 173),
        ("tome", torch.float16, 215),
    ],
)
def test_launches_of_a_pass_and_no_waiting(method: str | None, dtype: torch.dtype, launches: int) -> None:
    counts = count_pass(method, dtype)
    assert clean(counts)
    assert counts.n_launches == launches, counts.launches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": True},
        {"grid": (8, 8), "window": 3},
        {"grid": (8, 8), "window": (3, 8), "threshold": 0.5},
        {"metric": "euclidean"},
    ],
    ids=str,
)
def test_clustering_neither_copies_nor_waits(options: dict[str, object]) -> None:
    assert clean(count_clustering(**options))


def test_where_the_host_waits() -> None:
    assert count_clustering(grid=(8, 8), window=3, spread="need").waits
    assert count_clustering(grid=(8, 8), connectivity="grid").waits


def test_products_without_the_kernel_are_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = []
    with fake_gpu():
        monkeypatch.setattr(torch, "bmm", lambda a, b: multiplied.append(a.dtype) or a @ b)
        distances = _cosine(torch.empty(1, 4, 4, device=DEVICE))
    assert multiplied == [torch.float64] and distances.dtype == torch.float32


@pytest.fixture
def broken_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose Triton is there and compiles nothing."""

    class Backend:
        @staticmethod
        def labels(*_: object) -> None:
            raise RuntimeError("Failed to find C compiler")

    real = operators.module
    monkeypatch.setattr(operators, "module", lambda name: Backend if name == "triton" else real(name))
    monkeypatch.setattr(operators, "choose", lambda backend, device: backend or "triton")
    monkeypatch.setattr(gpu, "_lacking", lambda: "")
    monkeypatch.setattr(gpu, "_failures", [])
    monkeypatch.delenv("AGGLO_BACKEND", raising=False)


def test_without_a_compiler_the_torch_backend_goes_on(
    broken_kernels: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = agglo.cluster(FEATURES, 5, backend="cpu")
    for _ in range(2):
        assert torch.equal(agglo.cluster(FEATURES, 5), wanted)
    assert len(caplog.records) == 1 and "Failed to find C compiler" in caplog.text
    assert "Failed to find C compiler" in gpu.why_not()
    with pytest.raises(RuntimeError, match="C compiler"):
        agglo.cluster(FEATURES, 5, backend="triton")
    monkeypatch.setenv("AGGLO_BACKEND", "triton")
    with pytest.raises(RuntimeError, match="C compiler"):
        agglo.cluster(FEATURES, 5)


def test_what_a_kernel_declines_is_no_failure(broken_kernels: None) -> None:
    def decline() -> str:
        raise gpu.Declined("too many tokens")

    assert gpu.attempt(decline, lambda: "torch") == "torch" and not gpu.why_not()


def test_a_gpu_without_memory_is_no_reason_to_go_on_without_kernels(broken_kernels: None) -> None:
    def fill() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        gpu.attempt(fill, lambda: None)
    assert not gpu._failures


# --- tools/gpu, at sizes for a test; `make gpu-evidence` runs all of it -----------------------------------------------


def run_tool(name: str, *arguments: str) -> str:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, "-m", f"tools.gpu.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=root).stdout


def test_no_races_and_a_deleted_barrier_is_noticed() -> None:
    complete, *mutants = map(json.loads, run_tool("races", "--quick").splitlines())
    assert complete["races"] == complete["wrong"] == [] and complete["epochs"] > 100
    assert mutants and all(mutant["races"] for mutant in mutants)


def test_the_check_of_a_gpu_runs_as_far_as_it_can(tmp_path: Path) -> None:
    run_tool("check", "--tiny", "--output", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert not any(row["different"] for row in report["steps"]["labels"])
    assert report["steps"]["repeatable"] == {"means": True, "gradients": True}
    assert set(report["steps"]) == {step.__name__ for step in check.STEPS if step not in check.NEED_CUDA}
    assert all(f"### {step}" in "".join(check.tables(report)) for step in report["steps"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_a_gpu_the_check_says_what_it_would_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check"])
    check.main()
    said = capsys.readouterr().out
    assert all(step.__name__ in said for step in check.STEPS)
