"""The CPU backend where it is really run: in thread pools, forked workers and read-only installations."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import agglo
from agglo.clustering import kernels
from agglo.clustering.linkage import cpu
from agglo.utils.devices import torch_threads
from tests.support.clusters import distinct_distances
from tests.support.processes import HANGS

SOURCE = Path(agglo.__file__).parent


def test_many_python_threads_at_once_and_any_number_of_torch_threads():
    inputs = [distinct_distances(6, n, seed=n) for n in (20, 60, 130, 1100)]
    expected = [agglo.cluster(distances=x, k=9) for x in inputs]
    for count in (1, 3, 7):
        with torch_threads(count), ThreadPoolExecutor(16) as pool:
            results = list(pool.map(lambda i: (i, agglo.cluster(distances=inputs[i % 4], k=9)), range(32)))
        assert all(torch.equal(labels, expected[i % 4]) for i, labels in results), count


def test_every_part_runs_once_and_an_error_reaches_the_caller():
    seen = []
    cpu.run(lambda part, parts, word: seen.append((part, parts, word)), 5, "all")
    assert sorted(seen) == [(part, 5, "all") for part in range(5)]

    def fail(part, parts):
        if part == 1:
            raise ArithmeticError("in part 1")

    with pytest.raises(ArithmeticError, match="part 1"):
        cpu.run(fail, 2)


FORKED = """
import torch, agglo

torch.set_num_threads(2)
x = torch.randn(16, 50, 8)
large = torch.cdist(torch.randn(1, 1100, 8), torch.zeros(1, 1100, 8))
large = large + large.transpose(1, 2)
expected, expected_large = agglo.cluster(x, 9), agglo.cluster(distances=large, k=9)

def same(i):
    labels = agglo.cluster(x, 9)
    # A worker has one torch thread. With more, torch's own parallel loops hang after a fork, agglo's must not.
    torch.set_num_threads(2)
    labels_large = agglo.cluster(distances=large, k=9, check=False)
    torch.set_num_threads(1)
    return torch.equal(labels, expected) and torch.equal(labels_large, expected_large)

for worker in torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork", collate_fn=same):
    assert worker is True
print("same in forked workers")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_forked_dataloader_workers_after_the_parent_has_clustered():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS)
    assert done.stdout.strip() == "same in forked workers", done.stderr


KERNELS = """
import importlib.util, sys
import numpy as np

spec = importlib.util.spec_from_file_location("jit", sys.argv[1])  # without the rest of agglo, which imports torch
jit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jit)

@jit.inner
def total(x):
    found = x[0]
    for i in range(1, x.shape[0]):
        found += x[i]
    return found

@jit.kernel
def totals(x):
    return total(x) + total(x[1:])

for dtype in (np.float32, np.int64)[:: int(sys.argv[2])]:
    assert totals(np.arange(5, dtype=dtype)) == 20
print(sum(totals.stats.cache_misses.values()), "compiled")
"""


def start_kernels(folder: Path, order: int, **environment: str) -> subprocess.Popen:
    """Start a process that runs a kernel of a folder with two signatures, in this order or the other."""
    (folder / "kernels.py").write_text(KERNELS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    command = [sys.executable, str(folder / "kernels.py"), str(SOURCE / "clustering" / "kernels.py"), str(order)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**kept, **environment}
    )


@pytest.mark.parametrize("writable", [True, False])
def test_a_read_only_package_caches_for_the_user_or_nowhere(writable, tmp_path):
    (tmp_path / "__pycache__").write_text("a file where the cache folder would be: not writable, for root neither")
    home = tmp_path / "home"
    if not writable:
        home.write_text("a file: no folder can be made in it")
    process = start_kernels(tmp_path, 1, HOME=str(home))
    output, errors = process.communicate()
    assert output == "2 compiled\n", errors
    assert ("NUMBA_CACHE_DIR" in errors) != writable
    assert not writable or list(home.rglob("*.nbc")), "nothing was cached in the user's folder"


def test_processes_that_compile_at_once_share_what_each_of_them_compiled(tmp_path):
    cached = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for process in [start_kernels(tmp_path, order, **cached) for order in (1, -1)]:
        _, errors = process.communicate()
        assert process.returncode == 0 and not errors, errors
    assert start_kernels(tmp_path, 1, **cached).communicate() == ("0 compiled\n", "")


def test_a_kernel_runs_whatever_its_cache_holds(tmp_path, monkeypatch):
    from numba.core.codegen import CPUCodeLibrary

    def add_one(x):
        return x + 1

    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    assert kernels.kernel(add_one)(1) == 2
    (file,) = tmp_path.rglob("*.nbc")
    file.write_bytes(file.read_bytes()[:100])
    assert kernels.kernel(add_one)(1) == 2
    assert file.stat().st_size > 100
    file.unlink()
    monkeypatch.setattr(
        CPUCodeLibrary, "_compiled_object", property(lambda self: None, lambda self, value: None), False
    )
    with pytest.warns(RuntimeWarning, match="no compiled object yet"):
        assert kernels.kernel(add_one)(1) == 2


def test_what_takes_long_is_said_once(monkeypatch, caplog):
    now, timers = [0.0], []

    class FakeTimer:
        def __init__(self, seconds, say):
            self.at, self.say = now[0] + seconds, say
            timers.append(self)

        def start(self):
            pass

        def cancel(self):
            timers.remove(self)

    monkeypatch.setattr(kernels, "Timer", FakeTimer)
    monkeypatch.setattr(kernels.time, "monotonic", lambda: now[0])
    notice, said = kernels._Notice(), []
    for seconds, function in ((1.5, agglo.cluster), (9.0, json.dumps), (0.4, agglo.cluster), (0.2, agglo.cluster)) * 2:
        compiling = SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=function)})
        notice.on_start(compiling)
        now[0] += seconds
        for timer in [timer for timer in timers if timer.at < now[0]]:
            timer.cancel()
            timer.say()
        notice.on_end(compiling)
        said.append(len(caplog.records))
    assert said == [0, 0, 0, 1, 1, 1, 1, 1]
