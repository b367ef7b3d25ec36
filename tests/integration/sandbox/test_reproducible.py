"""Equal inputs give equal bytes, whatever the host's folder, time zone, locale, mask and load."""

import json
import subprocess
import sys
import time

import msgspec
import pytest

from headrace.errors import SandboxError
from headrace.sandbox import box as box_module
from headrace.sandbox.box import Sandbox
from headrace.sandbox.client import close_shared
from headrace.sandbox.spec import Limits, SandboxSpec
from headrace.sandbox.toolchains import load

pytestmark = pytest.mark.jail

PYTHON = """
import datetime, locale, os, platform, random, socket, sys, tempfile, time, uuid
print({chr(i) for i in range(97, 123)}, hash('x'), object(), random.random(), uuid.uuid4())
print(dict(sorted(os.environ.items())), os.getuid(), os.getgid(), os.getcwd(), os.getpid())
print(socket.gethostname(), platform.node(), time.tzname, locale.getlocale(), os.umask(0))
print(time.time(), time.localtime(), datetime.datetime.now(), os.urandom(8), os.listdir('/'))
print(sys.argv, sys.path, sys.getfilesystemencoding(), tempfile.mkdtemp(), sys.stdin.read())
if os.fork() == 0: print('child', random.SystemRandom().random(), flush=True); os._exit(0)
os.wait()
"""
BASH = """
echo $RANDOM $SRANDOM $EPOCHREALTIME $SECONDS $$ $UID $PWD $HOSTNAME $USER $HOME; env | sort
date; printf '%(%c %Z)T\\n' -1; uname -n; id -u; umask; echo \xc3\xa9 | wc -m; locale; mktemp -u
"""
C = r"""
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
extern char **environ;
int main(void) {
  char host[65], cwd[4096];
  struct timeval now;
  unsigned long word;
  time_t t = time(0);
  gethostname(host, 65);
  gettimeofday(&now, 0);
  getrandom(&word, sizeof word, 0);
  printf("%s %s %s %s", __DATE__, __TIME__, ctime(&t), setlocale(LC_ALL, ""));
  printf("%s %s %ld %d %d\n", host, getcwd(cwd, 4096), (long)now.tv_usec, getuid(), getpid());
  printf("%lx %p %p %p\n", word, (void *)main, (void *)&word, malloc(9));
  for (char **each = environ; *each; each++) puts(*each);
}
"""
NODE = """
const os = require('os'), crypto = require('crypto');
console.log(new Date(), Date.now(), new Date().getTimezoneOffset(), new Date().toString());
console.log(process.env, process.cwd(), process.pid, process.getuid(), process.argv);
console.log(Math.random(), crypto.randomBytes(4), os.hostname(), os.tmpdir());
console.log(Intl.DateTimeFormat().resolvedOptions());
"""
DRIVER = """
import asyncio, json, sys
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import SandboxSpec

async def one(name, source, command):
    spec = SandboxSpec(toolchain=name, clock=1_700_000_000, seed=int(sys.argv[2]))
    async with Sandbox(spec) as box:
        await box.write("source-" + name, source.encode())
        if name == "c":
            built = await box.run(["gcc", "-o", "program", "-x", "c", "source-c"])
            assert built.status == "ok", built
        result = await box.run(command, stdin=b"in")
        assert (result.status, result.stderr) == ("ok", b""), result
        return result.stdout.decode()

async def main():
    return [await one(*each) for each in json.loads(sys.argv[1])]

print(json.dumps(asyncio.run(main())))
"""
PROGRAMS = (
    ("python", PYTHON, ["python3", "-S", "source-python", "argument"]),
    ("bash", BASH, ["bash", "source-bash"]),
    ("c", C, ["./program"]),
    ("node", NODE, ["node", "source-node"]),
)


def drive(folder, *, seed, umask=0o022, **environment):
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER, json.dumps(PROGRAMS), str(seed)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        umask=umask,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_toolchain_gives_equal_bytes_whatever_the_host_is_set_to(tmp_path):
    one = drive(tmp_path / "a", seed=5, TZ="Asia/Tokyo", LANG="de_DE.UTF-8", USER="me")
    other = drive(tmp_path / "b", seed=5, umask=0o077, HOME="/nowhere", LC_ALL="C", HOSTNAME="h")
    for (name, *_), first, second in zip(PROGRAMS, one, other, strict=True):
        assert first == second, name
        assert "2023" in first, f"{name} does not see the fixed clock"
    seeded = drive(tmp_path / "c", seed=6)
    assert [a == b for a, b in zip(one, seeded, strict=True)] == [False] * 4


TIMERS = """
import subprocess, threading, time
began = time.monotonic()
time.sleep(0.05)
threading.Event().wait(0.05)
try:
    subprocess.run(["/sbin/init", "-c", "while :; do :; done"], timeout=0.05)
except subprocess.TimeoutExpired:
    print("waited", 0.1 <= time.monotonic() - began, time.time())
"""


async def test_waits_and_the_limit_on_wall_time_go_on_while_the_clock_stands():
    async with Sandbox(SandboxSpec(clock=1)) as box:
        result = await box.run(["python3", "-S", "-c", TIMERS], limits=Limits(wall_s=60))
        limits = Limits(wall_s=0.3)
        late = await box.run(["python3", "-S", "-c", "while True: pass"], limits=limits)
    assert result.stdout == b"waited True 1.0\n", result.stderr
    assert late.status == "timeout"


async def test_without_a_clock_the_time_is_the_hosts():
    async with Sandbox(SandboxSpec()) as box:
        before = time.time()
        result = await box.run(["python3", "-S", "-c", "import time; print(time.time())"])
    assert before < float(result.stdout) < time.time()


async def test_a_fixed_clock_without_a_compiler_is_one_clear_error(monkeypatch):
    known = load()
    known["c"] = msgspec.structs.replace(known["c"], path=["/no/such/folder"])
    monkeypatch.setitem(box_module._loaded, (), known)
    close_shared()  # the keeper of the earlier tests has the library already
    with pytest.raises(SandboxError, match=r"needs a C compiler on this host.*no command 'gcc'"):
        async with Sandbox(SandboxSpec(clock=1)):
            pass


@pytest.mark.parametrize("clock", [-1, 1 << 33])
def test_a_clock_that_is_no_time_is_refused(clock):
    with pytest.raises(ValueError, match="clock must be Unix seconds"):
        SandboxSpec(clock=clock)
