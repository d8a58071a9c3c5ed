"""Makes the script that draws charts on the page, and charts as files, both by vl-convert: no browser, no network."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import deepcopy
from functools import cache
from importlib.metadata import version
from typing import Any

import vl_convert

from mlhpc.suite.files import find_cache_folder, read_bytes, write_file_atomically

PNG_SCALE = 2.0  # pixels of a file for one of the page
SLIDES = "slides"
# Times the size on the page: of a slide's texts, and of its charts
SLIDE_TEXT_SCALE, SLIDE_WIDTH_SCALE, SLIDE_HEIGHT_SCALE = 1.6, 1.25, 1.5
LARGEST_SCRIPT = 2**23  # bytes of the script


@cache
def build_vega_script() -> str:
    """Build Vega, Vega-Lite and vega-embed as one text for a page.

    It is cached for the user: making it takes three seconds.
    """
    folder = find_cache_folder()
    # The version in the name: an update of the package makes a new file
    kept = folder / f"vega-{version('vl-convert-python')}.js" if folder else None
    if kept is not None:
        with suppress(OSError, ValueError):
            return read_bytes(kept, LARGEST_SCRIPT).decode()
    # "</script" inside of a string would end the page's script element
    made = str(vl_convert.javascript_bundle("window.vegaEmbed=vegaEmbed;")).replace("</script", "<\\/script")
    if kept is not None:
        with suppress(OSError):
            write_file_atomically(kept, made)
    return made


def encode_chart(specification: dict[str, Any], form: str, theme: str = "page") -> bytes:
    """Encode a chart as the bytes of an SVG, PNG or PDF file, on white."""
    drawn = _for_slides(specification) if theme == SLIDES else specification
    document = json.dumps(drawn | {"config": drawn["config"] | {"background": "white"}})
    if form == "svg":
        return str(vl_convert.vegalite_to_svg(document)).encode()
    if form == "png":
        return bytes(vl_convert.vegalite_to_png(document, scale=PNG_SCALE))
    return bytes(vl_convert.vegalite_to_pdf(document))


def _for_slides(specification: dict[str, Any]) -> dict[str, Any]:
    """Return the chart with texts that the last row of an audience can read, and room for them."""
    document = deepcopy(specification)
    for part in document["config"].values():
        for name in part if isinstance(part, dict) else ():
            if name.lower().endswith(("fontsize", "limit")):
                part[name] = round(SLIDE_TEXT_SCALE * part[name])
    # Panels have sizes of their own; a single chart is its own panel
    for panel in document.get("concat", [document]):
        for name, times in (("width", SLIDE_WIDTH_SCALE), ("height", SLIDE_HEIGHT_SCALE)):
            if isinstance(panel.get(name), int | float):
                panel[name] = round(times * panel[name])
    return document
