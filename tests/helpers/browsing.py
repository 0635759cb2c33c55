"""Pages opened in a real browser."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser
from playwright.sync_api import Page as Tab


@contextmanager
def opened(browser: Browser, page: Path, **options: Any) -> Iterator[Tab]:
    """The page in a tab of its own, without network; fails if anything was said on the console or asked of anyone."""
    context = browser.new_context(offline=True, **options)
    tab = context.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("dialog", lambda dialog: said.append(dialog.message))
    tab.on("request", lambda request: said.append(request.url) if request.url != page.as_uri() else None)
    tab.goto(page.as_uri())
    yield tab
    context.close()
    assert said == []


def no_overflow(tab: Tab) -> None:
    """The page is as wide as the window: what is wider scrolls within itself."""
    assert tab.evaluate("document.documentElement.scrollWidth") <= tab.viewport_size["width"]  # type: ignore[index]
    wider = tab.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, svg, script, noscript, style"))
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"""
    )
    assert wider == []


def written(html: str, directory: Path) -> Path:
    (directory / "page.html").write_text(html, encoding="utf-8")
    return directory / "page.html"
