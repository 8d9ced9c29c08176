"""Processors write as many placeholders as the model takes, and are themselves again afterwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import agglo
from tests.hosts.vlm.test_late import logits
from tests.support.vlms import QWEN, VLM, VLMS, every_vlm, image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LLAVA, GEMMA3, INTERNVL, IDEFICS3 = (VLMS[index] for index in (0, 3, 4, 5))


def late(vlm: VLM, keep_rate: float = 0.25) -> Any:
    return agglo.apply(vlm.model(), keep_rate=keep_rate, output="merged_late")


def n_placeholders(inputs: Any) -> list[int]:
    counts: list[int] = (inputs["input_ids"] == 4).sum(1).tolist()
    return counts


@every_vlm
def test_a_processor_is_itself_again(vlm: VLM) -> None:
    model, processor = late(vlm), vlm.processor()
    cls, before, written = type(processor), dict(vars(processor)), processor.to_dict()
    expected = vlm.inputs(processor, [[image(1)]])
    agglo.adapt_processor(processor, model)
    assert type(processor).__name__ == cls.__name__
    assert isinstance(processor, cls)
    assert processor.to_dict() == written
    assert agglo.remove(processor) is processor
    assert type(processor) is cls
    assert vars(processor) == before
    assert torch.equal(vlm.inputs(processor, [[image(1)]])["input_ids"], expected["input_ids"])


@pytest.mark.parametrize("vlm", [VLMS[0], VLMS[-1]], ids=lambda vlm: vlm.name)
def test_copies_and_pickles_are_adapted_and_files_are_not(vlm: VLM, tmp_path: Any) -> None:
    processor = agglo.adapt_processor(vlm.processor(), late(vlm))
    counts = n_placeholders(vlm.inputs(processor, [[image(1)]]))
    for other in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        assert n_placeholders(vlm.inputs(other, [[image(1)]])) == counts
    processor.save_pretrained(tmp_path)
    text = "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert "agglo" not in text
    assert type(agglo.remove(processor)).__name__ in text


@pytest.mark.parametrize("vlm", [INTERNVL, IDEFICS3], ids=lambda vlm: vlm.name)
def test_every_tile_of_an_image_has_its_number(vlm: VLM) -> None:
    images, model = [[image(1, 64, 64), image(2, 64, 128)]], late(vlm)
    tiles, rest = divmod(n_placeholders(vlm.inputs(vlm.processor(), images))[0], 16)
    assert tiles > 2 and rest == 0
    inputs = vlm.inputs(agglo.adapt_processor(vlm.processor(), model), images)
    assert n_placeholders(inputs) == [tiles * 4]
    logits(model, inputs)


@pytest.mark.parametrize("vlm", QWEN, ids=lambda vlm: vlm.name)
def test_images_of_different_sizes_have_different_numbers(vlm: VLM) -> None:
    model = late(vlm)
    processor = agglo.adapt_processor(vlm.processor(), model)
    images = [[image(1, 64, 64)], [image(2, 32, 96), image(3, 128, 64)]]
    inputs = vlm.inputs(processor, images)
    assert n_placeholders(inputs) == [4, 3 + 8]
    assert [agglo.image_tokens(model, dense) for dense in (16, 12, 32)] == [4, 3, 8]
    assert not logits(model, inputs).isnan().any()
    with pytest.raises(ValueError, match="depends on its size"):
        agglo.image_tokens(model)


def test_pooling_knows_the_grid_of_every_image() -> None:
    vlm = QWEN[0]
    model = agglo.apply(vlm.model(), "pool", keep_rate=0.25, output="merged_late")
    inputs = vlm.inputs(agglo.adapt_processor(vlm.processor(), model), [[image(1, 64, 128), image(2, 128, 128)]])
    assert n_placeholders(inputs) == [2 * 4 + 4 * 4]
    logits(model, inputs)


def test_videos_of_models_that_take_frames_for_images() -> None:
    processor = agglo.adapt_processor(INTERNVL.processor(), late(INTERNVL))
    frames = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    settings = {"do_sample_frames": False, "size": {"height": 64, "width": 64}}
    inputs = processor(videos=[frames], text=["what is in <video> here"], return_tensors="pt", **settings)
    assert n_placeholders(inputs) == [3 * 4]


def test_a_processor_of_another_model_is_refused() -> None:
    model = late(LLAVA)
    with pytest.raises(ValueError, match="Gemma3Processor"):
        agglo.adapt_processor(GEMMA3.processor(), model)
    with pytest.raises(agglo.UnsupportedModelError, match="vision-language"):
        agglo.adapt_processor(LLAVA.processor(), torch.nn.Linear(2, 2))


def test_a_processor_made_for_other_sizes_is_told() -> None:
    processor = INTERNVL.processor()
    processor.image_seq_length = 17
    with pytest.raises(ValueError, match="17"):
        INTERNVL.inputs(agglo.adapt_processor(processor, late(INTERNVL)), [[image(1)]])
