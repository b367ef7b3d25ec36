"""The configuration of where a run's metrics go: it decides nothing of what is trained."""

from headrace.configchecks import Section, one_of

_PORTS = 65_535


class Monitor(Section, frozen=True, kw_only=True):
    """Where the learner's metrics go besides `metrics.jsonl`; may differ between processes."""

    tensorboard: bool = True
    """Write TensorBoard curves to `tensorboard/` in the run folder."""
    wandb_project: str = ""
    """Project on Weights & Biases; empty turns it off. Needs the extra `headrace[wandb]`."""
    wandb_mode: str = "online"
    """`online`, with the key of `wandb login`, or `offline`: into `wandb/` in the run folder."""
    prometheus_port: int = 0
    """Port on which the learner serves `/metrics` for Prometheus; 0 turns it off."""
    prometheus_address: str = "127.0.0.1"
    """Address on which it listens; what it shows is open to all who reach it."""

    def __post_init__(self) -> None:
        one_of("wandb_mode", self.wandb_mode, ("online", "offline"))
        if not 0 <= self.prometheus_port <= _PORTS:
            raise ValueError(
                f"prometheus_port must be from 0 to {_PORTS}, got {self.prometheus_port}"
            )
