"""The words of the data path as frozen dataclasses; actor, learner and tools all read them.

numpy only. Nothing here reads files, talks HTTP or knows a tokenizer; the byte format is in
`shards.record`.
"""

import dataclasses
import enum
from typing import Any

import numpy as np


class StopReason(enum.StrEnum):
    """Why an episode ended. Only `completed` and `failed` are true ends; the rest cut it short."""

    COMPLETED = "completed"  # the verifier said done, and the task's rule was met
    FAILED = "failed"  # the verifier said done, and it was not; or the policy gave up
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    FORMAT_ERROR = "format_error"  # the policy's text was no action: trained, as a failure
    ENV_ERROR = "env_error"  # the environment's fault: refilled, never trained
    TIMEOUT = "timeout"

    @property
    def truncated(self) -> bool:
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.TIMEOUT)


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """One task instance: what to start on the verifier, and how long the policy may take.

    `seed` and `variant` decide the start state; two specs that are equal give the same pixels.
    """

    name: str  # "desktop/click_button"
    seed: int
    variant: str = ""
    max_turns: int = 1


@dataclasses.dataclass(frozen=True)
class Action:
    """One UI action, in real pixels of the verifier's screen. Unused fields stay None."""

    kind: str  # one of actions.KINDS
    x: int | None = None
    y: int | None = None
    x2: int | None = None
    y2: int | None = None
    text: str | None = None
    keys: str | None = None  # "ctrl+c"
    direction: str | None = None  # up, down, left, right
    amount: int | None = None  # pixels to scroll
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Turn:
    """One observation and the action that the policy took on it.

    context_ids is everything the policy read (chat template, image placeholders expanded, older
    turns that its context still holds), token_ids what it sampled. Where the next turn's
    context_ids begin with context_ids + token_ids, the two are one sequence for the learner.
    """

    context_ids: np.ndarray  # int32[C]
    token_ids: np.ndarray  # int32[S], sampled, the end-of-turn token included
    logprobs: np.ndarray  # float32[S], behaviour: of the distribution each token was sampled from
    full_logprobs: np.ndarray  # float32[S], before top-p and top-k cut that distribution
    # int32[S]: a new policy may come in the middle of a turn. All -1: nobody sampled it (recording)
    policy_versions: np.ndarray
    image_keys: tuple[str, ...]  # screenshots in context_ids, in order; keys of Trajectory.images
    text: str  # token_ids decoded, without the end-of-turn token
    action: Action | None  # None where the text was no action
    error: str = ""  # why the text was no action, or what the environment did wrong
    reward: float = 0.0
    progress: dict[str, Any] = dataclasses.field(default_factory=dict)  # raw, after this turn

    @property
    def policy_version(self) -> int:
        """The oldest that a token was sampled with: staleness counts from there."""
        return int(self.policy_versions.min())


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The record of one episode."""

    episode_id: str  # uuid4 hex: the key for duplicates
    group_id: str
    task: TaskSpec
    instruction: str
    turns: tuple[Turn, ...]
    images: dict[str, bytes]  # sha256 hex -> encoded bytes as they came; each distinct one once
    image_tokens: dict[str, int]  # sha256 hex -> visual tokens, as the policy read it
    stop_reason: StopReason
    reward: float  # of the whole episode, by the task's rule
    success: bool
    run_id: str = ""
    actor_id: str = ""
    started_unix_s: float = 0.0
    duration_s: float = 0.0

    @property
    def oldest_policy_version(self) -> int:
        """Staleness counts from here; an episode without a turn has no version (-1)."""
        return self.policy_versions[0]

    @property
    def policy_versions(self) -> tuple[int, int]:
        """The oldest and the newest that sampled a token; (-1, -1) without a turn."""
        if not self.turns:
            return -1, -1
        versions = np.concatenate([turn.policy_versions for turn in self.turns])
        return int(versions.min()), int(versions.max())


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """What goes through the learner at once. Row b holds one or more packed sequences.

    A ten-token row with one image of two visual tokens and one turn of three sampled tokens
    (P prompt, v visual, S sampled, . padding):

        token_ids        P P v v P P S S S .
        segment_ids      1 1 1 1 1 1 1 1 1 0
        completion_mask  0 0 0 0 0 0 1 1 1 0
        vision_index    -1-1 7 8-1-1-1-1-1-1     rows of the table of visual tokens
        sampled_index    6 7 8 -1                of S = 4 places
        turn_ids         0 0 0 0 0 0 1 1 1 0     from 1, other ones for other turns of the row

    Two sequences that begin alike may share their prompt, which then stands in the row once. Its
    last token is repeated in each of them, so that every sampled token follows the one it was
    sampled after:

        token_ids        P P P S S P S S S .
        segment_ids      1 1 2 2 2 3 3 3 3 0
        prefix_segments  1 1 1 1 1 1 1 1 1 0     read by a token beside its own segment

    Masks and logprobs at position t are about token_ids[:, t] itself, not about the token after it.
    """

    token_ids_bt: np.ndarray  # int32
    segment_ids_bt: np.ndarray  # int32, 0 is padding
    prefix_segments_bt: np.ndarray | None  # int32; None: no sequence of any row shares a prompt
    positions_abt: np.ndarray  # int32; A is 3 for M-RoPE (time, height, width), else 1
    completion_mask_bt: np.ndarray  # float32, 1 where the policy sampled the token
    sampled_index_bs: np.ndarray  # int32, where completion_mask is 1; -1 fills up
    turn_ids_bt: np.ndarray  # int32, 0 outside completion_mask
    vision_index_bt: np.ndarray  # int32, -1 where the token is no visual token
    behaviour_logprobs_bt: np.ndarray  # float32, 0 outside completion_mask
    advantages_bt: np.ndarray  # float32, 0 outside completion_mask
    weights_bt: np.ndarray  # float32, a token's share in the loss's mean; 0 outside of the mask
    values_bt: np.ndarray | None  # float32, of the critic before the update; None without one
    returns_bt: np.ndarray | None  # float32, what the critic is trained on
    vision: dict[str, np.ndarray]  # distinct screenshots, a row each; only the family reads them
    # For the host: which of the trajectories, and which of its sampled tokens, stands at
    # sampled_index; -1 fills up.
    trajectory_bs: np.ndarray
    token_bs: np.ndarray
