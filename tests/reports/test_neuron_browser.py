"""The page of a neuron in a real browser: offline, of any width, light and dark, whatever its tokens are."""

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from hooks.models import load_model
from hooks.neuron import inspect_neuron
from reports.neuron.page import NeuronPage
from tests.helpers.browsing import no_overflow, opened, written
from tests.helpers.hostile import CORPUS, hostile_tokenizer
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> NeuronPage:
    directory = tmp_path_factory.mktemp("hostile") / '"><img src=x onerror="window.hacked=1">'
    tiny_model("llama").save_pretrained(directory)
    hostile_tokenizer().save_pretrained(directory)
    (directory / "<b>text.txt").write_text(CORPUS, newline="")
    model = load_model(str(directory), device="cpu")
    text = model.read(str(directory / "<b>text.txt"), context=32, max_tokens=640)
    return NeuronPage(inspect_neuron(model, text, "1:7", top=10, quiet=True), '"><script>window.hacked = 1</script>')


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_opens_fits_and_can_be_read(
    browser: Browser,
    hostile_page: NeuronPage,
    tmp_path: Path,
    width: int,
    scheme: str,
) -> None:
    page = written(hostile_page.html(), tmp_path)
    with opened(browser, page, viewport={"width": width, "height": 900}, color_scheme=scheme) as tab:
        assert tab.evaluate("window.hacked") is None
        assert tab.query_selector("h1 img, h1 script, li script, bdi *, dd img") is None
        no_overflow(tab)
        found = Axe().run(tab).response["violations"]
        assert [f"{fault['id']}: {fault['nodes'][0]['html']}" for fault in found] == []
        token = tab.locator(".near.focus").first
        a, b, h = (token.get_attribute("title") or "").split(", ")
        assert (a[:2], b[:2], h[:2]) == ("a ", "b ", "h ")
        button = tab.locator("#symmetry th:has-text('percentile') button")
        button.click()
        shown = [float(text) for text in tab.locator("#symmetry tbody td:nth-child(6)").all_inner_texts() if text != "–"]
        assert shown == sorted(shown, reverse=True)


def test_a_notebooks_frame_holds_it(browser: Browser, hostile_page: NeuronPage, tmp_path: Path) -> None:
    frame = written(f"<!DOCTYPE html><html><body>{hostile_page._repr_html_()}</body></html>", tmp_path)
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.goto(frame.as_uri())
    inner = tab.frame_locator("iframe")
    assert inner.locator("h1").inner_text().startswith("Neuron 1:7")
    inner.locator("#symmetry th:has-text('percentile') button").click()
    assert tab.evaluate("window.hacked") is None
    context.close()
