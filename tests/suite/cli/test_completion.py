"""Names that a shell completes, and the schemas that an editor reads."""

import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from mlhpc.suite.cli.main import group
from mlhpc.suite.documents import parse_yaml
from tests.fixtures.cli import mlhpc

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("words", "incomplete", "expected", "absent"),
    [
        ("run", "co", {"cosmoflow"}, "deepcam"),
        ("run cosmoflow --size", "", {"smoke", "mini", "full"}, "mini_dense"),
        ("submit deepcam --system", "slurm", {"slurm-two-node"}, "laptop"),
        ("run cosmoflow --set", "hyperparameters.d", {"hyperparameters.dropout="}, "hyperparameters.depths="),
        ("run moe_lm --plan", "", {"experts", "sharded"}, "spatial"),
        ("check --explain", "rcp", {"rcp-above"}, "last-eval"),
        ("check --ruleset", "", {"mlhpc-1.0", "3.0.0"}, "none"),
        ("data generate", "", {"openfold"}, "none"),
        ("workload schema", "", {"card", "config", "system"}, "none"),
    ],
)
def test_names_are_completed(
    words: str, incomplete: str, expected: set[str], absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", f"mlhpc {words} {incomplete}")
    found = ShellComplete(group, {}, "mlhpc", "_MLHPC_COMPLETE").get_completions(words.split(), incomplete)
    names = {item.value for item in found}
    assert expected <= names
    assert absent not in names


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("config cosmoflow", "workloads/cosmoflow/config/smoke.yaml"),
        ("config", "workloads/moe_lm/config/mini.yaml"),
        ("card", "workloads/openfold/card.yaml"),
        ("system", "submissions/systems/example.yaml"),
    ],
)
def test_a_schema_admits_the_shipped_files_and_no_slip(words: str, file: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(mlhpc("workload", "schema", *words.split()).stdout)
    data = parse_yaml((ROOT / file).read_text())
    if words.startswith("config"):
        data["workload"] = file.split("/")[1]
    jsonschema.validate(data, schema)
    with pytest.raises(jsonschema.ValidationError, match="nonsense"):
        jsonschema.validate(data | {"nonsense": 1}, schema)
