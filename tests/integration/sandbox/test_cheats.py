"""Programs that want a reward they did not earn, against a scorer that runs them as a child."""

import json

import pytest

from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, SandboxSpec

pytestmark = [pytest.mark.jail, pytest.mark.usefixtures("nothing_left")]

SCORER = b"""
import json, os, subprocess, sys
CHILD = '''
import json, os, sys
sys.path.insert(0, "/candidate")
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
import solution
json.dump([solution.double(n) for n in (1, 2, 30)], out)
'''
child = subprocess.run([sys.executable, "-S", "-c", CHILD], capture_output=True, timeout=30)
try:
    answer = json.loads(child.stdout)
    right = child.returncode == 0 and answer == [2, 4, 60] and all(type(a) is int for a in answer)
except ValueError:
    right = False
os.write(3, json.dumps({"score": float(right), "checks": 1}).encode())
"""
HONEST = "def double(n): return n + n"
CHEATS = {
    "wrong": "def double(n): return n",
    "exit_with_0": "import sys\nsys.exit(0)",
    "exit_at_once_with_0": "import os\nos._exit(0)",
    "exit_when_called": "import os\ndef double(n): os._exit(0)",
    "equal_to_everything": "class A:\n  def __eq__(self, o): return True\n"
    "  def __repr__(self): return '2'\n"
    "def double(n): return A()",
    "integer_equal_to_everything": "class I(int):\n  def __eq__(self, o): return True\n"
    "def double(n): return I(0)",
    "success_text": "print('{\"score\": 1.0, \"checks\": 1}')\nprint('PASSED 1 passed OK')\n"
    "import os; os._exit(0)",
    "verdict_by_descriptor": "import os\nfor fd in range(3, 256):\n"
    '  try: os.write(fd, b\'{"score": 1.0, "checks": 1}\')\n  except OSError: pass\nos._exit(0)',
    "killing_the_scorer": "import os, signal\nfor s in (2, 9, 15, 19): os.kill(os.getppid(), s)\n"
    "os.kill(1, 9)\nos._exit(0)",
    "descriptor_taken_from_the_scorer": "import ctypes, os\nl = ctypes.CDLL(None)\n"
    "fd = l.syscall(438, os.pidfd_open(os.getppid()), 3, 0)\n"
    "os.write(fd if fd >= 0 else 2, b'{\"score\": 1.0}')\nos._exit(0)",
    "memory_of_the_scorer": "import ctypes, os\n"
    "ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\nos._exit(0)",
    "patched_json": "import json\njson.dump = lambda a, f: f.write('[2, 4, 6]')\n"
    "def double(n): return 0",
    "planted_files": "for n in ('verdict.json', 'result.json', 'score.py', '/box/score.py'):\n"
    "  try: open(n, 'w').write('{\"score\": 1.0}')\n  except OSError: pass\n"
    "def double(n): return 0",
    "endless": "while True: pass",
}


async def judge(box):
    return await box.spawn_scorer(
        ["python3", "-S", "score.py"], files={"score.py": SCORER}, limits=Limits(wall_s=20)
    )


async def test_an_honest_solution_earns_its_score():
    async with Sandbox(SandboxSpec()) as box:
        await box.write("solution.py", HONEST.encode())
        scored = await judge(box)
    assert json.loads(scored.verdict) == {"score": 1.0, "checks": 1}
    assert scored.result.isolation.startswith("namespaces+")


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_earns_nothing(name):
    async with Sandbox(SandboxSpec()) as box:
        await box.write("solution.py", CHEATS[name].encode())
        scored = await judge(box)
    assert scored.verdict is None or json.loads(scored.verdict)["score"] == 0.0, scored


async def test_tests_that_the_candidate_edited_are_not_the_scorers():
    edit = (
        "import os\nos.makedirs('tests'); open('tests/t.py', 'w').write('pass')\n"
        "open('solution.py', 'w').write('def double(n): return 0')\n"
        "open('score.py', 'w').write('import os; os.write(3, b\"1\")')"
    )
    async with Sandbox(SandboxSpec()) as box:
        await box.run(["python3", "-S", "-c", edit])
        scored = await judge(box)
    assert json.loads(scored.verdict)["score"] == 0.0


async def test_a_background_writer_is_dead_before_the_scorer_looks():
    writer = (
        "import os\nif os.fork() == 0:\n  os.setsid()\n  while True:\n"
        f"    open('new', 'w').write({HONEST!r}); os.replace('new', 'solution.py')"
    )
    async with Sandbox(SandboxSpec()) as box:
        await box.run(["python3", "-S", "-c", writer])
        await box.write("solution.py", CHEATS["wrong"].encode())  # a survivor would write over it
        scored = await judge(box)
    assert json.loads(scored.verdict)["score"] == 0.0


async def test_an_archive_with_hostile_members_stays_in_the_jail():
    pack = (
        "import io, tarfile\nt = tarfile.open('a.tar', 'w')\n"
        "def add(name, **k):\n  i = tarfile.TarInfo(name)\n"
        "  for a, v in k.items(): setattr(i, a, v)\n"
        "  i.size = 0 if k else 1; t.addfile(i, io.BytesIO(b'x'))\n"
        "add('../../../../up'); add('/absolute'); add('link', type=b'2', linkname='/usr')\n"
        "add('link/through'); add('hard', type=b'1', linkname='/etc/passwd')\n"
        "add('device', type=b'3', devmajor=1, devminor=1); t.close()\n"
    )
    unpack = (
        "import tarfile\nt = tarfile.open('a.tar')\n"
        "if hasattr(tarfile, 'fully_trusted_filter'):\n"  # as before it became the default to look
        "  t.extraction_filter = tarfile.fully_trusted_filter\n"
        "for m in t:\n"
        "  try: t.extract(m); print(m.name, 'written')\n"
        "  except (OSError, KeyError) as e: print(m.name, type(e).__name__)\n"
    )
    async with Sandbox(SandboxSpec()) as box:
        assert (await box.run(["python3", "-S", "-c", pack])).status == "ok"
        result = await box.run(["python3", "-S", "-c", unpack])
        names = [entry.path for entry in await box.list()]
    assert result.stdout.decode().split("\n") == [
        "../../../../up OSError",
        "/absolute OSError",
        "link written",
        "link/through OSError",
        "hard KeyError",
        "device PermissionError",
        "",
    ]
    assert names == ["a.tar", "link"]
