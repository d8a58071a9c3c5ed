"""Secrets are recognised by name, by form and by how random they look; words, paths and numbers are left."""

from __future__ import annotations

import msgspec
import pytest

from suite import REDACTED
from suite.machine.probes.collect import SLURM, TUNING, collect_facts
from suite.machine.secrets import looks_random, redact_random, redact_variable

SECRETS = {
    "NCCL_AUTH_TOKEN": "abc",
    "TORCH_HUB_KEY": "short",
    "UCX_SOMETHING": "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4",
    "FI_PROVIDER_OPTION": "hf_abcdefghijklmnopqrst",
    "XLA_ENDPOINT": "grpc://user:hunter2@10.0.0.1:1234",
    "CUDA_THING": "q8Zr2LmX0vTn5KbYw3Hd7Js",
    "MKL_LICENSE": "0123456789abcdef0123456789abcdef",
}
HARMLESS = {
    "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1,mlx5_2:1",
    "OMP_PLACES": "{0:4},{4:4},{8:4},{12:4}",
    "LD_LIBRARY_PATH": "/opt/cray/pe/mpich/8.1.25/ofi/gnu/9.1/lib:/usr/local/cuda-12.4/lib64",
    "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_graph_level=0",
    "UCX_TLS": "rc_x,sm,cuda_copy,cuda_ipc,gdr_copy",
    "TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX",
    "SLURM_JOB_NODELIST": "nid[001234-001240,001250]",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
    "MPICH_OFI_NIC_POLICY": "GPU",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_leaves_no_value(name: str) -> None:
    assert redact_variable(name, SECRETS[name]) == REDACTED


@pytest.mark.parametrize("name", HARMLESS)
def test_settings_are_kept(name: str) -> None:
    assert redact_variable(name, HARMLESS[name]) == HARMLESS[name]
    assert TUNING.fullmatch(name) or SLURM.fullmatch(name)


def test_facts_hold_variables_by_their_form_and_no_secret() -> None:
    facts = collect_facts(
        SECRETS | HARMLESS | {"HOME": "/home/me", "AWS_KEY": "x", "SLURM_JOB_USER": "me", "TZ": "UTC"}
    )
    assert set(facts.slurm) == {"SLURM_JOB_NODELIST"}
    assert {name: facts.tuning[name] for name in SECRETS} == dict.fromkeys(SECRETS, REDACTED)
    assert facts.tuning["TZ"] == facts.software.time_zone == "UTC"
    text = msgspec.json.encode(facts).decode()
    assert not [value for value in (*SECRETS.values(), "/home/me") if f'"{value}"' in text]


def test_changes_keep_their_checksums_and_lose_their_keys() -> None:
    text = 'index 0a1b2c3d4e5f60718293a4b5c6d7e8f901234567..1\n+key = "q8Zr2LmX0vTn5KbYw3Hd7Js"\n'
    text += "+from suite.training.statement import x\n"
    redacted = redact_random(text)
    assert "0a1b2c3d4e5f" in redacted
    assert "q8Zr2LmX0vTn5KbYw3Hd7Js" not in redacted
    assert "suite.training.statement" in redacted
    assert not looks_random("workloads/moe_lm/config/smoke.yaml and CosmoFlowConfig2 of mlperf_hpc_results_v3")
