"""The errors that headrace raises on purpose; anything else that escapes is a bug.

Each message says what was wrong, where, and what to do. The command line prints the message of a
`HeadraceError` on one line and exits with its `exit_code`; other exceptions keep their traceback.
"""


class HeadraceError(Exception):
    """Base of every deliberate error."""

    exit_code = 1


class ConfigError(HeadraceError):
    """A configuration, argument or file that the user gave is wrong."""

    exit_code = 2


class RunMismatchError(HeadraceError):
    """A process and the run it tries to join disagree (configuration, identity, lineage, model)."""

    exit_code = 2


class BrokerError(HeadraceError):
    """The broker is unreachable, refuses an operation, or is not set up as the run requires."""


class LogError(BrokerError):
    """The run log is not what the reader's position says it is: behind, purged beyond, replaced."""


class FencedError(BrokerError):
    """A newer writer of the same role exists; this process must stop before any further effect."""


class RecordError(HeadraceError):
    """A record does not decode, is of the wrong type, or exceeds a limit."""


class DeadlineError(HeadraceError):
    """A wait ended by its deadline; the message names whom or what it waited for."""


class WeightError(HeadraceError):
    """Weights are incomplete, corrupt, of the wrong base, or could not be applied."""


class EngineError(HeadraceError):
    """The inference engine failed or can no longer serve."""


class SandboxError(HeadraceError):
    """The sandbox itself failed, or was asked for something it cannot do. Never the candidate's."""


class ShellEndedError(SandboxError):
    """A persistent shell had ended, by its own doing or by a limit, before a command reached it."""


class TaskError(HeadraceError):
    """A domain produced a task, session or verdict that breaks the environment protocol."""


class TrainingError(HeadraceError):
    """A batch cannot be trained: not finite, empty, or sampled by a version that does not exist."""


class CheckpointError(HeadraceError):
    """A checkpoint cannot be written, or is incomplete, corrupt or of another model."""


class SandboxBusyError(SandboxError):
    """The queue for jails on this host is full, or a run waited in it past its deadline."""


class CollectionError(HeadraceError):
    """A workspace holds what the collection rules refuse: links, too many or too large files."""


class ExportError(HeadraceError):
    """A destination of metrics can no longer be reached; logged, and never the end of a run."""
