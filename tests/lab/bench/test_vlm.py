"""What `agglo bench vlm` reports is what ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agglo.lab.bench.vlm import MODELS
from agglo.lab.cli import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXT = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1,
        "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 4096, "bos_token_id": 2,
        "eos_token_id": 3}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 16, "hidden_size": 24,
        "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 32}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", {"vision_config": CLIP, "text_config": TEXT})


def test_the_report_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speed.json"
    words = ["--model", "tiny", "--keep", "0.25", "--clock", "processor", "--repeats", "2", "--threads", "1"]
    words += ["--batch-size", "2"]
    assert main(["bench", "vlm", *words, "--images", "2", "--words", "6", "--json", str(path)]) == 0
    assert "| dense |" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["machine"]["cpu"] and report["settings"]["model"] == "tiny"
    tokens = {row["name"]: (row["image_tokens"], row["prompt_tokens"]) for row in report["results"]}
    few, whole = (4, 6 + 2 * 5), (16, 6 + 2 * 17)
    assert tokens == {"dense": whole, "merged": few, "merged late": few, "random": few, "smaller image": few,
                      "dense again": whole}  # fmt: skip
    for row in report["results"]:
        seconds = row["seconds"]
        assert all(len(seconds[part]) == 2 for part in ("image", "prefill", "first token"))
        for image, prefill, first in zip(seconds["image"], seconds["prefill"], seconds["first token"], strict=True):
            assert first == pytest.approx(image + prefill)
            assert min(image, prefill) > 0
    assert report["results"][0]["to_dense"] == {"image": 1, "prefill": 1, "first token": 1}


@pytest.mark.parametrize("words", [["--keep", "1.5"], ["--clock", "processor"]])
def test_settings_that_make_no_sense_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vlm", "--model", "tiny", *words]) != 0
    assert " ".join(words) in capsys.readouterr().err
