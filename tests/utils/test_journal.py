"""The journal: every result once, whatever stops the run; another run's file is refused."""

from __future__ import annotations

import json
import signal
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agglo.utils.journal import Journal
from tests.support.killing import die_at_replacement

HEADER = {"machine": {"cpu": "a CPU", "gpu": None}, "model": {"name": "vit", "fingerprint": "aaaa"}}
SAME = ("model.name", "model.fingerprint")

values = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.dictionaries(st.text(max_size=5), values | st.lists(values, max_size=2), min_size=1, max_size=3)


def opened(path: Path | None, **options: Any) -> Journal:
    return Journal(path, HEADER, same=SAME, **options)


@settings(deadline=None, max_examples=15)
@given(st.lists(keys, max_size=8), st.data())
def test_every_key_is_computed_once_over_all_runs(wanted: list[dict[str, Any]], data: st.DataObject) -> None:
    """The oracle is a dict: canonical text -> how often it was computed."""
    stops = data.draw(st.lists(st.integers(1, 5), max_size=3))
    computed: dict[str, int] = {}

    def compute(key: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(key, sort_keys=True)
        computed[text] = computed.get(text, 0) + 1
        return {"value": len(computed)}

    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.json"
        for limit in [*stops, len(wanted)]:  # each run ends after so many keys, and its objects are gone
            journal = opened(path)
            for key in wanted[:limit]:
                journal.once(key, lambda key=key: compute(key))  # type: ignore[misc]
        after = opened(path)
        assert set(computed.values()) <= {1} and len(after.results) == len(computed)
        for key in wanted:
            found = after.find(dict(reversed(key.items())))
            assert found is not None and found["cell"] == key and key in after
            assert found["processor"] == "a CPU" and found["date"]
        content = json.loads(path.read_text()) if wanted else {"results": []}
        assert content["results"] == after.results


def _die_while_writing(path: Path) -> None:
    die_at_replacement(4)
    for number in range(9):
        opened(path).once({"number": number}, lambda number=number: {"square": number**2})  # type: ignore[misc]


def test_half_a_file_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    process = get_context("fork").Process(target=_die_while_writing, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [result["square"] for result in opened(path).results] == [0, 1, 4]


def test_a_result_is_replaced_in_its_place_by_the_process_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    opened(path, writes=False).add({"number": 7}, {})
    assert not path.exists()
    journal = opened(path)
    for number in range(3):
        journal.add({"number": number}, {"seconds": 1.0})
    journal.add({"number": 1}, {**(journal.find({"number": 1}) or {}), "turns": 8})
    again = opened(path)
    assert [result["number"] for result in again.results] == [0, 1, 2]
    assert again.results[1]["turns"] == 8 and again.results[1]["seconds"] == 1.0
    assert again.content == json.loads(path.read_text())


def test_entries_of_the_file_stay_unless_given_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    journal = opened(path)
    journal.header["seconds"] = 5
    journal.write()
    other = {"machine": {"cpu": "another CPU", "gpu": None}}
    again = Journal(path, {**HEADER, **other}, same=SAME)
    assert again.header["seconds"] == 5 and again.header["machine"] == HEADER["machine"], "nothing ran there yet"
    again.add({"number": 1}, {})
    assert again.header["machine"] == other["machine"] and again.results[0]["processor"] == "another CPU"


def test_another_run_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    opened(path).write()
    with pytest.raises(ValueError, match=r"model\.name: 'vit' there, 'deit' now; model\.fingerprint: .*'bbbb' now"):
        Journal(path, {**HEADER, "model": {"name": "deit", "fingerprint": "bbbb"}}, same=SAME)
    with pytest.raises(ValueError, match=r"model: .* now"):
        Journal(path, {**HEADER, "model": "x" * 999}, same=["model"])
    with pytest.raises(ValueError, match=r"settings\.seed: None there"):
        Journal(path, {**HEADER, "settings": {"seed": 0}}, same=["settings"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{"name": 1}]}'])
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a journal"):
        opened(path)


def test_results_of_one_subject_have_the_same_sources(tmp_path: Path) -> None:
    path, options = tmp_path / "journal.json", {"subject": ("model", "data"), "sources": ("weights", "images")}
    journal = opened(path, **options)
    journal.add({"model": "vit", "data": "toys", "rate": 0.5}, {"weights": "aaaa", "images": "1111"})
    journal.add({"model": "vit", "data": "toys", "rate": 0.25}, {})
    journal.add({"model": "deit", "data": "toys", "rate": 0.5}, {"weights": "bbbb", "images": "1111"})
    again = opened(path, **options)
    again.add({"model": "vit", "data": "toys", "rate": 0.1}, {"weights": "aaaa", "images": "1111"})
    with pytest.raises(ValueError, match=r"vit, toys with other weights \(aaaa there, bbbb now"):
        again.add({"model": "vit", "data": "toys", "rate": 0.2}, {"weights": "bbbb", "images": "1111"})
    assert len(opened(path).results) == 4
