"""The preflight: limits are attacked once for each boot, and what does not hold is said aloud."""

import json
import logging

import msgspec
import pytest

from headrace.sandbox import preflight
from headrace.sandbox.box import Sandbox
from headrace.sandbox.client import shared
from headrace.sandbox.preflight import prove, proven
from headrace.sandbox.spec import SandboxSpec

pytestmark = pytest.mark.jail


@pytest.fixture
def attacks(monkeypatch):
    """The two quickest attacks, and the names of those that were made."""
    made = []
    attack = preflight._attack

    async def noted(each):
        made.append(each.name)
        return await attack(each)

    quick = [each for each in preflight.ATTACKS if each.name in {"no network", "no host files"}]
    monkeypatch.setattr(preflight, "ATTACKS", quick)
    monkeypatch.setattr(preflight, "_attack", noted)
    yield made
    shared().failed = ()


def test_limits_are_attacked_once_until_the_host_boots_again(tmp_path, attacks, monkeypatch):
    cache = tmp_path / "deep" / "preflight.json"
    first = prove(cache=cache)
    assert [proof.held for proof in first.proofs] == [True, True]
    assert prove(cache=cache) == first
    assert len(attacks) == 2
    monkeypatch.setattr(preflight, "_key", lambda held_by: "another boot")
    assert prove(cache=cache).key == "another boot"
    assert len(attacks) == 4
    assert [path.name for path in cache.parent.iterdir()] == ["preflight.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', "\0"])
def test_a_kept_outcome_that_is_damaged_is_made_anew(tmp_path, attacks, caplog, content):
    cache = tmp_path / "preflight.json"
    cache.write_text(content)
    assert prove(cache=cache).failed == []
    assert len(attacks) == 2
    assert "ignored the kept preflight" in caplog.text
    assert len(json.loads(cache.read_text())["proofs"]) == 2


def test_a_cache_that_cannot_be_written_costs_the_next_process_its_time_only(
    tmp_path, attacks, caplog
):
    (tmp_path / "file").touch()
    outcome = prove(cache=tmp_path / "file" / "preflight.json")
    assert outcome.failed == []
    assert "the next process attacks again" in caplog.text


async def test_a_limit_that_does_not_hold_is_logged_and_named_in_every_result(
    tmp_path, attacks, monkeypatch, caplog
):
    broken = msgspec.structs.replace(preflight.ATTACKS[0], held=lambda result: False)
    monkeypatch.setattr(preflight, "ATTACKS", [broken])
    caplog.set_level(logging.WARNING)
    for _ in range(2):  # from the attack, and from what was kept of it
        shared().failed = ()
        caplog.clear()
        await proven(cache=tmp_path / "preflight.json")
        assert f"does not hold {broken.name} on this host" in caplog.text
        async with Sandbox(SandboxSpec()) as box:
            result = await box.run(["/sbin/init", "-c", ":"])
        assert result.isolation.endswith(f"+seccomp without {broken.name}")
    assert attacks == [broken.name] * 2  # among all, and by itself


def test_a_limit_that_holds_when_it_is_attacked_by_itself_holds(tmp_path, attacks, monkeypatch):
    first, *rest = preflight.ATTACKS
    outcomes = iter([False, True])
    hurried = msgspec.structs.replace(first, held=lambda result: next(outcomes))
    monkeypatch.setattr(preflight, "ATTACKS", [hurried, *rest])
    assert prove(cache=tmp_path / "preflight.json").failed == []
    assert attacks == [first.name, *(each.name for each in rest), first.name]
