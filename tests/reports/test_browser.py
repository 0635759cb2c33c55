"""The pages in a real browser, with the network off: nothing fails, nothing leaves, everything works and can be read."""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser
from playwright.sync_api import Page as Tab

from analysis.run import Run
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from reports.compare.figures import draw_comparison
from reports.compare.page import comparison_html
from reports.compare.tables import compare_runs
from reports.directory import write_directory
from reports.run import figures as drawn
from reports.run.page import report_html
from reports.tables import Tables, tables_of
from tests.helpers.browsing import no_overflow, opened, written
from tests.helpers.hostile import CORPUS, SCRIPT, TOKENS, hostile_tokenizer
from tests.helpers.mixtures import with_experts
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.browser
WIDTHS = (1280, 390)
PROMPT = 500
"""Milliseconds within which the table of neurons answers."""
READY = "#found:text-matches(' of .* neurons')"


@pytest.fixture(scope="module")
def smollm2_page(smollm2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of the real SmolLM2, 46,080 neurons, from little text."""
    directory = tmp_path_factory.mktemp("smollm2")
    write_directory(analyze(smollm2, smollm2.read(context=64, max_tokens=256), draws=2, quiet=True), directory)
    return directory / "report.html"


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run of a model, a tokenizer and a text that a stranger made, named by a stranger."""
    directory = tmp_path_factory.mktemp("hostile") / '"><img src=x onerror="window.hacked=1">'
    tiny_model("llama").save_pretrained(directory)
    hostile_tokenizer().save_pretrained(directory)
    text = directory / "<script>window.hacked = 1<" / "script>.txt"
    text.parent.mkdir()
    text.write_text(CORPUS, newline="")
    model = load_model(str(directory), device="cpu")
    return analyze(model, model.read(str(text), context=32, max_tokens=640), quiet=True)


@pytest.mark.real
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_opens_offline_and_fits(browser: Browser, smollm2_page: Path, width: int, scheme: str) -> None:
    assert smollm2_page.stat().st_size < 10_000_000
    size = {"width": width, "height": 900}
    with opened(browser, smollm2_page, viewport=size, color_scheme=scheme) as tab:
        tab.wait_for_selector(READY)
        no_overflow(tab)
        found = Axe().run(tab).response["violations"]
        assert [f"{fault['id']}: {fault['nodes'][0]['html']}" for fault in found] == []


@pytest.mark.real
def test_the_table_of_neurons_answers_at_once(browser: Browser, smollm2_page: Path) -> None:
    neurons = pd.read_parquet(smollm2_page.with_name("neurons.parquet"))
    with opened(browser, smollm2_page, viewport={"width": 1280, "height": 900}) as tab:
        tab.wait_for_selector(READY)
        assert tab.inner_text("#found") == "46,080 of 46,080 neurons"
        assert rows(tab)[0][:2] == places(neurons.sort_values("score", ascending=False))[0]

        timed(tab, "document.querySelector('[data-name=exchange] button').click()")
        by_exchange = neurons.sort_values("exchange", ascending=False, kind="stable")
        assert float(rows(tab)[0][4]) == pytest.approx(by_exchange["exchange"].iloc[0], rel=1e-3)
        timed(tab, "document.querySelector('[data-name=exchange] button').click()")
        assert tab.get_attribute("[data-name=exchange]", "aria-sort") == "ascending"
        assert float(rows(tab)[0][4]) == pytest.approx(by_exchange["exchange"].min(), rel=1e-3)

        timed(tab, typed("11:1229"))
        assert [row[:2] for row in rows(tab)] == [["11", "1229"]]
        bounds = neurons[(neurons["cos_qk"] > 0.5) & (neurons["score"] >= 2)]
        timed(tab, typed("cos_qk>0.5 score >= 2"))
        assert tab.inner_text("#found") == f"{len(bounds):,} of 46,080 neurons"
        timed(tab, "document.querySelector('[data-name=score] button').click()")
        assert [row[:2] for row in rows(tab)][:5] == places(bounds.sort_values("score", ascending=False))[:5]
        timed(tab, typed("colour>1"))
        assert "“colour>1” is not understood" in tab.inner_text("#found")
        assert tab.get_attribute("#search", "aria-invalid") == "true"
        timed(tab, typed(""))

        timed(tab, "const s = document.getElementById('layer-filter'); s.value = '28'; s.dispatchEvent(new Event('input'))")
        assert tab.inner_text("#found") == "1,536 of 46,080 neurons"
        assert {row[0] for row in rows(tab)} == {"28"}
        assert tab.evaluate("document.querySelectorAll('#neuron-rows tbody tr').length") < 100
        timed(tab, "document.getElementById('neuron-rows').scrollTop = 1e9")
        tab.wait_for_selector("tr[aria-rowindex='1537']")


def test_half_a_million_neurons_are_workable(browser: Browser, hostile_run: Run, tmp_path: Path, tables: Tables) -> None:
    count, generator = 500_000, np.random.default_rng(0)
    many = pd.DataFrame({"layer": np.arange(count) // 5000, "neuron": np.arange(count) % 5000})
    many["exchange_balanced_repaired_differs"], many["exchange_balanced_repaired_p"] = False, np.nan
    many["score"], many["exchange"] = generator.lognormal(size=count), generator.integers(0, 1024, count) / 1024
    html = report_html(hostile_run, Tables(tables.layers, many, tables.curves, tables.extremes), {})
    with opened(browser, written(html, tmp_path)) as tab:
        tab.wait_for_selector(READY)
        assert tab.inner_text("#found") == "500,000 of 500,000 neurons"
        timed(tab, "document.querySelector('[data-name=exchange] button').click()", limit=4 * PROMPT)
        timed(tab, typed("exchange<0.5"), limit=4 * PROMPT)
        left = int(tab.inner_text("#found").split(" of ")[0].replace(",", ""))
        assert left == (many["exchange"] < 0.5).sum()
        tab.evaluate("document.getElementById('neuron-rows').scrollTop = 1e9")
        tab.wait_for_selector(f"tr[aria-rowindex='{left + 1}']")
        assert tab.evaluate("document.querySelectorAll('#neuron-rows tbody tr').length") < 100


@pytest.fixture(scope="module")
def tables(hostile_run: Run) -> Tables:
    return tables_of(hostile_run)


def test_neurons_are_found_by_their_expert(browser: Browser, llama: LoadedModel, tmp_path: Path) -> None:
    run = with_experts(analyze(llama, llama.read(context=32, max_tokens=320), draws=3, quiet=True))
    mixtures = tables_of(run)
    html = report_html(run, mixtures, drawn.draw_all(mixtures))
    with opened(browser, written(html, tmp_path), viewport={"width": 390, "height": 900}) as tab:
        tab.wait_for_selector(READY)
        timed(tab, typed("1:2:3"))
        assert [row[:3] for row in rows(tab)] == [["1", "2", "3"]]
        timed(tab, typed("shared:1"))
        assert sorted(row[:3] for row in rows(tab)) == [["1", "shared", "1"], ["2", "shared", "1"]]
        timed(tab, typed("2:1"))
        assert sorted(row[:3] for row in rows(tab)) == [
            ["2", "0", "1"],
            ["2", "1", "1"],
            ["2", "2", "1"],
            ["2", "shared", "1"],
        ]
        timed(tab, typed("expert=-1"))
        assert len(rows(tab)) == 6
        timed(tab, typed("0:1"))
        assert [row[:3] for row in rows(tab)] == [["0", "–", "1"]]
        tab.locator("#experts th:has-text('expert') button").first.click()
        assert [text.rstrip("*") for text in tab.locator("#experts tbody td:nth-child(2)").all_inner_texts()][
            -1
        ] == "shared"
        no_overflow(tab)
        found = Axe().run(tab).response["violations"]
        assert [f"{fault['id']}: {fault['nodes'][0]['html']}" for fault in found] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_strangers_run_nothing_and_break_nothing(
    browser: Browser, hostile_run: Run, tables: Tables, tmp_path: Path, width: int
) -> None:
    assert set(TOKENS) & set(tables.extremes.groupby("layer").head(3)["text"])
    reports = {"report": report_html(hostile_run, tables, {})}
    both = compare_runs([hostile_run, hostile_run], [SCRIPT, TOKENS[1] + TOKENS[4]])
    reports["compare"] = comparison_html(both, draw_comparison(both))
    for name, html in reports.items():
        with opened(browser, written(html, tmp_path), viewport={"width": width, "height": 900}) as tab:
            tab.wait_for_timeout(100)
            assert tab.evaluate("window.hacked") is None, name
            assert tab.query_selector("h1 img, td img, td script, td h1, dd script") is None
            assert len(tab.query_selector_all("main")) == 1
            no_overflow(tab)
            cells = "[...document.querySelectorAll('#extremes td, #tables td')]"
            assert tab.evaluate(f"{cells}.filter(cell => cell.offsetHeight > 30).map(cell => cell.outerHTML)") == []
            found = Axe().run(tab).response["violations"]
            assert [f"{fault['id']}: {fault['nodes'][0]['html']}" for fault in found] == []


def test_small_tables_are_sorted_and_read_without_a_mouse(
    browser: Browser, hostile_run: Run, tables: Tables, tmp_path: Path
) -> None:
    with opened(browser, written(report_html(hostile_run, tables, {}), tmp_path)) as tab:
        button = tab.locator("#layers th:has-text('output_exchange_balanced') button").first
        button.focus()
        tab.keyboard.press("Enter")
        order = [int(text.rstrip("*")) for text in tab.locator("#layers tbody th").all_inner_texts()]
        assert order == list(tables.layers.sort_values("output_exchange_balanced", ascending=False)["layer"])
        tab.keyboard.press("Space")
        again = [int(text.rstrip("*")) for text in tab.locator("#layers tbody th").all_inner_texts()]
        assert again == order[::-1]


def test_it_prints_and_reads_without_script(browser: Browser, hostile_run: Run, tables: Tables, tmp_path: Path) -> None:
    page = written(report_html(hostile_run, tables, {}), tmp_path)
    with opened(browser, page, color_scheme="dark") as tab:
        tab.emulate_media(media="print")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgba(0, 0, 0, 0)"
        assert tab.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
        assert not tab.is_visible("nav")
        assert not tab.is_visible("#search")
        clipped = (
            "[...document.querySelectorAll('.scroll')].filter(e => getComputedStyle(e).overflowX !== 'visible').length"
        )
        assert tab.evaluate(clipped) == 0
        assert tab.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    with opened(browser, page, java_script_enabled=False) as tab:
        assert tab.is_visible("#layers table")
        assert tab.is_visible("noscript")
        assert not tab.is_visible("#search")


def test_colours_are_told_apart_by_colour_blind_readers() -> None:
    """Line colours differ under protanopia, deuteranopia and tritanopia (Machado 2009), and nulls by line style too."""
    machado = {
        "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
        "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    }
    nulls = {name: color for name, (_, color, _) in drawn.NULLS.items()}
    colours = {"pooled": drawn.POOLED, "tokens": drawn.TOKENS} | nulls
    linear = {name: np.array(matplotlib.colors.to_rgb(color)) ** 2.2 for name, color in colours.items()}
    for matrix in machado.values():
        seen = {name: np.clip(np.array(matrix) @ color, 0, 1) ** (1 / 2.2) for name, color in linear.items()}
        for one in seen:
            for other in seen:
                if one < other:
                    assert np.linalg.norm(seen[one] - seen[other]) > 0.1, (one, other)
    assert len({style for _, _, style in drawn.NULLS.values()}) == len(nulls)


def rows(tab: Tab) -> list[list[str]]:
    """The cells of the rows that are drawn."""
    drawn_rows = "[...document.querySelectorAll('#neuron-rows tbody tr:not(.gap)')]"
    cells = tab.evaluate(f"{drawn_rows}.map(row => [...row.cells].map(cell => cell.textContent))")
    return [[text.replace("−", "-") for text in row] for row in cells]


def places(neurons: pd.DataFrame) -> list[list[str]]:
    return neurons[["layer", "neuron"]].astype(str).to_numpy().tolist()


def typed(text: str) -> str:
    search = "const s = document.getElementById('search')"
    return f"{search}; s.value = {json.dumps(text)}; s.dispatchEvent(new Event('input'))"


def timed(tab: Tab, script: str, limit: int = PROMPT) -> None:
    """Do something on the page and wait until it is laid out again; fails if that takes longer than ``limit`` ms."""
    done = f"{{ {script} }}; document.body.offsetHeight"
    took = tab.evaluate(f"() => {{ const start = performance.now(); {done}; return performance.now() - start; }}")
    print(f"{took:.0f} ms: {script}")
    assert took < limit, f"{script}: {took:.0f} ms"
