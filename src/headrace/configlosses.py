"""The configuration of each policy loss; `kind` chooses among them."""

from headrace.configchecks import Section, above, at_least


class TruncatedIS(Section, frozen=True, kw_only=True, tag_field="kind", tag="truncated_is"):
    """Policy gradient with the importance ratio truncated from above."""

    cap: float = 2.0
    """Largest importance ratio."""

    def __post_init__(self) -> None:
        above("cap", self.cap, 0)


class DecoupledPPO(Section, frozen=True, kw_only=True, tag_field="kind", tag="decoupled_ppo"):
    """PPO whose proximal policy is the learner's at the start of the step, not the sampler."""

    clip: float = 0.2
    """Clip range of the ratio to the proximal policy."""
    cap: float = 5.0
    """Largest behaviour weight (proximal over sampler)."""

    def __post_init__(self) -> None:
        above("clip", self.clip, 0)
        above("cap", self.cap, 0)


class GRPO(Section, frozen=True, kw_only=True, tag_field="kind", tag="grpo"):
    """Clipped surrogate against the sampler."""

    clip_low: float = 0.2
    """Lower clip range of the ratio."""
    clip_high: float = 0.2
    """Upper clip range of the ratio."""

    def __post_init__(self) -> None:
        above("clip_low", self.clip_low, 0)
        above("clip_high", self.clip_high, 0)


class IcePop(Section, frozen=True, kw_only=True, tag_field="kind", tag="icepop"):
    """Policy gradient that drops tokens on which learner and sampler disagree too much."""

    low: float = 0.5
    """Smallest importance ratio of a token that is kept."""
    high: float = 5.0
    """Largest importance ratio of a token that is kept."""

    def __post_init__(self) -> None:
        at_least("low", self.low, 0)
        above("high", self.high, self.low)


class Reinforce(Section, frozen=True, kw_only=True, tag_field="kind", tag="reinforce"):
    """Policy gradient without any off-policy correction: the baseline of ablations."""


class CISPO(Section, frozen=True, kw_only=True, tag_field="kind", tag="cispo"):
    """Policy gradient whose importance ratio is clipped on both sides, as a constant."""

    clip_low: float = 1.0
    """Lower clip range of the ratio; 1 leaves it open."""
    clip_high: float = 1.0
    """Upper clip range of the ratio."""

    def __post_init__(self) -> None:
        above("clip_low", self.clip_low, 0)
        above("clip_high", self.clip_high, 0)


Loss = TruncatedIS | DecoupledPPO | GRPO | IcePop | CISPO | Reinforce
