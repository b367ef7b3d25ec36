"""Jobs through the broker: one result each, started once unless repeatable, surviving a host."""

import asyncio
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import nats.errors
import nats.js.errors
import pytest

from headrace.broker.connection import connected
from headrace.broker.server import bundled_server
from headrace.errors import DeadlineError
from headrace.sandbox.box import Sandbox
from headrace.sandbox.jobs import Job, JobQueue
from headrace.sandbox.spec import Limits, SandboxSpec

pytestmark = [pytest.mark.jail, pytest.mark.nats]

HEADRACE = str(Path(sys.executable).with_name("headrace"))


@asynccontextmanager
async def queue_on(folder, *, ack_wait_s=30.0):
    async with (
        bundled_server(folder, port=0) as server,
        connected(server.url, name="test", deadline_s=20) as connection,
    ):
        queue = JobQueue(connection, ack_wait_s=ack_wait_s)
        await queue.create()
        yield server, queue


@asynccontextmanager
async def served(queue, concurrent=2):
    stop = asyncio.Event()
    host = asyncio.create_task(queue.serve(stop, concurrent=concurrent))
    try:
        yield
    finally:
        stop.set()
        await host


def job(name, code, **options):
    argv = ["python3", "-S", "main.py"]
    return Job(id=name, spec=SandboxSpec(), files={"main.py": code.encode()}, argv=argv, **options)


async def test_a_job_has_the_result_of_a_run(tmp_path):
    async with queue_on(tmp_path) as (_, queue), served(queue):
        code = "import sys; print(sys.stdin.read()); sys.exit(3)"
        answer = await queue.run(job("a", code, stdin=b"in"), wait_s=30)
        late = await queue.run(job("b", "while True: pass", limits=Limits(wall_s=0.3)), wait_s=30)
    assert (answer.result.status, answer.result.exit_code) == ("nonzero_exit", 3)
    assert answer.result.stdout == b"in\n"
    assert late.result.status == "timeout"


async def test_a_job_that_cannot_run_has_an_error_and_the_host_goes_on(tmp_path):
    async with queue_on(tmp_path) as (_, queue), served(queue):
        bad = Job(id="bad", spec=SandboxSpec(toolchain="cobol"), files={}, argv=["x"])
        answer = await queue.run(bad, wait_s=30)
        assert answer.result.status == "sandbox_error"
        assert "cobol" in answer.result.detail
        assert (await queue.run(job("next", "print(1)"), wait_s=30)).result.stdout == b"1\n"


async def test_a_result_too_large_to_send_is_an_error_that_says_so_and_the_host_goes_on(tmp_path):
    async with queue_on(tmp_path) as (_, queue), served(queue):
        code = "import sys; sys.stdout.write('x' * 3_000_000); sys.stderr.write('y' * 3_000_000)"
        large = await queue.run(job("large", code, limits=Limits(output=3 << 20)), wait_s=30)
        assert large.result.status == "sandbox_error"
        assert "record of 6000" in large.result.detail
        assert "exceeds the limit of 4194304" in large.result.detail
        assert "smaller Limits.output" in large.result.detail
        assert (await queue.run(job("next", "print(1)"), wait_s=30)).result.stdout == b"1\n"


async def test_a_result_fits_what_the_broker_takes(tmp_path, monkeypatch):
    async with queue_on(tmp_path) as (_, queue), served(queue):
        monkeypatch.setattr(queue._connection.nc, "_max_payload", 100_000)
        large = await queue.run(job("large", "print('x' * 100_000)"), wait_s=30)
        assert "exceeds the limit of 98976" in large.result.detail
        assert (await queue.run(job("next", "print(1)"), wait_s=30)).result.stdout == b"1\n"


async def test_a_keeper_that_does_not_answer_is_an_error_of_the_job(tmp_path, monkeypatch):
    async def late(*_, **__):
        monkeypatch.undo()
        raise DeadlineError("the sandbox keeper did not answer 'start'")

    monkeypatch.setattr(Sandbox, "run", late)
    async with queue_on(tmp_path) as (_, queue), served(queue):
        answer = await queue.run(job("late", "print(1)"), wait_s=30)
        assert answer.result.status == "sandbox_error"
        assert "did not answer 'start'" in answer.result.detail
        assert (await queue.run(job("next", "print(1)"), wait_s=30)).result.stdout == b"1\n"


@contextmanager
def fetches(queue, monkeypatch, fetch):
    """Let `fetch(real)` stand for the fetching of jobs."""
    bind = queue._connection.js.pull_subscribe_bind

    async def binding(*args, **options):
        pull = await bind(*args, **options)
        real = pull.fetch
        pull.fetch = lambda *args, **options: fetch(real(*args, **options))
        return pull

    with monkeypatch.context() as patch:
        patch.setattr(queue._connection.js, "pull_subscribe_bind", binding)
        yield


async def test_a_host_outlasts_a_broker_that_refuses_for_a_moment(tmp_path, monkeypatch):
    refusals = [nats.js.errors.ServiceUnavailableError(), nats.errors.NoRespondersError()]

    async def refused(real):
        if not refusals:
            return await real
        real.close()
        raise refusals.pop()

    async with queue_on(tmp_path) as (_, queue):
        with fetches(queue, monkeypatch, refused):
            async with served(queue, concurrent=1):
                answer = await queue.run(job("a", "print(1)"), wait_s=30)
    assert not refusals
    assert answer.result.status == "ok"


async def test_a_cancelled_host_ends_though_a_request_swallowed_the_cancellation(
    tmp_path, monkeypatch
):
    asked = asyncio.Event()

    async def swallowing(real):
        asked.set()
        try:
            return await real
        except asyncio.CancelledError:
            raise nats.errors.TimeoutError from None

    async with queue_on(tmp_path) as (_, queue):
        with fetches(queue, monkeypatch, swallowing):
            host = asyncio.create_task(queue.serve(asyncio.Event(), concurrent=2))
            await asked.wait()
            host.cancel()
            ended, _ = await asyncio.wait({host}, timeout=10)
            host.cancel()
    assert ended


async def test_the_same_job_twice_runs_once(tmp_path):
    async with queue_on(tmp_path) as (_, queue), served(queue):
        code = "import os; print(os.urandom(8).hex())"
        first = await queue.run(job("same", code), wait_s=30)
        again = await queue.run(job("same", code), wait_s=30)
    assert first == again


async def test_a_job_runs_though_the_answer_to_its_start_is_lost(tmp_path, monkeypatch):
    async with queue_on(tmp_path) as (_, queue):
        publish = queue._connection.js.publish
        lost: list[object] = []

        async def losing(subject, *args, **options):
            answer = await publish(subject, *args, **options)
            if ".start." in subject and not lost:
                lost.append(answer)
                raise nats.errors.TimeoutError
            return answer

        monkeypatch.setattr(queue._connection.js, "publish", losing)
        async with served(queue):
            answer = await queue.run(job("a", "print(1)"), wait_s=30)
    assert lost
    assert (answer.result.status, answer.result.stdout) == ("ok", b"1\n")


async def test_without_a_host_the_wait_ends(tmp_path):
    async with queue_on(tmp_path) as (_, queue):
        with pytest.raises(DeadlineError, match="no sandbox host answered job x"):
            await queue.run(job("x", ""), wait_s=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_job_whose_host_is_killed_runs_again_only_if_it_may(tmp_path, repeatable):
    async with queue_on(tmp_path, ack_wait_s=2.0) as (server, queue):
        host = await asyncio.create_subprocess_exec(
            *(HEADRACE, "sandbox", "serve", "--broker", server.url, "--ack-wait", "2"),
            stdout=asyncio.subprocess.PIPE,
            env={"HOME": str(tmp_path)},
        )
        assert host.stdout is not None
        assert b"serving jobs" in await host.stdout.readline()
        assert (tmp_path / ".cache" / "headrace" / "preflight.json").is_file()
        code = "import time; time.sleep(2); print('done')"
        waiting = asyncio.create_task(queue.run(job("j", code, repeatable=repeatable), wait_s=60))
        started = await queue._connection.nc.subscribe("headrace-jobs.start.*")
        await started.next_msg(30)
        host.kill()
        await host.wait()
        async with served(queue):
            answer = await waiting
    if repeatable:
        assert (answer.result.status, answer.result.stdout) == ("ok", b"done\n")
    else:
        assert answer.result.status == "sandbox_error"
        assert "ended before it answered" in answer.result.detail
