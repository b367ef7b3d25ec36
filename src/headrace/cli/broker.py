"""`headrace broker`: serves the bundled NATS server."""

import argparse
from pathlib import Path

from headrace.cli.runargs import USAGE, resolve
from headrace.cli.runargs import add_arguments as add_run_arguments
from headrace.config import Config

HELP = f"""Serve the message broker: a nats-server with JetStream that syncs every write.

Its data lie in <run.dir>/broker, its address is broker.url. It listens on loopback only, unless
--credentials names a file with an authorization block.

{USAGE}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--credentials", metavar="FILE", help="nats-server authorization (and tls) block to include"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = resolve(args.items)
    from headrace.monitor.logs import setup_logging
    from headrace.process import run_until_stopped

    run_dir = Path(config.run.dir)
    setup_logging("broker", "", run_dir, run=config.run_name)
    credentials = str(Path(args.credentials).resolve()) if args.credentials else None
    run_until_stopped(_serve(config, run_dir / "broker", credentials))
    return 0


async def _serve(config: Config, store: Path, credentials: str | None) -> None:
    import logging
    import time

    from headrace.broker import leases
    from headrace.broker.connection import connected
    from headrace.broker.server import bundled_server, parse_url
    from headrace.broker.subjects import RunNames
    from headrace.errors import BrokerError
    from headrace.process import lease, leased, new_ident

    host, port = parse_url(config.broker.url)
    names, ident, started = RunNames(config.run_name), new_ident(), time.time()
    async with (
        bundled_server(store, host=host, port=port, credentials=credentials) as server,
        connected(config.broker.url, name="broker", deadline_s=10) as connection,
    ):
        await leases.create(connection, names)
        async with leased(
            connection,
            names,
            "broker",
            ident,
            lambda: lease("broker", ident, started=started, status="serving"),
        ):
            logging.getLogger(__name__).info("serving %s from %s", server.url, store)
            code = await server.process.wait()
            raise BrokerError(f"nats-server ended with code {code}; its log is {server.log}")
