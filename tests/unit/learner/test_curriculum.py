"""Which tasks a run asks."""

import logging

from headrace.broker.records import TaskRef
from headrace.config import load
from headrace.environments.registry import get_domain
from headrace.learner.curriculum import Curriculum


def prompt(ref: TaskRef) -> str:
    task = get_domain(ref.domain).task(ref.index, split=ref.split, level=ref.level)
    assert task.ref == ref
    return repr(task.messages)


MIX = 'domains=[{id="arithmetic"},{id="terminal",level=1}]'


def test_probes_are_held_out_tasks_that_differ_one_of_each_domain_in_turn():
    curriculum = Curriculum(load([], [MIX, "probes.tasks=40"]))
    probes = [curriculum.probe_task(number) for number in range(curriculum.probes)]
    assert [(probe.domain, probe.level) for probe in probes[:2]] == [
        ("arithmetic", 0),
        ("terminal", 1),
    ]
    assert {probe.split for probe in probes} == {"heldout"}
    assert len({prompt(probe) for probe in probes}) == len(probes) == 80


def test_a_split_with_fewer_tasks_than_probes_is_asked_whole_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO):
        curriculum = Curriculum(load([], ['domains=[{id="arithmetic"}]', "probes.tasks=5000"]))
    prompts = {prompt(curriculum.probe_task(number)) for number in range(curriculum.probes)}
    assert 50 < len(prompts) == curriculum.probes < 5000
    assert f"has {curriculum.probes} held-out tasks, fewer than probes.tasks=5000" in caplog.text


def test_another_process_of_the_same_run_asks_the_same():
    one, other = (Curriculum(load([], [MIX, "run.seed=3"])) for _ in range(2))
    assert [one.train_task(i) for i in range(50)] == [other.train_task(i) for i in range(50)]
    assert [one.probe_task(i) for i in range(one.probes)] == [
        other.probe_task(i) for i in range(other.probes)
    ]
