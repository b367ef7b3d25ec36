"""Toolchains: each runs its language and tells compilation, assertions and exceptions apart."""

import sys

import pytest

from headrace.errors import SandboxError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.spec import Limits, Mount, SandboxSpec

pytestmark = pytest.mark.jail

PROGRAMS = {
    ("python", "fine"): ("print(6 * 7)", "ok", b"42\n"),
    ("python", "broken"): ("print(", "compile_error", b""),
    ("python", "assertion"): ("assert 1 == 2", "assertion", b""),
    ("python", "exception"): ("{}['x']", "exception", b""),
    ("python", "quiet"): ("raise SystemExit(1)", "nonzero_exit", b""),
    ("bash", "fine"): ("echo $((6 * 7)) | tr 4 5", "ok", b"52\n"),
    ("bash", "broken"): ("if then", "compile_error", b""),
    ("bash", "quiet"): ("false", "nonzero_exit", b""),
    ("c", "fine"): ('#include <stdio.h>\nint main(){puts("42");}', "ok", b"42\n"),
    ("c", "broken"): ("int main(){ return x; }", "compile_error", b""),
    ("c", "unlinked"): ("int f(); int main(){ return f(); }", "compile_error", b""),
    ("c", "assertion"): ("#include <assert.h>\nint main(){assert(1 == 2);}", "assertion", b""),
    ("c", "crash"): ("int main(){ *(volatile int*)0 = 1; }", "signal", b""),
    ("cpp", "fine"): ("#include <iostream>\nint main(){std::cout << 42;}", "ok", b"42"),
    ("cpp", "exception"): ("int main(){ throw 1; }", "exception", b""),
    ("node", "fine"): ("console.log([1, 2].map(x => x * 21))", "ok", b"[ 21, 42 ]\n"),
    ("node", "broken"): ("let = ;", "compile_error", b""),
    ("node", "assertion"): ("require('assert')(1 === 2)", "assertion", b""),
    ("node", "exception"): ("null.x", "exception", b""),
}
ENDINGS = {"python": "py", "bash": "sh", "c": "c", "cpp": "cpp", "node": "js"}


@pytest.mark.parametrize(("language", "kind"), PROGRAMS)
async def test_program(language, kind):
    code, diagnosis, stdout = PROGRAMS[language, kind]
    async with Sandbox(SandboxSpec(toolchain=language)) as box:
        source = f"main.{ENDINGS[language]}"
        await box.write(source, code.encode())
        program = source
        if build := box.toolchain.build_command([source], "./program"):
            program = "./program"
            result = await box.run(build)
            if result.status != "ok":
                assert box.toolchain.diagnose(result) == diagnosis, result.stderr
                return
        result = await box.run(box.toolchain.run_command(program))
    assert (box.toolchain.diagnose(result), result.stdout) == (diagnosis, stdout), result.stderr


async def test_a_users_toolchain_is_data(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[shout]\nmounts = ["/usr/bin", "/usr/lib", "/usr/lib64?"]\npath = ["/usr/bin"]\n'
        'links = { "/lib" = "/usr/lib", "/lib64" = "/usr/lib64" }\nenv = { SAY = "mine" }\n'
        'run = ["tr", "a-z", "A-Z"]\nlimits = { wall_s = 0.3 }\n'
    )
    spec = SandboxSpec(toolchain="shout", toolchain_files=(str(file),))
    ample = Limits(wall_s=60)  # the toolchain's own is over before a slow machine has a jail
    async with Sandbox(spec) as box:
        loud = await box.run(box.toolchain.run_command(""), stdin=b"loud", limits=ample)
        env = await box.run(["env"], limits=ample)
        assert (await box.run(["sleep", "20"])).status == "timeout"
        long = await box.run(["sleep", "0.5"], limits=ample)
    assert loud.stdout == b"LOUD"
    assert b"SAY=mine\n" in env.stdout
    assert long.status == "ok"


async def test_declared_packages_are_importable_and_others_are_not(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "declared.py").write_text("value = 42")
    spec = SandboxSpec(
        trees=(Mount(source=str(tmp_path), target="/opt/packages"),),
        env={"PYTHONPATH": "/opt/packages"},
    )
    async with Sandbox(spec) as box:
        seen = await box.run(["python3", "-c", "import declared; print(declared.value)"])
        hidden = await box.run(["python3", "-c", "import pytest"])
    assert seen.stdout == b"42\n"
    assert b"No module named 'pytest'" in hidden.stderr


async def test_a_toolchain_extends_another_by_installed_packages_and_what_they_need(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[numeric]\nextends = "python"\npackages = ["numpy", "PyYAML"]\n')
    spec = SandboxSpec(toolchain="numeric", toolchain_files=(str(file),))
    async with Sandbox(spec) as box:
        seen = await box.run(["python3", "-c", "import numpy, yaml; print(numpy.arange(3).sum())"])
        hidden = await box.run(["python3", "-c", "import pytest"])
        written = await box.run(["python3", "-c", "open('/opt/packages/numpy/x', 'w')"])
    assert seen.stdout == b"3\n", seen.stderr
    assert b"No module named 'pytest'" in hidden.stderr
    assert b"Read-only file system" in written.stderr


def test_a_package_that_is_not_installed_is_named(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[mine]\nextends = "python"\npackages = ["no-such-package"]\n')
    with pytest.raises(SandboxError, match="'no-such-package' is not installed"):
        Sandbox(SandboxSpec(toolchain="mine", toolchain_files=(str(file),)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[x]\nextends = "cobol"\n', "'x' extends 'cobol', which is not defined before it"),
        ('[x]\nextends = ["bash"]\n', r"'x' extends \['bash'\], which is not defined before it"),
        ('x = 3\n[y]\nextends = "x"\n', "'y' extends 'x', which is not defined before it"),
        ("[python]\nmounts = []\npath = []\n", "'python' is defined already"),
        ("[x]\nmounts = []\n", "missing required field `path`"),
        ("[x]\nmounts = []\npath = []\nmount = 3\n", "unknown field `mount`"),
        ("[x", "Expected"),
    ],
)
def test_a_bad_toolchain_file_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(SandboxError, match=message) as caught:
        Sandbox(SandboxSpec(toolchain_files=(str(file),)))
    assert "bad.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SandboxSpec(toolchain="cobol"), "no toolchain 'cobol'"),
        (SandboxSpec(trees=(Mount(source="/no/such", target="/x"),)), "does not exist"),
        (SandboxSpec(trees=(Mount(source="/usr", target="x"),)), "cannot be shown"),
        (SandboxSpec(trees=(Mount(source="/run", target="/x"),)), "below /run"),
        (SandboxSpec(trees=(Mount(source="/usr", target="/box/x"),)), "which programs may change"),
        (SandboxSpec(trees=(Mount(source="/usr", target="/tmp"),)), "which programs may change"),
    ],
)
def test_a_spec_that_this_host_cannot_serve_is_refused(spec, message):
    with pytest.raises(SandboxError, match=message):
        Sandbox(spec)


async def test_a_tree_that_vanished_fails_its_own_session_and_none_after_it(tmp_path):
    tmp_path.chmod(0o755)
    gone, there = tmp_path / "gone", tmp_path / "there"
    for folder in (gone, there):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    late = Sandbox(SandboxSpec(trees=(Mount(source=str(gone), target="/x"),)))
    (gone / "file").unlink()
    gone.rmdir()
    with pytest.raises(SandboxError, match=r"show .*gone to jails"):
        await late.__aenter__()
    async with Sandbox(SandboxSpec(trees=(Mount(source=str(there), target="/x"),))) as box:
        result = await box.run(["python3", "-S", "-c", "print(open('/x/file').read())"])
    assert result.stdout == b"there\n", result.stderr


async def test_python_shows_its_interpreter_and_no_other_program_of_the_host():
    code = "import os, sys; print(sorted(os.listdir(sys.base_prefix + '/bin')))"
    async with Sandbox(SandboxSpec(toolchain="python")) as box:
        result = await box.run(["python3", "-S", "-c", code])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert result.stdout.decode().strip() == str(["python3", version])
