import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def interpreted(file: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def children(side_by_side):
    return side_by_side(interpreted, "file")


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_hold_under_the_interpreter(file, children):
    child = children[file].result()
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "skipped" not in child.stdout


def test_cpu_tensors_without_the_interpreter_are_refused_with_the_way_out():
    code = (
        "import torch\n"
        "from headrace.errors import ConfigError\n"
        "from headrace.kernels import packed_attention, linear_logprob\n"
        "x = torch.zeros(4, 1, 16)\n"
        "calls = (\n"
        "    lambda: packed_attention(x, x, x, torch.tensor([0, 4]), backend='triton'),\n"
        "    lambda: linear_logprob(\n"
        "        x[:, 0], x[:, 0], torch.zeros(4, dtype=torch.int64), backend='triton'\n"
        "    ),\n"
        ")\n"
        "for call in calls:\n"
        "    try:\n"
        "        call()\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.stdout.count("TRITON_INTERPRET=1") == 2, child.stderr


def test_without_triton_the_package_imports_and_names_what_is_missing():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from headrace.errors import ConfigError\n"
        "from headrace.kernels import packed_attention\n"
        "x = torch.zeros(4, 1, 16)\n"
        "packed_attention(x, x, x, torch.tensor([0, 4]))\n"
        "try:\n"
        "    packed_attention(x, x, x, torch.tensor([0, 4]), backend='triton')\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    child = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert "needs the package triton" in child.stdout, child.stderr
