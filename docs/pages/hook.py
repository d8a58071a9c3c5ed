"""Adds the generated pages and pictures to the files of the site, when mkdocs collects them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.pages import baselines, commands, events, gallery, rooms, rules


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make each page as mkdocs asks for the list of files."""
    with tempfile.TemporaryDirectory() as folder:
        example = gallery.example(Path(folder))
        shots = gallery.screenshots(example, Path(folder))
        pages = {
            "baselines.md": baselines.page(),
            "commands.md": commands.page(),
            "events.md": events.page(),
            "gallery.md": gallery.page(example, shots),
            "map.svg": rooms.svg(),
            "rules.md": rules.page(),
            **{f"gallery/page_{name}.png": shot for name, shot in shots.items()},
            **{f"gallery/{name}.svg": picture for name, picture in gallery.pictures(example).items()},
        }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files
