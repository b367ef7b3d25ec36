"""Hostile programs, each with its exact outcome."""

import asyncio
import os
import socket
from dataclasses import dataclass, field

import pytest

from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, Result, SandboxSpec

pytestmark = [pytest.mark.jail, pytest.mark.usefixtures("nothing_left")]

PRELUDE = """
import ctypes, errno, fcntl, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def name(code):
    print(errno.errorcode.get(code, code))
def call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        name(ctypes.get_errno())
    else:
        print('allowed')
def attempt(f, *arguments, **options):
    try:
        f(*arguments, **options)
        print('allowed')
    except OSError as error:
        name(error.errno)
"""
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A Python program and how its run must end."""

    code: str
    stdout: str | None = ""
    status: str = "ok"
    exit_code: int | None = 0
    signal: int | None = None
    hit: tuple[str, ...] | None = ()
    limits: Limits = field(default_factory=Limits)
    stderr: str | None = ""


def killed(code, status, *, hit=(), limits, stdout=""):
    return Case(code, stdout, status, None, 9, hit, limits, stderr=None)


def failed(code, status="nonzero_exit", *, hit=(), limits=None, stdout="", exit_code=1):
    return Case(code, stdout, status, exit_code, None, hit, limits or Limits(), stderr=None)


def refused(code, *errors):
    return Case(code, "".join(f"{error}\n" for error in errors))


SHORT = Limits(wall_s=0.5, processes=32)
SMALL = Limits(memory=48 * MIB)

RESOURCES = {
    "fork_bomb": failed(
        "while True: os.fork()", "processes", hit=("processes",), limits=Limits(processes=12)
    ),
    "fork_bomb_that_never_gives_up": killed(
        "while True:\n  try: os.fork()\n  except OSError: pass",
        "timeout",
        hit=("processes",),
        limits=Limits(wall_s=5.0, processes=6),
    ),
    "shell_fork_bomb_left_behind": Case(
        "subprocess.run(['/sbin/init', '-c', 'f(){ f|f& }; f'], stderr=-3)",
        hit=None,
        limits=Limits(wall_s=60),
        stderr=None,
    ),
    "thread_bomb": failed(
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "processes",
        hit=("processes",),
    ),
    "memory_of_one_process": killed(
        "x = []\nwhile True: x.append(bytearray(1 << 20))", "memory", hit=("memory",), limits=SMALL
    ),
    "memory_of_many_processes": failed(
        "r, w = os.pipe()\n"
        "for i in range(6):\n"
        "  if os.fork() == 0:\n"
        "    os.close(w); x = bytearray(15 << 20); os.read(r, 1); os._exit(0)\n"
        "while True:\n"
        "  if os.wait()[1] == 9: os._exit(1)",
        "memory",
        hit=("memory",),
        limits=SMALL,
    ),
    "memory_shared_and_anonymous": killed(
        "import mmap\nm = mmap.mmap(-1, 256 << 20)\nwhile m.write(b'x' * 4096): pass",
        "memory",
        hit=("memory",),
        limits=SMALL,
    ),
    "memory_in_a_memory_file": killed(
        "f = os.memfd_create('x')\nwhile os.write(f, b'x' * 65536): pass",
        "memory",
        hit=("memory",),
        limits=SMALL,
    ),
    "disk_fill": failed(
        "f = open('x', 'wb', 0)\nwhile True: f.write(b'x' * 65536)", "disk", hit=("disk",)
    ),
    "disk_fill_of_tmp": failed(
        "f = open('/tmp/x', 'wb', 0)\nwhile True: f.write(b'x' * 65536)", "disk", hit=("disk",)
    ),
    "disk_fill_of_shared_memory": failed(
        "f = open('/dev/shm/x', 'wb', 0)\nwhile True: f.write(b'x' * 65536)", "disk", hit=("disk",)
    ),
    "inode_fill": failed(
        "i = 0\nwhile True:\n  open(str(i), 'w').close(); i += 1", "disk", hit=("disk",)
    ),
    "link_fill": failed(
        "i = 0\nwhile True:\n  os.symlink('/etc/passwd', str(i)); i += 1", "disk", hit=("disk",)
    ),
    "disk_reserved_at_once": refused(
        "attempt(os.posix_fallocate, os.open('x', 66), 0, 1 << 40)", "ENOSPC"
    ),
    "descriptors": Case(
        "n = 0\ntry:\n  while os.dup(0): n += 1\nexcept OSError as e: print(n); name(e.errno)",
        "253\nEMFILE\n",
    ),
    "descriptor_limit_raised": Case(
        "try: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "except ValueError: print('refused')",
        "refused\n",
    ),
    "output_flood": killed(
        "while True: os.write(1, b'x' * 65536)",
        "output_limit",
        limits=Limits(output=100_000),
        stdout="x" * 100_000,
    ),
    "error_output_flood": killed(
        "while True: os.write(2, b'x' * 65536)", "output_limit", limits=Limits(output=100_000)
    ),
    "output_flood_by_many": killed(
        "for i in range(4): os.fork()\nwhile True: os.write(1, b'x' * 512)",
        "output_limit",
        limits=Limits(output=50_000),
        stdout="x" * 50_000,
    ),
    "busy_for_ever": killed("while True: pass", "timeout", limits=SHORT),
    "asleep_for_ever": killed("time.sleep(99)", "timeout", limits=SHORT),
    "ignoring_every_signal": killed(
        "for s in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(9)",
        "timeout",
        limits=SHORT,
    ),
    "stopping_itself": killed("os.kill(os.getpid(), 19)", "timeout", limits=SHORT),
    "waiting_for_a_stopped_child": killed(
        "p = os.fork() or os.kill(os.getpid(), 19)\nos.waitpid(p, 0)", "timeout", limits=SHORT
    ),
    "reading_a_fifo_nobody_writes": killed("os.mkfifo('f'); open('f')", "timeout", limits=SHORT),
    "daemon_by_double_fork": Case(
        "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(99)\n  os._exit(0)"
    ),
    "child_holding_the_output": Case("os.fork() or time.sleep(99)\nos._exit(0)"),
    "sleep_with_a_deadline_in_the_background": Case(
        "subprocess.Popen(['/sbin/init', '-c', 'trap \"\" TERM HUP; while :; do :; done'])"
    ),
    "environment_too_large": refused(
        "attempt(os.execve, sys.executable, ['x'], {'A': 'x' * 200_000})", "E2BIG"
    ),
}

ENDINGS = {
    "segmentation_fault": Case("ctypes.string_at(0)", None, "signal", None, 11),
    "abort": Case("os.abort()", None, "signal", None, 6),
    "killing_itself": Case("os.kill(os.getpid(), 9)", None, "signal", None, 9),
    "terminating_itself": Case("os.kill(os.getpid(), 15)", None, "signal", None, 15),
    "stack_overflow": Case(
        "sys.setrecursionlimit(1 << 30)\ndef f(): return eval('f()')\nf()", None, "signal", None, 11
    ),
    "exit_code_that_looks_like_a_signal": failed("sys.exit(139)", exit_code=139),
    "exit_code_that_looks_like_a_failed_jail": failed("os._exit(255)", exit_code=255),
    "exit_code_that_looks_like_a_missing_command": failed("os._exit(127)", exit_code=127),
    "output_that_is_no_text": Case("os.write(1, b'\\xff\\x00\\x1b[2J')", "\udcff\0\x1b[2J"),
}

HOST = {
    "password_files": refused(
        "attempt(open, '/etc/shadow'); attempt(open, '/etc/passwd')", "ENOENT", "ENOENT"
    ),
    "home_folders": refused(
        "attempt(os.listdir, '/home'); attempt(os.listdir, '/root/.ssh')", "ENOENT", "ENOENT"
    ),
    "the_other_folders": refused(
        "for f in ('/etc', '/var', '/run', '/opt', '/mnt', '/boot'): attempt(os.listdir, f)",
        *["ENOENT"] * 6,
    ),
    "proc": refused(
        "attempt(os.listdir, '/proc'); attempt(open, '/proc/self/mem')", *["ENOENT"] * 2
    ),
    "sys": refused("attempt(os.listdir, '/sys')", "ENOENT"),
    "climbing_out": refused("attempt(open, '../../../../../../etc/passwd')", "ENOENT"),
    "devices_that_exist": Case(
        "print(*sorted(os.listdir('/dev')))", "full null random shm urandom zero\n"
    ),
    "devices_made": refused(
        "attempt(os.mknod, 'm', 0o20666, 257); attempt(os.mknod, 'd', 0o60666, 64768)",
        "EPERM",
        "EPERM",
    ),
    "writing_the_root": refused(
        "for f in ('/x', '/dev/x', '/sbin/x', sys.prefix + '/bin/x'): attempt(open, f, 'w')",
        *["EROFS"] * 4,
    ),
    "changing_the_interpreter": refused(
        "attempt(open, sys.executable, 'r+'); attempt(os.chmod, os.__file__, 0o777); "
        "attempt(os.remove, os.__file__)",
        "EACCES",
        "EROFS",
        "EROFS",
    ),
    "replacing_the_init": Case("open('x', 'w'); attempt(os.rename, 'x', '/sbin/init')", "EXDEV\n"),
    "hard_link_to_a_tool": refused("attempt(os.link, os.__file__, 'x')", "EXDEV"),
    "packages_of_the_host": Case(
        "import importlib.util as u; print(u.find_spec('numpy'), u.find_spec('headrace'))",
        "None None\n",
    ),
    "variables_of_the_host": Case(
        "print(*sorted(os.environ))",
        "HOME LANG LC_ALL LOGNAME OMP_NUM_THREADS OPENBLAS_NUM_THREADS PATH PWD "
        "PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONNOUSERSITE PYTHONUTF8 SEED "
        "SOURCE_DATE_EPOCH TERM TMPDIR TZ USER\n",
    ),
    "inherited_descriptors": Case(
        "n = []\nfor i in range(4096):\n  try: fcntl.fcntl(i, 1); n.append(i)\n"
        "  except OSError: pass\nprint(n)",
        "[0, 1, 2]\n",
    ),
    "standard_input_is_sealed": refused("attempt(os.write, 0, b'x')", "EPERM"),
}

NETWORK = {
    "internet": refused(
        "attempt(socket.create_connection, ('1.1.1.1', 53)); "
        "attempt(socket.create_connection, ('2606:4700::1111', 53))",
        "ENETUNREACH",
        "EADDRNOTAVAIL",
    ),
    "loopback": refused("attempt(socket.create_connection, ('127.0.0.1', 22))", "ENETUNREACH"),
    "metadata_service": refused(
        "attempt(socket.create_connection, ('169.254.169.254', 80))", "ENETUNREACH"
    ),
    "names": Case(
        "try: socket.getaddrinfo('example.com', 80)\nexcept socket.gaierror: print('no name')",
        "no name\n",
    ),
    "raw_packets": refused(
        "attempt(socket.socket, 2, socket.SOCK_RAW, 1); attempt(socket.socket, 17, 3)",
        "EPERM",
        "EAFNOSUPPORT",
    ),
    "hypervisor_sockets": refused("attempt(socket.socket, 40, 1)", "EAFNOSUPPORT"),
    "kernel_crypto_sockets": refused("attempt(socket.socket, 38, 5)", "EAFNOSUPPORT"),
    "interfaces": Case("print(socket.if_nametoindex('lo'))", "1\n"),
}

KERNEL = {
    "user_namespace": refused("call(272, 0x10000000)", "EPERM"),
    "mount_namespace": refused("call(272, 0x20000)", "EPERM"),
    "namespace_by_clone": refused("call(56, 0x10000011, 0, 0, 0, 0)", "EPERM"),
    "namespace_by_clone3": refused("call(435, 0, 0)", "ENOSYS"),
    "joining_a_namespace": refused("call(308, 0, 0)", "EPERM"),
    "mount": refused("call(165, b'none', b'/tmp', b'tmpfs', 0, 0)", "EPERM"),
    "new_mount_calls": refused(
        "for n in (428, 429, 430, 431, 432, 433, 442): call(n, 0, 0, 0, 0, 0)", *["EPERM"] * 7
    ),
    "unmount": refused("call(166, b'/box', 2)", "EPERM"),
    "pivot_root_and_chroot": refused("call(155, b'/', b'/'); call(161, b'/tmp')", "EPERM", "EPERM"),
    "ptrace": refused("call(101, 0, 0, 0, 0); call(101, 16, 1, 0, 0)", "EPERM", "EPERM"),
    "memory_of_other_processes": refused(
        "call(310, 1, 0, 0, 0, 0, 0); call(311, 1)", "EPERM", "EPERM"
    ),
    "descriptors_of_other_processes": refused("call(438, os.pidfd_open(1), 0, 0)", "EPERM"),
    "keyrings": refused(
        "call(250, 0, -3, 1); call(248, b'user', b'x', b'x', 1, -3); call(249, 0, 0, 0, 0)",
        *["EPERM"] * 3,
    ),
    "io_uring": refused(
        "call(425, 8, ctypes.create_string_buffer(120)); call(426); call(427)", *["EPERM"] * 3
    ),
    "bpf_and_perf": refused("call(321, 0, 0, 0); call(298, 0, 0, 0, 0, 0)", "EPERM", "EPERM"),
    "userfaultfd": refused("call(323, 1)", "EPERM"),
    "modules_and_kexec": refused("for n in (175, 313, 176, 246): call(n, 0, 0, 0)", *["EPERM"] * 4),
    "file_handles": refused("call(303, -100, b'/', 0, 0, 0); call(304, 0, 0, 0)", "EPERM", "EPERM"),
    "clock_changed": refused(
        "attempt(time.clock_settime, time.CLOCK_REALTIME, 0); call(164, 0, 0); call(159, 0)",
        *["EPERM"] * 3,
    ),
    "host_name_changed": refused("attempt(socket.sethostname, 'x')", "EPERM"),
    "kernel_log_and_reboot": refused("call(103, 3, 0, 0); call(169, 0, 0, 0)", "EPERM", "EPERM"),
    "swap_and_accounting": refused("call(167, b'x', 0); call(163, b'x')", "EPERM", "EPERM"),
    "becoming_root": refused(
        "attempt(os.setuid, 0); attempt(os.setgid, 0); attempt(os.setgroups, [0])",
        "EINVAL",
        "EINVAL",
        "EPERM",
    ),
    "capabilities": Case(
        "h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)()\n"
        "libc.capget(h, d); print(list(d), libc.prctl(39, 0, 0, 0, 0))",
        "[0, 0, 0, 0, 0, 0] 1\n",
    ),
    "set_user_id_program": Case(
        "open('s', 'w'); os.chmod('s', 0o6755)\n"
        "print(all(os.statvfs(p).f_flag & os.ST_NOSUID for p in ('/box', '/tmp', sys.executable)))",
        "True\n",
    ),
    "real_time_priority": refused(
        "attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)); attempt(os.nice, -5)",
        "EPERM",
        "EPERM",
    ),
    "limits_of_other_processes": refused(
        "attempt(resource.prlimit, 1, resource.RLIMIT_NOFILE)", "EPERM"
    ),
    "killing_everything": refused(
        "attempt(os.kill, 1, 9); attempt(os.kill, -1, 9)", "allowed", "ESRCH"
    ),
    "killing_the_host": refused(
        f"for p in ({os.getpid()}, {os.getppid()}): attempt(os.kill, p, 9)", "ESRCH", "ESRCH"
    ),
    "core_dump": Case("print(resource.getrlimit(resource.RLIMIT_CORE))", "(0, 0)\n"),
}

CASES = RESOURCES | ENDINGS | HOST | NETWORK | KERNEL


def outcome(result: Result, case: Case):
    """What is compared; None in the case means anything."""
    return (
        result.status,
        result.exit_code,
        result.signal,
        None if case.hit is None else result.limits_hit,
        None if case.stdout is None else result.stdout.decode("utf-8", "surrogateescape"),
        None if case.stderr is None else result.stderr.decode("utf-8", "surrogateescape"),
    )


def expected(case: Case):
    return (case.status, case.exit_code, case.signal, case.hit, case.stdout, case.stderr)


async def attack(case: Case) -> Result:
    async with Sandbox(SandboxSpec(disk=8 * MIB, files=500)) as box:
        return await box.run(["python3", "-S", "-c", PRELUDE + case.code], limits=case.limits)


@pytest.mark.parametrize("name", CASES)
async def test_attack(name):
    result = await attack(CASES[name])
    assert outcome(result, CASES[name]) == expected(CASES[name]), (result.stderr, result.detail)


@pytest.mark.slow
async def test_all_attacks_at_once_end_as_they_do_alone():
    results = await asyncio.gather(*(attack(case) for case in CASES.values()))
    wrong = {
        name: (outcome(result, case), expected(case))
        for (name, case), result in zip(CASES.items(), results, strict=True)
        if outcome(result, case) != expected(case)
    }
    assert wrong == {}


async def test_an_abstract_socket_of_the_host_is_out_of_reach():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0headrace-test-" + str(os.getpid()))
        listener.listen()
        name = listener.getsockname().decode()
        code = f"s = socket.socket(socket.AF_UNIX); attempt(s.connect, {name!r})"
        result = await attack(Case(code))
    assert result.stdout == b"ECONNREFUSED\n"


OTHER_CALLS = r"""
#include <errno.h>
#include <stdio.h>
#include <unistd.h>
int main(int count, char **argv) {
    long result = 0;
    if (argv[1][0] == 'i')
        __asm__ volatile("int $0x80" : "=a"(result) : "a"(310L), "b"(0x10000000L));
    else
        result = syscall(0x40000000 | 272, 0x10000000);
    printf("%ld %d\n", result, errno);
}
"""


async def test_system_calls_by_other_numbers_are_refused():
    async with Sandbox(SandboxSpec(toolchain="c")) as box:
        await box.write("a.c", OTHER_CALLS.encode())
        assert (await box.run(["gcc", "a.c"])).status == "ok"
        of_32_bit = await box.run(["./a.out", "i"])
        of_x32 = await box.run(["./a.out", "x"])
    assert (of_32_bit.status, of_32_bit.signal) == ("signal", 31)
    assert of_x32.stdout == b"-1 38\n"
