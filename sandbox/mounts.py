"""Private mounts of the keeper: a namespace whose contents vanish with its last process.

Standard library only: the keeper runs without site-packages.
"""

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_RDONLY = 1
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2

RUNTIME = "/run"
"""Covered by the keeper's own tmpfs, which the host never sees."""
BOXES = "/run/box"
TREES = "/run/tree"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount_tmpfs(target: str, options: str) -> None:
    """Mount a tmpfs without set-user-id programs and devices.

    Raises:
        OSError: the kernel refuses.
    """
    result = _libc.mount(
        b"tmpfs", target.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()
    )
    _check(result, f"mount a tmpfs ({options}) on {target}")


def bind(source: str, target: str) -> None:
    """Show a folder or file of the host read-only at `target`, which is made.

    Raises:
        OSError: there is no such source, or the kernel refuses.
    """
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    result = _libc.mount(source.encode(), target.encode(), None, _MS_BIND | _MS_REC, None)
    _check(result, f"show {source} to jails")
    flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    _check(_libc.mount(None, target.encode(), None, flags, None), f"make {source} read-only")


def unmount(target: str) -> None:
    """Detach a mount; its contents are freed when the last open file goes.

    Raises:
        OSError: it is no mount point.
    """
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def enter_private_namespace() -> bool:
    """Move this process into its own mount namespace and cover `RUNTIME` with an empty tmpfs.

    Without the right to do so as it is, the process first becomes the root of its own user
    namespace.

    Returns:
        Whether a user namespace was needed.

    Raises:
        OSError: the kernel refuses namespaces.
    """
    uid, gid = os.geteuid(), os.getegid()
    nested = uid != 0 or _libc.unshare(_CLONE_NEWNS) != 0
    if nested:
        _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "create a user namespace")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    mount_tmpfs(RUNTIME, "size=1m,nr_inodes=8k,mode=755")
    os.mkdir(BOXES, 0o755)
    os.mkdir(TREES, 0o755)
    # nsjail makes the mount point of a jail's root here, as the jail's own user.
    os.mkdir("/run/user")
    os.chmod("/run/user", 0o1777)
    return nested
