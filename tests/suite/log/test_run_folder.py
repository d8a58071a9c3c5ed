"""A run folder is made once; what a kill left of one that had no run.json yet is made anew."""

from pathlib import Path

import pytest

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.run_folder import create_run_folder, refuse_existing, write_run_info


@pytest.mark.parametrize(
    "left", [("config.yaml",), (".config.yaml.host.12.part",), ("config.yaml", ".run.json.host.12.part")]
)
def test_a_folder_that_a_kill_left_unfinished_is_made_anew(tmp_path: Path, left: tuple[str, ...]) -> None:
    root = tmp_path / "run"
    root.mkdir()
    for name in left:
        (root / name).write_text("size: other\n")
    config = load_config(load_descriptor("cosmoflow"), "smoke")
    create_run_folder(root)
    folder = write_run_info(root, config, mode="strong", runs=2, ranks=1, seed=5)
    names = {path.name for path in root.iterdir()} - {"changes.diff"}  # there if this checkout has some
    assert names == {"config.yaml", "run.json", "sources.json", "environment.json"}
    assert "size: smoke" in folder.config_path.read_text()
    assert folder.read_info().seed == 5


@pytest.mark.parametrize("name", ["run.json", "result_0.txt", "notes.txt", "facts"])
def test_a_folder_with_anything_else_is_never_written_into(tmp_path: Path, name: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "config.yaml").write_text("size: other\n")
    (root / name).write_text("mine")
    with pytest.raises(InputError, match="exists already; choose another folder with -o"):
        create_run_folder(root)
    assert (root / "config.yaml").read_text() == "size: other\n"


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    """A kill just after the folder was made leaves it empty; the same command starts again."""
    refuse_existing(tmp_path)
    create_run_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        create_run_folder(path)
