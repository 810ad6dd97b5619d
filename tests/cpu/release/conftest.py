"""The browser that shows pages of the viewer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, open_browser
from tests.support.viewed_pages import write_page
from tests.support.viewed_runs import HOSTILE, make_run


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium) -> Iterator[Browser]:
    """A browser whose page must not complain."""
    chromium.errors()
    yield chromium
    assert chromium.errors() == []


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a run of three steps."""
    run = make_run(tmp_path_factory.mktemp("one") / "run", hostile=HOSTILE)
    return write_page(run / "view.html", run)
