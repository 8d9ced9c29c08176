"""What is asked for: the paper's prompts, names and seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agglo.lab.tasks.synthesis.data.requests import (
    fashion_requests,
    image_seed,
    imagenet_requests,
    prompt_requests,
)
from agglo.models.zero_shot import imagenet_names


def test_the_papers_protocol() -> None:
    requests = imagenet_requests(2)
    assert len(requests) == 2000
    magpie = next(request for request in requests if request.name == "18_1")
    assert (magpie.prompt, magpie.seed, magpie.label) == ("A high quality photograph of a magpie.", 181, 18)
    assert requests[0].prompt == "A high quality photograph of a tench, Tinca tinca."
    assert len({request.seed for request in requests}) == 2000


def test_the_names_are_those_of_timm_in_its_order() -> None:
    ImageNetInfo = pytest.importorskip("timm.data").ImageNetInfo
    info = ImageNetInfo()
    theirs = [info.index_to_description(index, detailed=False) for index in range(1000)]
    different = [index for index, (one, other) in enumerate(zip(imagenet_names(), theirs, strict=True)) if one != other]
    assert different == [134, 517]
    names = imagenet_names()
    assert len(set(names)) == 1000
    assert (names[134], names[517]) == ("crane, a type of bird", "crane, construction equipment")


@given(st.integers(1, 1200), st.data())
def test_no_two_images_share_a_seed(per_prompt: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, 999), st.integers(0, per_prompt - 1))
    one, other = data.draw(pairs), data.draw(pairs)
    assert (image_seed(*one, per_prompt) == image_seed(*other, per_prompt)) == (one == other)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  a dog \n", encoding="utf-8")
    requests = prompt_requests(path, 2, seed=5)
    assert [(request.name, request.prompt, request.seed) for request in requests] == [
        ("0_0", "a cat", 5),
        ("0_1", "a cat", 6),
        ("1_0", "a dog", 15),
        ("1_1", "a dog", 16),
    ]
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no prompt"):
        prompt_requests(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        prompt_requests(path)


def test_some_classes() -> None:
    assert [request.name for request in fashion_requests(2, classes=[3, 1, 3])] == ["3_0", "3_1", "1_0", "1_1"]
    with pytest.raises(ValueError, match=r"class 10 does not exist: 0 to 9"):
        fashion_requests(1, classes=[10])
    with pytest.raises(ValueError, match="0 images"):
        fashion_requests(0)
