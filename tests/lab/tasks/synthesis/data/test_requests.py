"""What is asked for: the paper's prompts, names and seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timm.data import ImageNetInfo

from agglo.lab.tasks.synthesis.data.requests import fashion_requests, image_seed, imagenet_requests, prompt_requests
from agglo.models.zero_shot import imagenet_names


def test_the_papers_protocol() -> None:
    requests = imagenet_requests(2)
    assert len(requests) == 2000
    magpie = next(request for request in requests if request.name == "18_1")
    assert (magpie.prompt, magpie.seed, magpie.label) == ("A high quality photograph of a magpie.", 181, 18)
    assert requests[0].prompt == "A high quality photograph of a tench, Tinca tinca."
    assert len({request.seed for request in requests}) == 2000


def test_the_names_are_those_of_timm_in_its_order() -> None:
    info, names = ImageNetInfo(), imagenet_names()
    theirs = [info.index_to_description(index, detailed=False) for index in range(1000)]
    assert {name for name, other in zip(names, theirs, strict=True) if name != other} == {
        "crane, a type of bird",
        "crane, construction equipment",
    }
    assert len(set(names)) == 1000


@given(st.integers(1, 1200), st.data())
def test_no_two_images_share_a_seed(per_prompt: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, 999), st.integers(0, per_prompt - 1))
    one, other = data.draw(pairs), data.draw(pairs)
    assert (image_seed(*one, per_prompt) == image_seed(*other, per_prompt)) == (one == other)


def test_prompts_of_a_file_and_some_classes(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  a dog \n", encoding="utf-8")
    requests = prompt_requests(path, 2, seed=5)
    found = [(request.name, request.prompt, request.seed) for request in requests]
    assert found == [("0_0", "a cat", 5), ("0_1", "a cat", 6), ("1_0", "a dog", 15), ("1_1", "a dog", 16)]
    for content, message in ((b"\n \n", "holds no prompt"), (b"\xff\xfe\x00", "UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            prompt_requests(path)
    assert [request.name for request in fashion_requests(2, classes=[3, 1, 3])] == ["3_0", "3_1", "1_0", "1_1"]
    with pytest.raises(ValueError, match="class 10 does not exist: 0 to 9"):
        fashion_requests(1, classes=[10])
