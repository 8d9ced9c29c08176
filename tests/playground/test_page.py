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

import agglo
from agglo.playground.classifiers import Classifier
from agglo.playground.examples import picture
from agglo.playground.settings import choose
from agglo.playground.tokens import Reduced, compare
from tests.playground.test_uploads import bomb, sent
from tests.support.playground import Played, client

pytest.importorskip("gradio_client")
PACKAGE = str(Path(agglo.__file__).parent)


def labels_in(page: str) -> list[list[int]]:
    """The groups in all pictures of an answer."""
    return [[int(label) for label in found.split(",")] for found in re.findall(r'data-labels="([^"]*)"', page)]


def test_visitors_with_different_settings_each_get_their_own(page: Played, classifier: Classifier) -> None:
    asked = [
        (f"example:{name}", rate, method, linkage, "atc", other)
        for name, rate, method, linkage, other in [
            ("boot", 0.3, "atc", "single", "complete"),
            ("bag", 0.5, "tome", "average", "single"),
            ("boot", 0.8, "atc", "complete", "average"),
            ("dress", 0.45, "kmedoids", "average", "single"),
            ("shirt", 0.6, "evit", "average", "average"),
            ("bag", 0.9, "topk", "average", "complete"),
        ]
    ]

    def visit(number: int) -> list[list[list[int]]]:
        visitor = client(page.address)
        # Each asks for all in another order, so that all kinds of requests meet.
        answers = {}
        for step in range(len(asked)):
            chosen = (number + step) % len(asked)
            answers[chosen] = labels_in(visitor.predict(*asked[chosen], api_name="/tokens"))
        return [answers[chosen] for chosen in range(len(asked))]

    with ThreadPoolExecutor(4) as pool:
        visits = list(pool.map(visit, range(4)))
    for number, (name, rate, method, linkage, other, other_linkage) in enumerate(asked):
        sides = [choose(method, linkage, keep_rate=rate), choose(other, other_linkage, keep_rate=rate)]
        found = compare(classifier, picture(name), sides)
        expected = [
            stage.reshape(-1).tolist()
            for side in found.sides
            if isinstance(side, Reduced)
            for stage in side.stages.values()
        ]
        assert len(expected) == 6
        for visit_ in visits:
            assert visit_[number] == expected


def everything(page: Played) -> dict[str, Any]:
    """An answer of every address and every function."""
    visitor = client(page.address)
    answers: dict[str, Any] = {}
    for path in ("", "config", "gradio_api/info", "theme.css"):
        with urllib.request.urlopen(page.address + path) as answer:
            answers[path] = answer.read().decode()
    ask = visitor.predict
    answers["tokens"] = ask("example:boot", 0.5, "atc", "average", "tome", "average", api_name="/tokens")
    answers["dynamic"] = ask("example:boot", "example:bag", 0.1, "average", api_name="/dynamic")
    answers["detection"] = ask("example:scene 1", 0.7, "atc", "average", 0.5, api_name="/detection")
    answers["synthesis"] = ask("Bag", 0, 0.5, "average", "none", api_name="/synthesis")
    answers["groups"] = ask(13, 0, api_name="/groups")
    answers["curve"] = ask("agglo_fashion_vit-half", "speed", 0, api_name="/curve")
    answers["point"] = ask("agglo_fashion_vit-half", "GFLOPs", 1, api_name="/point")
    for number, bad in enumerate(
        ["/etc/passwd", "example:../../../etc/passwd", sent(b"no picture"), sent(bomb(6000, 6000)), "data:,", "{}"]
    ):
        answers[f"bad {number}"] = ask(bad, 0.5, "atc", "average", "tome", "average", api_name="/tokens")
    return answers


def test_no_answer_names_a_path_of_the_server(page: Played) -> None:
    answers = everything(page)
    private = [PACKAGE, os.path.dirname(PACKAGE), str(page.work), str(page.home), str(page.temporary), "/tmp/", "/usr/"]
    private += [str(Path.home()) + "/", os.path.dirname(os.__file__), "site-packages"]
    for name, answer in answers.items():
        text = html.unescape(answer if isinstance(answer, str) else json.dumps(answer))
        assert not [each for each in private if each in text], name
    for number in range(6):
        assert 'class="refused"' in answers[f"bad {number}"] and "figure" not in answers[f"bad {number}"]
    assert "6000 x 6000 pixels" in answers["bad 3"]
    assert len(labels_in(answers["groups"])) == 2
    assert "agglo.apply(model" in answers["dynamic"] and "agglo.apply(model" in answers["detection"]


def test_bad_settings_are_refused_with_a_sentence(page: Played) -> None:
    visitor = client(page.address)
    said = visitor.predict("example:boot", 0.2, "tome", "average", "atc", "average", api_name="/tokens")
    assert "tome cannot go from 196 to 39" in said and len(labels_in(said)) == 3
    # What no control of the page can send, Gradio turns away before it gets here.
    for wrong in [("example:boot", 7, "atc"), ("example:boot", 0.5, "evil")]:
        with pytest.raises(Exception, match=r"(?i)choices|maximum|value"):
            visitor.predict(*wrong, "average", "tome", "average", api_name="/tokens")


def test_addresses_that_are_not_needed_are_not_there(page: Played) -> None:
    for path in ("gradio_api/upload", "gradio_api/file=/etc/passwd", "docs", "openapi.json", "monitoring"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(page.address + path)
        assert refused.value.code == 404
    request = urllib.request.Request(page.address, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 421


def test_it_listens_to_this_machine_alone(page: Played) -> None:
    assert page.address.startswith("http://127.0.0.1:")
    assert not page.process.poll()


def test_it_writes_nothing_but_temporary_files(page: Played) -> None:
    """What is left of those when it ends is looked at where the page is stopped."""
    asked = client(page.address).predict("example:boot", 0.5, "atc", "average", "tome", "average", api_name="/tokens")
    assert labels_in(asked)
    assert list(page.work.iterdir()) == []
    assert [path for path in page.home.rglob("*") if path.is_file()] == []


def test_pictures_that_are_sent_are_looked_at(page: Played, classifier: Classifier) -> None:
    from io import BytesIO

    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 256, (50, 80, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    said = client(page.address).predict(
        sent(file.getvalue()), 0.5, "atc", "average", "tome", "average", api_name="/tokens"
    )
    found = compare(classifier, Image.fromarray(pixels), [choose("atc", "average", keep_rate=0.5)])
    [side] = found.sides
    assert isinstance(side, Reduced)
    assert labels_in(said)[:3] == [stage.reshape(-1).tolist() for stage in side.stages.values()]


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "playground.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```python playground\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(example, "playground.md", "exec"), {})
    assert "[98, 49, 24] agglo.apply(model," in capsys.readouterr().out


def test_the_documentation_says_what_is_accepted() -> None:
    from agglo.playground.uploads import FORMATS, MOST_BYTES, MOST_PIXELS

    text = (Path(__file__).parents[2] / "docs" / "playground.md").read_text(encoding="utf-8")
    assert f"at most {MOST_BYTES // 1024 // 1024} MB and {MOST_PIXELS // 1_000_000} million pixels" in text
    assert all(kind.lower() in text.lower() for kind in FORMATS)
