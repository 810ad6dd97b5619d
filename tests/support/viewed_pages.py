"""Pages of the viewer in a browser: how tests write them, and read what they show."""

from __future__ import annotations

from pathlib import Path

from tests.support.browser import Browser
from trainer.view.build import Builder, Limits


def write_page(out: Path, *runs: Path) -> Path:
    Builder([str(run) for run in runs], Limits()).write(str(out))
    return out


def show_episodes(browser: Browser, page: Path, state: str = "") -> None:
    """Open the tab of the episodes, and wait until its table is filled."""
    browser.open(page, f"#tab=episodes{state}")
    browser.until(lambda: any(browser.texts("#count")))


def column(browser: Browser, key: str) -> list[str]:
    """Return the cells of a column, from the top."""
    return browser.run(
        "const keys = [...document.querySelectorAll('.head .cell')].map((one) => one.dataset.key);"
        "const place = keys.indexOf(arguments[0]);"
        "return [...document.querySelectorAll('.row')].map((row) => row.children[place].textContent)",
        key,
    )


def shown(browser: Browser, count: int) -> None:
    browser.until(lambda: browser.texts("#count") == [f"{count:,} shown"])
