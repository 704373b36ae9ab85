"""The data types of the data path as frozen dataclasses, used by actor, learner and tools.

numpy only; no files, HTTP or tokenizer. The byte format is in `shards.record`.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

IN_A_METRIC_NAME = "A-Za-z0-9_.-"
METRIC_NAME = re.compile(f"[{IN_A_METRIC_NAME}]+(/[{IN_A_METRIC_NAME}]+)+")  # group/name


class StopReason(enum.StrEnum):
    """Why an episode ended. Only `completed` and `failed` are regular ends."""

    COMPLETED = "completed"  # the verifier reported done, and the task was solved
    FAILED = "failed"  # the verifier reported done without success, or the policy terminated
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    FORMAT_ERROR = "format_error"  # the text was not a valid action; trained on as a failure
    ENV_ERROR = "env_error"  # a fault of the environment: repeated, never trained on
    TIMEOUT = "timeout"

    @property
    def truncated(self) -> bool:
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.TIMEOUT)


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """One task instance: the task to start on the verifier, and the limit on turns.

    `seed` and `variant` determine the start state; equal specs give the same pixels.
    """

    name: str  # "desktop/click_button"
    seed: int
    variant: str = ""
    max_turns: int = 1

    @property
    def label(self) -> str:
        """The kind of task, as tables and metrics name it: instances differ in their seed alone."""
        return f"{self.name} ({self.variant})" if self.variant else self.name


@dataclasses.dataclass(frozen=True)
class Action:
    """One UI action, in pixels of the verifier's screen. Unused fields are None."""

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
    """One observation and the action that the policy took.

    context_ids is the whole prompt (chat template, expanded image placeholders, the earlier turns
    that fit), token_ids the sampled tokens. If the next turn's context_ids start with context_ids +
    token_ids, both turns are one sequence for the learner.
    """

    context_ids: np.ndarray  # int32[C]
    token_ids: np.ndarray  # int32[S], sampled, including the end-of-turn token
    logprobs: np.ndarray  # float32[S], behaviour: of the distribution each token was sampled from
    full_logprobs: np.ndarray  # float32[S], of the distribution before top-p and top-k
    # int32[S]; the policy may change during a turn. All -1: not sampled by a policy (a recording).
    policy_versions: np.ndarray
    image_keys: tuple[str, ...]  # screenshots in context_ids, in order; keys of Trajectory.images
    text: str  # token_ids decoded, without the end-of-turn token
    action: Action | None  # None if the text was not a valid action
    error: str = ""  # why the text was not a valid action, or the environment's fault
    reward: float = 0.0
    progress: dict[str, Any] = dataclasses.field(default_factory=dict)  # raw, after this turn

    @property
    def policy_version(self) -> int:
        """The oldest policy version of the turn's tokens, which determines its staleness."""
        return int(self.policy_versions.min())


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The record of one episode."""

    episode_id: str  # uuid4 hex: the key for duplicates
    group_id: str
    task: TaskSpec
    instruction: str
    turns: tuple[Turn, ...]
    images: dict[str, bytes]  # sha256 hex -> encoded bytes as received; no duplicates
    image_tokens: dict[str, int]  # sha256 hex -> number of visual tokens
    stop_reason: StopReason
    reward: float  # of the whole episode, by the task's rule
    success: bool
    run_id: str = ""
    actor_id: str = ""
    started_unix_s: float = 0.0
    duration_s: float = 0.0
    # Fingerprint of how the verifier draws pages; empty: it gives none, or nothing depends on it.
    renderer: str = ""

    @property
    def length(self) -> tuple[int, int]:
        """Turns, then tokens of all turns: what makes one success shorter than another."""
        return len(self.turns), sum(len(turn.token_ids) for turn in self.turns)

    @property
    def oldest_policy_version(self) -> int:
        """Determines the staleness; -1 for an episode without turns."""
        return self.policy_versions[0]

    @property
    def policy_versions(self) -> tuple[int, int]:
        """The oldest and the newest version of all sampled tokens; (-1, -1) without turns."""
        if not self.turns:
            return -1, -1
        versions = np.concatenate([turn.policy_versions for turn in self.turns])
        return int(versions.min()), int(versions.max())


class Judgement(NamedTuple):
    """What a task's rule says of the progress so far."""

    done: bool  # the episode ends
    reward: float  # of the episode so far
    success: bool


@dataclasses.dataclass(frozen=True)
class Rule:
    """Instruction and reward of one task instance, where the server does not decide them.

    judge is called after every turn with the server's progress (untrusted JSON) and the number of
    turns. It raises VerifierError for progress that it cannot judge: that is env_error.
    """

    instruction: str  # empty: the server's own
    judge: Callable[[Mapping[str, Any], int], Judgement]


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """One batch of the learner. Each row has one or more packed sequences.

    A ten-token row with one image of two visual tokens and one turn of three sampled tokens
    (P prompt, v visual, S sampled, . padding):

        token_ids        P P v v P P S S S .
        segment_ids      1 1 1 1 1 1 1 1 1 0
        completion_mask  0 0 0 0 0 0 1 1 1 0
        vision_index    -1-1 7 8-1-1-1-1-1-1     rows of the table of visual tokens
        sampled_index    6 7 8 -1                positions of sampled tokens; here S = 4
        turn_ids         0 0 0 0 0 0 1 1 1 0     from 1, distinct for the turns of a row

    Sequences with a common prefix may share it: the row has the prefix once, as a segment. Its last
    token is repeated at the start of each sequence, so that every sampled token follows the token
    that it was sampled after:

        token_ids        P P P S S P S S S .
        segment_ids      1 1 2 2 2 3 3 3 3 0
        prefix_segments  1 1 1 1 1 1 1 1 1 0     attended to in addition to the own segment

    Masks and logprobs at position t are about token_ids[:, t] itself, not the token after it.
    """

    token_ids_bt: np.ndarray  # int32
    segment_ids_bt: np.ndarray  # int32, 0 is padding
    prefix_segments_bt: np.ndarray | None  # int32; None: no sequences share a prefix
    positions_abt: np.ndarray  # int32; A is 3 for M-RoPE (time, height, width), else 1
    completion_mask_bt: np.ndarray  # float32, 1 where the policy sampled the token
    sampled_index_bs: np.ndarray  # int32, positions where completion_mask is 1; -1 is padding
    turn_ids_bt: np.ndarray  # int32, 0 outside completion_mask
    vision_index_bt: np.ndarray  # int32, -1 for tokens that are not visual
    behaviour_logprobs_bt: np.ndarray  # float32, 0 outside completion_mask
    advantages_bt: np.ndarray  # float32, 0 outside completion_mask
    weights_bt: np.ndarray  # float32, a token's share in the mean loss; 0 outside completion_mask
    values_bt: np.ndarray | None  # float32, of the critic before the step; None without critic
    returns_bt: np.ndarray | None  # float32, the critic's targets
    vision: dict[str, np.ndarray]  # distinct screenshots, one row each; only the family reads them
    # Host only: the trajectory's index, and the token's index in it, of each entry of
    # sampled_index; -1 is padding.
    trajectory_bs: np.ndarray
    token_bs: np.ndarray
