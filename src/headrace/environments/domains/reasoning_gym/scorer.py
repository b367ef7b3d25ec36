"""An entry of a reasoning-gym dataset and, run as a program in the jail, its score for an answer.

The domain imports `make`; the jail runs this file's text. Both make the entry from dataset, level
and seed, so that nothing of it has to survive JSON. Standard library and reasoning-gym only.
"""

import contextlib
import decimal
import hashlib
import importlib
import importlib.util
import io
import json
import math
import os
import re
import resource
import sys
from typing import Any

VERDICT_FD = 3
ANSWER_CPU_S = 3
"""CPU seconds that scoring an answer may take; real ones take milliseconds."""


def make(name: str, module: str, level: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Make a dataset of one entry.

    Args:
        name: the dataset's name in the library.
        module: where it is defined, below `reasoning_gym`.
        level: 0 for the dataset's own configuration, else the global level of its curriculum.
        seed: seed of the entry, in [0, 2^31).

    Returns:
        The dataset, and the entry with its `question` and `answer`.
    """
    _load(module)
    factory = importlib.import_module("reasoning_gym.factory")
    dataset_class, config_class = factory.DATASETS[name]
    wanted = {"seed": seed, "size": 1}
    if level == 0:
        config = config_class(**wanted)
    else:
        curriculum = factory.CURRICULA[name]()
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration(wanted)
    # some generators print as they go; one sets the precision of all decimals to come
    with (
        contextlib.redirect_stdout(io.StringIO()),
        decimal.localcontext(decimal.Context()),
    ):
        dataset = dataset_class(config=config)
        return dataset, dataset[0]


def digest(question: str) -> str:
    """Hash of a question, by which the jail proves that it made the same entry."""
    return hashlib.sha256(question.encode()).hexdigest()


def _load(module: str) -> None:
    # The library's packages import every dataset, with sympy and matplotlib: over a second in each
    # jail. Made but not run, they let one module be imported alone, in a twentieth of that.
    for package in ("reasoning_gym", f"reasoning_gym.{module.partition('.')[0]}"):
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            if spec is None:
                raise ImportError(f"no package {package}")
            sys.modules[package] = importlib.util.module_from_spec(spec)
    # first, because modules import it in a circle
    importlib.import_module("reasoning_gym.coaching")
    importlib.import_module(f"reasoning_gym.{module}")


def _score(dataset: Any, entry: dict[str, Any], answer: str) -> float | None:
    """Score an answer in a child, so that what it breaks is no verdict: None if it broke anything.

    The library's scorers parse with whatever is at hand; odd answers make them raise, recurse or
    compute for hours.
    """
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(VERDICT_FD)
        # errors quote the answer, and more output than allowed would end the jail
        for noisy in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), noisy)
        resource.setrlimit(resource.RLIMIT_CPU, (ANSWER_CPU_S, ANSWER_CPU_S))
        score = float(dataset.score_answer(answer, entry))
        os.write(writable, json.dumps(score).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as lines:
        told = lines.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        return None
    score = float(json.loads(told))
    return score if math.isfinite(score) and 0 <= score <= 1 else None


def main() -> None:
    """Judge the answer that follows the task's line on standard input."""
    line, _, given = sys.stdin.buffer.read().partition(b"\n")
    task = json.loads(line)
    answer = given.decode("utf-8", "replace")
    dataset, entry = make(task["name"], task["module"], task["level"], task["seed"])
    if digest(entry["question"]) != task["digest"]:
        raise SystemExit("the jail made another entry than the task's")
    score = None
    if re.fullmatch(task["alphabet"], answer):
        score = _score(dataset, entry, answer)
        # whose fault is it? A scorer that cannot judge the right answer is the environment's
        if score is None and _score(dataset, entry, task["answer"]) != 1:
            raise SystemExit("the scorer fails on the right answer as well")
    os.write(VERDICT_FD, json.dumps(score).encode())


if __name__ == "__main__":
    main()
