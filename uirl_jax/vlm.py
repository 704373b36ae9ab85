"""One model in a notebook: the action for a screenshot, the loss of answers, logits, files.

    vlm = uirl_jax.VLM.from_pretrained("/path/to/a/Qwen2-VL/directory")
    vlm.predict_action(image, "Click the login button").action
    vlm.forward([image], ["Click the login button"], ["click(120, 80)"])["loss"]

Every method compiles for the shapes that it is called with, and keeps what it compiled. It is for
looking and trying: training that lasts is `uirl_jax.main`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import jax
import numpy as np
from flax import nnx
from PIL import Image

from uirl_jax import assets
from uirl_jax.actions import parse
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest
from uirl_jax.errors import ActionError, ContextError, ImageError
from uirl_jax.families import loading
from uirl_jax.families.border import PlacedScreen, Screen, TokenRows
from uirl_jax.families.chat import Chat, run_starts
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.screens import decode_image, image_key, vision_index
from uirl_jax.models import scoring, weights
from uirl_jax.models.lora import LoraConfig
from uirl_jax.models.quantization import Quantize
from uirl_jax.players import BackgroundLoop
from uirl_jax.types import Action

# An image; uint8[H,W], [H,W,3] or [H,W,4]; the bytes of a PNG, JPEG or WEBP file, or its path.
Picture = Image.Image | np.ndarray | bytes | str | Path
_CHANNELS = ((), (3,), (4,))
Parameters = Mapping[str, jax.Array | np.ndarray]
Arrays = dict[str, jax.Array | np.ndarray]


class Prediction(NamedTuple):
    """What the model said, and what it means."""

    text: str
    action: Action | None  # in pixels of the image; None where the text is not an action
    reason: str  # why it is none


class VLM:
    """A vision-language model with adapters.

    Attributes:
      model: the split model (loading.PolicyModel); its adapters are those that it was loaded with.
    """

    def __init__(
        self, model: loading.PolicyModel, lora: LoraConfig, chat: ChatConfig | None = None
    ) -> None:
        self.model = model
        self._lora_cfg, self._lora, self._version = lora, model.trainable, 0
        self._known_chat = chat
        self._chat_cfg = chat or ChatConfig()
        self._freezes_vision = False
        self._chats: dict[str, Chat] = {}
        self._engines: dict[tuple[object, ...], Engine] = {}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        lora: LoraConfig | None = None,
        adapter: str | Path = "",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        quantize: Quantize = "none",
        chat: ChatConfig | None = None,
        seed: int = 0,
    ) -> Self:
        """Reads a model directory in Hugging Face's format; downloads it only for `hf://`.

        Args:
          path: a directory, hf://owner/name[@revision] or the owner/name of a cached model
            (see `models.hub`).
          lora: of the adapters, which change nothing until they are trained; None: that of
            `adapter`, or LoraConfig().
          adapter: a directory in PEFT's format that they come from.
          dtype: of the frozen weights and activations; float16 becomes bfloat16, with a warning.
          quantize: int8 holds the frozen projections in 8 bits.
          chat: prompts and action format. What it leaves out, or all of it if None, comes from
            uirl_chat.json of the adapter or the model, if there is one.
          seed: of fresh adapters.

        Raises:
          ModelError: no model there, or not one that this package knows.
        """
        if lora is None:
            lora = loading.adapter_lora(path, adapter) if adapter else LoraConfig()
        model = loading.load(
            path, lora=lora, seed=seed, param_dtype=dtype, quantize=quantize, adapter=adapter
        )
        adapter_dir = assets.find(adapter) if adapter else ""
        known = (chat or ChatConfig()).completed(adapter_dir, model.path)
        return cls(model, lora, known if chat or known != ChatConfig() else None)

    # ------------------------------------------------------------------------------ what it says

    def predict_action(
        self,
        image: Picture,
        instruction: str,
        action_format: str = "",
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> Prediction:
        """One turn: a screenshot and an instruction in, an action out.

        Args:
          action_format: one of actions.FORMATS; empty: that of `chat`.
          temperature: 0 is greedy; else `seed` decides.
          top_p, top_k: samples from the likeliest tokens that together have this probability, and
            from so many; 0: from all.

        Raises:
          ImageError: an image that cannot be read.
          ConfigError: an unknown action format.
          ContextError: the context and max_new_tokens are longer than the model takes.
          ValueError: a temperature, top_p or top_k out of range.
        """
        if not (0.0 <= temperature < 1e3 and 0.0 < top_p <= 1.0 and top_k >= 0):
            raise ValueError(
                f"temperature={temperature}, top_p={top_p}, top_k={top_k}: expected 0 or more, "
                "more than 0 to 1, and 0 or more"
            )
        picture = _open(image)
        # The engine keeps the visual tokens of a screen by its key.
        key = image_key(picture.tobytes() + repr(picture.size).encode())
        screen = dataclasses.replace(self.model.inputs.cut_screen(picture), key=key)
        chat = self._chat(action_format)
        context_ids = chat.context(instruction, [screen], []).ids
        self._check_length(self.model.inputs.positions(context_ids, [screen]), max_new_tokens)
        request = SampleRequest(
            context_ids=context_ids,
            screens=(screen,),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        )
        engine = self._engine(chat, len(context_ids), screen, max_new_tokens)

        async def sample() -> np.ndarray:
            async with engine:
                return (await engine.sample(request)).token_ids

        with BackgroundLoop() as loop:  # a notebook has a loop of its own on this thread
            text = chat.decode(loop.run(sample()))
        try:
            action = parse(
                text,
                screen.size_px,
                chat.action_format,
                image_size=screen.seen_px,
                margins=screen.margins,
            )
            return Prediction(text, action, "")
        except ActionError as error:
            return Prediction(text, None, str(error))

    def forward(
        self,
        images: Sequence[Picture],
        prompts: Sequence[str],
        labels: Sequence[str],
        parameters: Parameters | None = None,
    ) -> dict[str, jax.Array]:
        """How likely answers are: a screenshot, an instruction and an answer for each row.

        Args:
          parameters: in place of `trainable_parameters`. So gradients are taken:
            jax.grad(lambda p: vlm.forward(images, prompts, labels, p)["loss"])(parameters)

        Returns:
          loss: float32[], the mean of -logprob over the tokens of all answers.
          logprobs: float32[B,T], 0 where no answer is.

        Raises:
          ValueError: lists of different lengths, or empty ones.
          ContextError: a row is longer than the model takes.
        """
        if not 0 < len(images) == len(prompts) == len(labels):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts, {len(labels)} labels: expected "
                "one of each for every row"
            )
        chat = self._chat("")
        screens = [self.model.inputs.cut_screen(_open(image)) for image in images]
        contexts = [
            chat.context(prompt, [screen], []).ids
            for prompt, screen in zip(prompts, screens, strict=True)
        ]
        answers = [chat.completion_ids(label) for label in labels]
        lengths = [len(c) + len(a) for c, a in zip(contexts, answers, strict=True)]
        ids_bt = np.zeros((len(images), max(lengths)), np.int32)
        mask_bt, answer_bt = np.zeros_like(ids_bt), np.zeros(ids_bt.shape, np.float32)
        for row, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
            ids_bt[row, : lengths[row]] = np.concatenate([context, answer])
            mask_bt[row, : lengths[row]] = 1
            answer_bt[row, len(context) : lengths[row]] = 1.0
        most = max(screen.patches for screen in screens)
        placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
        packed = self.model.inputs.pack_screens(placed, len(screens), most)
        rows = self._rows(ids_bt, mask_bt, screens, packed.first_tokens)
        rows = rows._replace(turn_ids_bt=answer_bt.astype(np.int32))
        lora = self._with(parameters)
        logprobs_bt = _logprobs(self.model.graphdef, lora, self.model.frozen, rows, packed.arrays)
        logprobs_bt = logprobs_bt * answer_bt
        return {"loss": -logprobs_bt.sum() / answer_bt.sum(), "logprobs": logprobs_bt}

    def logits(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        pixel_values: np.ndarray | None = None,
        image_grid_thw: np.ndarray | None = None,
        token_type_ids: np.ndarray | None = None,
        mm_token_type_ids: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        **more: np.ndarray,
    ) -> np.ndarray:
        """What transformers' model computes of what its processor returns, as numpy arrays.

        Args:
          input_ids: int[B,T], image placeholders expanded.
          attention_mask: int[B,T], 0 at padding on either side.
          pixel_values, image_grid_thw, more: the processor's arrays of images. For Qwen2-VL
            float[P,F], the patches of all images, row after row, and int[N,3], in patches.
          token_type_ids: int[B,T], 1 at an answer; of PaliGemma's processor, whose contexts see all
            of themselves. None: there is no answer.
          mm_token_type_ids, labels: of the same processors; not read.

        Returns: float32[B,T,V]; values at padding are undefined.
        Raises:
          ImageError: the images do not fit each other or the placeholders.
          ContextError: a row is longer than the model takes.
        """
        del mm_token_type_ids, labels
        ids_bt, mask_bt = np.asarray(input_ids, np.int32), np.asarray(attention_mask, np.int32)
        images = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw, **more}
        given = {name: np.asarray(array) for name, array in images.items() if array is not None}
        screens, packed = self.model.inputs.from_processor(**given) if given else ([], None)
        rows = self._rows(ids_bt, mask_bt, screens, packed.first_tokens if packed else [])
        if token_type_ids is not None:
            rows = rows._replace(turn_ids_bt=np.asarray(token_type_ids, np.int32))
        vision = packed.arrays if packed else None
        model = self.model
        return np.asarray(_logits(model.graphdef, self._lora, model.frozen, rows, vision))

    # -------------------------------------------------------------------------- what it consists of

    def freeze_vision_encoder(self) -> None:
        """Leaves the vision encoder's adapters, if any, out of the trainable parameters."""
        self._freezes_vision = True

    def trainable_parameters(self) -> dict[str, np.ndarray]:
        """The adapters by name: {"text/blocks/q_proj/lora_a": float32[L,D,R], ...}."""
        vision = tuple(f"{part}/" for part in self.model.family.vision_parts)
        return {
            name: array
            for name, array in weights.adapters_to_numpy(self._lora).items()
            if not (self._freezes_vision and name.startswith(vision))
        }

    def set_parameters(self, parameters: Parameters) -> None:
        """Puts new adapters in; names that are missing stay as they are.

        Raises: ModelError for names or shapes that are not the model's.
        """
        self._lora, self._version = self._with(parameters), self._version + 1

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a whole model with the adapters added, which transformers reads as well.

        Its weights come from the directory that the model was read from, in the files' dtype.
        """
        loading.save_merged(
            self.model.path, self._lora_cfg, self._lora, directory, chat=self._known_chat
        )

    def save_adapter(self, directory: str | Path) -> None:
        """Writes the adapters alone, in PEFT's format."""
        base_model = self.model.path.resolve()
        loading.save_adapter(
            self.model, directory, lora=self._lora, base_model=base_model, chat=self._known_chat
        )

    # ------------------------------------------------------------------------------------ inside

    def _with(self, parameters: Parameters | None) -> nnx.State:
        if parameters is None:
            return self._lora
        flat = {**weights.adapters_to_numpy(self._lora), **parameters}
        return weights.adapters_from_numpy(flat, self.model.trainable)

    def _chat(self, action_format: str) -> Chat:
        name = action_format or self._chat_cfg.action_format
        if name not in self._chats:
            cfg = self._chat_cfg
            if name != cfg.action_format:
                cfg = ChatConfig(action_format=name)
            self._chats[name] = Chat(self.model.path, cfg, self.model.family.chat)
        return self._chats[name]

    def _engine(self, chat: Chat, tokens: int, screen: Screen, max_new_tokens: int) -> Engine:
        """An engine with room for a context; sizes are powers of two, so that few are compiled."""
        context, row_patches = _power_of_two(tokens), _power_of_two(screen.patches)
        key = (chat.action_format.name, context, row_patches, max_new_tokens)
        if key not in self._engines:
            chunk = 512 if self.model.family.capabilities.chunked_prefill else context
            self._engines[key] = Engine(
                self.model,
                chat.vocabulary(self.model.cfg.vocab_size),
                EngineConfig(
                    context_lengths=(context,),
                    max_new_tokens=max_new_tokens,
                    batch_sizes=(1,),
                    prefill_rows=(1,),
                    prefill_lengths=(min(context, chunk),),
                    image_rows=(1,),
                    image_row_patches=row_patches,
                ),
            )
            self._engines[key].set_policy(self._lora, self._version)
        engine = self._engines[key]
        if engine.policy_version != self._version:
            engine.set_policy(self._lora, self._version)
        return engine

    def _check_length(self, positions_ac: np.ndarray, more: int = 0) -> None:
        """Of one row. Raises: ContextError: it has more positions than the model was trained on.

        Args: more: tokens to be sampled behind it.
        """
        family = self.model.family
        if family.max_positions is None:
            return
        position_c = positions_ac[0]
        ahead = position_c.max(initial=-1) + 1 + np.arange(more, dtype=position_c.dtype)
        length = _longest_run(np.concatenate([position_c, ahead]))
        limit = family.max_positions(self.model.cfg)
        if length > limit:
            sampled = f", {more} of them new" if more else ""
            raise ContextError(
                f"a context of {length} tokens{sampled}: {self.model.path} takes {limit} positions "
                "(max_position_embeddings or sliding_window of its config.json); shorten the text, "
                "or lower max_new_tokens"
            )

    def _rows(
        self,
        ids_bt: np.ndarray,
        mask_bt: np.ndarray,
        screens: Sequence[Screen],
        first_tokens: Sequence[int],
    ) -> TokenRows:
        """Rows of one sequence each, whose placeholders stand for the screens in their order."""
        if ids_bt.ndim != 2 or ids_bt.shape != mask_bt.shape:
            raise ValueError(
                f"input_ids {ids_bt.shape} and attention_mask {mask_bt.shape}: expected [B,T] both"
            )
        inputs = self.model.inputs
        positions_abt = np.zeros((inputs.position_axes, *ids_bt.shape), np.int32)
        index_bt = np.full_like(ids_bt, -1)
        used = 0
        for row, mask_t in enumerate(mask_bt > 0):
            ids_c = ids_bt[row, mask_t]
            first, used = used, used + int(run_starts(ids_c, inputs.image_token_id).sum())
            row_screens = screens[first:used]
            positions_ac = inputs.positions(ids_c, row_screens)
            self._check_length(positions_ac)
            positions_abt[:, row, mask_t] = positions_ac
            rows_v = np.array(
                [
                    start + token
                    for start, screen in zip(first_tokens[first:used], row_screens, strict=True)
                    for token in range(screen.tokens)
                ],
                np.int32,
            )
            index_bt[row, mask_t] = vision_index(ids_c, inputs.image_token_id, rows_v)
        if used != len(screens):
            raise ImageError(f"placeholders of {used} images, expected those of {len(screens)}")
        return TokenRows(ids_bt, positions_abt, mask_bt, index_bt if len(screens) else None)


def _longest_run(position_t: np.ndarray) -> int:
    """Of positions that count on. A family with two towers counts anew in the second one:

    positions     0 1 2 3 | D D+1     D is far beyond the others
    runs          4       | 2         the longest has 4
    """
    breaks = np.flatnonzero(np.diff(position_t) != 1) + 1
    return max(len(run_t) for run_t in np.split(position_t, breaks))


def _open(image: Picture) -> Image.Image:
    """RGB. Raises: ImageError for what is not an image, or not there."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in _CHANNELS:
            raise ImageError(
                f"an array {image.dtype}{list(image.shape)}, expected uint8[H,W], uint8[H,W,3] or "
                "uint8[H,W,4]"
            )
        image = Image.fromarray(image)
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if not isinstance(image, bytes):
        try:
            image = Path(image).read_bytes()
        except OSError as error:
            raise ImageError(f"{image}: {error}") from error
    return decode_image(image)


def _power_of_two(number: int) -> int:
    return max(64, 1 << (number - 1).bit_length())


def _hidden(model: Any, rows: TokenRows, vision: Arrays | None) -> jax.Array:
    visual_md = None if vision is None else model.encode_images(vision)
    return model.hidden(rows, visual_md)


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    graphdef: nnx.GraphDef,
    lora: nnx.State,
    frozen: nnx.State,
    rows: TokenRows,
    vision: Arrays | None,
) -> jax.Array:
    model = nnx.merge(graphdef, lora, frozen)
    return model.logits(_hidden(model, rows, vision))


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(
    graphdef: nnx.GraphDef, lora: nnx.State, frozen: nnx.State, rows: TokenRows, vision: Arrays
) -> jax.Array:
    model = nnx.merge(graphdef, lora, frozen)
    return scoring.token_logprobs(model, _hidden(model, rows, vision), rows.token_ids_bt)
