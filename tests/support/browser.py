"""A headless Chromium for tests of pages, driven as a person would."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.lacking import lacking

WAIT_S = 120.0
_SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--force-device-scale-factor=1",
    "--window-size=1500,950",
)
_INTERRUPTED = ("navigation", "document unloaded", "execution context")
"""What Chromium's driver says of them."""


class Browser:
    """An open page."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, path: Path | str, state: str = "") -> None:
        """Open a file in a new page, without the state of the page before."""
        self.driver.get("about:blank")
        self.driver.get(f"{Path(path).absolute().as_uri()}{state}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        from selenium.webdriver.common.by import By

        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        (found,) = self.all(selector)
        return found

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition holds, and return its value. Elements or the page may be replaced meanwhile."""
        from selenium.common import exceptions
        from selenium.webdriver.support.ui import WebDriverWait

        ignored = [
            exceptions.StaleElementReferenceException,
            exceptions.ElementNotInteractableException,
            exceptions.ElementClickInterceptedException,
        ]

        def poll(_: Any) -> Any:
            try:
                return condition()
            except exceptions.WebDriverException as error:  # a script that a load of the page interrupts
                if any(words in str(error) for words in _INTERRUPTED):
                    return None
                raise

        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05, ignored_exceptions=ignored).until(poll)

    def click(self, selector: str) -> None:
        """Click an element when it is there."""
        self.until(lambda: len(self.all(selector)) == 1)
        self.until(lambda: self.one(selector).click() is None)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.until(lambda: self.one(selector).clear() is None)
        self.one(selector).send_keys(text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list when it is there."""
        from selenium.webdriver.support.ui import Select

        self.until(lambda: len(self.all(selector)) == 1)
        self.until(lambda: Select(self.one(selector)).select_by_value(value) is None)

    def errors(self) -> list[str]:
        """Return what the page has complained about since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def is_installed() -> bool:
    """Return whether pages can be opened on this machine."""
    programs = (shutil.which("chromium"), shutil.which("chromedriver"))
    return None not in programs and importlib.util.find_spec("selenium") is not None


def _start(options: Any) -> Any:
    """Start Chromium. Where it cannot start, as in some containers, skip the test, or fail it (`lacking`)."""
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException

    problem = None
    for _ in range(3):  # another program may take the port that the driver has chosen
        try:
            return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        except WebDriverException as error:
            problem = error
    lacking("BROWSER", f"Chromium does not start here ({problem})")


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Yield a browser with an empty profile. Skip the test where there is none (`lacking`)."""
    if not is_installed():
        lacking(
            "BROWSER", "Chromium is not installed (Debian's packages chromium and chromium-driver), or selenium is not"
        )
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for switch in (*_SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = _start(options)
    try:
        running.set_script_timeout(WAIT_S)
        running.set_page_load_timeout(WAIT_S)
        yield Browser(running)
    finally:
        running.quit()
