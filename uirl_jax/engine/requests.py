"""What the engine is asked, what it answers, and its fixed sizes. numpy only.

Everything that a single request can get wrong is refused here, at its arrival, so that it cannot
fail others. Nothing here knows the queue, the slots or the model's weights.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import Inputs, PlacedScreen, Screen
from uirl_jax.families.chat import Message
from uirl_jax.untrusted.http import check_base_url

MIN_TEMPERATURE = 1e-3  # below it logits / temperature overflows float32; 0 itself means greedy


@dataclasses.dataclass(frozen=True)
class OpenAIConfig:
    """Where the server of `kind="openai"` is, and what a call to it may cost."""

    url: str = ""  # with its /v1: http://127.0.0.1:8000/v1
    model: str = ""  # what the server calls the base model
    # Where adapters are written for the server to load; needed with kind="openai".
    adapters_dir: str = ""
    # The directory's name on the server's side; empty: the same.
    adapters_dir_there: str = ""
    api_key_env: str = ""  # name of the environment variable that holds the key; empty: no key
    # Requests at a time.
    concurrency: int = dataclasses.field(default=64, metadata={"min": 1, "max": 65_536})
    # For no connection, 429 and 503; pauses double, with jitter. 6 of them add up to half a minute.
    attempts: int = dataclasses.field(default=7, metadata={"min": 1, "max": 100})
    # Before the second attempt; doubled for each further one.
    backoff_s: float = dataclasses.field(default=0.5, metadata={"min": 0.0, "max": 600.0})
    # Of one attempt.
    connect_timeout_s: float = dataclasses.field(
        default=5.0, metadata={"above": 0.0, "max": 3600.0}
    )
    # A request waits in the server's own queue, too: what takes longer is not an answer.
    request_timeout_s: float = dataclasses.field(
        default=300.0, metadata={"above": 0.0, "max": 86_400.0}
    )
    # A longer answer is refused.
    max_answer_bytes: int = dataclasses.field(
        default=8 * 1024 * 1024, metadata={"min": 1024, "max": 2**30}
    )

    def __post_init__(self) -> None:
        if self.url:
            check_base_url(self.url, "engine.openai.url", ConfigError)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The fixed sizes of the device's buffers and programs.

    A call takes the smallest size of each kind that holds it; `Engine.warm_up` compiles every
    combination, so short tuples keep starting fast. Of the sizes, those of an `openai` engine are
    context_lengths[-1] and max_new_tokens; the others are its server's business.
    """

    kind: Literal["jax", "openai"] = "jax"  # this process samples, or a server does
    openai: OpenAIConfig = dataclasses.field(default_factory=OpenAIConfig)
    # Memory: slots x (context_lengths[-1] + max_new_tokens) tokens of keys and values. 0: as many
    # as the largest batch; more keep the contexts of episodes that wait for their environment.
    slots: int = dataclasses.field(default=0, metadata={"min": 0, "max": 65_536})
    # Of a context; the largest bounds an episode. A call looks at so much of its slots.
    context_lengths: tuple[int, ...] = dataclasses.field(
        default=(128, 256), metadata={"min": 1, "max": 10_000_000}
    )
    # Most that a turn may ask for.
    max_new_tokens: int = dataclasses.field(default=32, metadata={"min": 1, "max": 65_536})
    # Rows of a decode step.
    batch_sizes: tuple[int, ...] = dataclasses.field(
        default=(1, 8, 32), metadata={"min": 1, "max": 65_536}
    )
    # Tokens between looks.
    decode_steps: int = dataclasses.field(default=8, metadata={"min": 1, "max": 4096})
    # Contexts in a call that reads them.
    prefill_rows: tuple[int, ...] = dataclasses.field(
        default=(1, 8), metadata={"min": 1, "max": 65_536}
    )
    # Of a row and call; what is longer takes several.
    prefill_lengths: tuple[int, ...] = dataclasses.field(
        default=(64, 256), metadata={"min": 1, "max": 10_000_000}
    )
    # Rows of the vision tower in a call.
    image_rows: tuple[int, ...] = dataclasses.field(
        default=(1, 8), metadata={"min": 1, "max": 65_536}
    )
    # Patches of such a row; screenshots that fit together share it.
    image_row_patches: int = dataclasses.field(default=256, metadata={"min": 1, "max": 1_000_000})
    # Visual tokens that are kept for later; 0: four of the largest calls' worth.
    image_tokens: int = dataclasses.field(default=0, metadata={"min": 0, "max": 1_000_000_000})
    # Under a new policy keep what older ones computed: nothing is computed again, and logprobs are
    # those of no single policy.
    keep_stale_cache: bool = False
    # int8: a quarter of float32's memory, for rounded keys and values (models.kv_cache).
    cache_dtype: Literal["float32", "bfloat16", "int8"] = "float32"

    def __post_init__(self) -> None:
        faults = [
            f"{key}={sizes} must be positive and rising"
            for key in (
                *("context_lengths", "batch_sizes", "prefill_rows", "prefill_lengths"),
                "image_rows",
            )
            if not (sizes := getattr(self, key))
            or sizes[0] < 1
            or sorted(set(sizes)) != list(sizes)
        ]
        if self.kind == "openai":
            needed = ("url", "model", "adapters_dir")
            faults += [
                f"openai.{key} is empty, and kind='openai' needs it"
                for key in needed
                if not getattr(self.openai, key)
            ]
        if faults:
            raise ConfigError("engine: " + "; ".join(faults))

    @property
    def num_slots(self) -> int:
        return self.slots or self.batch_sizes[-1]

    @property
    def slot_positions(self) -> int:
        """Cache positions of a slot."""
        return self.context_lengths[-1] + self.max_new_tokens

    def table_rows(self, inputs: Inputs) -> int:
        """Visual tokens of the table."""
        a_call = self.image_rows[-1] * inputs.row_tokens(self.image_row_patches)
        return self.image_tokens or 4 * a_call

    def span(self, needed: int) -> int:
        """Cache positions of a slot that a program reads."""
        return next(
            length + self.max_new_tokens
            for length in self.context_lengths
            if length + self.max_new_tokens >= needed
        )


def needed_capabilities(cfg: EngineConfig) -> dict[str, str]:
    """What these sizes need of a family, as `Family.require` takes it."""
    if cfg.prefill_lengths[-1] >= cfg.context_lengths[-1]:
        return {}
    return {
        "chunked_prefill": f"engine.prefill_lengths={cfg.prefill_lengths} below "
        f"engine.context_lengths={cfg.context_lengths}"
    }


def smallest(sizes: Sequence[int], needed: int) -> int:
    """The smallest of ascending sizes that holds so many, or the largest."""
    return next((size for size in sizes if size >= needed), sizes[-1])


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One turn to sample. Screenshots come in the order of their placeholders in context_ids."""

    context_ids: np.ndarray  # int32[C]
    # Screens with equal keys are encoded once. The engine reads the arrays of a planned one when it
    # needs them, and raises ImageError where it cannot.
    screens: tuple[Screen, ...]
    max_new_tokens: int
    temperature: float  # 0 is greedy
    seed: int  # decides the tokens, together with weights and context: whoever shares the batch
    top_p: float = 1.0  # of the likeliest tokens that together have this probability
    top_k: int = 0  # of the k likeliest; 0: of all
    stop_strings: tuple[str, ...] = ()  # the text that has one of them ends
    # Whose cache it continues: the turns of an episode have one. Empty: nobody's.
    episode: str = ""
    # The same context as text, for a server that tokenises it and cuts the screenshots itself. The
    # engine of this process does not read it.
    messages: tuple[Message, ...] = ()


@dataclasses.dataclass(frozen=True)
class SampleResult:
    """The tokens of one request."""

    token_ids: np.ndarray  # int32[S], S >= 1, the end token included
    # float32[S]: of the distribution that was sampled from, and before top_p and top_k cut it.
    logprobs: np.ndarray
    policy_version: int  # the oldest of policy_versions
    stopped: bool  # by an end token or a stop string; else max_new_tokens cut it
    full_logprobs: np.ndarray  # NaN where a server cut the distribution and told the rest to nobody
    policy_versions: np.ndarray  # int32[S]
    # int32[C']: what was read where it is not the request's context_ids (`Chat.as_read`).
    context_ids: np.ndarray | None = None


class ImageArrays(NamedTuple):
    """Screens in the rows of the vision tower, and where their tokens go in the table."""

    vision: dict[str, np.ndarray]  # of Inputs.pack_screens
    row_m: np.ndarray  # int32, one past the table's last at padding


def validated_positions(request: SampleRequest, cfg: EngineConfig, inputs: Inputs) -> np.ndarray:
    """Refuses a request that could never be sampled.

    Returns:
      int32[A,C], positions of its context; computing them is half of the checks.

    Raises:
      ConfigError: beyond a limit; the message names it and the key to change.
      ValueError: the request contradicts itself (a defect of the caller, not a user's mistake).
    """
    check_settings(request, cfg)
    largest = max((screen.patches for screen in request.screens), default=0)
    if largest > cfg.image_row_patches:
        raise ConfigError(
            f"a screenshot of {largest} patches is larger than a row of the vision tower, "
            f"{cfg.image_row_patches}: raise engine.image_row_patches (or screen_px, from which it "
            "follows), or lower max_pixels"
        )
    if not len(request.context_ids):
        raise ValueError("a request with an empty context")
    tokens = visual_tokens(request)
    if sum(tokens.values()) > cfg.table_rows(inputs):
        raise ConfigError(
            f"the {len(tokens)} screenshots of one context have {sum(tokens.values())} visual "
            f"tokens, and the engine keeps {cfg.table_rows(inputs)}: raise engine.image_tokens "
            "or keep fewer screenshots"
        )
    if request.context_ids[-1] == inputs.image_token_id:
        raise ValueError("a context that ends with a visual token: an image is cut, or no text")
    try:
        return inputs.positions(request.context_ids, request.screens)
    except ImageError as error:  # the caller's arithmetic, not a screenshot, is at fault
        raise ValueError(f"context_ids and screens of a request disagree: {error}") from error


def check_settings(request: SampleRequest, cfg: EngineConfig) -> None:
    """What every engine refuses. Raises: ConfigError that names the limit and the key to change."""
    length = len(request.context_ids)
    if length > cfg.context_lengths[-1]:
        raise ConfigError(
            f"a context of {length} tokens is longer than the engine's largest, "
            f"{cfg.context_lengths[-1]}: raise engine.context_lengths or keep fewer screenshots"
        )
    if not 1 <= request.max_new_tokens <= cfg.max_new_tokens:
        raise ConfigError(
            f"a request for {request.max_new_tokens} new tokens is outside 1 to "
            f"{cfg.max_new_tokens}: raise engine.max_new_tokens"
        )
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < math.inf:
        raise ConfigError(
            f"temperature {request.temperature} is neither 0 (greedy) nor a number of at least "
            f"{MIN_TEMPERATURE}"
        )
    if not 0 < request.top_p <= 1:
        raise ConfigError(f"top_p {request.top_p} is outside of 0 (not included) to 1")
    if request.top_k < 0:
        raise ConfigError(f"top_k {request.top_k} is negative; 0 cuts nothing")


def visual_tokens(request: SampleRequest) -> dict[str, int]:
    """By key, of every distinct screen of the request."""
    return {screen.key: screen.tokens for screen in request.screens}


def place_screen(
    placed: list[PlacedScreen], screen: Screen, cfg: EngineConfig, inputs: Inputs
) -> bool:
    """Adds a screen behind those already placed, in the last row while it fits.

    Returns: False where the rows of a call do not suffice; then nothing is added.
    """
    row, start, segment = 0, 0, 1
    if placed:
        last = placed[-1]
        row, start, segment = last.row, last.start + last.screen.patches, last.segment + 1
        if not inputs.shares_rows or start + screen.patches > cfg.image_row_patches:
            row, start, segment = row + 1, 0, 1
    if row >= cfg.image_rows[-1]:
        return False
    placed.append(PlacedScreen(screen, row, start, segment))
    return True


def image_arrays(
    placed: Sequence[PlacedScreen],
    table_rows: dict[str, np.ndarray],
    cfg: EngineConfig,
    inputs: Inputs,
) -> ImageArrays:
    """The arrays of one call, in the smallest number of rows that holds the screens.

    Args:
      table_rows: by key, where in the table the screen's tokens belong.
    """
    used = 1 + max((screen.row for screen in placed), default=0)
    return packed_images(placed, table_rows, smallest(cfg.image_rows, used), cfg, inputs)


def packed_images(
    placed: Sequence[PlacedScreen],
    table_rows: dict[str, np.ndarray],
    rows: int,
    cfg: EngineConfig,
    inputs: Inputs,
) -> ImageArrays:
    """As image_arrays, in so many rows."""
    packed = inputs.pack_screens(placed, rows, cfg.image_row_patches)
    row_tokens = inputs.row_tokens(cfg.image_row_patches)
    row_m = np.full(rows * row_tokens, cfg.table_rows(inputs), np.int32)
    for (screen, *_), first in zip(placed, packed.first_tokens, strict=True):
        row_m[first : first + screen.tokens] = table_rows[screen.key]
    return ImageArrays(packed.arrays, row_m)


def seed_words(seed: int) -> np.ndarray:
    """The two words of a threefry key, uint32[2], for any integer seed (taken modulo 2**64)."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
