"""One episode in one verifier session, from the first screenshot to its record.

On the data path: verifier --HTTP--> here --> `host` --> shards. `run_episode` opens and closes the
session, `_play` takes its turns. `host` retries and groups episodes and writes shards; the learner
decides which trajectories it trains on.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    MutableMapping,
    Sequence,
)
from typing import Any, cast

import numpy as np

from uirl_jax import actions
from uirl_jax.engine.interface import SamplingEngine
from uirl_jax.engine.requests import SampleRequest, SampleResult
from uirl_jax.errors import (
    ActionError,
    ActUncertainError,
    ConfigError,
    ContextError,
    ImageError,
    InvalidRequestError,
    VerifierError,
    VerifierFullError,
)
from uirl_jax.families.border import Inputs, Screen
from uirl_jax.families.chat import Chat
from uirl_jax.families.screens import plan_screen
from uirl_jax.log_lines import key_values
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.verifiers.client.answers import Session
from uirl_jax.verifiers.containers.containers import Client

logger = logging.getLogger(__name__)

MAX_REWARD = 1e6  # a larger one is a verifier's bug, and would break its group's normalisation
TERMINATE = "terminate"  # the policy ends the episode
# Turns whose action may or may not have been applied; one more ends the episode as env_error.
MAX_TAINTED_TURNS = 2
# Kinds of action that are not sent to the verifier, unless its session judges every action.
UNSENT = frozenset({TERMINATE, "answer"})
_FAULTS = (VerifierError, ImageError, ContextError, ConfigError)  # end an episode as env_error


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Sampling settings and limits of one episode; the task has `max_turns`."""

    # 0 is greedy, for a run that only plays (learner.steps=0); else at least 0.001.
    temperature: float = dataclasses.field(default=1.0, metadata={"min": 0.0, "max": 100.0})
    # Truncate the sampling distribution. The learner's ratios use the full distributions; the
    # importance weights correct for the difference (loss.importance).
    top_p: float = dataclasses.field(default=1.0, metadata={"above": 0.0, "max": 1.0})  # 1: off
    top_k: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})  # 0: off
    # A turn ends after the token whose text completes one of these, which stays in the text.
    stop_strings: tuple[str, ...] = ()
    # Per turn.
    max_new_tokens: int = dataclasses.field(default=32, metadata={"min": 1, "max": 65_536})
    # Including screenshots, excluding sampled tokens of the turn.
    max_context_tokens: int = dataclasses.field(
        default=2048, metadata={"min": 1, "max": 10_000_000}
    )
    # Of a whole episode, the waits for verifier and engine included.
    episode_timeout_s: float = dataclasses.field(
        default=300.0, metadata={"above": 0.0, "max": 86_400.0}
    )
    # For deleting the session, on top of episode_timeout_s.
    delete_timeout_s: float = dataclasses.field(default=5.0, metadata={"above": 0.0, "max": 3600.0})
    # An episode that is done with at least this reward is a success.
    success_reward: float = dataclasses.field(default=1.0, metadata={"min": -1e6, "max": 1e6})

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise ConfigError("rollout.stop_strings: has an empty text, which would end every turn")


@dataclasses.dataclass(frozen=True)
class RolloutSetup:
    """The verifier client, engine and settings that an episode is played with."""

    client: Client
    engine: SamplingEngine
    chat: Chat
    inputs: Inputs
    cfg: RolloutConfig


@dataclasses.dataclass
class _Episode:
    """The observations and turns so far."""

    episode_id: str
    instruction: str = ""
    renderer: str = ""  # fingerprint, see Trajectory
    turns: list[Turn] = dataclasses.field(default_factory=list)
    images: dict[str, bytes] = dataclasses.field(default_factory=dict)
    image_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    progress: dict[str, Any] = dataclasses.field(default_factory=dict)  # the verifier's latest
    reward: float = 0.0  # the episode's reward as of that progress
    success: bool = False


async def run_episode(
    task: TaskSpec,
    setup: RolloutSetup,
    *,
    seed: int,
    group_id: str,
    run_id: str = "",
    actor_id: str = "",
    repeat: Sequence[Turn] = (),
    waits_s: MutableMapping[str, float] | None = None,
    on_mismatch: Callable[[str], None] = lambda reason: None,
    on_env_error: Callable[[str], None] = lambda reason: None,
) -> Trajectory:
    """Plays one episode of `task` and returns its record, also if the verifier fails.

    Args:
        seed: of the sampling; with the policy and the screenshots it determines the tokens.
        repeat: the first turns of an earlier episode of the same task. They are taken again as they
            were, as long as the screenshots are the same; after them the policy is asked.
        waits_s: if given, the seconds spent waiting for "environment" and "engine" are added.
        on_mismatch: called with the reason if this verifier and this config can never play the
            task together: the verifier refuses the task, or its screen does not fit the engine.
        on_env_error: called with the reason if the episode ends as env_error.

    Returns:
        The trajectory. A verifier fault, or text that the engine's server would tokenize
        differently, ends it as `env_error` with the turns so far and reward 0. An episode without
        a turn is `env_error` too: the policy took no action, so there is nothing to train on.

    Raises:
        VerifierFullError: the verifier has no room for another session; nothing was played.
        ConfigError: the engine refuses a request after the first turn: the screens had fitted, so
            that its sizes are at fault and every long episode would end so.
        asyncio.CancelledError: after the session is deleted. Errors of the engine are not caught.
    """
    cfg = setup.cfg
    started_unix_s, started_s = time.time(), time.monotonic()
    waits_s = {} if waits_s is None else waits_s
    episode = _Episode(episode_id=uuid.uuid4().hex)
    stop_reason: StopReason | None = None
    fault: Exception | None = None
    deadline = asyncio.timeout(cfg.episode_timeout_s)
    try:
        async with deadline, _open_session(setup.client, task, cfg, waits_s) as session:
            episode.instruction, episode.renderer = session.instruction, session.renderer
            try:
                stop_reason = await _play(episode, task, session, setup, seed, repeat, waits_s)
            except _FAULTS as error:
                fault = error  # also if the deadline passes while the session is deleted
    except TimeoutError:
        if not deadline.expired():
            raise
        if stop_reason is None:  # otherwise only the session's deletion timed out
            stop_reason = StopReason.TIMEOUT
    except VerifierFullError:
        raise
    except _FAULTS as error:
        fault = error
    finally:
        setup.engine.release(episode.episode_id)

    if fault is not None:
        if isinstance(fault, ConfigError) and episode.turns:
            raise fault
        stop_reason = StopReason.ENV_ERROR
        _warn("episode_env_error", group=group_id, turns=len(episode.turns), reason=fault)
        on_env_error(str(fault))
        # A session that was refused; after that a 4xx is a session that is gone. ConfigError: the
        # engine refused the request, for the size of the screen.
        refused = isinstance(fault, InvalidRequestError) and not episode.instruction
        if not episode.turns and (refused or isinstance(fault, ConfigError)):
            on_mismatch(str(fault))
    assert stop_reason is not None  # `_play` returned, or what ended it is known
    if not episode.turns and stop_reason is not StopReason.ENV_ERROR:
        reason = f"{stop_reason}, no turn taken"
        if stop_reason is StopReason.MAX_TOKENS:
            reason = (
                f"the first prompt is longer than {cfg.max_context_tokens} tokens, the smaller of "
                "actor.rollout.max_context_tokens and engine.context_lengths[-1]: raise them, or "
                "use smaller screenshots"
            )
            on_mismatch(reason)
        _warn("episode_env_error", group=group_id, turns=0, reason=reason)
        on_env_error(reason)
        stop_reason = StopReason.ENV_ERROR
    env_error = stop_reason is StopReason.ENV_ERROR
    return Trajectory(
        episode_id=episode.episode_id,
        group_id=group_id,
        task=task,
        instruction=episode.instruction,
        turns=tuple(episode.turns),
        images=episode.images,
        image_tokens=episode.image_tokens,
        stop_reason=stop_reason,
        reward=0.0 if env_error else episode.reward,
        success=episode.success and not env_error,
        run_id=run_id,
        actor_id=actor_id,
        started_unix_s=started_unix_s,
        duration_s=time.monotonic() - started_s,
        renderer=episode.renderer,
    )


async def _play(
    episode: _Episode,
    task: TaskSpec,
    session: Session,
    setup: RolloutSetup,
    seed: int,
    repeat: Sequence[Turn],
    waits_s: MutableMapping[str, float],
) -> StopReason:
    """Takes turns until the episode ends; `episode` is updated after every turn."""
    client, chat, cfg = setup.client, setup.chat, setup.cfg
    screen_size = (session.width_px, session.height_px)
    # All observations in order. The engine decodes the pixels; a screenshot that it cannot decode
    # raises ImageError there and ends the episode.
    screens: list[Screen] = []

    with _stopwatch(waits_s, "environment"):
        screenshot = await client.screenshot(session.id)

    for turn_index in range(task.max_turns):
        # 1. Observe.
        screens.append(plan_screen(setup.inputs, screenshot, screen_size))

        # 2. Sample.
        context = chat.context(
            episode.instruction, screens, [turn.token_ids for turn in episode.turns]
        )
        if len(context.ids) > cfg.max_context_tokens:
            return StopReason.MAX_TOKENS
        kept = tuple(screens[index] for index in context.kept)
        keys = tuple(screen.key for screen in kept)
        if turn_index < len(repeat) and repeat[turn_index].image_keys != keys:
            repeat = ()  # the task is not the same again: from here on another episode
        request = SampleRequest(
            context_ids=context.ids,
            screens=kept,
            max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            top_k=cfg.top_k,
            stop_strings=cfg.stop_strings,
            seed=derive_seed(seed, turn_index),
            episode=episode.episode_id,
            messages=context.messages,
        )
        if turn_index < len(repeat):
            sample = _as_sampled(repeat[turn_index])
        else:
            with _stopwatch(waits_s, "engine"):
                sample = await setup.engine.sample(request)
        newest = screens[-1]
        episode.images[newest.key] = screenshot
        episode.image_tokens[newest.key] = newest.tokens
        turn = Turn(
            context_ids=context.ids if sample.context_ids is None else sample.context_ids,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            image_keys=keys,
            full_logprobs=sample.full_logprobs,
            policy_versions=sample.policy_versions,
            text=chat.decode(sample.token_ids),
            action=None,
            progress=episode.progress,
        )

        # 3. Act. A text that max_new_tokens cut off is parsed too: it may be a valid action.
        try:
            action = actions.parse(
                turn.text,
                screen_size,
                chat.action_format,
                image_size=newest.seen_px,
                margins=newest.margins,
                cursor=actions.cursor_after(turn.action for turn in episode.turns),
            )
            is_sent = action.kind not in UNSENT or session.judges_every_action
            if is_sent:
                client.check_action(action)
        except ActionError as error:
            if session.judges_every_action:  # it says which recorded step this was
                turn = dataclasses.replace(turn, progress=await client.progress(session.id))
            # A format error forfeits positive reward and keeps negative reward.
            _append(episode, turn, reward=min(0.0, episode.reward), error=str(error))
            return StopReason.FORMAT_ERROR
        turn = dataclasses.replace(turn, action=action)
        try:
            with _stopwatch(waits_s, "environment"):
                taint = ""
                if is_sent:
                    screenshot, taint = await _act(client, session, action, episode)
                progress = await client.progress(session.id)
            done, reward = _verdict(progress)
        except VerifierError as error:
            _append(episode, turn, reward=episode.reward, error=str(error))
            raise

        # 4. Reward. It comes from the verifier alone; terminate(success) does not change it.
        episode.progress = progress
        turn = dataclasses.replace(turn, progress=progress)
        _append(episode, turn, reward=reward, error=taint)
        episode.success = done and reward >= cfg.success_reward
        if session.judged_here:  # success by the task's own rule, not by the reward
            episode.success = progress["success"] is True
        if done:
            return StopReason.COMPLETED if episode.success else StopReason.FAILED
        if action.kind == TERMINATE:
            return StopReason.FAILED
    return StopReason.MAX_TURNS


def _as_sampled(turn: Turn) -> SampleResult:
    """What the engine answered in a turn of an earlier episode."""
    return SampleResult(
        turn.token_ids,
        turn.logprobs,
        turn.policy_version,
        True,
        turn.full_logprobs,
        turn.policy_versions,
        turn.context_ids,
    )


async def _act(
    client: Client, session: Session, action: Action, episode: _Episode
) -> tuple[bytes, str]:
    """Sends the action; returns the next screenshot and an error text.

    If it is unknown whether the action was applied, the error is not empty and the episode goes on
    from a new screenshot.
    """
    try:
        return await client.act(session.id, action, uuid.uuid4().hex), ""
    except ActUncertainError as error:
        if sum(turn.error != "" for turn in episode.turns) >= MAX_TAINTED_TURNS:
            raise
        _warn("turn_env_error", session=session.id, reason=error)
        return await client.screenshot(session.id), f"env_error: {error}"


def _append(episode: _Episode, turn: Turn, *, reward: float, error: str = "") -> None:
    """Adds a turn. Its reward is the change of `reward`, so turns sum to the episode's reward."""
    episode.turns.append(dataclasses.replace(turn, reward=reward - episode.reward, error=error))
    episode.reward = reward


def _verdict(progress: dict[str, Any]) -> tuple[bool, float]:
    """(done, reward) of a progress answer; no reward before done means 0. Raises VerifierError."""
    done: Any = progress.get("done")
    reward: Any = progress.get("reward")
    if not isinstance(done, bool):
        raise VerifierError(f"progress has done={done!r}: expected true or false")
    if reward is None and not done:
        return False, 0.0
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not is_number or not abs(cast(float, reward)) <= MAX_REWARD:  # written so that NaN fails
        raise VerifierError(
            f"progress has done={done} and reward={str(reward)[:40]!r}: expected a number from "
            f"-{MAX_REWARD:g} to {MAX_REWARD:g}"
        )
    return done, float(cast(float, reward))


def derive_seed(*path: int) -> int:
    """A 31-bit seed from integers >= 0, such as (run seed, group index, member)."""
    return int(np.random.SeedSequence(path).generate_state(1)[0]) >> 1


@contextlib.contextmanager
def _stopwatch(waits_s: MutableMapping[str, float], name: str) -> Iterator[None]:
    started_s = time.monotonic()
    try:
        yield
    finally:
        waits_s[name] = waits_s.get(name, 0.0) + time.monotonic() - started_s


@contextlib.asynccontextmanager
async def _open_session(
    client: Client,
    task: TaskSpec,
    cfg: RolloutConfig,
    waits_s: MutableMapping[str, float],
) -> AsyncIterator[Session]:
    """Opens a session and always deletes it, also if cancelled while it is being created."""
    creation = asyncio.create_task(client.create(task))
    try:
        with _stopwatch(waits_s, "environment"):
            session = await asyncio.shield(creation)
    except asyncio.CancelledError:
        await uninterrupted(_delete_when_created(client, creation, cfg.delete_timeout_s))
        raise
    try:
        yield session
    finally:
        await uninterrupted(_delete(client, session.id, cfg.delete_timeout_s))


async def _delete_when_created(
    client: Client, creation: asyncio.Task[Session], timeout_s: float
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            session = await creation  # the timeout cancels it
    except (VerifierError, TimeoutError, asyncio.CancelledError):
        return
    await _delete(client, session.id, timeout_s)


async def _delete(client: Client, session_id: str, timeout_s: float) -> None:
    """Deletes a session; a failure is logged, and the verifier's idle timeout ends the session."""
    try:
        async with asyncio.timeout(timeout_s):
            await client.delete(session_id)
    except (VerifierError, TimeoutError) as error:
        _warn("session_not_deleted", session=session_id, reason=str(error) or "time-out")


def _warn(event: str, **fields: object) -> None:
    logger.warning(key_values(event, **fields))  # quoted: the reason may be untrusted text


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end, even if cancelled; then raises the cancellation. Work limits its own
    time."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
