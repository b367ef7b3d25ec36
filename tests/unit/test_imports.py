"""What the light parts load: nothing that takes seconds to import."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers", "numpy", "triton", "tensorboard")


def loaded_by(module, names):
    """Which of `names` a fresh interpreter has loaded after importing the module."""
    program = f"import sys, {module}; print(*(n for n in {names!r} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        "headrace.actor.passrates",
        "headrace.cli.main",
        "headrace.cli.runargs",
        "headrace.cli.train",
        "headrace.config",
        "headrace.configchecks",
        "headrace.configkeys",
        "headrace.configlosses",
        "headrace.configmonitor",
        "headrace.doctor.runner",
        "headrace.errors",
        "headrace.broker.records",
        "headrace.broker.subjects",
        "headrace.environments.protocol",
        "headrace.monitor.progress",
        "headrace.monitor.logs",
        "headrace.monitor.metrics",
        "headrace.monitor.exporters.base",
        "headrace.monitor.supervisor",
        "headrace.monitor.display",
    ],
)
def test_a_light_module_loads_no_heavy_library(module):
    assert loaded_by(module, HEAVY) == []


def test_the_check_itself_sees_a_heavy_library():
    assert loaded_by("numpy", HEAVY) == ["numpy"]


def test_writing_metrics_loads_no_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from headrace.configmonitor import Monitor\n"
        "from headrace.monitor.exporters.base import Exporters\n"
        "Exporters.open(Monitor(), Path(sys.argv[1]), 'run', 'id').step(1, {'loss': 0.5}, 1.0)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False"
