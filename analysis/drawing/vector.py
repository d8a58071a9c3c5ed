"""A figure as an ``<svg>`` element of a page: a third of what matplotlib writes, drawn once, the same bytes every time.

Matplotlib lays a figure out by drawing it, names every group, repeats the style of every mark and gives each corner of
a path its own line. Here the layout is computed without drawing, groups that nothing refers to go, styles that repeat
become classes, and paths are written in steps of a tenth of a point, which is finer than a screen.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from analysis.drawing.axes import INK, clip, style
from analysis.drawing.tips import Tip, tips_of

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_HASHED_ID = re.compile(r"(?:[mph]|C\d+_\d+_)[0-9a-f]{10}")  # of markers, clip paths, hatches and collections
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_NUMBER = re.compile(r"-?\d+\.\d+")
_STRAIGHT = re.compile(r"M -?[\d.]+ -?[\d.]+ (?:[LM] -?[\d.]+ -?[\d.]+ )*(?:z )?")
_PLACE = re.compile(r"[ML] (-?[\d.]+) (-?[\d.]+) ")
_UNTURNED = re.compile(r"rotate\(-?0(?:\.0+)? [^)]*\)")
SLIDE_DPI, LARGEST_PX = 200.0, 16_000  # of a PNG
EDGE = 3.0  # pixels between a text and the edge of its figure
_SHARED_FROM = 3  # elements of one style, from which on a class is shorter than repeating it
Element = ElementTree.Element


def svg(figure: Figure, name: str, title: str, description: str) -> str:
    """Render a figure to an ``<svg>`` element for a page.

    All ids and classes get the prefix ``name``, so that several figures can share a page. INK becomes the page's text
    colour. Marks get their values as a ``<title>``, which browsers show where the pointer rests.
    """
    with style():
        lay_out(figure)
        tips = tips_of(figure)
        buffer = io.StringIO()  # not savefig, which draws the whole figure once more, only to lay it out
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())  # noqa: S314  matplotlib wrote it
    writer = _Writer(name, tips, _numbered_ids(root))
    body = writer.written(root)
    label = f"{name}-title {name}-desc"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{root.get("viewBox")}" role="img" aria-labelledby="{label}" '
        f'stroke-linejoin="round">\n<title id="{name}-title">{_xml(title)}</title>\n'
        f'<desc id="{name}-desc">{_xml(description)}</desc>\n<style>{writer.rules()}</style>\n{body}\n</svg>'
    )


def lay_out(figure: Figure) -> None:
    """Compute the positions of everything, once, without drawing. What is added later moves nothing.

    The name of an axis that is wider than its panel is moved into the figure: matplotlib's layout keeps room for its
    height only.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    canvas = measuring(figure)
    for axis in figure.axes:
        label, width = axis.xaxis.label, figure.bbox.width
        box = label.get_window_extent(canvas) if label.get_text() and axis.axison else figure.bbox
        if box.x1 > width:
            label.set_horizontalalignment("right")
        elif box.x0 < 0:
            label.set_horizontalalignment("left")
        else:
            continue
        edge = width - EDGE if box.x1 > width else EDGE
        label.set_x(axis.transAxes.inverted().transform((edge, 0))[0])


def measuring(figure: Figure) -> RendererAgg:
    """What texts of a figure are measured with.

    Made once: without it matplotlib makes one of the figure's size for every text.
    """
    canvas: Any = FigureCanvasAgg(figure)
    renderer: RendererAgg = canvas.get_renderer()
    return renderer


def _numbered_ids(root: Element) -> dict[str, str]:
    """The ids that something refers to, and what they become; hashed ones are numbered in the order of their
    definition.

    Matplotlib hashes the exact position of an axis, and the last bits of a computed layout are not the same in every
    run.
    """
    used = set()
    for element in root.iter():
        used.update(_REFERENCE.findall(element.get("clip-path", "") + element.get("style", "")))
        used.add(element.get(_LINK, "#")[1:])
    ids = dict.fromkeys(name for element in root.iter() if (name := element.get("id", "")) in used)
    hashed = [name for name in ids if _HASHED_ID.fullmatch(name)]
    numbers = {name: f"{name[0]}{number}" for number, name in enumerate(hashed)}
    return {name: numbers.get(name, name) for name in ids}


@dataclass
class _Writer:
    """Writes the elements of one figure. ``tips`` by the id of a group, ``ids`` as `_numbered_ids` has them."""

    name: str
    tips: Mapping[str, list[Tip]]
    ids: Mapping[str, str]
    classes: dict[str, str] = field(default_factory=dict)
    often: Counter[str] = field(default_factory=Counter)

    def written(self, root: Element) -> str:
        """Everything inside the root."""
        self.often.update(_plain_style(element) for element in root.iter())
        return "".join(part for child in root for part in self._element(child, {}, ()))

    def rules(self) -> str:
        """The style sheet of the classes that are in use."""
        return "".join(f".{name}{{{text}}}" for text, name in self.classes.items())

    def _element(self, element: Element, inherited: Mapping[str, str], tips: tuple[Tip, ...]) -> Iterator[str]:
        """The text of an element and all that is in it."""
        tag = element.tag.removeprefix(_SVG)
        if tag in ("metadata", "style") or _is_invisible(element, tag):
            return
        given = tuple(self.tips.get(element.get("id", ""), ()))
        tips = () if tag == "defs" else given or tips
        attributes = self._attributes(element, tag, inherited)
        children = list(element)
        if tag == "g" and not attributes and "id" not in attributes:
            yield from self._children(children, inherited, tips)
            return
        tip = tips[0] if tips and tag in ("path", "use") and len(tips) == 1 else None
        if tip is not None and tip.run is not None:
            attributes["data-run"] = str(tip.run)
        head = "".join([f' {key}="{value}"' for key, value in attributes.items()])
        text = "" if tag != "text" else _xml(element.text or "")
        inner = "".join(self._children(children, inherited, tips)) + text
        if tip is not None:
            inner += f"<title>{_lines(tip.text)}</title>"
        if inner or tag != "g":
            yield f"<{tag}{head}>{inner}</{tag}>" if inner else f"<{tag}{head}/>"

    def _children(self, children: list[Element], inherited: Mapping[str, str], tips: tuple[Tip, ...]) -> Iterator[str]:
        """The children of a group: marks of one style in a group of theirs, each with its own tip if the numbers agree."""
        marks = [child for child in children if child.tag == f"{_SVG}use"]
        each = dict(zip(map(id, marks), tips, strict=True)) if len(marks) == len(tips) else {}
        lone = tips if not marks and len(tips) == 1 else ()
        shared = {text: len(marks) for text in {_plain_style(mark) for mark in marks}}
        if len(marks) >= _SHARED_FROM and len(shared) == 1:
            (text,) = shared
            yield f'<g class="{self._class_of(text)}">'
            inherited = {"style": text}
        for child in children:
            own = (each[id(child)],) if id(child) in each else lone if child.tag != f"{_SVG}g" else tips
            yield from self._element(child, inherited, own)
        if inherited.get("style") and len(marks) >= _SHARED_FROM and len(shared) == 1:
            yield "</g>"

    def _attributes(self, element: Element, tag: str, inherited: Mapping[str, str]) -> dict[str, str]:
        attributes: dict[str, str] = {}
        marker = tag == "path" and "id" in element.attrib
        for key, value in element.attrib.items():
            if key == "id":
                if value in self.ids:
                    attributes["id"] = f"{self.name}-{self.ids[value]}"
            elif key == "style":
                text = _plain_style(element)
                if text == inherited.get("style"):
                    continue
                if self.often[text] >= _SHARED_FROM:
                    attributes["class"] = self._class_of(text)
                else:
                    attributes["style"] = self._referring(text).replace('"', "&quot;")
            elif key == _LINK:
                attributes["href"] = f"#{self.name}-{self.ids[value[1:]]}"
            elif key == "clip-path":
                attributes[key] = self._referring(value)
            elif key == "d":
                attributes[key] = _curve(value) if marker else _path(value)
            elif key != "transform" or not _UNTURNED.fullmatch(value):
                attributes[key] = _NUMBER.sub(_tenth, value)
        return attributes

    def _class_of(self, text: str) -> str:
        return self.classes.setdefault(self._referring(text), f"{self.name}-{len(self.classes)}")

    def _referring(self, text: str) -> str:
        return _REFERENCE.sub(lambda match: f"url(#{self.name}-{self.ids[match[1]]})", text)


def _plain_style(element: Element) -> str:
    """The style of an element without spaces that mean nothing, in the page's text colour where it is that of ink."""
    given = element.get("style", "")
    return given.replace(": ", ":").replace("; ", ";").replace(INK, "currentColor")


def _is_invisible(element: Element, tag: str) -> bool:
    """True for a path that is neither filled nor drawn, such as the frame of a panel without a background."""
    return tag == "path" and element.get("style") == "fill: none" and "id" not in element.attrib


def _path(d: str) -> str:
    """A path in tenths of a point; straight lines as steps from point to point, exactly summed, so that none drifts."""
    flat = " ".join(d.split()) + " "
    if not _STRAIGHT.fullmatch(flat):
        return _curve(d)
    parts, at = [], (0, 0)
    for match in _PLACE.finditer(flat):
        to = (round(float(match[1]) * 10), round(float(match[2]) * 10))
        x, y = to[0] - at[0], to[1] - at[1]
        if match[0][0] == "M":
            parts.append(f"M{_text(to[0])}{_joined(to[1])}")
        elif x and y:
            parts.append(f"l{_text(x)}{_joined(y)}")
        elif x or y:
            parts.append(f"h{_text(x)}" if x else f"v{_text(y)}")
        at = to
    return "".join(parts) + ("z" if flat.endswith("z ") else "")


def _curve(d: str) -> str:
    """A path with curves, in hundredths: markers are small, and are drawn often."""
    return " ".join(_NUMBER.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), d).split())


def _text(tenths: int) -> str:
    whole, rest = divmod(abs(tenths), 10)
    return ("-" if tenths < 0 else "") + (f"{whole}.{rest}" if whole and rest else f".{rest}" if rest else str(whole))


def _joined(tenths: int) -> str:
    """A number after another one: a minus separates them, else a space does."""
    return _text(tenths) if tenths < 0 else f" {_text(tenths)}"


def _tenth(match: re.Match[str]) -> str:
    return _text(round(float(match[0]) * 10))


def _xml(text: str) -> str:
    return clip(text, 10_000).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _lines(text: str) -> str:
    return "\n".join(_xml(line) for line in text.split("\n"))


def save(figure: Figure, form: str) -> bytes:
    """A figure as a file for slides, on white: ``form`` is svg, png or pdf. The same figure gives the same bytes."""
    with style():
        buffer = io.BytesIO()
        metadata: dict[str, Any] = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
        dpi = min(SLIDE_DPI, LARGEST_PX / max(figure.get_size_inches()))
        figure.savefig(buffer, format=form, dpi=dpi, facecolor="white", metadata=metadata[form])
    return buffer.getvalue()
