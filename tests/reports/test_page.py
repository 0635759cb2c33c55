"""The page of a run: one file, everything from outside escaped, the run's own numbers, nothing shown that is not there."""

import base64
import hashlib
import json
import re
import unicodedata
import zlib

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.run import Run
from hooks.collect import analyze
from hooks.models import LoadedModel
from reports.html.packed_table import packed, rounded
from reports.html.render import bidi_isolated, inline_svg, number, standard_error, token, visible
from reports.run.definitions import CAUSAL, EXTREME_COLUMNS, LAYER_COLUMNS, NEURON_COLUMNS
from reports.run.figures import draw_all
from reports.run.page import CAPTIONS, report_html
from reports.tables import Tables, tables_of
from tests.helpers.hostile import SCRIPT, TOKENS, renamed
from tests.helpers.html_page import Page


@pytest.fixture(scope="module")
def run(llama: LoadedModel) -> Run:
    return analyze(llama, llama.read(context=32, max_tokens=320), quiet=True)


@pytest.fixture(scope="module")
def tables(run: Run) -> Tables:
    return tables_of(run)


@pytest.fixture(scope="module")
def figures(tables: Tables) -> dict[str, Figure]:
    return draw_all(tables)


@pytest.fixture(scope="module")
def html(run: Run, tables: Tables, figures: dict[str, Figure]) -> str:
    return report_html(run, tables, figures)


def unpacked(page: Page) -> dict[str, np.ndarray]:
    """The table of neurons as the page's own script reads it."""
    by_id = {attributes.get("id"): text for attributes, text in page.scripts}
    header = json.loads(by_id["neuron-header"] or "")
    planes = np.frombuffer(zlib.decompress(base64.b64decode(by_id["neuron-data"] or "")), dtype=np.uint8)
    columns = planes.reshape(len(header["columns"]), 4, header["rows"]).transpose(0, 2, 1)
    return dict(zip(header["columns"], np.ascontiguousarray(columns).view("<f4")[..., 0], strict=True))


def test_the_page_loads_nothing_and_runs_only_its_own_script(html: str) -> None:
    page = Page(html)
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "action", "poster", "srcset"):
            reference = attributes.get(name) or "#"
            assert reference.startswith(("#", "data:")), (tag, reference)
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    policy = next(
        attributes["content"] for tag, attributes in page.elements if tag == "meta" and "http-equiv" in attributes
    )
    assert "default-src 'none'" in (policy or "")
    run_by_browser = [text for attributes, text in page.scripts if "type" not in attributes]
    assert len(run_by_browser) == 1
    digest = base64.b64encode(hashlib.sha256(run_by_browser[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in (policy or "")


def test_what_comes_from_outside_cannot_act(run: Run, figures: dict[str, Figure]) -> None:
    """A hostile run's page has the elements of a page of the same run under harmless names, and no invisible marks."""
    named = (renamed(run), renamed(run, ["x"] * len(TOKENS)))
    pages = [Page(report_html(one, tables_of(one), figures)) for one in named]
    # runs of right-to-left letters in sentences are set apart, which is what bdi elements are there for
    dangerous, safe = ([tag for tag in page.tags() if tag != "bdi"] for page in pages)
    assert dangerous == safe
    assert SCRIPT in pages[0].text
    assert "7 * 191" in pages[0].text
    assert "1337" not in pages[0].text
    unseen = {letter for letter in pages[0].text if unicodedata.category(letter) in ("Cf", "Cs", "Cc") and letter != "\n"}
    assert unseen == set()


def test_the_page_holds_the_runs_numbers(html: str, tables: Tables) -> None:
    page = Page(html)
    columns = unpacked(page)
    assert set(columns) == set(NEURON_COLUMNS) - {"expert", "n_tokens"}
    for name, values in columns.items():
        exact = tables.neurons[name].to_numpy(dtype=float)
        np.testing.assert_allclose(values, exact, rtol=2.0**-15, atol=0, equal_nan=True, err_msg=name)
    np.testing.assert_array_equal(columns["neuron"], tables.neurons["neuron"])
    shown = {attributes["data-value"] for tag, attributes in page.elements if tag == "td" and "data-value" in attributes}
    for name in (set(LAYER_COLUMNS) & set(tables.layers.columns)) - {"output_exchange_balanced_raw"}:
        assert {str(value) for value in tables.layers[name]} <= shown, name
    for name in EXTREME_COLUMNS:
        assert {str(value) for value in tables.extremes.groupby("layer").head(3)[name]} <= shown, name


def test_shown_columns_are_those_of_the_tables(tables: Tables) -> None:
    random = {"exchange_balanced_null_random", "output_exchange_balanced_null_random"}
    assert set(LAYER_COLUMNS) - set(tables.layers.columns) == random
    assert set(NEURON_COLUMNS) - set(tables.neurons.columns) == {"expert", "n_tokens"}
    assert set(EXTREME_COLUMNS) <= set(tables.extremes.columns)


def test_a_section_is_there_only_if_its_data_are(run: Run, tables: Tables, figures: dict[str, Figure], html: str) -> None:
    assert CAUSAL.names not in html
    assert CAPTIONS["causal_cost"][0] not in html
    layers = tables.layers.assign(kl_exchange=0.25, kl_exchange_se=0.01, kl_exchange_placebo=0.125)
    with_costs = Tables(layers, tables.neurons, tables.curves, tables.extremes)
    more = report_html(run, with_costs, figures | {"causal_cost": Figure(), "another": Figure()})
    assert CAUSAL.names in more
    assert "0.250 <small>± 0.010</small>" in more
    assert 'data-value="0.125"' in more
    order = [found[1] for found in re.finditer(r'<figure id="figure-(\w+)"', more)]
    assert order == ["output", "output_parts", "exchange", "causal_cost", "scaling", "measures", "neurons", "another"]
    bare = Page(report_html(run, tables, {}))
    assert "figures" not in {attributes.get("id") for _, attributes in bare.elements}
    assert "No command was recorded" in bare.text


def test_a_number_that_is_not_there_is_a_dash(llama: LoadedModel) -> None:
    poor = analyze(llama, llama.read(context=32, max_tokens=32), layers=[1], alphas=[3.0], quiet=True)
    tables = tables_of(poor)
    page = Page(report_html(poor, tables, draw_all(tables)))
    assert "nan" not in page.text.lower().replace("antisymmetr", "").split()
    assert "–" in page.text
    assert "scale 0.5 is not among --alphas" in page.text


def test_ids_are_unique_and_figures_take_the_pages_colours(html: str, figures: dict[str, Figure]) -> None:
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    known = set(ids)
    for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', html):
        assert reference in known
    svg = inline_svg(figures["exchange"], "one", 'a "label"')
    assert svg.startswith('<svg viewBox="0 0 540 540" role="img" aria-label="a &#34;label&#34;">')
    assert "var(--ink)" in svg
    assert "#262626" not in svg
    assert "<metadata>" not in svg


def test_packed_numbers_keep_four_digits() -> None:
    generator = np.random.default_rng(0)
    values = (generator.normal(size=5000) * 10.0 ** generator.integers(-30, 30, 5000)).astype(np.float32)
    edge = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1, -2.5], dtype=np.float32)
    np.testing.assert_allclose(rounded(values), values, rtol=2.0**-15)
    np.testing.assert_array_equal(rounded(edge), edge)
    assert len(np.unique(rounded(values).view(np.uint32) & 0x1FF)) == 1
    table = pd.DataFrame({"n": [0, 1, 2**24 - 1], "x": [0.1, np.nan, 1e-9], "flag": [True, False, True]})
    payload = packed(table)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(payload.data)), np.uint8).reshape(3, 4, 3)
    n, x, flag = np.ascontiguousarray(planes.transpose(0, 2, 1)).view("<f4")[..., 0]
    np.testing.assert_array_equal(n, table["n"])
    np.testing.assert_allclose(x, table["x"], rtol=2.0**-15)
    np.testing.assert_array_equal(flag, [1, 0, 1])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.22315, "0.223"), (0.0, "0"), (255, "255"), (-12.2549, "−12.255"), (5.6e-5, "5.6e−05"), (34530.7, "34,531"),
     (np.nan, "–"), (np.inf, "∞"), (-np.inf, "−∞")],
)  # fmt: skip
def test_numbers_are_written_to_be_read(value: float | int, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.0022, "0.0022"), (0.01, "0.010"), (5.62e-5, "5.6e−05"), (12.3, "12")])
def test_errors_have_two_digits(value: float, text: str) -> None:
    assert standard_error(value) == text


def test_marks_that_are_not_seen_become_visible() -> None:
    assert visible("a\u202eb\x00\n\ud800\u200b") == "a⟨U+202E⟩b⟨U+0000⟩⏎⟨U+D800⟩⟨U+200B⟩"
    assert visible("é ü 漢 שלום ⅛ 🙂") == "é ü 漢 שלום ⅛ 🙂"
    assert visible(3) == 3
    assert bidi_isolated("a <b> שלום (1)") == "a &lt;b&gt; <bdi>שלום</bdi> (1)"
    assert token(" <i>") == '<bdi class="token"> &lt;i&gt;</bdi>'
    assert token("x" * 41) == f'<bdi class="token">{"x" * 40}…</bdi>'
