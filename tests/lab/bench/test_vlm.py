"""What `agglo bench vlm` reports is what ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agglo.lab.bench import vlm_models
from agglo.lab.cli import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
        "intermediate_size": 48, "vocab_size": 4096}  # fmt: skip


def tiny_llava() -> Any:
    vision = {"image_size": 64, "patch_size": 16, "hidden_size": 24, "num_hidden_layers": 8, "num_attention_heads": 2}
    return vlm_models._llava({**vision, "intermediate_size": 32}, TEXT)


def tiny_qwen() -> Any:
    vision = {"depth": 4, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}
    text = {**TEXT, "hidden_size": 32}
    model = vlm_models._qwen2(vision, text)
    return model


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = vlm_models.SIZES
    monkeypatch.setitem(sizes, "tiny-llava", replace(sizes["llava-small"], build=tiny_llava, side=64))
    monkeypatch.setattr(vlm_models, "_MROPE", {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4})
    monkeypatch.setitem(sizes, "tiny-qwen", replace(sizes["qwen2-vl-small"], build=tiny_qwen, side=112))


@pytest.mark.parametrize("model", ["tiny-llava", "tiny-qwen"])
def test_the_report_adds_up(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speed.json"
    clock = "processor" if model == "tiny-qwen" else "wall"
    words = ["--model", model, "--keep", "0.25", "--clock", clock, "--repeats", "2", "--threads", "1"]
    words += ["--batch-size", "2"]
    assert main(["bench", "vlm", *words, "--pictures", "2", "--words", "6", "--json", str(path)]) == 0
    assert "| dense |" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["skipped"] == []
    assert report["machine"]["cpu"]
    assert report["settings"]["model"] == model
    tokens = {row["name"]: (row["image_tokens"], row["prompt_tokens"]) for row in report["results"]}
    few, whole = (4, 6 + 2 * 5), (16, 6 + 2 * 17)
    assert tokens == {"dense": whole, "merged": few, "merged late": few, "random": few, "smaller image": few,
                      "dense again": whole}  # fmt: skip
    for row in report["results"]:
        seconds = row["seconds"]
        assert all(len(seconds[part]) == 2 for part in ("picture", "prefill", "first token"))
        for picture, prefill, first in zip(seconds["picture"], seconds["prefill"], seconds["first token"], strict=True):
            assert first == pytest.approx(picture + prefill)
            assert min(picture, prefill) > 0
    assert report["results"][0]["to_dense"] == {"picture": 1, "prefill": 1, "first token": 1}


@pytest.mark.parametrize("words", [["--keep", "1.5"], ["--clock", "processor"]])
def test_settings_that_make_no_sense_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vlm", "--model", "tiny-llava", *words]) != 0
    assert " ".join(words) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["repeats", "words", "pictures"])
def test_numbers_below_one_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "vlm", f"--{name}", "0"])
    assert f"--{name}: '0' is not a whole number of at least 1" in capsys.readouterr().err
