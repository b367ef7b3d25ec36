"""What was said in one sample: its tokens as text, by role and policy version."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.broker.records import (
    ROLE_ENVIRONMENT,
    ROLE_PROMPT,
    ROLE_SAMPLED,
    Span,
    Trajectory,
)
from headrace.config import Config
from headrace.runfolder import existing_checkpoints

ROLES = {ROLE_PROMPT: "prompt", ROLE_SAMPLED: "sampled", ROLE_ENVIRONMENT: "environment"}
_TOKENIZER = "tokenizer.json"


class Segment(msgspec.Struct, kw_only=True):
    """A contiguous piece of a trajectory: one role, and one policy version where it was sampled."""

    role: str
    start: int
    end: int
    """Token positions `[start, end)`."""
    text: str
    version: int | None = None
    logprob_mean: float | None = None
    """Of the sampler, nats a token."""
    logprob_min: float | None = None


class Decoder:
    """Token ids to text with the run's own tokenizer, or to numbers where there is none to load.

    Attributes:
        note: says why token ids are shown; empty where text is.
    """

    def __init__(self, config: Config) -> None:
        """Find the tokenizer in the newest checkpoint, else beside the model."""
        run_dir, model = Path(config.run.dir), Path(config.model.path)
        folders = (*reversed(existing_checkpoints(run_dir)), model)
        paths = [path for folder in folders if (path := folder / _TOKENIZER).is_file()]
        self.note = ""
        self._decode: Callable[[list[int]], str] = _numbers
        if not paths:
            self.note = (
                f"no {_TOKENIZER} in a checkpoint of {run_dir} or in model.path {model}: "
                "token ids are shown"
            )
            return
        from tokenizers import Tokenizer

        try:
            # from_file would raise a bare Exception
            tokenizer = Tokenizer.from_buffer(paths[0].read_bytes())
        except (OSError, ValueError) as error:
            self.note = f"{paths[0]} cannot be loaded ({error}): token ids are shown"
            return

        def text(ids: list[int]) -> str:
            # the records of a run may hold ids that its learner refuses
            if min(ids, default=0) < 0:
                return _numbers(ids)
            return str(tokenizer.decode(ids, skip_special_tokens=False))

        self._decode = text

    def __call__(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._decode(list(ids))


def segments(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[Segment]:
    """The pieces of a trajectory in order.

    A character whose bytes lie in two pieces is decoded as U+FFFD in both.
    """
    tokens = [int(token) for token in trajectory.tokens.numpy().tolist()]
    logprobs = [float(value) for value in trajectory.logprobs.numpy().tolist()]
    found: list[Segment] = []
    taken = 0
    for role in trajectory.roles:
        if role.value != ROLE_SAMPLED:
            text = decode(tokens[role.start : role.end])
            found.append(Segment(role=ROLES[role.value], start=role.start, end=role.end, text=text))
            continue
        for part in _within(trajectory.versions, role):
            values = logprobs[taken : taken + part.end - part.start]
            taken += len(values)
            found.append(
                Segment(
                    role=ROLES[ROLE_SAMPLED],
                    start=part.start,
                    end=part.end,
                    text=decode(tokens[part.start : part.end]),
                    version=part.value,
                    logprob_mean=sum(values) / len(values),
                    logprob_min=min(values),
                )
            )
    return found


def _within(spans: Sequence[Span], role: Span) -> list[Span]:
    """The parts of policy-version spans that lie inside one span of sampled tokens."""
    cut = [Span(s.value, max(s.start, role.start), min(s.end, role.end)) for s in spans]
    return [span for span in cut if span.start < span.end]


def _numbers(ids: list[int]) -> str:
    return " ".join(map(str, ids))
