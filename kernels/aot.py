"""Compiles every shipped configuration ahead of time, without a device, and gates it.

    python -P -m headrace.kernels.aot [--architecture sm_90] [--dtype bfloat16] [--json]

A row fails when registers spill to memory, when the program needs more shared memory than the
architecture gives, or when 16-bit products did not become tensor-core instructions. Passing says
that the configuration can run; it says nothing about its speed.

Compiling and interpreting exclude each other in one process: run this without TRITON_INTERPRET.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.errors import ConfigError
from headrace.kernels.attention import launch as attention
from headrace.kernels.attention.triton_kernels import (
    attention_forward,
    attention_grad_kv,
    attention_grad_q,
)
from headrace.kernels.backend import interpreted
from headrace.kernels.logprob import launch as logprob
from headrace.kernels.logprob.triton_kernels import logit_gradient, logprob_fold

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes that one program may use: CUDA programming guide, compute capability 9.0 and 10.0 (227 KiB
# of opt-in shared memory); CDNA3 instruction set (64 KiB of LDS).
SHARED_LIMIT = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
TENSOR_CORE = {"sm_90": r"\bHGMMA", "sm_100": r"\bUTC\w*MMA", "gfx942": r"\bv_mfma_"}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}
FLOAT32_POINTERS = {
    "LSE", "DELTA", "B", "TOP", "TOTAL", "MOMENT", "PICKED", "ENTROPY", "SLOPE", "CURVE", "DB",
}  # fmt: skip
INT32_POINTERS = {"TILES", "SPANS", "VISITS"}
INT32_VALUES = {"window", "row_count", "class_count", "column_count", "width", "first_class"}
FLOAT_VALUES = {"scale", "scale_log2", "inverse_temperature"}


@dataclass(frozen=True)
class Case:
    """One shipped configuration.

    Attributes:
        kernel: a Triton function.
        architecture: key of `TARGETS`.
        dtype: of the tensors.
        constants: its compile-time arguments.
        warps: warps per program.
        stages: depth of the software pipeline.
    """

    kernel: Any
    architecture: str
    dtype: torch.dtype
    constants: dict[str, Any]
    warps: int
    stages: int


@dataclass(frozen=True)
class Report:
    """What the compiler made of a case.

    Attributes:
        name: kernel, dtype and constants.
        architecture: what it was compiled for.
        registers: per thread.
        spilled: bytes (NVIDIA) or registers (AMD) per thread that live in memory.
        shared: bytes of shared memory per program.
        tensor_core: tensor-core instructions in the program.
        faults: what the gate holds against it.
    """

    name: str
    architecture: str
    registers: int
    spilled: int
    shared: int
    tensor_core: int
    faults: tuple[str, ...]


def cases(architecture: str, dtype: torch.dtype) -> Iterator[Case]:
    """Every configuration in the launch tables for an architecture and dtype."""
    for padded, rows in attention.TABLE.get((architecture, dtype), {}).items():
        shared = {"D": padded, "BD": padded, "GROUP": 3, "COUNT": False}
        programs: list[tuple[Any, attention.Launch, dict[str, Any]]] = [
            (attention_forward, rows.forward, {}),
            (attention_grad_q, rows.grad_q, {}),
        ]
        programs += [
            (attention_grad_kv, row, {"GRAD_K": k, "GRAD_V": v}) for row, k, v in rows.key_passes()
        ]
        for kernel, row, more in programs:
            constants = shared | {"BM": row.queries, "BN": row.keys} | more
            yield Case(kernel, architecture, dtype, constants, row.warps, row.stages)
    if (architecture, dtype) in logprob.TABLE:
        head = logprob.TABLE[architecture, dtype]
        for kernel, line in ((logprob_fold, head.fold), (logit_gradient, head.gradient)):
            tile = {"BR": line.rows, "BV": line.classes, "BK": line.depth}
            for bias in (False, True):
                constants = tile | {"BIAS": bias}
                yield Case(kernel, architecture, dtype, constants, line.warps, line.stages)


def build(case: Case) -> Report:
    """Compile one case and hold it against the gate.

    Raises:
        ConfigError: the process interprets kernels.
    """
    if interpreted(case.kernel):
        raise ConfigError("kernels are interpreted in this process: unset TRITON_INTERPRET")
    signature = {name: _type_of(name, case) for name in case.kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith(("_row", "_head"))
    }
    compiled = triton.compile(
        ASTSource(
            fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=aligned
        ),
        target=TARGETS[case.architecture],
        options={
            "num_warps": case.warps,
            "num_stages": case.stages,
            "enable_fp_fusion": True,
        },
    )
    read = _read_amd if case.architecture.startswith("gfx") else _read_nvidia
    registers, spilled, program = read(compiled.asm)
    tensor_core = len(re.findall(TENSOR_CORE[case.architecture], program))
    shared = compiled.metadata.shared
    faults = []
    if spilled:
        faults.append(f"spills {spilled}")
    if shared > SHARED_LIMIT[case.architecture]:
        faults.append(f"needs {shared} of {SHARED_LIMIT[case.architecture]} bytes shared memory")
    if case.dtype != torch.float32 and not tensor_core:
        faults.append("has no tensor-core instruction")
    constants = " ".join(
        f"{key}={int(value)}" for key, value in case.constants.items() if key not in ("D", "COUNT")
    )
    name = f"{case.kernel.__name__} {str(case.dtype).removeprefix('torch.')} {constants}"
    return Report(name, case.architecture, registers, spilled, shared, tensor_core, tuple(faults))


def _type_of(name: str, case: Case) -> str:
    if name in case.constants:
        return "constexpr"
    if name in FLOAT32_POINTERS:
        return "*fp32"
    if name in INT32_POINTERS:
        return "*i32"
    if name in INT32_VALUES:
        return "i32"
    if name in FLOAT_VALUES:
        return "fp32"
    if name == "Y":
        return "*i64"
    return POINTERS[case.dtype] if name.isupper() else "i64"


def _read_nvidia(binaries: dict[str, Any]) -> tuple[int, int, str]:
    """Registers, bytes of stack and the disassembly, with the tools that Triton brings."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binaries["cubin"])
        file.flush()
        usage = _output(str(tools / "cuobjdump"), "--dump-resource-usage", file.name)
        program = _output(str(tools / "nvdisasm"), "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ConfigError(f"cuobjdump printed no resource usage: {usage.strip()!r}")
    return int(found[1]), int(found[2]), program


def _read_amd(binaries: dict[str, Any]) -> tuple[int, int, str]:
    program = str(binaries["amdgcn"])
    counts = {
        key: int(value) for key, value in re.findall(r"\.(vgpr(?:_spill)?_count):\s*(\d+)", program)
    }
    # Scalar registers spill into vector registers, not to memory.
    return counts["vgpr_count"], counts["vgpr_spill_count"], program


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def main(argv: list[str] | None = None) -> int:
    """Print a row per configuration; 1 if any fails the gate."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in POINTERS}
    parser = argparse.ArgumentParser(prog="headrace.kernels.aot", description=__doc__)
    parser.add_argument("--architecture", choices=TARGETS, action="append")
    parser.add_argument("--dtype", choices=names, action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    failed = 0
    for architecture in options.architecture or TARGETS:
        for dtype in options.dtype or names:
            for case in cases(architecture, names[dtype]):
                report = build(case)
                failed += bool(report.faults)
                sys.stdout.write(_line(report, options.json) + "\n")
                sys.stdout.flush()
    return 1 if failed else 0


def _line(report: Report, as_json: bool) -> str:
    if as_json:
        return json.dumps(asdict(report))
    verdict = "; ".join(report.faults) or "ok"
    return (
        f"{report.architecture:7} {report.name:90} {report.registers:4} registers "
        f"{report.shared:7} B shared {report.tensor_core:4} tensor-core  {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
