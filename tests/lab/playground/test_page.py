"""The page as programs ask it: many at once, with bad input, and what it leaves behind."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.settings import choose
from agglo.lab.playground.tokens import Classifier, compare
from tests.lab.playground.test_images import bomb, file_of, noise, sent
from tests.support.playground import Played, client

pytest.importorskip("gradio_client")


def labels_in(page: str) -> list[list[int]]:
    """The groups in all figures of an answer."""
    return [[int(label) for label in found.split(",")] for found in re.findall(r'data-labels="([^"]*)"', page)]


def groups_of(classifier: Classifier, image: Image.Image, *configs: Any) -> list[list[int]]:
    found = compare(classifier, image, configs)
    return [stage.reshape(-1).tolist() for one in found.passes for stage in one.stages.values()]


def test_visitors_with_different_settings_each_get_their_own(page: Played, classifier: Classifier) -> None:
    asked = [
        ("example:boot", 0.3, "atc", "single", "atc", "complete"),
        ("example:bag", 0.5, "tome", "average", "atc", "single"),
        ("example:shirt", 0.6, "evit", "average", "atc", "average"),
    ]

    def visit(number: int) -> dict[int, list[list[int]]]:
        visitor = client(page.address)
        # Each asks for all in another order, so that all kinds of requests meet.
        order = [(number + step) % len(asked) for step in range(len(asked))]
        return {chosen: labels_in(visitor.predict(*asked[chosen], api_name="/tokens")) for chosen in order}

    with ThreadPoolExecutor(3) as pool:
        visits = list(pool.map(visit, range(3)))
    for number, (name, rate, method, linkage, other, other_linkage) in enumerate(asked):
        configs = [choose(method, linkage, keep_rate=rate), choose(other, other_linkage, keep_rate=rate)]
        expected = groups_of(classifier, chosen_image(name), *configs)
        assert len(expected) == 6 and all(answers[number] == expected for answers in visits)


def test_every_tab_answers_and_no_answer_names_a_path_of_the_server(page: Played) -> None:
    ask = client(page.address).predict
    answers = {
        "tokens": ask("example:boot", 0.5, "atc", "average", "tome", "average", api_name="/tokens"),
        "dynamic": ask("example:boot", "example:bag", 0.1, "average", api_name="/dynamic"),
        "detection": ask("example:scene 1", 0.7, "atc", "average", 0.5, api_name="/detection"),
        "synthesis": ask("Bag", 0, 0.5, "average", "none", api_name="/synthesis"),
    }
    for image in ("/etc/passwd", "example:../../../etc/passwd", sent(b"no image"), sent(bomb(6000, 6000))):
        refused = ask(image, 0.5, "atc", "average", "tome", "average", api_name="/tokens")
        assert 'class="refused"' in refused and "figure" not in refused
        answers[image[:40]] = refused.replace("/etc/passwd", "")
    for name, groups in {"tokens": 6, "dynamic": 6, "detection": 3, "synthesis": 6}.items():
        assert len(labels_in(answers[name])) == groups, name
    for name, answer in answers.items():
        found = [
            path for path in (page.work, page.home, page.temporary, "site-packages", "/src/") if str(path) in answer
        ]
        assert not found, name
    assert list(page.work.iterdir()) == list(page.temporary.rglob("*.*")) == []


def test_what_no_control_of_the_page_can_send_is_turned_away(page: Played) -> None:
    visitor = client(page.address)
    for wrong in [("example:boot", 7, "atc"), ("example:boot", 0.5, "evil")]:
        with pytest.raises(Exception, match=r"(?i)choices|maximum|value"):
            visitor.predict(*wrong, "average", "tome", "average", api_name="/tokens")


def test_images_that_are_sent_are_looked_at(page: Played, classifier: Classifier) -> None:
    image = noise(80, 50)
    answer = client(page.address).predict(
        sent(file_of(image, "PNG")), 0.5, "atc", "average", "tome", "average", api_name="/tokens"
    )
    assert labels_in(answer)[:3] == groups_of(classifier, image, choose("atc", keep_rate=0.5))
