"""Writes the folder of a run as its learner would, with the learner's own writers."""

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.broker.records import (
    Array,
    Check,
    Execution,
    Failed,
    Issued,
    Record,
    RunConfig,
    Span,
    Step,
    TaskRef,
    Trajectory,
    Turn,
    Verdict,
    encode,
)
from headrace.broker.runlog import Entry
from headrace.broker.subjects import RunNames
from headrace.config import Config, load, to_json
from headrace.learner.archive import Archive
from headrace.monitor.metrics import MetricsWriter
from headrace.monitor.progress import Progress, Rate, Summary, write_progress, write_summary

Text = Callable[[int, int], str]
DEAD_BROKER = "nats://127.0.0.1:9"
PER_STEP = 2
SIZE = 4


def byte_tokenizer() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Recorder:
    """A run of a few domains: per step two groups of four samples, each trained by the next step.

    Sample `group.1` fails with an assertion, `group.3` of every third group in the environment; the
    version changes in the middle of each completion of `group.2`.
    """

    def __init__(
        self,
        folder: Path,
        domains: tuple[str, ...],
        steps: int,
        text: Text,
        *,
        broker: str = DEAD_BROKER,
    ) -> None:
        self._names, self._domains, self._steps, self._text = RunNames("t"), domains, steps, text
        self._folder, self._broker, self._rng, self._seq = folder, broker, random.Random(0), 0
        self._tokenizer = byte_tokenizer()
        self.config = self._config()
        self._archive = Archive(folder / "archive", "id")

    async def write(self, *, finished: bool = True) -> Config:
        """Write the whole run, with probes at both ends when it is finished."""
        self._configured()
        ordinal = self._probes(0, 0)
        with closing(MetricsWriter(self._folder)) as metrics:
            for version in range(1, self._steps + 1):
                for group in range(ordinal, ordinal + PER_STEP):
                    self._group(group, max(version - 1 - group % 3, 0), "train")
                trained = list(range(ordinal, ordinal + PER_STEP))
                ordinal += PER_STEP
                self._add(self._names.step, Step(version=version, lineage=1, trained=trained,
                          filtered=[], failed=[], position=self._seq, weights_hash="w",
                          metrics={}))  # fmt: skip
                metrics.write(version, self._metrics(version), at=1e9 + 10 * version)
        if finished:
            self._probes(ordinal, self._steps)
        await self._archive.flush()
        self._totals(finished)
        return self.config

    async def begin(self) -> None:
        """Write a run of which the configuration alone is recorded."""
        self._configured()
        await self._archive.flush()

    def _configured(self) -> None:
        self._add(self._names.config, RunConfig(batch_groups=PER_STEP, max_versions=2,
                  group_size=SIZE, steps=self._steps, seed=0, config_hash="h"))  # fmt: skip

    def _config(self) -> Config:
        model = self._folder / "model"
        model.mkdir(parents=True)
        self._tokenizer.save(str(model / "tokenizer.json"))
        settings = [f"run.dir={self._folder}", "run.name=t", f"broker.url={self._broker}",
                    f"model.path={model}", f"learner.steps={self._steps}"]  # fmt: skip
        table = self._folder.parent / "t.toml"
        table.write_text("".join(f'[[domains]]\nid = "{domain}"\n' for domain in self._domains))
        config = load([table], settings)
        (self._folder / "config.json").write_bytes(to_json(config))
        return config

    def _add(self, subject: str, record: Record) -> None:
        self._seq += 1
        self._archive.add(Entry(self._seq, subject, encode(record)))

    def _probes(self, ordinal: int, version: int) -> int:
        for _ in range(3):
            for _domain in self._domains:
                self._group(ordinal, version, "probe")
                ordinal += 1
        return ordinal

    def _group(self, group: int, version: int, purpose: str) -> None:
        size = SIZE if purpose == "train" else 1
        task = TaskRef(domain=self._domains[group % len(self._domains)], level=group % 2,
                       split="train", index=group, hash="h")  # fmt: skip
        self._add(self._names.issued, Issued(ordinal=group, task=task, purpose=purpose,
                  group_size=size, version=version, lineage=1, deadline=1e12, seed=0,
                  seen=0))  # fmt: skip
        for index in range(size):
            record = self.sample(group, index, version)
            self._add(self._names.sample(group, index), record)

    def sample(self, group: int, index: int, version: int) -> Trajectory | Failed:
        """The record of one slot, sampled from `version` on."""
        if index == 3 and group % 3 == 0:
            return Failed(group=group, index=index, attempt=2, actor="a", lineage=1,
                          side="environment", kind="sandbox_error", evidence="no jail")  # fmt: skip
        ok = index == 0 or (index != 1 and self._rng.random() < 0.3 + 0.6 * version / self._steps)
        prompt, first, answer, second = (
            self._tokenizer.encode(part).ids
            for part in (f"question {group}", self._text(group, index), "it printed 4\n", "so 4")
        )
        a = len(prompt)
        b, c = a + len(first), a + len(first) + len(answer)
        end = c + len(second)
        half = (a + b) // 2
        served = [Span(version, a, half), Span(version + 1, half, b)] if index == 2 else []
        count = len(first) + len(second)
        return Trajectory(
            group=group, index=index, attempt=1, actor="a-1", lineage=1,
            tokens=Array.of("int32", prompt + first + answer + second),
            roles=[Span(0, 0, a), Span(1, a, b), Span(2, b, c), Span(1, c, end)],
            versions=[*(served or [Span(version, a, b)]), Span(version + bool(served), c, end)],
            logprobs=Array.of("float32", [-self._rng.random() for _ in range(count)]),
            temperature=1.0,
            verdict=Verdict(
                score=float(ok), success=ok, step_scores=[0.5, float(ok)],
                checks=[Check(name="adds", passed=ok, detail=self._text(group, index))],
                side="" if ok else "model", kind="" if ok else "assertion",
                evidence="" if ok else "4 != 5",
            ),
            turns=[Turn(start=a, end=b, stop="stop", generate_s=0.5, execute_s=0.25),
                   Turn(start=c, end=end, stop="length", generate_s=0.5, execute_s=0.0)],
            executions=[Execution(purpose="tool", status="ok", exit_code=0, signal=None, wall_s=0.2,
                                  cpu_s=0.1, isolation="namespaces", output_sha256="s")],
            queue_s=0.1, wall_s=1.5,
        )  # fmt: skip

    def _metrics(self, version: int) -> dict[str, float]:
        tokens = 100.0 + self._rng.random() * 50
        return {
            "tokens": tokens, "entropy": 1.0 / version, "kl": 0.01, "ess": 0.9, "grad_norm": 1.0,
            "truncated_fraction": 0.01, "logprob_diff_mean": 0.03 + 0.01 * self._rng.random(),
            "lag0/logprob_diff_mean": 0.01, "lag0/tokens": 40.0, "lag2/tokens": 60.0,
        }  # fmt: skip

    def _totals(self, finished: bool) -> None:
        times = {"train": 20.0, "wait for samples": 50.0, "publish weights": 5.0}
        write_progress(self._folder, Progress(version=self._steps, steps=self._steps,
                       phase="done" if finished else "training", started=1e9, updated=1e9 + 75,
                       waiting=times))  # fmt: skip
        if finished:
            write_summary(self._folder, Summary(run="t", version=self._steps, steps=self._steps,
                          before={"d": Rate(n=3, ok=1)}, time_s=times, wall_s=75.0))  # fmt: skip
