"""The documentation site: built strictly, whole, searchable, and with the API that the pages import."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tools.docs_site import ROOT, build_site, gather

API = (ROOT / "docs/api.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site. A warning of the build fails it: a dead link or anchor, a page without a place, an unknown name."""
    base = tmp_path_factory.mktemp("site")
    pages = gather(base / "pages")
    assert len([path for path in pages if path.suffix == ".md"]) > 30
    build_site(base / "pages", base / "site")
    return base / "site"


def page_of(site: Path, page: str) -> str:
    return (site / page.replace("README.md", "index.html").replace(".md", ".html")).read_text()


def test_the_site_has_every_page(site):
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        title = re.sub(r"[`*]", "", path.read_text().splitlines()[0].removeprefix("# "))
        assert title in re.sub("<[^>]+>", "", page_of(site, str(path.relative_to(ROOT)))), path


def test_the_search_finds_words_of_all_kinds_of_pages(site):
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    for word, page in (
        ("trainer.ckpt_interval", "docs/config.html"),
        ("rollback", "docs/recovery.html"),
        ("load_checkpoint", "docs/api.html"),
        ("SecondChance", "docs/tutorial/2-own-task.html"),
    ):
        assert any(word in entry["text"] + entry["title"] for entry in index if entry["location"].startswith(page)), (
            word
        )


def test_the_api_page_shows_signatures_and_docstrings(site):
    text = re.sub(r"\s+", " ", re.sub("<[^>]+>", "", page_of(site, "docs/api.md")))
    for name in re.findall(r"^::: (\S+)$", API, flags=re.MULTILINE):
        assert name in text, name
    assert "Do what trainer train OVERRIDES does, and return the result of the run." in text
    assert "finished , or stopped" in re.sub(r"(?<=\w)(?=[,;])", " ", text), "attributes have their docstrings"


def test_the_api_page_names_what_the_pages_import():
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", API, flags=re.MULTILINE)}
    tables = {"TASKS", "POLICY_LOSSES", "SCORE"}  # values; extending.md says what is in them
    for path in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL):
            for names in re.findall(r"^from trainer[\w.]* import ([\w, ]+)$", block, flags=re.MULTILINE):
                assert set(names.split(", ")) <= listed | tables, (path.name, names)


class _Sources(HTMLParser):
    """Collects what a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        names = {"script": "src", "img": "src", "iframe": "src"}
        is_sheet = tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon")
        self.found.append(given.get("href" if is_sheet else names.get(tag, ""), "") or "")


def test_a_page_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        sources = _Sources()
        sources.feed(page.read_text())
        assert [source for source in sources.found if "://" in source or source.startswith("//")] == [], page


def test_a_dead_link_ends_the_build(tmp_path):
    from mkdocs.exceptions import Abort

    gather(tmp_path / "pages")
    page = tmp_path / "pages/docs/install.md"
    page.write_text(page.read_text() + "\n[nowhere](nowhere.md)\n")
    keep = {page, tmp_path / "pages/README.md"}
    for other in (tmp_path / "pages").rglob("*.md"):
        if other not in keep:
            other.unlink()
    with pytest.raises(Abort):
        build_site(tmp_path / "pages", tmp_path / "site")


def test_every_page_of_the_navigation_exists():
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())

    def pages(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [page for value in entry.values() for page in pages(value)]
        return [page for value in entry for page in pages(value)] if isinstance(entry, list) else [str(entry)]

    named = pages(yaml.safe_load(text)["nav"])
    assert all((ROOT / page).is_file() for page in named)
    assert {f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")} <= set(named)


def test_the_search_box_finds_keys_by_their_last_part_and_guides_before_lists(site, browser):
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    found = "return [...document.querySelectorAll('.md-search-result__link')].map((one) => new URL(one.href).pathname)"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for words, page in (
            ("val_interval", "/docs/config.html"),
            ("resume", "/docs/recovery.html"),
            ("checkpoint", "/docs/checkpoints.html"),
        ):
            browser.driver.get("about:blank")
            browser.driver.get(f"http://127.0.0.1:{server.server_port}/index.html?q={words}")
            assert browser.until(lambda: browser.run(found))[0] == page, words
        browser.driver.get("about:blank")
        server.shutdown()
