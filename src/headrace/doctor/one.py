"""The process of one check: a run's configuration on standard input, findings on the last line.

python -P -m headrace.doctor.one MODULE:FUNCTION < config.json
"""

import importlib
import sys

import msgspec

from headrace.config import from_json


def main() -> None:
    """Call the function and print what it found as JSON."""
    module, _, function = sys.argv[1].partition(":")
    given = sys.stdin.buffer.read()
    config = from_json(given, where="standard input") if given else None
    check = vars(importlib.import_module(f"headrace.doctor.{module}"))[function]
    line = msgspec.json.encode(check(config))
    sys.stdout.flush()
    # behind whatever libraries printed
    sys.stdout.buffer.write(b"\n" + line + b"\n")


if __name__ == "__main__":
    main()
