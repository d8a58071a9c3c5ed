"""The map of the code: its rooms and which room imports which, as SVG.

Rooms stand in layers: a room imports only rooms below it. Lines that follow from two others are left out.
"""

from __future__ import annotations

import ast
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 230, 92, 26, 58, 20


def rooms() -> dict[str, str]:
    """Every room and the first sentence of its docstring. ``suite`` is the modules directly in it; the other tops are whole."""
    folders = [
        ROOT / "suite",
        *sorted(p.parent for p in (ROOT / "suite").glob("*/__init__.py")),
        ROOT / "workloads",
        ROOT / "analysis",
        ROOT / "plugins",
    ]
    return {".".join(f.relative_to(ROOT).parts): _first_sentence(f / "__init__.py") for f in folders}


def imports(names: list[str]) -> dict[str, set[str]]:
    """The rooms that each room imports, at the top of a module or inside a function."""
    graph: dict[str, set[str]] = {name: set() for name in names}
    for top in ("suite", "workloads", "analysis", "plugins"):
        for path in sorted((ROOT / top).rglob("*.py")):
            here = _room(".".join(path.relative_to(ROOT).with_suffix("").parts), names)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mlhpc."):
                    module = node.module.removeprefix("mlhpc.")
                    targets = [f"{module}.{alias.name}" for alias in node.names]
                    graph[here] |= {_room(target, names) for target in targets} - {here}
    return graph


def layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rooms by the length of the longest way down, lowest first."""
    depth: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((measure(below) for below in graph[name]), default=-1)
        return depth[name]

    for name in graph:
        measure(name)
    return [[name for name in graph if depth[name] == level] for level in range(max(depth.values()) + 1)]


def reduced(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others."""
    reach: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in reach:
            reach[name] = graph[name].union(*(reached(below) for below in graph[name]))
        return reach[name]

    return [
        (name, below)
        for name, belows in graph.items()
        for below in sorted(belows)
        if not any(below in reached(other) for other in belows - {below})
    ]


def svg() -> str:
    """The picture as text, the same for the same code."""
    texts = rooms()
    graph = imports(list(texts))
    rows = layers(graph)
    width = 2 * MARGIN + max(len(row) for row in rows) * (BOX_W + GAP_X) - GAP_X
    height = 2 * MARGIN + len(rows) * (BOX_H + GAP_Y) - GAP_Y
    at: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * (BOX_W + GAP_X) + GAP_X) / 2
        for index, name in enumerate(row):
            at[name] = (left + index * (BOX_W + GAP_X), height - MARGIN - BOX_H - level * (BOX_H + GAP_Y))
    lines = [
        f'<line x1="{at[a][0] + BOX_W / 2:g}" y1="{at[a][1] + BOX_H:g}" x2="{at[b][0] + BOX_W / 2:g}" y2="{at[b][1]:g}"/>'
        for a, b in reduced(graph)
    ]
    boxes = [_box(name, text, *at[name]) for name, text in texts.items()]
    style = (
        "line{stroke:#8a94a6;stroke-width:1.2}rect{fill:#f4f6fa;stroke:#4a5568}"
        "text{font:11px sans-serif;fill:#1a202c}.n{font-weight:bold;font-size:13px}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">',
            f"<title>Rooms of mlhpc and their imports</title><style>{style}</style>",
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def _box(name: str, text: str, x: float, y: float) -> str:
    title = "suite (contract)" if name == "suite" else name
    wrapped = textwrap.wrap(text, 38)[:4]
    spans = "".join(
        f'<text x="{x + 10:g}" y="{y + 36 + 14 * i:g}">{escape(line)}</text>' for i, line in enumerate(wrapped)
    )
    box = f'<rect x="{x:g}" y="{y:g}" width="{BOX_W}" height="{BOX_H}" rx="6"/>'
    return f'{box}<text class="n" x="{x + 10:g}" y="{y + 19:g}">{title}</text>{spans}'


def _room(module: str, names: list[str]) -> str:
    parts = module.split(".")
    return next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in names)


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
