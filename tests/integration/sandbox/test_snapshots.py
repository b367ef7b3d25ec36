"""Snapshots: an equal tree has an equal id, and restoring gives it back whatever was done to it."""

import pytest

from headrace.errors import SandboxError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import SandboxSpec

pytestmark = pytest.mark.jail

BUILD = """
import os
os.makedirs('a/b'); os.mkdir('empty', 0o700)
open('a/b/f', 'w').write('one'); open('run', 'w').write('#!'); os.chmod('run', 0o755)
os.symlink('a/b/f', 'link'); os.symlink('/etc/passwd', 'out')
open(b'name\\nwith-\\xff', 'w').write('odd')
"""
CHANGES = {
    "nothing": "pass",
    "contents": "open('a/b/f', 'w').write('two')",
    "same_length_at_once": "open('a/b/f', 'r+').write('eno')",
    "mode": "os.chmod('run', 0o600); os.chmod('empty', 0o755)",
    "removed": "os.remove('a/b/f'); os.rmdir('a/b')",
    "added": "os.makedirs('x/y/z'); open('x/y/z/f', 'w').write('x'); os.mkfifo('fifo')",
    "link_to_elsewhere": "os.remove('link'); os.symlink('/', 'link')",
    "file_for_a_folder": "os.rmdir('empty'); open('empty', 'w')",
    "folder_for_a_file": "os.remove('run'); os.makedirs('run/deep')",
    "folder_for_a_link": "os.remove('out'); os.mkdir('out')",
    "link_for_a_folder": "os.remove('a/b/f'); os.rmdir('a/b'); os.symlink('/tmp', 'a/b')",
    "unreadable": "os.chmod('a', 0)",
    "deep": "\nfor i in range(300): os.mkdir('d'); os.chdir('d')",
    "moved": "os.rename('a', 'c')",
}
LOOK = """
import os
for root, folders, files in sorted(os.walk(b'.')):
    for n in sorted(folders + files):
        p = os.path.join(root, n); s = os.lstat(p)
        c = os.readlink(p) if os.path.islink(p) else open(p, 'rb').read() if n in files else b''
        print(p, oct(s.st_mode), s.st_uid, c)
"""


@pytest.mark.parametrize("name", CHANGES)
async def test_restoring_undoes(name):
    async with Sandbox(SandboxSpec()) as box:

        async def python(code):
            result = await box.run(["python3", "-S", "-c", code])
            assert result.status == "ok", result.stderr
            return result.stdout

        await python(BUILD)
        before = await python(LOOK)
        snapshot = await box.snapshot()
        await python("import os\n" + CHANGES[name])
        await box.restore(snapshot)
        assert await python(LOOK) == before
        assert await box.snapshot() == snapshot


async def test_equal_trees_have_equal_ids_and_different_ones_do_not():
    ids = []
    for data in (b"x", b"x", b"y"):
        async with Sandbox(SandboxSpec()) as box:
            await box.write("d/f", data)
            ids.append(await box.snapshot())
    assert ids[0] == ids[1] != ids[2]


async def test_snapshots_form_a_history_and_restore_goes_both_ways():
    async with Sandbox(SandboxSpec()) as box:
        ids = []
        for i in range(4):
            await box.write(f"f{i}", b"x" * i)
            ids.append(await box.snapshot())
        for i in (1, 3, 0, 2):
            await box.restore(ids[i])
            assert [entry.path for entry in await box.list()] == [f"f{j}" for j in range(i + 1)]


async def test_an_unknown_snapshot_is_refused():
    async with Sandbox(SandboxSpec()) as box:
        with pytest.raises(SandboxError, match="no snapshot"):
            await box.restore("f" * 64)


async def test_restoring_under_a_running_shell_is_refused():
    async with Sandbox(SandboxSpec(toolchain="bash")) as box:
        snapshot = await box.snapshot()
        await box.shell()
        with pytest.raises(SandboxError, match="close the shell"):
            await box.restore(snapshot)
