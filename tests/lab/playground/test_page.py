"""The page as programs ask it: many at once, with bad input, and what it leaves behind."""

from __future__ import annotations

import html
import json
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import agglo
from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.settings import choose
from agglo.lab.playground.tokens import Classifier, compare
from tests.lab.playground.test_images import bomb, file_of, sent
from tests.support.playground import Played, client, played

pytest.importorskip("gradio_client")
PACKAGE = str(Path(agglo.__file__).parent)


def labels_in(page: str) -> list[list[int]]:
    """The groups in all figures of an answer."""
    return [[int(label) for label in found.split(",")] for found in re.findall(r'data-labels="([^"]*)"', page)]


def groups_of(classifier: Classifier, image: Image.Image, *sides: Any) -> list[list[int]]:
    found = compare(classifier, image, sides)
    return [stage.reshape(-1).tolist() for one in found.passes for stage in one.stages.values()]


def test_visitors_with_different_settings_each_get_their_own(page: Played, classifier: Classifier) -> None:
    asked = [
        ("example:boot", 0.3, "atc", "single", "atc", "complete"),
        ("example:bag", 0.5, "tome", "average", "atc", "single"),
        ("example:dress", 0.45, "kmedoids", "average", "atc", "single"),
        ("example:shirt", 0.6, "evit", "average", "atc", "average"),
    ]

    def visit(number: int) -> dict[int, list[list[int]]]:
        visitor = client(page.address)
        # Each asks for all in another order, so that all kinds of requests meet.
        order = [(number + step) % len(asked) for step in range(len(asked))]
        return {chosen: labels_in(visitor.predict(*asked[chosen], api_name="/tokens")) for chosen in order}

    with ThreadPoolExecutor(4) as pool:
        visits = list(pool.map(visit, range(4)))
    for number, (name, rate, method, linkage, other, other_linkage) in enumerate(asked):
        sides = [choose(method, linkage, keep_rate=rate), choose(other, other_linkage, keep_rate=rate)]
        expected = groups_of(classifier, chosen_image(name), *sides)
        assert len(expected) == 6 and all(answers[number] == expected for answers in visits)


def everything(page: Played) -> dict[str, Any]:
    """An answer of every address and every function."""
    ask = client(page.address).predict
    answers: dict[str, Any] = {}
    for path in ("", "config", "gradio_api/info", "theme.css"):
        with urllib.request.urlopen(page.address + path) as answer:
            answers[path] = answer.read().decode()
    answers["tokens"] = ask("example:boot", 0.5, "atc", "average", "tome", "average", api_name="/tokens")
    answers["dynamic"] = ask("example:boot", "example:bag", 0.1, "average", api_name="/dynamic")
    answers["detection"] = ask("example:scene 1", 0.7, "atc", "average", 0.5, api_name="/detection")
    answers["synthesis"] = ask("Bag", 0, 0.5, "average", "none", api_name="/synthesis")
    answers["groups"] = ask(13, 0, api_name="/groups")
    answers["curve"] = ask("agglo_fashion_vit-half", "speed", 0, api_name="/curve")
    answers["point"] = ask("agglo_fashion_vit-half", "GFLOPs", 1, api_name="/point")
    bad = ["/etc/passwd", "example:../../../etc/passwd", sent(b"no image"), sent(bomb(6000, 6000)), "data:,", "{}"]
    for image in bad:
        answers[image[:40]] = ask(image, 0.5, "atc", "average", "tome", "average", api_name="/tokens")
        assert 'class="refused"' in answers[image[:40]] and "figure" not in answers[image[:40]]
    return answers


def test_no_answer_names_a_path_of_the_server_and_nothing_is_written(page: Played) -> None:
    """What is left of temporary files when the page ends is looked at where it is stopped."""
    answers = everything(page)
    private = [PACKAGE, os.path.dirname(PACKAGE), str(page.work), str(page.home), str(page.temporary), "/tmp/", "/usr/"]
    private += [str(Path.home()) + "/", os.path.dirname(os.__file__), "site-packages"]
    for name, answer in answers.items():
        text = html.unescape(answer if isinstance(answer, str) else json.dumps(answer))
        assert not [each for each in private if each in text], name
    for name, groups in {"tokens": 6, "dynamic": 6, "detection": 3, "groups": 2}.items():
        assert len(labels_in(answers[name])) == groups, name
    assert list(page.work.iterdir()) == []
    assert [path for path in page.home.rglob("*") if path.is_file()] == []


def test_what_no_control_of_the_page_can_send_is_turned_away(page: Played) -> None:
    visitor = client(page.address)
    for wrong in [("example:boot", 7, "atc"), ("example:boot", 0.5, "evil")]:
        with pytest.raises(Exception, match=r"(?i)choices|maximum|value"):
            visitor.predict(*wrong, "average", "tome", "average", api_name="/tokens")


def test_addresses_and_hosts_that_are_not_needed_are_refused(page: Played) -> None:
    assert page.address.startswith("http://127.0.0.1:")  # listens to this machine alone
    asked = [urllib.request.Request(page.address + path) for path in ("gradio_api/upload", "docs", "monitoring")]
    asked += [
        urllib.request.Request(page.address, headers={"Host": "evil.example"}),
        # An iterator of unknown length is sent in chunks.
        urllib.request.Request(page.address + "gradio_api/queue/join", data=iter([b"x"]), method="POST"),
    ]
    statuses = []
    for request in asked:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        statuses.append(refused.value.code)
    assert statuses == [404, 404, 404, 421, 411]


def test_it_can_be_stopped_while_models_are_made(tmp_path: Path) -> None:
    with played(tmp_path / "play") as page:
        urllib.request.urlopen(page.address + "config").close()
        assert page.stop() == 130
        assert not list(page.temporary.glob("agglo*"))


def test_images_that_are_sent_are_looked_at(page: Played, classifier: Classifier) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (50, 80, 3), dtype=np.uint8))
    answer = client(page.address).predict(
        sent(file_of(image, "PNG")), 0.5, "atc", "average", "tome", "average", api_name="/tokens"
    )
    assert labels_in(answer)[:3] == groups_of(classifier, image, choose("atc", "average", keep_rate=0.5))
