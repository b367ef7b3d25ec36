"""What one new version of the weights costs, from the learner's tensors to the engine.

The learner's side and one actor's side run in two processes over a bundled broker, with a real
engine. A version changes a given share of all values, as an optimizer step does. One row per way
(broadcast, pulled delta, pulled anchor) goes to benchmarks/results/weight_transfer.jsonl.

    python benchmarks/weight_transfer.py models/smollm2-135m-instruct
"""

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.actor.engine import Engine
from headrace.actor.receiver import Received, WeightReceiver
from headrace.benchrows import store
from headrace.broker import leases
from headrace.broker.connection import Connection, connected
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.config import Weights
from headrace.learner.publisher import WeightPublisher

NAMES = RunNames("benchmark")


async def be_actor(url: str, model: Path) -> None:
    """Serve versions and print one JSON line."""
    async with connected(url, name="actor", deadline_s=20) as connection:
        engine = await Engine.start(
            model, dtype="bfloat16", max_model_len=512, kv_cache_bytes=64 << 20, threads=1
        )
        spent = time.process_time()

        def report(received: Received) -> None:
            nonlocal spent
            now = time.process_time()
            print(json.dumps({**dataclasses.asdict(received), "cpu_s": now - spent}), flush=True)
            spent = now

        receiver = WeightReceiver(connection, NAMES, engine, ident="a", on_applied=report)
        async with receiver:
            print("ready", flush=True)
            await receiver.failed()


async def announce(connection: Connection) -> None:
    lease = leases.Lease(role="actor", id="a", pid=0, host="h", started=0, status="sampling")
    await leases.renew(connection, NAMES, lease)


def change(tensors: dict[str, torch.Tensor], share: float, generator: torch.Generator) -> None:
    """Move a share of all values by about one unit in the last place."""
    for tensor in tensors.values():
        mask = torch.rand(tensor.shape, generator=generator) < share
        tensor[mask] *= 1.01


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    tensors = load_file(arguments.model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with (
            bundled_server(Path(folder)) as server,
            connected(server.url, name="learner", deadline_s=20) as connection,
        ):
            await leases.create(connection, NAMES)
            publisher = WeightPublisher(connection, NAMES, Weights(anchor_every=100), lineage=1)
            actor = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                __file__,
                str(arguments.model),
                "--actor",
                server.url,
                stdout=asyncio.subprocess.PIPE,
            )
            assert actor.stdout is not None
            try:
                async with asyncio.timeout(180):
                    while (await actor.stdout.readline()).strip() != b"ready":
                        pass
                for version in range(1 + 2 * arguments.versions):
                    if version:
                        change(tensors, arguments.share, generator)
                    # Without a lease the actor is no member and has to pull.
                    if version % 2:
                        await announce(connection)
                    else:
                        await leases.release(connection, NAMES, "actor", "a")
                    cpu = time.process_time()
                    report = await publisher.publish(version, tensors)
                    cpu = time.process_time() - cpu
                    if not version % 2:
                        await publisher._broadcaster.offer(version, 1, ["a"])  # type: ignore[union-attr]
                    async with asyncio.timeout(60):
                        line = await actor.stdout.readline()
                    rows.append(
                        {
                            "learner": {
                                **{
                                    key: round(value, 3) if isinstance(value, float) else value
                                    for key, value in dataclasses.asdict(report).items()
                                },
                                "cpu_s": round(cpu, 3),
                            },
                            "actor": {
                                key: round(value, 3) if isinstance(value, float) else value
                                for key, value in json.loads(line).items()
                            },
                        }
                    )
            finally:
                actor.kill()
                await actor.wait()
                await publisher.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", type=float, default=0.1, help="changed values of a version")
    parser.add_argument("--versions", type=int, default=3, help="versions by each way")
    parser.add_argument("--actor", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.actor:
        asyncio.run(be_actor(arguments.actor, arguments.model))
        return
    about = {"model": arguments.model.name, "share": arguments.share}
    for row in asyncio.run(measure(arguments)):
        store(__file__, about | row)


if __name__ == "__main__":
    main()
