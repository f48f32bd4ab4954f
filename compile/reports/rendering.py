"""Pages: a template, with the style and the scripts that it takes, in one HTML file that needs no network.

Jinja fills `assets/NAME.html`, in `base.html`, with escaping. It inlines `shared.css` and, for a page that has
`NAME.js`, that and `shared.js`. What comes from a program is either escaped by the template, or embedded as JSON that
the script shows as text, never as markup.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

ASSETS = Path(__file__).with_name("assets")


def rendered(name: str, data: Any = None, **given: Any) -> str:
    """Return the HTML of a page.

    Args:
        name: the name of its template, and of its script if it has one.
        data: what the script shows, to be embedded as JSON.
        given: what the template shows.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(ASSETS)
    )
    scripted = (ASSETS / f"{name}.js").exists()
    return environment.get_template(f"{name}.html").render(
        style=_inlined("shared.css"),
        script=_inlined("shared.js") + _inlined(f"{name}.js") if scripted else "",
        data=_as_json(data),
        **given,
    )


def _inlined(name: str) -> Markup:
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def _as_json(data: Any) -> Markup:
    """JSON that is safe inside a script element: no markup can end it."""
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


__all__ = ["rendered"]
