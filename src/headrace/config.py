"""The configuration of a run: one tree of frozen structs, read from TOML files and `a.b=value`.

Files are merged from left to right, then the overrides; the result is validated after every layer
so that an error names the file or argument it came from. `resolved` writes the tree into the run
folder. There is no other way to configure a run; no environment variable is read.
"""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

from headrace.configchecks import Section, above, at_least, explain, no_double, one_of, pool_name
from headrace.configlosses import Loss, TruncatedIS
from headrace.configmonitor import Monitor
from headrace.errors import ConfigError

_LEAST_LOG_BYTES = 64 << 20
_SHOWN = 200
"""Characters of an argument that an error repeats."""


class Run(Section, frozen=True, kw_only=True):
    """What run this is and where it lives."""

    dir: str = "runs/run"
    """Folder of the run: resolved configuration, logs, metrics, archive and checkpoints."""
    name: str = ""
    """Name on the broker: 1 to 64 of a-z, 0-9, `-` and `_`; empty means one made of the last part
    of `run.dir`."""
    seed: int = 0
    """Seed of every random choice: curriculum, sampling, task generation."""

    def __post_init__(self) -> None:
        if self.name and not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", self.name):
            raise ValueError(
                f"name must be 1 to 64 of a-z, 0-9, '-' and '_', starting with a letter or digit, "
                f"got {self.name!r}"
            )


class Broker(Section, frozen=True, kw_only=True):
    """How processes find the message broker."""

    url: str = "nats://127.0.0.1:4222"
    """Address of the broker. `headrace train` starts a bundled one when it is on loopback."""
    log_bytes: int = 2 << 30
    """Limit of the run log in bytes, at least 64 MiB; purged below the oldest kept checkpoint."""
    connect_s: float = 60.0
    """Deadline in seconds for reaching the broker, at start and after a loss."""

    def __post_init__(self) -> None:
        at_least(
            "log_bytes",
            self.log_bytes,
            _LEAST_LOG_BYTES,
            "groups are issued only while the log keeps room for every sample of the window, at "
            "its largest, and a reserve",
        )
        above("connect_s", self.connect_s, 0)


class Model(Section, frozen=True, kw_only=True):
    """The language model."""

    path: str = ""
    """Base model: a Hugging Face folder, which is never modified, or `org/name` of the hub, with
    `@revision` where it is not the main branch."""
    recipe: str = ""
    """How to make `model.path` where it does not exist: `smollm2-135m-instruct` or `tiny-llama`."""
    dtype: str = "bfloat16"
    """`bfloat16`, `float16` or `float32`: what is published, sampled from and trained through."""

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, ("bfloat16", "float16", "float32"))


class Actors(Section, frozen=True, kw_only=True):
    """Processes that sample trajectories."""

    count: int = 1
    """Actors that `headrace train` starts; more may join at any time."""
    samples_in_flight: int = 32
    """Samples that one actor runs at the same time; a task is taken while fewer run, so it may be
    exceeded by a group per pool."""
    max_model_len: int = 1024
    """Longest sequence of an episode in tokens."""
    kv_cache_bytes: int = 256 << 20
    """Key-value cache of one actor in bytes."""
    threads: int = 1
    """CPU threads of the engine; ignored on GPUs."""
    pools: list[str] = field(default_factory=lambda: ["default"])
    """Task pools that `headrace train`'s actors serve."""

    def __post_init__(self) -> None:
        at_least("count", self.count, 0)
        at_least("samples_in_flight", self.samples_in_flight, 1)
        at_least("max_model_len", self.max_model_len, 16)
        at_least("kv_cache_bytes", self.kv_cache_bytes, 1 << 20)
        at_least("threads", self.threads, 1)
        if not self.pools:
            raise ValueError("pools must name at least one pool, got []")
        no_double("pools", self.pools)
        for pool in self.pools:
            pool_name("pools", pool)


class Sampling(Section, frozen=True, kw_only=True):
    """How tokens are sampled. There is no truncation: top_p = 1 and top_k = 0 always."""

    temperature: float = 1.0
    """Softmax temperature, at least 0.01; the learner divides its logits by the same number."""
    max_new_tokens: int = 256
    """Upper bound of sampled tokens per turn; a domain may ask for fewer."""

    def __post_init__(self) -> None:
        at_least(
            "temperature",
            self.temperature,
            0.01,
            "the engine samples at 0.01 where less is asked, and the learner would divide by less",
        )
        at_least("max_new_tokens", self.max_new_tokens, 1)


class Attempts(Section, frozen=True, kw_only=True):
    """Deadlines and retries of environment-side failures."""

    max: int = 3
    """Attempts that may be started on a slot before it is recorded as failed."""
    slot_deadline_s: float = 900.0
    """Seconds after issue when an empty slot is decided as failed (`no_actor`)."""
    episode_s: float = 300.0
    """Wall-clock limit of one episode in seconds; exceeding it is the environment's failure."""
    ack_wait_s: float = 30.0
    """Seconds without a heartbeat after which the broker gives a task to another actor."""

    def __post_init__(self) -> None:
        at_least("max", self.max, 1)
        for name in ("slot_deadline_s", "episode_s", "ack_wait_s"):
            above(name, getattr(self, name), 0)


class Staleness(Section, frozen=True, kw_only=True):
    """How far sampling may lag behind training."""

    max_versions: int = 2
    """No token is trained at version v if sampled by weights older than v minus this; 0 is
    synchronous."""

    def __post_init__(self) -> None:
        at_least("max_versions", self.max_versions, 0)


class Learner(Section, frozen=True, kw_only=True):
    """The optimizer side."""

    steps: int = 10
    """Optimizer steps of the run."""
    batch_groups: int = 8
    """Informative groups in a batch; always exactly this many."""
    group_size: int = 8
    """Samples of one task."""
    advantage: str = "group_std"
    """`group_std` (divided by the group's standard deviation), `group_mean` or `leave_one_out`."""
    loss: Loss = field(default_factory=TruncatedIS)
    """Loss and its parameters; `kind` is `truncated_is`, `decoupled_ppo`, `grpo`, `icepop`, `cispo`
    or `reinforce`."""
    step_weight: float = 0.0
    """Share of the step scores in the advantage of a turn, 0 to 1; the rest is the final score.
    Final scores alone decide whether a group has a spread and is trained."""
    shuffle_scores: bool = False
    """Control experiment: permute final scores, and the returns of each turn, within each group, so
    that nothing can be learned."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Moment decay rates of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Largest gradient norm."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    token_budget: int = 4096
    """Tokens of one packed micro-batch."""
    share_prompts: bool = True
    """Compute the common prompt of a group once."""
    threads: int = 1
    """CPU threads of the learner; ignored on GPUs."""
    checkpoint_every: int = 8
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept; the newest is also the resume point."""
    max_filtered: int = 200
    """Groups in a row without reward spread after which the run stops; may differ at a restart."""
    idle_s: float = 600.0
    """Seconds without a new record after which the learner gives up, naming what it waits for; may
    differ at a restart."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_groups",
            "token_budget",
            "threads",
            "checkpoint_every",
            "keep_checkpoints",
            "max_filtered",
        ):
            at_least(name, getattr(self, name), 1)
        at_least("group_size", self.group_size, 2)
        one_of("advantage", self.advantage, ("group_std", "group_mean", "leave_one_out"))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas}")
        for name in ("lr", "weight_decay", "warmup_steps"):
            at_least(name, getattr(self, name), 0)
        if not 0 <= self.step_weight <= 1:
            raise ValueError(f"step_weight must be from 0 to 1, got {self.step_weight}")
        above("clip_grad", self.clip_grad, 0)
        above("idle_s", self.idle_s, 0)


class Weights(Section, frozen=True, kw_only=True):
    """How new weights reach the actors."""

    bucket_bytes: int = 16 << 20
    """Size of one broadcast bucket in bytes."""
    anchor_every: int = 8
    """Versions between full anchors on the broker; deltas in between."""
    interface: str = "127.0.0.1"
    """Address of the network interface on which the learner's broadcast store listens."""
    round_s: float = 30.0
    """Deadline of one broadcast round in seconds; members that miss it are left out."""

    def __post_init__(self) -> None:
        at_least("bucket_bytes", self.bucket_bytes, 4096)
        at_least("anchor_every", self.anchor_every, 1)
        above("round_s", self.round_s, 0)


class DomainMix(Section, frozen=True, kw_only=True):
    """One domain of the run's mix."""

    id: str
    """Identifier of a registered domain; `headrace domain list` shows them."""
    weight: float = 1.0
    """Share of the issued training groups, relative to the other domains."""
    level: int = 0
    """Difficulty level of the tasks."""
    pool: str = "default"
    """Task pool whose actors run this domain."""

    def __post_init__(self) -> None:
        above("weight", self.weight, 0)
        at_least("level", self.level, 0)
        pool_name("pool", self.pool)


class Probes(Section, frozen=True, kw_only=True):
    """Held-out evaluation through the same actors; probes are never trained on."""

    tasks: int = 50
    """Held-out tasks per domain that differ, sampled once each, before the first and after the last
    step; 0 turns probing off."""

    def __post_init__(self) -> None:
        at_least("tasks", self.tasks, 0)


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration of a run."""

    run: Run = field(default_factory=Run)
    """What run this is and where it lives."""
    broker: Broker = field(default_factory=Broker)
    """How processes find the message broker."""
    model: Model = field(default_factory=Model)
    """The language model."""
    actors: Actors = field(default_factory=Actors)
    """Processes that sample trajectories."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are sampled."""
    attempts: Attempts = field(default_factory=Attempts)
    """Deadlines and retries of environment-side failures."""
    staleness: Staleness = field(default_factory=Staleness)
    """How far sampling may lag behind training."""
    learner: Learner = field(default_factory=Learner)
    """The optimizer side."""
    weights: Weights = field(default_factory=Weights)
    """How new weights reach the actors."""
    domains: list[DomainMix] = field(default_factory=list)
    """The domains and their shares."""
    probes: Probes = field(default_factory=Probes)
    """Held-out evaluation."""
    monitor: Monitor = field(default_factory=Monitor)
    """Where metrics go."""

    def __post_init__(self) -> None:
        no_double("domains", [mix.id for mix in self.domains])

    @property
    def run_name(self) -> str:
        """Name of the run on the broker."""
        derived = re.sub(r"[^a-z0-9_-]+", "-", Path(self.run.dir).name.lower()).strip("-_")
        return self.run.name or derived[:64] or "run"


def load(files: list[Path], overrides: list[str]) -> Config:
    """Merge TOML files from left to right, then `a.b=value` overrides, and validate.

    A file that ends in `.json` is read as a resolved configuration.

    Raises:
        ConfigError: a file is missing or not TOML, a key is unknown (the nearest right one is
            named), or a value has the wrong type or range.
    """
    config = Config()
    # from the defaults up, so that a field of a default variant can be set without its `kind`
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for path in files:
        tree = _merge(tree, _read(path))
        config = _convert(tree, str(path))
    for override in overrides:
        tree = _merge(tree, _parse_override(override))
        config = _convert(tree, f"argument {_short(override)!r}")
    return config


def from_json(data: bytes, *, where: str) -> Config:
    """Read a resolved configuration.

    Raises:
        ConfigError: it is not one.
    """
    try:
        tree = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{where}: not a resolved configuration: {error}") from error
    return _convert(tree, where)


def to_json(config: Config) -> bytes:
    """Resolved configuration as readable JSON with every default filled in."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def shared(config: Config) -> dict[str, Any]:
    """What every process of a run must agree on.

    The run folder, the broker's address, where metrics go, how long the learner goes on without
    progress, and what an actor's machine decides (threads, cache, pools, concurrency) may differ.
    """
    tree: dict[str, Any] = msgspec.to_builtins(config)
    del tree["run"]["dir"], tree["run"]["name"], tree["broker"], tree["monitor"]
    del tree["learner"]["max_filtered"], tree["learner"]["idle_s"]
    tree["actors"] = {"max_model_len": config.actors.max_model_len}
    return tree


def fingerprint(config: Config) -> str:
    """Hash of what every process of a run must agree on."""
    return hashlib.sha256(msgspec.json.encode(shared(config), order="sorted")).hexdigest()[:16]


def difference(old: Config, new: Config) -> list[str]:
    """One line `key: old -> new` for each shared value that differs."""
    left, right = _flatten(shared(old)), _flatten(shared(new))
    return [
        f"{key}: {left.get(key, '(absent)')!r} -> {right.get(key, '(absent)')!r}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list):
        pairs = {str(i): item for i, item in enumerate(tree)}.items()
    else:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in pairs:
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _read(path: Path) -> dict[str, Any]:
    stored = path.suffix == ".json"
    try:
        text = path.read_text()
        tree: dict[str, Any] = (
            msgspec.json.decode(text, type=dict[str, Any]) if stored else tomllib.loads(text)
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path}: not {'JSON' if stored else 'TOML'}: {error}") from error
    return tree


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"argument {text!r}: overrides have the form section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"argument {_short(text)!r}: its value cannot be read: {error}"
        ) from error
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree


def _short(argument: str) -> str:
    return argument if len(argument) <= _SHOWN else f"{argument[:_SHOWN]}…"


def _merge(base: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in layer.items():
        old = merged.get(key)
        # a layer that names another variant of a union replaces the table
        if (
            isinstance(value, dict)
            and isinstance(old, dict)
            and ("kind" not in value or value["kind"] == old.get("kind"))
        ):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _convert(tree: dict[str, Any], where: str) -> Config:
    try:
        config = msgspec.convert(tree, Config)
        msgspec.msgpack.encode(config)  # integers of more than 64 bits cannot be
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {explain(str(error), tree, Config)}") from error
    return config
