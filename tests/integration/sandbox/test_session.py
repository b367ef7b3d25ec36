"""A session's commands, files and scorer, on the real nsjail."""

import asyncio

import pytest

from headrace.errors import CollectionError, SandboxError
from headrace.sandbox.admission import Admission
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, SandboxSpec

pytestmark = pytest.mark.jail

PYTHON = ["python3", "-S", "-c"]


async def run(code, **options):
    async with Sandbox(SandboxSpec()) as box:
        return await box.run([*PYTHON, code], **options)


async def test_a_program_and_its_tests_run_on_the_workspace():
    async with Sandbox(SandboxSpec()) as box:
        await box.write("answer.py", b"def answer():\n    return 6 * 7\n")
        await box.write("tests/check.py", b"import answer\nassert answer.answer() == 42\n")
        result = await box.run(["python3", "-S", "tests/check.py"], env={"PYTHONPATH": "/box"})
    assert (result.status, result.exit_code, result.signal) == ("ok", 0, None)
    assert (result.stdout, result.stderr) == (b"", b"")


async def test_output_input_and_exit_code_arrive():
    code = (
        "import sys; d = sys.stdin.read(); print(d * 2); print('e', file=sys.stderr); sys.exit(3)"
    )
    result = await run(code, stdin=b"ab")
    assert (result.status, result.exit_code) == ("nonzero_exit", 3)
    assert (result.stdout, result.stderr) == (b"abab\n", b"e\n")
    assert result.isolation.startswith("namespaces+")
    assert result.isolation.endswith("+seccomp")
    assert 0 < result.cpu_s < 5
    assert result.wall_s > 0
    assert result.peak_memory > 1 << 20


async def test_an_input_larger_than_a_pipe_is_read_whole():
    result = await run("import sys; print(len(sys.stdin.buffer.read()))", stdin=b"x" * 5_000_000)
    assert result.stdout == b"5000000\n"


async def test_files_persist_between_the_runs_of_a_session_and_end_with_it():
    async with Sandbox(SandboxSpec()) as box:
        await box.run([*PYTHON, "open('/box/a', 'w').write('kept')"])
        assert await box.read("a") == b"kept"
        assert (await box.run([*PYTHON, "print(open('a').read())"])).stdout == b"kept\n"
    async with Sandbox(SandboxSpec()) as box:
        assert await box.list() == ()


async def test_no_process_of_a_run_is_there_in_the_next():
    spawn = "import subprocess; subprocess.Popen(['/sbin/init', '-c', 'while :; do :; done'])"
    look = (
        "import os\nfor p in range(2, 200):\n  try: os.kill(p, 0); print(p)\n  except OSError: pass"
    )
    async with Sandbox(SandboxSpec()) as box:
        first = await box.run([*PYTHON, spawn])
        second = await box.run([*PYTHON, look])
    assert first.status == "ok"
    assert second.stdout.split() == [b"2"]


async def test_a_scorer_sees_the_candidates_files_and_alone_has_the_verdict_descriptor():
    scorer = (
        "import os, subprocess, sys\n"
        "forge = 'import os; os.write(3, b\"forged\")'\n"
        "child = subprocess.run([sys.executable, '-S', '-c', forge], capture_output=True)\n"
        "os.write(3, open('/candidate/answer').read().encode() + str(child.returncode).encode())\n"
    )
    async with Sandbox(SandboxSpec()) as box:
        tried = await box.run([*PYTHON, "import os; os.write(3, b'forged')"])
        await box.write("answer", b"42 ")
        scored = await box.spawn_scorer(
            ["python3", "-S", "score.py"], files={"score.py": scorer.encode()}
        )
    assert tried.status == "nonzero_exit"
    assert scored.result.status == "ok"
    assert scored.verdict == b"42 1"


async def test_a_scorer_cannot_change_the_candidates_files():
    async with Sandbox(SandboxSpec()) as box:
        await box.write("answer", b"42")
        scored = await box.spawn_scorer([*PYTHON, "open('/candidate/answer', 'w')"])
    assert scored.result.status == "nonzero_exit"
    assert b"Read-only file system" in scored.result.stderr


@pytest.mark.parametrize(
    "code",
    ["pass", "import os; os.write(3, b'1'); os._exit(1)", "import os; os.write(3, b'1' * 2000000)"],
)
async def test_a_scorer_that_fails_or_says_nothing_or_too_much_has_no_verdict(code):
    async with Sandbox(SandboxSpec()) as box:
        assert (await box.spawn_scorer([*PYTHON, code])).verdict is None


async def test_a_run_whose_input_cannot_be_sent_gives_back_what_was_promised(no_memory_file_once):
    limits = Limits()
    admission = Admission(cpus=limits.cpus, memory=limits.memory, wait_s=5.0)
    async with Sandbox(SandboxSpec(limits=limits), admission=admission) as box:
        no_memory_file_once()
        with pytest.raises(SandboxError, match="Too many open files"):
            await box.run([*PYTHON, "print(1)"], stdin=b"in")
        assert (await box.run([*PYTHON, "print(1)"])).stdout == b"1\n"


async def test_a_cancelled_run_is_dead_before_the_cancellation_arrives():
    async with Sandbox(SandboxSpec()) as box:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await box.run([*PYTHON, "import time; time.sleep(60)"])
        assert (await box.run([*PYTHON, "print(1)"])).stdout == b"1\n"


@pytest.mark.parametrize(
    "code",
    [
        "for p in ('/box', '/tmp', '/dev/shm'): os.chmod(p, 0)",
        "i = 0\nwhile True: open(str(i), 'w').close(); i += 1",
        "f = open('x', 'wb', 0)\nwhile True: f.write(b'x' * 65536)",
        "os.symlink('/', 'a'); os.symlink('/box', '/tmp/b'); os.mkfifo('/dev/shm/c')",
        "\nfor i in range(2000): os.mkdir('d'); os.chdir('d')",
    ],
)
async def test_whatever_a_program_did_to_its_workspace_the_next_one_runs(code):
    async with Sandbox(SandboxSpec(disk=4 << 20)) as box:
        await box.run([*PYTHON, "import os\n" + code])
        result = await box.run(["/sbin/init", "-c", "echo here"])
    assert (result.status, result.stdout) == ("ok", b"here\n")


async def test_a_session_closed_under_a_running_command_disturbs_no_other():
    async with Sandbox(SandboxSpec()) as other:
        box = await Sandbox(SandboxSpec()).__aenter__()
        running = asyncio.create_task(box.run([*PYTHON, "import time; time.sleep(0.5)"]))
        await asyncio.sleep(0)
        await box.close()
        await running
        assert (await other.run([*PYTHON, "print(1)"])).stdout == b"1\n"


async def test_a_command_may_be_large():
    async with Sandbox(SandboxSpec()) as box:
        code = "import os, sys; print(len(sys.argv), len(sys.argv[1]), len(os.environ['A']))"
        result = await box.run(
            [*PYTHON, code, "\u20ac" * 20_000, *["x"] * 5000], env={"A": "y" * 20_000}
        )
    assert result.stdout == b"5002 20000 20000\n"


@pytest.mark.parametrize(
    ("argv", "env", "reason"),
    [
        ([], {}, "argv is empty"),
        ([""], {}, "argv is empty"),
        (["no-such-command"], {}, "has no command 'no-such-command'"),
        (["python3", "a\0b"], {}, "NUL"),
        (["python3"], {"A": "\0"}, "NUL"),
        (["python3"], {"A=B": "1"}, "bad name"),
        (["python3"], {"": "1"}, "bad name"),
        (["python3"], {"A": "\ud800"}, "UTF-8"),
        (["python3"], {"A": "x" * 200_000}, "at most"),
    ],
)
async def test_a_bad_command_is_refused_before_anything_runs(argv, env, reason):
    async with Sandbox(SandboxSpec()) as box:
        with pytest.raises(SandboxError, match=reason):
            await box.run(argv, env=env)


@pytest.mark.parametrize(
    "path", ["", "/etc/x", "../x", "a/../../x", "a//b", ".", "a\0b", "n" * 256]
)
async def test_a_path_that_leaves_the_workspace_is_refused(path):
    async with Sandbox(SandboxSpec()) as box:
        with pytest.raises(SandboxError):
            await box.write(path, b"x")
        with pytest.raises(SandboxError):
            await box.read(path)


async def test_links_of_a_candidate_are_followed_neither_in_reading_nor_in_writing():
    make = "import os; os.symlink('/etc/passwd', 'l'); os.symlink('/etc', 'd'); os.mkfifo('f')"
    async with Sandbox(SandboxSpec()) as box:
        await box.run([*PYTHON, make])
        for path in ("l", "d/passwd", "f"):
            with pytest.raises(CollectionError):
                await box.read(path)
            with pytest.raises(CollectionError):
                await box.write(path, b"x")
        assert [(e.path, e.kind) for e in await box.list()] == [
            ("d", "link"),
            ("f", "special"),
            ("l", "link"),
        ]
        assert await box.collect() == {}
