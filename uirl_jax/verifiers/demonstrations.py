"""Scripted episodes of the hermetic desktop as trajectories: what a cold start learns from.

Played in this process, without HTTP: nothing here judges a policy. The records look like an
actor's, but that nobody sampled them: their logprobs are 0 and their policy version is -1.
"""

import hashlib
import io
import uuid

import numpy as np

from uirl_jax import actions, vision_inputs
from uirl_jax.chat import Chat
from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.verifiers import desktop


def demonstrate(
    task: TaskSpec,
    chat: Chat,
    image_cfg: vision_inputs.ImageConfig,
    rng: np.random.Generator,
    *,
    quality: float = 1.0,
) -> Trajectory:
    """One episode by the scripted demonstrator.

    Args:
      quality: probability that an action is the right one, not the task's characteristic mistake.
    """
    session = desktop.open_session(task)
    screen_size = (session.width_px, session.height_px)
    images: dict[str, bytes] = {}
    grids: dict[str, tuple[int, int, int]] = {}
    keys: list[str] = []
    turns: list[Turn] = []
    progress = session.progress()
    while len(turns) < task.max_turns and not progress["done"]:
        image = session.screenshot()
        encoded = io.BytesIO()
        image.save(encoded, "PNG", compress_level=1)
        key = hashlib.sha256(encoded.getvalue()).hexdigest()
        images[key] = encoded.getvalue()
        grids[key] = vision_inputs.process_image(image, image_cfg)[1]
        keys.append(key)
        context = chat.context(
            session.instruction, [grids[key] for key in keys], [turn.token_ids for turn in turns]
        )
        action = desktop.scripted_action(session, rng, quality)
        text = actions.format_action(
            action,
            screen_size,
            chat.action_format,
            image_size=chat.image_size(grids[key]),
            cursor=actions.cursor_after(turn.action for turn in turns),
        )
        token_ids = chat.completion_ids(text)
        session.act(action)
        progress = session.progress()
        turns.append(
            Turn(
                context_ids=context.ids,
                token_ids=token_ids,
                logprobs=np.zeros(len(token_ids), np.float32),
                image_keys=tuple(keys[index] for index in context.kept),
                full_logprobs=np.zeros(len(token_ids), np.float32),
                policy_versions=np.full(len(token_ids), -1, np.int32),
                text=text,
                action=action,
                progress=progress,
            )
        )
    reward = float(progress["reward"] or 0.0)
    success = bool(progress["done"]) and reward >= 1.0
    ended = StopReason.COMPLETED if success else StopReason.FAILED
    return Trajectory(
        episode_id=uuid.uuid4().hex,
        group_id="demonstration",
        task=task,
        instruction=session.instruction,
        turns=tuple(turns),
        images=images,
        image_grids=grids,
        stop_reason=ended if progress["done"] else StopReason.MAX_TURNS,
        reward=reward,
        success=success,
    )
