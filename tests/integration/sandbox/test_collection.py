"""What is read out of a workspace that a hostile program has shaped."""

import pytest

from headrace.errors import CollectionError, SandboxError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import SandboxSpec
from headrace.sandbox.tree import Rules

pytestmark = [pytest.mark.jail, pytest.mark.usefixtures("nothing_left")]


async def made(box, code):
    result = await box.run(["python3", "-S", "-c", "import os\n" + code])
    assert result.status == "ok", result.stderr


@pytest.mark.parametrize(
    ("code", "rules", "message"),
    [
        ("for i in range(9): open(str(i), 'w')", Rules(entries=8), "more than 8 entries"),
        ("os.makedirs('a/b/c')", Rules(depth=2), "deeper than 2"),
        ("\nfor i in range(2000): os.mkdir('d'); os.chdir('d')", Rules(), "deeper than 32"),
        ("open('x', 'w').truncate(1 << 40)", Rules(), "more than 67108864 bytes"),
        (
            "open('x', 'w').write('x' * 60); open('y', 'w').write('y' * 60)",
            Rules(file_bytes=100),
            "more than 100 bytes",
        ),
        ("open(b'\\xff', 'w')", Rules(), "not UTF-8"),
        ("open('n' * 200, 'w')", Rules(name_bytes=100), "longer than 100 bytes"),
    ],
)
async def test_collecting_stops_at(code, rules, message):
    async with Sandbox(SandboxSpec()) as box:
        await made(box, code)
        with pytest.raises(CollectionError, match=message):
            await box.collect(rules)


async def test_only_regular_files_are_collected():
    code = (
        "import socket\nopen('file', 'w').write('x'); open('line\\nbreak', 'w').write('y')\n"
        "os.symlink('/etc/passwd', 'l'); os.symlink('.', 'loop'); os.mkfifo('fifo')\n"
        "socket.socket(socket.AF_UNIX).bind('s'); os.mkdir('d'); os.link('file', 'd/hard')"
    )
    async with Sandbox(SandboxSpec()) as box:
        await made(box, code)
        assert await box.collect() == {"file": b"x", "line\nbreak": b"y", "d/hard": b"x"}
        kinds = {entry.path: entry.kind for entry in await box.list()}
    assert kinds["l"] == kinds["loop"] == "link"
    assert kinds["fifo"] == kinds["s"] == "special"


async def test_a_sparse_file_is_not_read_into_memory():
    async with Sandbox(SandboxSpec()) as box:
        await made(box, "open('x', 'w').truncate(1 << 42)")
        with pytest.raises(CollectionError, match="4398046511104 bytes"):
            await box.read("x")


async def test_a_folder_swapped_for_a_link_is_not_entered():
    async with Sandbox(SandboxSpec()) as box:
        await box.write("out/result", b"mine")
        await made(box, "os.rename('out', 'kept'); os.symlink('/etc', 'out')")
        with pytest.raises(CollectionError, match="out"):
            await box.read("out/passwd")
        with pytest.raises(CollectionError, match="out"):
            await box.write("out/new", b"x")


async def test_a_full_workspace_is_the_callers_error_when_the_caller_writes():
    async with Sandbox(SandboxSpec(disk=1 << 20)) as box:
        with pytest.raises(SandboxError, match="full"):
            await box.write("x", b"x" * (2 << 20))


async def test_a_file_without_permissions_is_still_read():
    async with Sandbox(SandboxSpec()) as box:
        await made(box, "open('x', 'w').write('secret'); os.chmod('x', 0)")
        assert await box.read("x") == b"secret"
