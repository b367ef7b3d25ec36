"""The gate over compiled kernels. It has a process of its own: compiling excludes interpreting."""

import json
import os
import subprocess
import sys

import pytest
import torch

from headrace.kernels.attention import launch as attention
from headrace.kernels.logprob import launch as logprob

HEAD_DIMS = {16, 32, 64, 128, 256}


def gate(*arguments, environment=None):
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "headrace.kernels.aot", *arguments],
        env=clean | (environment or {}),
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def gates(side_by_side):
    return side_by_side(
        lambda dtype: gate("--architecture", "sm_90", "--dtype", dtype, "--json"), "dtype"
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_configuration_for_hopper_compiles_without_spills_and_within_memory(dtype, gates):
    """float16 has bfloat16's rows; continuous integration passes it and other architectures."""
    result = gates[dtype].result()
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(row["spilled"] == 0 and row["shared"] <= 227 * 1024 for row in rows)
    names = {row["name"].split()[0] for row in rows}
    assert names == {
        "attention_forward",
        "attention_grad_q",
        "attention_grad_kv",
        "logprob_fold",
        "logit_gradient",
    }
    if dtype == "bfloat16":
        assert all(row["tensor_core"] > 0 for row in rows)


def test_the_gate_refuses_a_process_that_interprets():
    result = gate("--architecture", "sm_90", environment={"TRITON_INTERPRET": "1"})
    assert result.returncode != 0
    assert "TRITON_INTERPRET" in result.stderr


@pytest.mark.slow
def test_the_gate_fails_what_spills_or_does_not_fit():
    code = (
        "import dataclasses, torch\n"
        "from headrace.kernels.aot import build, cases\n"
        "case = next(c for c in cases('sm_90', torch.bfloat16) if c.constants.get('BD') == 256)\n"
        "for changes, stages in (({'BN': 128}, 4), ({'BM': 128, 'BN': 128}, 1)):\n"
        "    wide = dataclasses.replace(case, constants=case.constants | changes, stages=stages)\n"
        "    print(build(wide).faults)\n"
    )
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], env=clean, capture_output=True, text=True, timeout=300
    )
    assert "shared memory" in result.stdout.splitlines()[0], result.stderr
    assert "spills" in result.stdout.splitlines()[1], result.stderr


def test_every_table_covers_every_head_dim_with_whole_tiles():
    for (architecture, dtype), rows in attention.TABLE.items():
        assert set(rows) == HEAD_DIMS, architecture
        assert (architecture, dtype) in logprob.TABLE
        for row in rows.values():
            for launch in (row.forward, row.grad_q, *(line[0] for line in row.key_passes())):
                assert launch.queries & (launch.queries - 1) == 0
                assert launch.keys & (launch.keys - 1) == 0
                assert min(launch.queries, launch.keys) >= 16
    for head_dim in range(16, 257):
        assert attention.padded(head_dim) in HEAD_DIMS
        assert attention.padded(head_dim) >= head_dim


def test_an_unknown_architecture_is_named_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"sm_75 .*; there are gfx942, sm_100, sm_90"):
        attention.launches("sm_75", torch.bfloat16, 64)
    with pytest.raises(ValueError, match=r"sm_75 .*; there are gfx942, sm_100, sm_90"):
        logprob.launches("sm_75", torch.bfloat16)
