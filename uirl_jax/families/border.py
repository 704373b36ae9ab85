"""What the package asks of a model family, and nothing else: host side, device side, tables.

A family is a folder: `config.py`, `inputs.py` and `chat.py` (numpy alone), `model.py` (JAX) and
`names.py` (tables). Its `__init__.py` puts them together as one `Family`, and `families.table`
lists it under the model_type of config.json. Everything outside `families/` reads a model through
the types below; docs/add_a_model.md walks through a family. No JAX is imported here.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from uirl_jax.actions.coordinates import NO_MARGINS, Margins
from uirl_jax.errors import ConfigError
from uirl_jax.models.weight_table import WeightTable

if TYPE_CHECKING:
    import jax

    from uirl_jax.models.lora import LoraConfig

Size = tuple[int, int]  # (width, height) in pixels


# ------------------------------------------------------------------------------------ host side


@dataclasses.dataclass(frozen=True, eq=False)
class Screen:
    """A screenshot as the model reads it.

    A screen is planned from its size alone and has arrays once its pixels were read: an engine that
    still has its visual tokens never decodes it (22 ms and 3 MB for 1280x800).
    """

    key: str  # screens with equal keys are the same picture
    size_px: Size  # of the screenshot
    seen_px: Size  # of the image that the model sees, resized: the coordinate space "image"
    tokens: int  # visual tokens in the text
    patches: int  # length in a row of the vision tower
    margins: Margins = NO_MARGINS  # put around the screenshot before it was resized
    layout: tuple[int, ...] = ()  # the family's own, such as a grid of patches
    screenshot: bytes = b""  # an encoded image file
    arrays: Mapping[str, np.ndarray] | None = None  # the family's own; None: not read yet


class PlacedScreen(NamedTuple):
    """Where a screen lies in the rows of one call of the vision tower."""

    screen: Screen
    row: int
    start: int  # first patch within the row
    segment: int  # from 1, distinct within the row


class PackedScreens(NamedTuple):
    """Screens as the arrays of one call of the vision tower."""

    arrays: dict[str, np.ndarray]  # only the family's `encode_images` reads them; rows first
    first_tokens: list[int]  # row of the table of visual tokens where each screen's tokens begin


class Inputs(Protocol):
    """Screens and positions of one model directory; numpy and Pillow alone.

    Attributes:
      image_token_id: the placeholder in token ids, one for each visual token.
      position_axes: A, rows of `positions`: 3 for M-RoPE, else 1.
      shares_rows: several screens may lie in one row of the vision tower.
      prefix_lm: as Family.prefix_lm.
    """

    @property
    def image_token_id(self) -> int: ...

    @property
    def position_axes(self) -> int: ...

    @property
    def shares_rows(self) -> bool: ...

    @property
    def prefix_lm(self) -> bool: ...

    def plan_screen(self, size_px: Size) -> Screen:
        """A screen of that size without arrays. Raises: ImageError for a size without a plan."""
        ...

    def cut_screen(self, image: Image.Image) -> Screen:
        """A screen with its arrays, of an RGB image. Raises: ImageError, as plan_screen."""
        ...

    def row_tokens(self, row_patches: int) -> int:
        """Visual tokens that a row of so many patches gives. Raises: ConfigError: no such row."""
        ...

    def pack_screens(
        self, placed: Sequence[PlacedScreen], rows: int, row_patches: int
    ) -> PackedScreens:
        """The arrays of screens; what they leave free is padding.

        A screen that was not read (`arrays` is None) takes its place and stays padding: another
        host has its pixels.
        """
        ...

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        """int32[A,T] of one unpadded sequence.

        Raises: ImageError where the runs of image_token_id are not those of the screens.
        """
        ...

    def next_position(self, positions_at: np.ndarray) -> int:
        """Of the text token that follows, the same on every axis."""
        ...

    @property
    def from_processor(self) -> Callable[..., tuple[list[Screen], PackedScreens]]:
        """A method whose keyword arguments are what transformers' processor returns of images,
        besides input_ids and attention_mask.

        Raises: ImageError where the arrays contradict each other.
        """
        ...


class Marker(NamedTuple):
    """One token of the tokenizer's added tokens, by its text."""

    token: str


class ScreenSlot(NamedTuple):
    """Where the visual tokens of a screen stand."""

    tokens: int


Piece = str | Marker | ScreenSlot


@dataclasses.dataclass(frozen=True)
class ChatLayout:
    """How a family writes a chat as pieces; `families.chat` turns them into ids.

    Text pieces that touch are encoded together, also across turns, so that a tokenizer with prefix
    spaces sees whole texts. Markers never come out of a text: an instruction cannot open an image,
    nor a turn where turns are opened by markers.

    Attributes:
      end_tokens: each ends a turn when sampled; the first is what completions are given.
      image_token: the placeholder of visual tokens.
      forbidden: markers that may not be sampled: they would open an image or a turn.
      needed: added tokens that a tokenizer of this family must have.
      system: text -> pieces of a system turn.
      user: parts -> pieces of a user turn.
      reply: what opens the model's turn.
      after_reply: what follows the end token of the model's turn.
      template: system prompt -> the Jinja template for transformers that writes the same chat;
        the system prompt is that of a chat without one.
      opening: what every context begins with.
    """

    end_tokens: tuple[str, ...]
    image_token: str
    forbidden: tuple[str, ...]
    system: Callable[[str], Sequence[Piece]]
    user: Callable[[Sequence[str | ScreenSlot]], Sequence[Piece]]
    reply: tuple[Piece, ...]
    after_reply: tuple[Piece, ...]
    template: Callable[[str], str]
    opening: tuple[Piece, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        turn = (*self.system(""), *self.user(("", ScreenSlot(1))), *self.reply, *self.after_reply)
        markers = (p.token for p in (*self.opening, *turn) if isinstance(p, Marker))
        named = (*self.end_tokens, self.image_token, *self.forbidden, *markers)
        return tuple(dict.fromkeys(named))


# ---------------------------------------------------------------------------------- device side


Array = Any  # of jax.numpy in a program, of numpy where rows are built


class TokenRows(NamedTuple):
    """Rows of packed tokens as `Model.hidden` takes them; see types.TrainBatch for the layout."""

    token_ids_bt: Array  # int32
    positions_abt: Array  # int32
    segment_ids_bt: Array  # int32, 0 at padding
    vision_index_bt: Array | None = None  # int32, -1 at ordinary tokens
    prefix_segments_bt: Array | None = None  # int32
    turn_ids_bt: Array | None = None  # int32, 0 where nothing was sampled


class Model(Protocol):
    """A flax.nnx module with these methods, all pure; its adapters are models.lora.LoRAParam.

    Visual tokens are rows of a table [M,D]. D is the family's own: a family that feeds several
    layers of the text tower lays their vectors side by side.

    Attributes:
      cfg: as `Family.read_config` returns it.
      lora: of its adapters, or None.
    """

    cfg: Any
    lora: "LoraConfig | None"

    def encode_images(
        self,
        vision: "Mapping[str, jax.Array]",
        *,
        adapters: bool = True,
        dropout_key: "jax.Array | None" = None,
    ) -> "jax.Array":
        """The table of visual tokens [M,D] of `PackedScreens.arrays`.

        Args:
          adapters: False computes the base alone, here and below.
          dropout_key: of the adapters' inputs (LoraConfig.dropout); None drops nothing.
        """
        ...

    def hidden(
        self,
        rows: TokenRows,
        visual_md: "jax.Array | None",
        *,
        adapters: bool = True,
        dropout_key: "jax.Array | None" = None,
    ) -> "jax.Array":
        """x_btd of whole rows after the final norm; a token sees its segment and shared prefix.

        On a mesh whose data axis divides the rows and visual_md, a row of text reads visual tokens
        of its own part of that axis alone (shards.plan). `extend` may read all.
        """
        ...

    def extend(
        self,
        token_ids_bt: "jax.Array",
        visual_md: "jax.Array | None",
        vision_index_bt: "jax.Array | None",
        positions_abt: "jax.Array",
        cache: Any,
        start_b: "jax.Array",
        *,
        slot_b: "jax.Array | None" = None,
        span: int | None = None,
        blocks: Sequence[Any] | None = None,
    ) -> "tuple[jax.Array, Any]":
        """Writes the rows' next tokens into the cache; x_btd of them, and the cache.

        With `Family.prefix_lm` it takes prefix_b, too: int32[B], length of each row's context in
        its slot, whose tokens come in one call and see each other; then its last token comes again
        alone. None: the tokens are of no context.

        Args:
          start_b: int32[B], cache position of each row's first token; those past the end of the
            cache are dropped.
          slot_b: int32[B], slots of the rows; one past the last writes nothing. None: row b has
            slot b.
          span: cache positions of a slot that are read; None: all.
          blocks: the text blocks one by one, in place of the stacked ones.
        """
        ...

    def logits(self, x_btd: "jax.Array", *, adapters: bool = True) -> "jax.Array":
        """float32[B,T,V]."""
        ...


# ------------------------------------------------------------------------------------ the family


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a family can do. Engine and learner refuse what it cannot, before a run starts.

    A bidirectional prefix (PaliGemma) rules out chunked_prefill and reuse_across_turns: what a
    token reads then depends on tokens after it.
    """

    chunked_prefill: bool = True  # a context may enter the cache in several calls
    reuse_across_turns: bool = True  # a longer context may continue a cached one
    share_in_group: bool = True  # equal prompts may be computed once for several samples
    packing: bool = True  # several sequences may share a row
    multi_image: bool = True  # a context may hold more than one screenshot
    growing_contexts: bool = True  # a context may begin with all of the turn before
    trainable_tokens: bool = True  # adapters may include rows of tokens (models.token_rows)


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
      model_type: as config.json names it.
      read_config: model directory -> its config, a frozen dataclass with at least vocab_size,
        hidden_size and image_token_id. Raises ModelError for what the family does not compute.
      to_config_json: config -> the content of config.json.
      make_inputs: config -> Inputs.
      chat: markers and layout of turns.
      coordinates: coordinate space of its pretraining (actions.coordinates); empty: none.
      make_model: (config, *, lora, rngs, param_dtype, remat="none") -> Model.
      init_cache: (config, slots, positions, dtype) -> an empty cache, a pytree of arrays
        [layer, slot, kv head, position, width].
      weights: names of published tensors, LoRA projections, sharding rules.
      text_blocks: attributes that lead from the model to its stacked text blocks.
      vision_parts: the model's attributes whose adapters change visual tokens.
      prefix_lm: the tokens of a context see each other, whatever their order.
      max_positions: config -> positions that the model was trained on, where a run may not go
        beyond them; None: not checked.
      processor_json: config -> preprocessor_config.json of an exported model; None: that of the
        base is copied.
    """

    model_type: str
    read_config: Callable[[Path], Any]
    to_config_json: Callable[[Any], dict[str, Any]]
    make_inputs: Callable[[Any], Inputs]
    chat: ChatLayout
    coordinates: str
    make_model: Callable[..., Any]
    init_cache: Callable[..., Any]
    weights: WeightTable
    text_blocks: tuple[str, ...] = ("text", "blocks")
    vision_parts: tuple[str, ...] = ("visual",)
    capabilities: Capabilities = Capabilities()
    prefix_lm: bool = False
    max_positions: Callable[[Any], int] | None = None
    processor_json: Callable[[Any], dict[str, Any]] | None = None

    def require(self, wanted: Mapping[str, str]) -> None:
        """Refuses what the family cannot do.

        Args:
          wanted: capability -> the config value that needs it, as the user wrote it.

        Raises: ConfigError that names the family and every such value.
        """
        faults = [
            f"{value} needs {capability}"
            for capability, value in wanted.items()
            if not getattr(self.capabilities, capability)
        ]
        if faults:
            raise ConfigError(f"the family {self.model_type} cannot do this: {'; '.join(faults)}")
