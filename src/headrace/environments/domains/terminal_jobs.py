"""The jobs that `terminal` asks for: a tree of files at the start, a tree that is wanted.

A tree maps relative paths to states: `folder`, `file:` with the text, or `absent`.
"""

import random
from collections.abc import Callable

from msgspec import Struct

INSIDE = 0.5
"""Share of level 0 whose file is in the folder."""
ABSENT = "absent"
FOLDER = "folder"
_WORDS = (
    "apple bank bear bird boat book bread cake card chair city cloud corn desk door farm fish "
    "flag fork game gate gold green hand hill horse house key king lake lamp leaf lion map milk "
    "moon nest note park pear pink plum queen rain ring road rock room rose salt sand ship shoe "
    "silver snow song star stone sun table tea time tree wall wind wolf wood"
)
NAMES = _WORDS.split()
Tree = dict[str, str]
Turn = tuple[str, str]
"""What is asked, and a command that does it."""
Request = tuple[str, list[str]]
"""A sentence, and the paths that it is about."""


class Job(Struct, frozen=True):
    """What is asked, one request after the other, and by which trees it is judged."""

    requests: list[Request]
    start: Tree
    end: Tree
    commands: list[str]
    """A solution, one command per turn; `{}` is the first word of the last answer."""

    @property
    def key(self) -> str:
        """Equal for jobs with the same prompt; jobs of the same requests have one order."""
        return self.requests[0][0]

    @property
    def wanted(self) -> Tree:
        """State of every path that is at the start, or shall be at the end."""
        return {path: self.end.get(path, ABSENT) for path in {**self.start, **self.end}}


def file(*lines: object) -> str:
    """State of a file with these lines."""
    return "file:" + "\n".join(map(str, lines))


def make_and_write(rng: random.Random) -> Job:
    """A folder to make and a number to write: to a file in it, or first and elsewhere."""
    folder, name = rng.sample(NAMES, 2)
    number = rng.randint(1, 99)
    inside = rng.random() < INSIDE
    path = f"{folder}/{name}" if inside else name
    steps: list[tuple[Request, str]] = [
        ((f"Make the folder {folder}.", [folder]), f"mkdir {folder}"),
        ((f"Write {number} to {path}.", [path]), f"echo {number} > {path}"),
    ]
    if not inside:
        steps.reverse()
    return Job(
        [request for request, _ in steps],
        {},
        {folder: FOLDER, path: file(number)},
        [command for _, command in steps],
    )


def change_two(rng: random.Random) -> Job:
    """Two of five changes to files that are there."""
    names = rng.sample(NAMES, 6)
    start = {name: file(rng.randint(1, 99)) for name in names[:2]}
    start |= {names[2]: FOLDER, f"{names[2]}/{names[3]}": file(rng.randint(1, 99))}
    end = dict(start)
    steps: list[tuple[Request, str]] = []
    for change, name, new in zip(rng.sample(CHANGES, 2), names[:2], names[4:], strict=True):
        before = dict(end)
        sentence, command = change(rng, end, name, new, names[2])
        steps.append(((sentence, changed(before, end)), command))
    steps.sort()
    return Job([request for request, _ in steps], start, end, [command for _, command in steps])


def changed(before: Tree, after: Tree) -> list[str]:
    """Paths whose state differs."""
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]


def _rename(rng: random.Random, tree: Tree, name: str, new: str, folder: str) -> Turn:
    tree[new] = tree.pop(name)
    return f"Rename {name} to {new}.", f"mv {name} {new}"


def _delete(rng: random.Random, tree: Tree, name: str, new: str, folder: str) -> Turn:
    del tree[name]
    return f"Delete {name}.", f"rm {name}"


def _copy(rng: random.Random, tree: Tree, name: str, new: str, folder: str) -> Turn:
    tree[new] = tree[name]
    return f"Copy {name} to {new}.", f"cp {name} {new}"


def _move(rng: random.Random, tree: Tree, name: str, new: str, folder: str) -> Turn:
    tree[f"{folder}/{name}"] = tree.pop(name)
    return f"Move {name} into the folder {folder}.", f"mv {name} {folder}"


def _append(rng: random.Random, tree: Tree, name: str, new: str, folder: str) -> Turn:
    number = rng.randint(1, 99)
    tree[name] += f"\n{number}"
    return f"Append {number} to {name}.", f"echo {number} >> {name}"


CHANGES: list[Callable[[random.Random, Tree, str, str, str], Turn]] = [
    _rename,
    _delete,
    _copy,
    _move,
    _append,
]


def read_first(rng: random.Random) -> Job:
    """One change that depends on what a file holds."""
    return rng.choice((_count, _find, _sort_in))(rng)


def _count(rng: random.Random) -> Job:
    log, new, *words = rng.sample(NAMES, 4)
    start = {log: file(*(rng.choice(words) for _ in range(rng.randint(2, 9))))}
    end = {**start, new: file(start[log].count("\n") + 1)}
    return Job(
        [(f"Write the number of lines of {log} to {new}.", [new])],
        start,
        end,
        [f"wc -l {log}", f"echo {{}} > {new}"],
    )


def _find(rng: random.Random) -> Job:
    new, *names = rng.sample(NAMES, 4)
    words = rng.sample(NAMES, 3)
    start = {name: file(word) for name, word in zip(names, words, strict=True)}
    end = dict(start)
    end[new] = end.pop(names[0])
    return Job(
        [(f"Rename the file that holds {words[0]} to {new}.", changed(start, end))],
        dict(sorted(start.items())),
        end,
        [f"grep -l {words[0]} *", f"mv {{}} {new}"],
    )


def _sort_in(rng: random.Random) -> Job:
    name, sign, inner, *folders = rng.sample(NAMES, 6)
    start = {name: file(rng.randint(1, 99)), sign: file(folders[0])}
    for folder in sorted(folders):
        start |= {folder: FOLDER, f"{folder}/{inner}": file(rng.randint(1, 99))}
    end = dict(start)
    end[f"{folders[0]}/{name}"] = end.pop(name)
    return Job(
        [(f"Move {name} into the folder that {sign} names.", changed(start, end))],
        start,
        end,
        [f"cat {sign}", f"mv {name} {{}}"],
    )


LEVELS: list[tuple[Callable[[random.Random], Job], list[Turn]]] = [
    (
        make_and_write,
        [("Write 7 to red/cat.", "echo 7 > red/cat"), ("Make the folder red.", "mkdir red")],
    ),
    (
        change_two,
        [("Append 5 to dog.", "echo 5 >> dog"), ("Copy red to cat.", "cp red cat")],
    ),
    (
        read_first,
        [
            ("Write the number of lines of red to cat.", "wc -l red"),
            ("3 red\nWrite the number of lines of red to cat.", "echo 3 > cat"),
        ],
    ),
]
"""By level: what draws a job, and the turns of another that are shown before it."""
