"""The byte format that actor and learner share: trajectories as records, records in a shard.

The actor's `writer` encodes with it, the learner's `reader` decodes with it, and so do reports and
tools. It checks what it decodes: a record comes from another process, perhaps another version. It
opens no file by name, and knows neither queues nor batches. numpy only, no JAX.

A shard is a TFRecord file; every payload is a `tf.train.Example`:

    header | trajectory | trajectory | ... | footer

A cut at a record boundary is silent in TFRecord: header and footer are there to notice it. Arrays
are raw little-endian bytes in a feature, with `<name>/dtype` and `<name>/shape` beside it; the
turns' token lists are concatenated, with their lengths beside them.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import example, framing
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn

# 2: full_logprobs, and a policy version for every token. 3: visual tokens of a screenshot in place
# of a grid of patches. 4: renderer.
SCHEMA_VERSION = 4
_READ_SCHEMAS = (2, 3, 4)

_ID_CHARS = 200
_TEXTS = (
    *("episode_id", "group_id", "instruction", "stop_reason", "run_id", "actor_id"),
    "renderer",
)
_MAX_RECORDS = 1_000_000  # of a shard: more than framing.MAX_SHARD_BYTES can hold
_MAX_IMAGE_TOKENS = 2**22


@dataclasses.dataclass(frozen=True)
class TokenLayout:
    """What a reader must know of the model to check a record's tokens against its screenshots."""

    vocab_size: int
    image_token_id: int  # the placeholder; one per visual token in context_ids
    merge_size: int = 0  # of a header of schema 2: patches per side that become one visual token


@dataclasses.dataclass(frozen=True)
class Header:
    """Record 0 of a shard. Versions are of all turns that a policy sampled; -1 without one."""

    run_id: str
    actor_id: str
    base_hash: str
    lowest_version: int
    highest_version: int
    records: int
    layout: TokenLayout
    schema: int = SCHEMA_VERSION


@dataclasses.dataclass(frozen=True)
class Footer:
    """The last record. Size and crc are over everything before it, the header included."""

    records: int
    size_bytes: int  # of the file up to the footer
    crc: int  # crc32c of the concatenated masked crcs, little-endian


# ---------------------------------------------------------------- header and footer


def encode_header(header: Header) -> bytes:
    flat = dataclasses.asdict(header)
    flat |= flat.pop("layout")
    del flat["merge_size"]
    return example.encode(_features(b"header", flat))


def decode_header(payload: bytes) -> Header:
    """Raises ShardError: what is not a header, or has a schema that this reader does not know."""
    try:
        fields = example.Fields(example.decode(payload), "header")
        schema = fields.integer("schema")
        if schema not in _READ_SCHEMAS:
            raise ShardError(f"schema {schema}, this reader knows 2 to 4")
        header = Header(
            schema=schema,
            run_id=fields.text("run_id"),
            actor_id=fields.text("actor_id"),
            base_hash=fields.text("base_hash"),
            lowest_version=fields.integer("lowest_version"),
            highest_version=fields.integer("highest_version"),
            records=fields.integer("records"),
            layout=TokenLayout(
                vocab_size=fields.integer("vocab_size"),
                image_token_id=fields.integer("image_token_id"),
                merge_size=fields.integer("merge_size") if schema == 2 else 0,
            ),
        )
        fields.finish()
    except RecordError as error:
        raise ShardError(f"record 0 is not a header: {error}") from None
    merge_size = header.layout.merge_size
    if not 1 <= header.records <= _MAX_RECORDS or (schema == 2 and not 1 <= merge_size <= 64):
        raise ShardError(f"the header says {header.records} records and merge size {merge_size}")
    return header


def encode_footer(footer: Footer) -> bytes:
    return example.encode(_features(b"footer", dataclasses.asdict(footer)))


def decode_footer(payload: bytes) -> Footer:
    """Raises ShardError for what is not a footer."""
    try:
        fields = example.Fields(example.decode(payload), "footer")
        footer = Footer(
            fields.integer("records"), fields.integer("size_bytes"), fields.integer("crc")
        )
        fields.finish()
    except RecordError as error:
        raise ShardError(f"the last record is not a footer: {error}") from None
    return footer


# ---------------------------------------------------------------- trajectory


def encode(trajectory: Trajectory, layout: TokenLayout | None = None) -> bytes:
    """One payload. Checks what `decode` checks: no actor publishes what nobody can read.

    Raises RecordError, also for a payload above framing.MAX_RECORD_BYTES.
    """
    validate(trajectory, layout)
    turns, keys = trajectory.turns, list(trajectory.images)
    features: dict[str, example.Feature] = {
        "kind": [b"trajectory"],
        "schema": [SCHEMA_VERSION],
        "task": [_dump_json(dataclasses.asdict(trajectory.task), "task")],
        "success": [int(trajectory.success)],
        "turns": [len(turns)],
        "turns/text": [_utf8(turn.text) for turn in turns],
        "turns/error": [_utf8(turn.error) for turn in turns],
        "turns/action": [
            _dump_json(turn.action and dataclasses.asdict(turn.action), "action") for turn in turns
        ],
        "turns/progress": [_dump_json(turn.progress, "progress") for turn in turns],
        "turns/image_keys": [_utf8(key) for turn in turns for key in turn.image_keys],
        "images/key": [_utf8(key) for key in keys],
        "images/data": [trajectory.images[key] for key in keys],
    }
    for name in _TEXTS:
        features[name] = [_utf8(getattr(trajectory, name))]
    image_tokens = [trajectory.image_tokens[key] for key in keys]
    times = [trajectory.reward, trajectory.started_unix_s, trajectory.duration_s]
    arrays = {
        "turns/context_ids": np.concatenate([_EMPTY_I4, *(t.context_ids for t in turns)]),
        "turns/token_ids": np.concatenate([_EMPTY_I4, *(t.token_ids for t in turns)]),
        "turns/logprobs": np.concatenate([_EMPTY_F4, *(t.logprobs for t in turns)]),
        "turns/full_logprobs": np.concatenate([_EMPTY_F4, *(t.full_logprobs for t in turns)]),
        "turns/policy_versions": np.concatenate([_EMPTY_I4, *(t.policy_versions for t in turns)]),
        "turns/context_lengths": np.array([len(t.context_ids) for t in turns], "<i4"),
        "turns/token_lengths": np.array([len(t.token_ids) for t in turns], "<i4"),
        "turns/image_counts": np.array([len(t.image_keys) for t in turns], "<i4"),
        "turns/reward": np.array([t.reward for t in turns], "<f8"),
        "images/tokens": np.array(image_tokens, "<i4"),
        "reward_started_duration": np.array(times, "<f8"),
    }
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<")
        features[name] = [array.astype(dtype).tobytes()]
        features[f"{name}/dtype"] = [dtype.str.encode()]
        features[f"{name}/shape"] = list(array.shape)
    payload = example.encode(features)
    if len(payload) > framing.MAX_RECORD_BYTES:
        raise RecordError(
            f"episode {trajectory.episode_id}: record of {len(payload)} bytes, at most "
            f"{framing.MAX_RECORD_BYTES} are accepted: fewer turns or smaller screenshots"
        )
    return payload


def decode(payload: bytes, layout: TokenLayout | None = None) -> Trajectory:
    """The trajectory of a payload, checked by `validate`. Raises RecordError.

    Args:
      layout: of the shard's header; a record of schema 2 cannot be decoded without it.
    """
    if len(payload) > framing.MAX_RECORD_BYTES:
        raise RecordError(
            f"record of {len(payload)} bytes, at most {framing.MAX_RECORD_BYTES} are read"
        )
    fields = example.Fields(example.decode(payload), "trajectory")
    schema = fields.integer("schema")
    if schema not in _READ_SCHEMAS:
        raise RecordError(f"schema {schema}, this reader knows 2 to 4")
    count = fields.integer("turns")
    texts, errors, actions, progresses = (
        fields.items(f"turns/{name}", count) for name in ("text", "error", "action", "progress")
    )
    contexts = _split(fields, "turns/context_ids", "<i4", "turns/context_lengths", count)
    tokens = _split(fields, "turns/token_ids", "<i4", "turns/token_lengths", count)
    lengths_u = np.array([len(token_ids) for token_ids in tokens], np.int64)
    logprobs, full_logprobs, versions = (
        _cut(fields.array(name, dtype, 1), lengths_u, name)
        for name, dtype in (
            ("turns/logprobs", "<f4"),
            ("turns/full_logprobs", "<f4"),
            ("turns/policy_versions", "<i4"),
        )
    )
    image_keys = _text_lists(fields, "turns/image_keys", "turns/image_counts", count)
    rewards_u = fields.array("turns/reward", "<f8", 1, count)
    turns = tuple(
        Turn(
            context_ids=contexts[u],
            token_ids=tokens[u],
            logprobs=logprobs[u],
            full_logprobs=full_logprobs[u],
            policy_versions=versions[u],
            image_keys=image_keys[u],
            text=example.decode_text(texts[u], "turns/text"),
            action=_action(actions[u]),
            error=example.decode_text(errors[u], "turns/error"),
            reward=float(rewards_u[u]),
            progress=_load_object(progresses[u], "progress"),
        )
        for u in range(count)
    )
    keys = [example.decode_text(key, "images/key") for key in fields.items("images/key")]
    if len(set(keys)) != len(keys):
        raise RecordError("images/key names an image twice")
    data = fields.items("images/data", len(keys))
    if schema == 2:
        if layout is None or not layout.merge_size:
            raise RecordError("schema 2 needs the merge size of its shard's header")
        image_tokens_i = _tokens_of_grids(fields, len(keys), layout.merge_size)
    else:
        image_tokens_i = fields.array("images/tokens", "<i4", 1, len(keys))
    reward, started_unix_s, duration_s = fields.array("reward_started_duration", "<f8", 1, 3)
    stop_reason = fields.text("stop_reason")
    if stop_reason not in list(StopReason):
        raise RecordError(f"stop_reason {stop_reason!r}, expected one of {', '.join(StopReason)}")
    trajectory = Trajectory(
        episode_id=fields.text("episode_id"),
        group_id=fields.text("group_id"),
        task=_task(fields.items("task", 1)[0]),
        instruction=fields.text("instruction"),
        turns=turns,
        images=dict(zip(keys, data, strict=True)),
        image_tokens=dict(zip(keys, image_tokens_i.tolist(), strict=True)),
        stop_reason=StopReason(stop_reason),
        reward=float(reward),
        success=bool(fields.integer("success")),
        run_id=fields.text("run_id"),
        actor_id=fields.text("actor_id"),
        started_unix_s=float(started_unix_s),
        duration_s=float(duration_s),
        renderer=fields.text("renderer") if schema >= 4 else "",
    )
    fields.finish()
    validate(trajectory, layout)
    return trajectory


# ---------------------------------------------------------------- checks


def validate(trajectory: Trajectory, layout: TokenLayout | None = None) -> None:
    """Raise RecordError, naming the episode, for contents that contradict each other or a limit.

    layout: with it, ids are checked against the vocabulary, placeholders against screenshots.
    """
    where = f"episode {trajectory.episode_id[:_ID_CHARS]!r}"
    for name in ("episode_id", "group_id"):
        if not 0 < len(getattr(trajectory, name)) <= _ID_CHARS:
            raise RecordError(f"{where}: {name} must have 1 to {_ID_CHARS} characters")
    if len(trajectory.renderer) > _ID_CHARS:
        raise RecordError(f"{where}: renderer must have at most {_ID_CHARS} characters")
    for name in ("reward", "started_unix_s", "duration_s"):
        if not math.isfinite(getattr(trajectory, name)):
            raise RecordError(f"{where}: {name} is not finite: {getattr(trajectory, name)}")
    if trajectory.images.keys() != trajectory.image_tokens.keys():
        raise RecordError(f"{where}: images and image_tokens have different keys")
    for key, data in trajectory.images.items():
        if hashlib.sha256(data).hexdigest() != key:
            raise RecordError(f"{where}: the sha256 of image {key[:16]!r} is not its key")
    for key, tokens in trajectory.image_tokens.items():
        if not 1 <= tokens <= _MAX_IMAGE_TOKENS:
            raise RecordError(f"{where}: image {key[:16]} has {tokens} visual tokens")
    for number, turn in enumerate(trajectory.turns):
        _validate_turn(turn, trajectory, layout, f"{where}: turn {number}")


def _validate_turn(
    turn: Turn, trajectory: Trajectory, layout: TokenLayout | None, where: str
) -> None:
    for name in ("context_ids", "token_ids"):
        ids = getattr(turn, name)
        if ids.ndim != 1 or ids.dtype != np.int32:
            raise RecordError(f"{where}: {name} is {ids.dtype}{list(ids.shape)}, expected int32[n]")
        if ids.size and ids.min() < 0:
            raise RecordError(f"{where}: {name} has the negative id {ids.min()}")
        if layout is None:
            continue
        # A placeholder has no embedding: a screenshot's takes its place.
        beyond = ids[(ids >= layout.vocab_size) & (ids != layout.image_token_id)]
        if beyond.size:
            raise RecordError(
                f"{where}: {name} has id {beyond.max()}, the vocabulary ends at {layout.vocab_size}"
            )
    if not turn.token_ids.size:
        raise RecordError(f"{where}: nothing was sampled")
    for name, dtype in (
        *(("logprobs", np.float32), ("full_logprobs", np.float32)),
        ("policy_versions", np.int32),
    ):
        array = getattr(turn, name)
        if array.dtype != dtype or array.shape != turn.token_ids.shape:
            raise RecordError(
                f"{where}: {name} are {array.dtype}{list(array.shape)} for "
                f"{len(turn.token_ids)} tokens"
            )
        if dtype == np.float32 and not (np.isfinite(array) & (array <= 0)).all():
            raise RecordError(f"{where}: one of {name} is above 0 or not finite")
    # -1: nobody sampled it, as in a demonstration. A shard of those names no base model, so that
    # the learner's queue never takes it for one of its run.
    if turn.policy_version < 0 and np.any(turn.policy_versions != -1):
        raise RecordError(f"{where}: policy version {turn.policy_version}")
    if not math.isfinite(turn.reward):
        raise RecordError(f"{where}: reward is not finite: {turn.reward}")
    missing = [key for key in turn.image_keys if key not in trajectory.images]
    if missing:
        raise RecordError(f"{where}: image key {missing[0][:16]!r} has no image")
    if layout is None:
        return
    expected = [trajectory.image_tokens[key] for key in turn.image_keys]
    # One run of placeholders per screenshot: 1 2 9 9 3 9 9 9 -> starts at 2, 5, ends before 4, 8.
    is_image_c = np.concatenate([[0], turn.context_ids == layout.image_token_id, [0]])
    edges = np.flatnonzero(np.diff(is_image_c))
    found = (edges[1::2] - edges[::2]).tolist()
    if found != expected:
        raise RecordError(
            f"{where}: context_ids has runs of {found[:20]} image placeholders, its screenshots "
            f"have {expected[:20]} visual tokens"
        )
    if np.any(turn.token_ids == layout.image_token_id):
        raise RecordError(f"{where}: an image placeholder was sampled")


# ---------------------------------------------------------------- features and JSON

_EMPTY_I4, _EMPTY_F4 = np.zeros(0, "<i4"), np.zeros(0, "<f4")


def _tokens_of_grids(fields: example.Fields, count: int, merge_size: int) -> np.ndarray:
    """int64[I] visual tokens of schema 2's grids (time, height, width) in patches."""
    grids_i3 = fields.array("images/grid_thw", "<i4", 2, count).astype(np.int64)
    if grids_i3.shape[1] != 3:
        raise RecordError(f"images/grid_thw has shape {grids_i3.shape}, expected [I, 3]")
    sides = grids_i3.min(initial=1), grids_i3.max(initial=1)
    if sides[0] < 1 or sides[1] > 4096 or (grids_i3[:, 1:] % merge_size).any():
        raise RecordError(
            f"images/grid_thw is {grids_i3.tolist()[:20]}, expected sides of 1 to 4096 patches, "
            f"height and width multiples of {merge_size}"
        )
    return grids_i3.prod(axis=1) // merge_size**2


def _split(
    fields: example.Fields, name: str, dtype: str, lengths_name: str, count: int
) -> list[np.ndarray]:
    lengths_u = fields.array(lengths_name, "<i4", 1, count)
    return _cut(fields.array(name, dtype, 1), lengths_u, name)


def _cut(flat: np.ndarray, lengths_u: np.ndarray, name: str) -> list[np.ndarray]:
    ends_u = np.cumsum(lengths_u, dtype=np.int64)
    total = int(ends_u[-1]) if len(ends_u) else 0
    if np.any(lengths_u < 0) or total != len(flat):
        raise RecordError(f"{name} has {len(flat)} values, the turns' lengths add up to {total}")
    return [flat[end - length : end] for end, length in zip(ends_u, lengths_u, strict=True)]


def _text_lists(
    fields: example.Fields, name: str, counts_name: str, count: int
) -> list[tuple[str, ...]]:
    flat = [example.decode_text(value, name) for value in fields.items(name)]
    counts_u = fields.array(counts_name, "<i4", 1, count)
    chunks = _cut(np.arange(len(flat)), counts_u, name)
    return [tuple(flat[idx] for idx in chunk) for chunk in chunks]


def _features(kind: bytes, flat: Mapping[str, str | int]) -> dict[str, example.Feature]:
    features: dict[str, example.Feature] = {"kind": [kind]}
    for name, value in flat.items():
        features[name] = [_utf8(value)] if isinstance(value, str) else [value]
    return features


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"text that is not UTF-8 at character {error.start}") from None


def _dump_json(value: Any, name: str) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{name} is not JSON: {error}") from None


def _load_json(data: bytes, name: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise RecordError(f"{name} has a key twice")
        return dict(pairs)

    def finite(number: str) -> float:  # NaN, Infinity and 1e999 all parse, if allowed to
        if not math.isfinite(float(number)):
            raise RecordError(f"{name} has the number {number[:20]}, which is not finite")
        return float(number)

    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError) as error:  # also an integer of too many digits
        raise RecordError(f"{name} is not JSON: {type(error).__name__}") from None


def _load_object(data: bytes, name: str) -> dict[str, Any]:
    value = _load_json(data, name)
    if not isinstance(value, dict):
        raise RecordError(f"{name} is not a JSON object")
    return value


def _task(data: bytes) -> TaskSpec:
    return TaskSpec(**_typed(_load_object(data, "task"), _TASK_TYPES, "task"))


def _action(data: bytes) -> Action | None:
    value = _load_json(data, "action")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RecordError("action is not a JSON object")
    return Action(**_typed(value, _ACTION_TYPES, "action"))


_TASK_TYPES = {"name": (str,), "seed": (int,), "variant": (str,), "max_turns": (int,)}
_OPTIONAL_INT, _OPTIONAL_STR = (int, type(None)), (str, type(None))
_ACTION_TYPES = {
    "kind": (str,),
    **dict.fromkeys(("x", "y", "x2", "y2", "amount"), _OPTIONAL_INT),
    **dict.fromkeys(("text", "keys", "direction"), _OPTIONAL_STR),
    "seconds": (int, float, type(None)),
}


def _typed(value: dict[str, Any], types: dict[str, tuple[type, ...]], name: str) -> dict[str, Any]:
    if value.keys() != types.keys():
        raise RecordError(f"{name} has keys {sorted(value)[:12]}, expected {sorted(types)}")
    for key, allowed in types.items():
        # type(), not isinstance: JSON's true is not an integer
        if type(value[key]) not in allowed:
            raise RecordError(f"{name} has {key} of type {type(value[key]).__name__}")
    return value
