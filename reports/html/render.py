"""HTML pages: self-contained files in which no text from outside can run or change the layout.

Text from models, file names, corpora and tokens is escaped by Jinja2, and invisible characters that affect the display
(controls, bidirectional marks, lone surrogates) are replaced by visible ones. A content security policy allows only the
page's own script to run, and nothing to load.
"""

import base64
import hashlib
import math
import re
import unicodedata
from io import StringIO
from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

TOKEN_LENGTH = 40
"""Longer tokens are cut to this many characters."""
THEMED = {"#262626": "var(--ink)", "#000000": "var(--ink)", "#666666": "var(--muted)", "#999999": "var(--muted)"}
THEMED |= {"#cccccc": "var(--line)", "#ffffff": "var(--paper)"}
"""Colours of text, axes and background in figures, and the page's variables that replace them in light and dark mode."""
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def render(template: str, **content: Any) -> str:
    """A page from a template of this package, with script and style inlined."""
    script = _source("table.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    inlined = {"script": Markup(script), "script_hash": f"sha256-{digest}", "style": Markup(_source("style.css"))}
    return _environment().get_template(template).render(**inlined, **content)


def visible(value: Any) -> Any:
    """Text with invisible characters replaced by visible ones; anything that is not text is unchanged."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "".join(map(_visible_letter, value))


def bidi_isolated(sentence: str) -> Markup:
    """A sentence with its right-to-left runs isolated, so that they do not reorder the text around them."""
    runs = groupby(visible(sentence), key=lambda letter: unicodedata.bidirectional(letter) in ("R", "AL"))
    texts = ((right_to_left, "".join(letters)) for right_to_left, letters in runs)
    return Markup().join(Markup("<bdi>{}</bdi>").format(text) if rtl else escape(text) for rtl, text in texts)


def token(text: str) -> Markup:
    """A token in a cell: isolated, with its spaces kept, cut if it is long."""
    shown = text if len(text) <= TOKEN_LENGTH else f"{text[:TOKEN_LENGTH]}…"
    return Markup('<bdi class="token">{}</bdi>').format(visible(shown))


def number(value: float | int) -> str:
    """Three decimals, fewer for large numbers, an exponent for tiny ones; a dash for NaN."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}".replace("-", "−")
    digits = 0 if abs(value) >= 1000 or value == int(value) else 3
    return f"{value:,.{digits}f}".replace("-", "−")


def standard_error(value: float) -> str:
    """Two significant digits, trailing zeros included."""
    return f"{value:#.2g}".removesuffix(".").replace("-", "−")


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
    """A figure as inline SVG with the colours of the page and unique ids.

    Args:
        figure: its background becomes transparent.
        name: a prefix for its ids, unique on the page.
        label: description for screen readers.
    """
    buffer = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    head, _, body = buffer.getvalue().partition("<svg")[2].partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    body = re.sub(r'\bid="', f'id="{name}-', body).replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    body = re.sub("|".join(THEMED), lambda found: THEMED[found[0]], body)
    return Markup('<svg {} role="img" aria-label="{}">').format(Markup(box[0] if box else ""), label) + Markup(body)


def _visible_letter(letter: str) -> str:
    """Letters, marks and spaces are kept, newlines and tabs get symbols, other invisible characters their code point."""
    if unicodedata.category(letter) not in ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"):
        return letter
    return {"\n": "⏎", "\t": "⇥"}.get(letter, f"⟨U+{ord(letter):04X}⟩")


def _source(name: str) -> str:
    loader = _loader()
    return loader.get_source(jinja2.Environment(autoescape=True), name)[0]


def _loader() -> jinja2.PackageLoader:
    return jinja2.PackageLoader("reports")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=_loader(), autoescape=True, finalize=visible, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "bidi_isolated": bidi_isolated,
        "token": token,
        "number": number,
        "standard_error": standard_error,
    }
    return environment
