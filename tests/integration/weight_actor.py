"""Actors reduced to their weight path; run as a script, one of them in a process of its own."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import torch
from nats.aio.msg import Msg

from headrace.actor.engine import ApplyReport
from headrace.actor.receiver import Received, WeightReceiver
from headrace.broker import leases
from headrace.broker.broadcast import BroadcastGroup, reach_store
from headrace.broker.connection import Connection, connected
from headrace.broker.host_weights import HostWeights
from headrace.broker.records import decode, encode
from headrace.broker.subjects import RunNames
from headrace.broker.weight_channel import WeightChannel
from headrace.broker.weights import Answer, Begin, Control, Join, Prepare
from headrace.errors import EngineError, WeightError

WAIT_S = 300.0
"""Bounds what ends by itself."""
ROUND_S = 60.0
"""Of learners and actors, and of the meeting of a group: a busy machine must not end a round."""
LEASE_S = 600
"""The actors here announce themselves once."""


@dataclass
class FakeEngine:
    """Keeps a copy of what it was given, and whether it was ever given less than a whole."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    fails: bool = False

    async def apply(self, weights: HostWeights, *, version: int) -> ApplyReport:
        await asyncio.sleep(0)
        if self.fails:
            raise EngineError("the fake engine failed")
        self.tensors = {name: tensor.clone() for name, tensor in weights.tensors().items()}
        self.versions.append(version)
        return ApplyReport(0.0, 0.0)


async def announce(connection: Connection, names: RunNames, ident: str) -> None:
    await leases.renew(
        connection,
        names,
        leases.Lease(role="actor", id=ident, pid=0, host="h", started=0.0, status="sampling"),
    )


@dataclass
class Actor:
    engine: FakeEngine
    receiver: WeightReceiver
    received: list[Received]


@contextlib.asynccontextmanager
async def actor(
    connection: Connection, names: RunNames, ident: str, *, round_s: float = ROUND_S
) -> AsyncIterator[Actor]:
    engine = FakeEngine()
    received: list[Received] = []
    receiver = WeightReceiver(
        connection,
        names,
        engine,
        ident=ident,
        round_s=round_s,
        device=torch.device("cpu"),
        on_applied=received.append,
    )
    async with receiver:
        await announce(connection, names, ident)
        await connection.nc.flush()
        yield Actor(engine, receiver, received)


class HandMadePeer:
    """A member that speaks the control protocol by hand, to misbehave at a chosen moment."""

    def __init__(self, connection: Connection, names: RunNames, ident: str) -> None:
        self.connection, self.names, self.ident = connection, names, ident
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.die_at = -1
        self._tasks: list[asyncio.Task[None]] = []

    async def listen(self) -> None:
        await self.connection.nc.subscribe(self.names.control(self.ident), cb=self._on)
        await announce(self.connection, self.names, self.ident)
        await self.connection.nc.flush()

    async def _on(self, message: Msg) -> None:
        if not message.reply:
            return
        request: object = decode(message.data, Control, where="peer")  # type: ignore[arg-type]
        epoch = ""
        match request:
            case Prepare():
                manifest = await WeightChannel(self.connection, self.names).manifest(
                    request.subject
                )
                self.memory = HostWeights(manifest.layout)
                self.bucket_bytes = manifest.bucket_bytes
            case Join():
                self.group = await asyncio.to_thread(
                    BroadcastGroup,
                    reach_store(request.host, request.port, timeout_s=ROUND_S),
                    epoch=request.epoch,
                    rank=request.rank,
                    size=request.size,
                    address="127.0.0.1",
                    timeout_s=ROUND_S,
                    device=torch.device("cpu"),
                )
                epoch = request.epoch
            case Begin():
                self._tasks.append(asyncio.create_task(self._receive()))
        answer = Answer(ok=True, reason="", version=-1, lineage=-1, epoch=epoch)
        await message.respond(encode(answer))

    async def _receive(self) -> None:
        self.begun.set()
        await self.go.wait()

        def received(index: int) -> None:
            if index == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        with contextlib.suppress(WeightError):
            await asyncio.to_thread(
                self.group.transfer,
                self.memory.flat,
                self.bucket_bytes,
                deadline_s=ROUND_S,
                received=received,
            )


async def die_mid_bucket(url: str, names: RunNames) -> None:
    """Be a member that is killed when the fourth bucket has come."""
    async with connected(url, name="dying", deadline_s=WAIT_S) as connection:
        peer = HandMadePeer(connection, names, "dying")
        peer.die_at = 3
        peer.go.set()
        await peer.listen()
        await asyncio.Event().wait()


async def serve(url: str, names: RunNames) -> None:
    """Be an actor until killed."""
    async with (
        connected(url, name="process", deadline_s=WAIT_S) as connection,
        actor(connection, names, "process"),
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    leases.TTL_S = LEASE_S
    role = {"die": die_mid_bucket, "serve": serve}[sys.argv[1]]
    asyncio.run(role(sys.argv[2], RunNames(sys.argv[3])))
