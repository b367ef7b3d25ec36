"""Admission: first come first served, within what there is, waits that end."""

import asyncio

import pytest

from headrace.errors import SandboxBusyError, SandboxError
from headrace.sandbox.admission import Admission


async def test_promised_cpus_exceed_what_there_is_by_less_than_one_request():
    admission = Admission(cpus=2.0, memory=1000)
    used = peak = 0.0

    async def run():
        nonlocal used, peak
        await admission.take(0.7, 10)
        used += 0.7
        peak = max(peak, used)
        await asyncio.sleep(0)
        used -= 0.7
        admission.give(0.7, 10)

    await asyncio.gather(*(run() for _ in range(64)))
    assert peak == pytest.approx(2.1)
    assert admission.waiting == 0


async def test_a_scorer_is_not_kept_waiting_by_tools_that_sleep():
    admission = Admission(cpus=1.0, memory=1000)
    for _ in range(49):
        await admission.take(0.02, 1)
    await asyncio.wait_for(admission.take(1.0, 1), 1)
    waiting = asyncio.create_task(admission.take(0.02, 1))
    await asyncio.sleep(0)
    assert admission.waiting == 1, "the scorer has the rest and more"
    admission.give(1.0, 1)
    await waiting


async def test_memory_is_never_promised_twice():
    admission = Admission(cpus=64.0, memory=100)
    await admission.take(1.0, 60)
    second = asyncio.create_task(admission.take(1.0, 60))
    await asyncio.sleep(0)
    assert admission.waiting == 1
    admission.give(1.0, 60)
    await second


async def test_a_small_request_does_not_pass_a_large_one():
    admission = Admission(cpus=2.0, memory=100)
    order = []

    async def run(name, cpus):
        await admission.take(cpus, 1)
        order.append(name)

    await admission.take(2.0, 1)
    tasks = [asyncio.create_task(run(*job)) for job in (("large", 2.0), ("small", 0.1))]
    await asyncio.sleep(0)
    assert order == []
    admission.give(2.0, 1)
    await tasks[0]
    assert order == ["large"]
    admission.give(2.0, 1)
    await tasks[1]


async def test_a_request_for_no_memory_passes_those_that_wait_for_memory():
    admission = Admission(cpus=2.0, memory=100)
    await admission.take(0.0, 100)
    shells = [asyncio.create_task(admission.take(0.0, memory)) for memory in (60, 10)]
    await asyncio.sleep(0)
    await asyncio.wait_for(admission.take(2.0, 0), 1)
    command = asyncio.create_task(admission.take(0.5, 0))
    await asyncio.sleep(0)
    assert admission.waiting == 3
    admission.give(2.0, 0)
    await asyncio.wait_for(command, 1)
    assert admission.waiting == 2, "what needs memory keeps its order"
    admission.give(0.0, 100)
    await asyncio.gather(*shells)


async def test_a_request_that_waits_for_cpu_alone_is_passed_by_none():
    admission = Admission(cpus=1.0, memory=100)
    await admission.take(0.5, 100)
    run = asyncio.create_task(admission.take(1.0, 60))
    await asyncio.sleep(0)
    await asyncio.wait_for(admission.take(0.5, 0), 1)
    command = asyncio.create_task(admission.take(0.5, 0))
    await asyncio.sleep(0)
    admission.give(0.0, 100)
    admission.give(0.5, 0)
    await asyncio.wait_for(run, 1)
    assert not command.done()
    admission.give(1.0, 60)
    await command


async def test_a_request_beyond_the_host_fails_at_once():
    admission = Admission(cpus=2.0, memory=100)
    with pytest.raises(SandboxError, match="can never be admitted"):
        await admission.take(3.0, 1)
    with pytest.raises(SandboxError, match="can never be admitted"):
        await admission.take(1.0, 101)


async def test_a_full_queue_fails_at_once():
    admission = Admission(cpus=1.0, memory=100, max_waiting=1)
    await admission.take(1.0, 1)
    waiting = asyncio.create_task(admission.take(1.0, 1))
    await asyncio.sleep(0)
    with pytest.raises(SandboxBusyError, match="1 runs wait"):
        await admission.take(1.0, 1)
    admission.give(1.0, 1)
    await waiting


async def test_a_full_queue_does_not_keep_out_what_need_not_wait():
    admission = Admission(cpus=1.0, memory=100, max_waiting=1)
    await admission.take(0.0, 100)
    waiting = asyncio.create_task(admission.take(0.0, 100))
    await asyncio.sleep(0)
    await asyncio.wait_for(admission.take(0.5, 0), 1)
    admission.give(0.0, 100)
    await waiting


async def test_a_wait_ends_at_its_deadline_and_leaves_the_queue():
    admission = Admission(cpus=1.0, memory=100, wait_s=0.01)
    await admission.take(1.0, 1)
    with pytest.raises(SandboxBusyError, match=r"0\.01 s"):
        await admission.take(1.0, 1)
    assert admission.waiting == 0


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_wait_takes_nothing(granted):
    admission = Admission(cpus=1.0, memory=100)
    await admission.take(1.0, 1)
    waiting = asyncio.create_task(admission.take(1.0, 1))
    await asyncio.sleep(0)
    if granted:
        admission.give(1.0, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not granted:
        admission.give(1.0, 1)
    await admission.take(1.0, 1)
