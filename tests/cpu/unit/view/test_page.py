"""The one file: what is in it cannot break out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainer.view
from tests.support.viewed_runs import HOSTILE
from trainer.view.page import as_data, pack, render


class Elements(HTMLParser):
    """The elements of a page with their texts."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self._is_open = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), ""))
        self._is_open = True

    def handle_endtag(self, tag):
        self._is_open = False

    def handle_data(self, data):
        if self._is_open:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def texts(self, tag: str) -> list[str]:
        return [text for name, _, text in self.found if name == tag]


dangerous = st.sampled_from([HOSTILE, "</script>", "<!--", "<script>", "]]>", "{{SCRIPT}}", "\u2028", "\x00", "\ud800"])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text() | dangerous, st.text() | dangerous | st.floats(allow_nan=False, allow_infinity=False)))
def test_any_data_comes_back_and_breaks_nothing(data):
    page = render(data, {"c0": pack(data)})
    page.encode("utf-8")
    elements = Elements(page)
    tags = [tag for tag, _, _ in elements.found]
    assert tags == ["html", "head", *["meta"] * 4, "title", "style", "body", "noscript", "div", *["script"] * 3]
    given_data, chunk, script = elements.texts("script")
    assert json.loads(given_data) == data
    assert json.loads(zlib.decompress(base64.b64decode(chunk))) == data
    assert script == Elements(render({}, {})).texts("script")[-1]


def test_the_policy_allows_the_page_alone():
    page = render({}, {})
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        text = Elements(page).texts(tag)[-1]
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/)|url\(|@import", page), "the page loads nothing"
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_a_mistake(value):
    with pytest.raises(ValueError, match="JSON"):
        as_data({"a": value})
    with pytest.raises(ValueError, match="JSON"):
        pack({"a": value})


def test_an_axis_of_very_large_numbers_ends():
    source = (Path(trainer.view.__file__).parent / "curves.js").read_text()
    function = re.search(r"^function ticks\(.*?^}", source, re.DOTALL | re.MULTILINE)[0]
    calls = [[0, 10, 5], [2**53, 2**53 + 4, 4], [1e17, 1.0000000000000002e17, 4], [-1, 1e308, 4], [3, 3, 4]]
    script = f"{function}\nconsole.log(JSON.stringify({json.dumps(calls)}.map((call) => ticks(...call))))"
    node = shutil.which("node") or pytest.skip("needs node")
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=60, check=True)
    axes = json.loads(done.stdout)
    assert axes[0] == [0, 2, 4, 6, 8, 10] and all(0 < len(axis) <= 11 for axis in axes)
