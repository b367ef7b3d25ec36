"""The learner's side of weight broadcasts: memberships and rounds.

A round: prepare (every actor that answers in time is in) -> join (only if the membership changed)
-> begin -> buckets -> commit (each actor verifies, then applies). A round that fails costs its
deadline at most; whoever missed it pulls.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import nats.errors
import torch
from nats.aio.client import Client

from headrace.broker.broadcast import BroadcastGroup, open_store
from headrace.broker.records import decode, encode
from headrace.broker.subjects import RunNames
from headrace.broker.weights import (
    Answer,
    Begin,
    Commit,
    Control,
    Join,
    Manifest,
    Offer,
    Prepare,
)
from headrace.errors import RecordError, WeightError

logger = logging.getLogger(__name__)

_JOIN_S = 10.0
_CLOSE_S = 5.0


@dataclass(frozen=True)
class Membership:
    """A built group: actor `members[i]` is rank i + 1."""

    group: BroadcastGroup
    members: tuple[str, ...]


class Broadcaster:
    """Sends versions to the actors that are there; never raises because one of them is not."""

    def __init__(
        self,
        nc: Client,
        names: RunNames,
        *,
        lineage: int,
        interface: str,
        round_s: float,
        prepare_s: float = 3.0,
        device: torch.device,
    ) -> None:
        """Listen for actors.

        Args:
            nc: connection to the broker.
            names: names of the run.
            lineage: of this learner; part of the memberships' names.
            interface: address on which the store listens and buckets are sent.
            round_s: deadline of the buckets and of the commit, in seconds.
            prepare_s: how long an actor may take to answer; one that does not is left out.
            device: a CUDA device broadcasts by NCCL; the CPU by gloo.
        """
        self._nc = nc
        self._names = names
        self._lineage = lineage
        self._interface = interface
        self._round_s = round_s
        self._prepare_s = prepare_s
        self._device = device
        self._store = open_store(interface, timeout_s=_JOIN_S)
        self._membership: Membership | None = None
        self._numbered = 0

    @property
    def epoch(self) -> str:
        """Name of the membership that stands; empty if none."""
        return self._membership.group.epoch if self._membership is not None else ""

    async def send(
        self, manifest: Manifest, subject: str, flat: torch.Tensor, actors: Sequence[str]
    ) -> list[str]:
        """Broadcast a version whose manifest is stored at `subject`; returns who verified it."""
        prepare = Prepare(version=manifest.version, lineage=manifest.lineage, subject=subject)
        answers = await self._ask(actors, prepare, self._prepare_s)
        ready = tuple(sorted(actor for actor, answer in answers.items() if answer.ok))
        if not ready:
            return []
        try:
            membership = await self._membership_of(ready, answers)
            begin = Begin(
                epoch=membership.group.epoch, version=manifest.version, lineage=manifest.lineage
            )
            begun = await self._ask(ready, begin, self._prepare_s)
            refused = [actor for actor in ready if actor not in begun or not begun[actor].ok]
            if refused:
                raise WeightError(f"actors {', '.join(refused)} did not begin")
            await asyncio.to_thread(
                membership.group.transfer,
                flat,
                manifest.bucket_bytes,
                deadline_s=self._round_s,
            )
        except WeightError as error:
            logger.warning("broadcast of weights %d ended: %s", manifest.version, error)
            self._drop()
            return []
        commit = Commit(
            version=manifest.version, lineage=manifest.lineage, weights_hash=manifest.weights_hash
        )
        verified = await self._ask(ready, commit, self._round_s)
        for actor in ready:
            if actor not in verified or not verified[actor].ok:
                reason = verified[actor].reason if actor in verified else "no answer"
                logger.warning(
                    "actor %s did not take weights %d: %s", actor, manifest.version, reason
                )
                self._drop()
        return [actor for actor, answer in verified.items() if answer.ok]

    async def offer(self, version: int, lineage: int, actors: Sequence[str]) -> None:
        """Tell actors that a version can be pulled."""
        data = encode(Offer(version=version, lineage=lineage))
        for actor in actors:
            # an actor that gets no offer finds the version by its poll
            with contextlib.suppress(nats.errors.Error):
                await self._nc.publish(self._names.control(actor), data)

    async def close(self) -> None:
        """Leave the membership and close the store."""
        if self._membership is not None:
            await asyncio.to_thread(self._membership.group.close().join, _CLOSE_S)
            self._membership = None

    async def _membership_of(
        self, ready: tuple[str, ...], answers: dict[str, Answer]
    ) -> Membership:
        held = self._membership
        if (
            held is not None
            and held.members == ready
            and all(answers[actor].epoch == held.group.epoch for actor in ready)
        ):
            return held
        self._numbered += 1
        epoch = f"{self._lineage}.{self._numbered}"
        started = time.monotonic()
        joins = {
            actor: Join(
                epoch=epoch,
                rank=rank,
                size=len(ready) + 1,
                host=self._interface,
                port=self._store.port,
                timeout_s=_JOIN_S,
            )
            for rank, actor in enumerate(ready, 1)
        }
        building = asyncio.create_task(asyncio.to_thread(self._build, epoch, len(ready) + 1))
        joined = await asyncio.gather(
            *(self._ask([actor], join, 2 * _JOIN_S) for actor, join in joins.items())
        )
        group = await building
        # The old membership is left only now that the new one stands.
        self._drop()
        self._membership = Membership(group, ready)
        absent = [
            a for a, part in zip(ready, joined, strict=True) if a not in part or not part[a].ok
        ]
        if absent:
            raise WeightError(f"actors {', '.join(absent)} did not join membership {epoch}")
        logger.info(
            "membership %s of %d actors built in %.1f s",
            epoch,
            len(ready),
            time.monotonic() - started,
        )
        return self._membership

    def _build(self, epoch: str, size: int) -> BroadcastGroup:
        return BroadcastGroup(
            self._store,
            epoch=epoch,
            rank=0,
            size=size,
            address=self._interface,
            timeout_s=_JOIN_S,
            device=self._device,
        )

    def _drop(self) -> None:
        if self._membership is not None:
            self._membership.group.close()
            self._membership = None

    async def _ask(
        self, actors: Sequence[str], question: Control, deadline_s: float
    ) -> dict[str, Answer]:
        """Answers of those who gave one in time."""
        data = encode(question)

        async def ask(actor: str) -> tuple[str, Answer] | None:
            subject = self._names.control(actor)
            try:
                reply = await self._nc.request(subject, data, timeout=deadline_s)
                return actor, decode(reply.data, Answer, where=subject)
            except (nats.errors.Error, RecordError, msgspec.MsgspecError) as error:
                logger.info("actor %s: no answer to %s: %s", actor, type(question).__name__, error)
                return None

        found = await asyncio.gather(*(ask(actor) for actor in actors))
        return dict(item for item in found if item is not None)
