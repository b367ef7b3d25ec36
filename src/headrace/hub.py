"""Models by their name on the Hugging Face hub: `org/name`, or `org/name@revision`.

Only configuration, tokenizer and safetensors weights are downloaded, into the cache that all of
Hugging Face's libraries share; what is there already is not fetched again, and serves without a
connection. Whoever is logged in (`hf auth login`) reaches private models too.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from httpx2 import Client, Request

FILES = ["*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors"]
ANSWER_S = 10.0
"""Seconds within which the hub must answer a request, and in which some of it must arrive."""
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
# with what the hub's client refuses of a name, and git of a revision
_NAME = re.compile(
    rf"(?!.*\.\.)(?![^@]*--)(?![^@]*\.git(?:@|$)){_PART}/{_PART}(@[A-Za-z0-9][\w./-]*)?", re.ASCII
)
_REMEDY = "give the folder of a Hugging Face model instead"


def is_name(text: str) -> bool:
    """Whether a text can be the name of a model on the hub; a relative path of two parts can be.

    >>> is_name("org/name@v1.0"), is_name("/models/name"), is_name("name"), is_name("org/a..b")
    (True, False, False, False)
    """
    return _NAME.fullmatch(text) is not None


def fetch(
    name: str,
    *,
    endpoint: str | None = None,
    cache: Path | None = None,
    answer_s: float = ANSWER_S,
) -> Path:
    """Download a model, or find it in the cache.

    How long a whole download may take depends on its size alone, but a hub that falls silent is
    given up, after the library's few tries; an interrupted download goes on where it was.

    Args:
        name: `org/name`, or `org/name@revision` with a branch, tag or commit.
        endpoint: address of the hub; the public one by default.
        cache: folder of the downloads; the shared one of Hugging Face's libraries by default.
        answer_s: seconds without a byte from the hub after which a request has failed.

    Returns:
        Its folder, whose name is the commit.

    Raises:
        ConfigError: the hub has no such model or revision, what it has is no model with weights in
            safetensors, or it cannot be reached and the cache does not hold it.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is not listed
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    model, _, revision = name.partition("@")
    missing = f"model {name!r} is no folder here"
    try:
        # asked by itself, so that what the hub does not have is told from a hub that is away
        HfApi(endpoint=endpoint).model_info(model, revision=revision or None, timeout=answer_s)
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"{missing}, and the hub's {model!r} has no revision {revision!r}: name another one, "
            f"or {_REMEDY}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{missing}, and the hub shows no such model to this user: correct the name, log in "
            f"with `hf auth login` where it is private or gated, or {_REMEDY}"
        ) from error
    except (HTTPError, OSError) as error:
        found = cached(name, cache=cache)
        if found is not None:
            return found
        raise ConfigError(
            f"{missing}, the hub cannot be reached ({error}) and the cache does not hold it: "
            f"connect this machine, or {_REMEDY}"
        ) from error
    try:
        with _impatient(answer_s):
            folder = snapshot_download(
                model,
                revision=revision or None,
                allow_patterns=FILES,
                etag_timeout=answer_s,
                endpoint=endpoint,
                cache_dir=cache,
            )
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigError(f"{missing}, and its download failed ({error}): {_REMEDY}") from error
    _check_model(name, Path(folder))
    return Path(folder)


def _check_model(name: str, folder: Path) -> None:
    """Refuse a repository of data sets, adapters or other formats, before a run begins with it."""
    lacks = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any(folder.glob("model*.safetensors")):
        lacks.append("weights in safetensors")
    if lacks:
        raise ConfigError(
            f"{name!r} of the hub has no {' and no '.join(lacks)}: name a model in the format of "
            f"transformers, or {_REMEDY}"
        )


@contextmanager
def _impatient(answer_s: float) -> Iterator[None]:
    """Give the library's requests a timeout where it gives them none, as it does when it lists."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def bound(request: "Request") -> None:
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            part: answer_s if seconds is None else seconds for part, seconds in given.items()
        }

    def make() -> "Client":
        client = default_client_factory()
        # not the client's own timeout: a request that asks for none overrides that
        client.event_hooks["request"].append(bound)
        return client

    set_client_factory(make)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)


def cached(name: str, *, cache: Path | None = None) -> Path | None:
    """Folder of a model that was downloaded before; None where it was not, or not to its end.

    Args:
        name: as for `fetch`.
        cache: as for `fetch`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    model, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            model,
            revision=revision or None,
            allow_patterns=FILES,
            cache_dir=cache,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder)
