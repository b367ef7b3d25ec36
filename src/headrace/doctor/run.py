"""What a run names: its folder, its model and its domains."""

import tempfile
from pathlib import Path

from headrace import hub
from headrace.config import Config
from headrace.doctor.findings import Finding, failed, not_needed, ok, warning
from headrace.errors import ConfigError
from headrace.models import RECIPES, ensure_model, hub_name, missing_for

_NO_RUN = "no run given"


def folder(config: Config | None) -> list[Finding]:
    """Whether the run folder can be written."""
    if config is None:
        return [not_needed("run folder", _NO_RUN)]
    path = Path(config.run.dir)
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"x")
    except OSError as error:
        return [
            failed(
                "run folder",
                f"{path} cannot be written: {nearest}: {error.strerror}",
                "add another folder to the command: `headrace train RUN.toml run.dir=FOLDER`",
            )
        ]
    return [ok("run folder", f"{path} {'is there' if path.exists() else 'can be made'}")]


def model(config: Config | None) -> list[Finding]:
    """Whether the base model is there, or can be made."""
    if config is None:
        return [not_needed("model", _NO_RUN)]
    path, recipe = Path(config.model.path), config.model.recipe
    name = hub_name(config)
    if name is not None:
        folder = hub.cached(name)
        if folder is None:
            remedy = f"`headrace model fetch {name}`, which the run's start would do as well"
            return [warning("model", f"{name} of the hub is not downloaded yet", remedy)]
        return [ok("model", f"{name} of the hub, in the cache at {folder}")]
    if recipe in RECIPES and not path.exists():
        absent = missing_for(recipe)
        if absent:
            found = f"{path} can't be made: {recipe} needs {', '.join(absent)}"
            return [failed("model", found, "`pip install 'headrace[quickstart]'`")]
        return [ok("model", f"{path} is made at the start, by the recipe {recipe}")]
    try:
        ensure_model(path, recipe)
    except ConfigError as error:
        return [failed("model", str(error), "`headrace model make RECIPE FOLDER`, or model.path=…")]
    absent = [name for name in ("tokenizer_config.json",) if not (path / name).is_file()]
    weights = sorted(path.glob("model*.safetensors"))
    if absent or not weights:
        lacks = ", ".join([*absent, *([] if weights else ["weights in safetensors"])])
        return [failed("model", f"{path} lacks {lacks}", "`headrace model fetch org/name`")]
    size = sum(file.stat().st_size for file in weights)
    return [ok("model", f"{path}, {size / 1e6:.0f} MB of weights")]


def model_folder(config: Config) -> Path | None:
    """Folder of the base model on this machine; None where it is still to be made or downloaded."""
    name = hub_name(config)
    if name is not None:
        return hub.cached(name)
    path = Path(config.model.path)
    return path if config.model.path and (path / "config.json").is_file() else None


def domains(config: Config | None) -> list[Finding]:
    """Whether every domain of the run loads and makes a task."""
    if config is None:
        return [not_needed("domains", _NO_RUN)]
    from headrace.environments.registry import get_domain

    for mix in config.domains:
        try:
            get_domain(mix.id).task(0, split="train", level=mix.level)
        except (ConfigError, ValueError, ImportError) as error:
            return [failed("domains", f"{mix.id}: {error}", "`headrace domain list` shows all")]
    names = ", ".join(f"{mix.id}:{mix.level}" for mix in config.domains)
    if not names:
        return [failed("domains", "the run names none", "`headrace domain list` shows all")]
    return [ok("domains", f"{names} load and make tasks")]
