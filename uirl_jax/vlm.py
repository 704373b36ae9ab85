"""One model in a notebook: the action for a screenshot, the loss of answers, logits, files.

    vlm = uirl_jax.VLM.from_pretrained("/path/to/a/Qwen2-VL/directory")
    vlm.predict_action(image, "Click the login button").action
    vlm.forward([image], ["Click the login button"], ["click(120, 80)"])["loss"]

Every method compiles for the shapes that it is called with, and keeps what it compiled. It is for
looking and trying: training that lasts is `uirl_jax.main`.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

from uirl_jax import vision_inputs
from uirl_jax.actions import parse
from uirl_jax.chat import Chat, ChatConfig, run_starts
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest
from uirl_jax.errors import ActionError, ImageError
from uirl_jax.models import loading, peft_adapters, qwen2_vl, qwen2_vl_weights, scoring
from uirl_jax.models.lora import LoraConfig
from uirl_jax.models.quantization import Quantize
from uirl_jax.run import BackgroundLoop, forbidden_ids
from uirl_jax.types import Action

Picture = Image.Image | bytes | str | Path  # bytes of a PNG, JPEG or WEBP file, or its path
Parameters = Mapping[str, jax.Array | np.ndarray]
Arrays = dict[str, jax.Array | np.ndarray]

_VISION = "visual/"  # how the names of the vision tower's adapters begin


class Prediction(NamedTuple):
    """What the model said, and what it means."""

    text: str
    action: Action | None  # in pixels of the image; None where the text is no action
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
        self._lora_cfg, self._lora, self._version = lora, model.lora, 0
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
        dtype: Literal["float32", "bfloat16"] = "float32",
        quantize: Quantize = "none",
        chat: ChatConfig | None = None,
        seed: int = 0,
    ) -> Self:
        """Reads a model directory in Hugging Face's format; downloads it only for `hf://`.

        Args:
          path: a directory, hf://owner/name[@revision] or the owner/name of a cached model
            (see `models.hub`).
          lora: of the adapters, which change nothing until they are trained; None: LoraConfig().
          adapter: a directory in PEFT's format that they come from; it must be what `lora` says.
          quantize: int8 holds the frozen projections in 8 bits.
          chat: prompts; None: those of the action format.
          seed: of fresh adapters.

        Raises:
          ModelError: no model there, or not one that this package knows.
        """
        lora = lora or LoraConfig()
        model = loading.load(
            path, lora=lora, seed=seed, param_dtype=dtype, quantize=quantize, adapter=adapter
        )
        return cls(model, lora, chat)

    # ------------------------------------------------------------------------------ what it says

    def predict_action(
        self,
        image: Picture,
        instruction: str,
        action_format: str = "",
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Prediction:
        """One turn: a screenshot and an instruction in, an action out.

        Args:
          action_format: one of actions.FORMATS; empty: that of `chat`.
          temperature: 0 is greedy; else `seed` decides.

        Raises:
          ImageError: an image that cannot be read.
          ConfigError: an unknown action format.
        """
        screen = _open(image)
        chat = self._chat(action_format)
        patches_pc, grid = vision_inputs.cut_image(screen, self.model.image_cfg)
        context_ids = chat.context(instruction, [grid], []).ids
        request = SampleRequest(
            context_ids=context_ids,
            patches=(patches_pc,),
            grids=(grid,),
            image_keys=("screen",),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        engine = self._engine(chat, len(context_ids), len(patches_pc), max_new_tokens)

        async def sample() -> np.ndarray:
            async with engine:
                return (await engine.sample(request)).token_ids

        with BackgroundLoop() as loop:  # a notebook has a loop of its own on this thread
            text = chat.decode(loop.run(sample()))
        try:
            size_px = chat.image_size(grid)
            return Prediction(
                text, parse(text, screen.size, chat.action_format, image_size=size_px), ""
            )
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
        """
        if not 0 < len(images) == len(prompts) == len(labels):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts, {len(labels)} labels: expected "
                "one of each for every row"
            )
        chat = self._chat("")
        cut = [vision_inputs.cut_image(_open(one), self.model.image_cfg) for one in images]
        contexts = [
            chat.context(prompt, [grid], []).ids
            for prompt, (_, grid) in zip(prompts, cut, strict=True)
        ]
        answers = [chat.completion_ids(label) for label in labels]
        lengths = [len(c) + len(a) for c, a in zip(contexts, answers, strict=True)]
        ids_bt = np.zeros((len(images), max(lengths)), np.int32)
        mask_bt, answer_bt = np.zeros_like(ids_bt), np.zeros(ids_bt.shape, np.float32)
        for row, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
            ids_bt[row, : lengths[row]] = np.concatenate([context, answer])
            mask_bt[row, : lengths[row]] = 1
            answer_bt[row, len(context) : lengths[row]] = 1.0
        pixels_pf = vision_inputs.pixel_values(
            np.concatenate([patches_pc for patches_pc, _ in cut]), self.model.image_cfg
        )
        arrays = self._arrays(ids_bt, mask_bt, pixels_pf, np.array([grid for _, grid in cut]))
        lora = self._with(parameters)
        logprobs_bt = _logprobs(self.model.graphdef, lora, self.model.frozen, arrays) * answer_bt
        return {"loss": -logprobs_bt.sum() / answer_bt.sum(), "logprobs": logprobs_bt}

    def logits(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        pixel_values: np.ndarray | None = None,
        image_grid_thw: np.ndarray | None = None,
    ) -> np.ndarray:
        """What transformers' model computes of what its processor returns, as numpy arrays.

        Args:
          input_ids: int[B,T], image placeholders expanded.
          attention_mask: int[B,T], 0 at padding on either side.
          pixel_values: float[P,F], the patches of all images, row after row.
          image_grid_thw: int[N,3], of each image in patches.

        Returns: float32[B,T,V]; what stands at padding means nothing.
        Raises: ImageError where the images do not fit each other or the placeholders.
        """
        arrays = self._arrays(
            np.asarray(input_ids, np.int32),
            np.asarray(attention_mask, np.int32),
            np.zeros((0, 0), np.float32) if pixel_values is None else np.asarray(pixel_values),
            np.zeros((0, 3), np.int32) if image_grid_thw is None else np.asarray(image_grid_thw),
        )
        return np.asarray(_logits(self.model.graphdef, self._lora, self.model.frozen, arrays))

    # -------------------------------------------------------------------------- what it consists of

    def freeze_vision_encoder(self) -> None:
        """Its adapters, where it has some, are no longer among the trainable parameters."""
        self._freezes_vision = True

    def trainable_parameters(self) -> dict[str, np.ndarray]:
        """The adapters by name: {"text/blocks/q_proj/lora_a": float32[L,D,R], ...}."""
        return {
            name: array
            for name, array in qwen2_vl_weights.adapters_to_numpy(self._lora).items()
            if not (self._freezes_vision and name.startswith(_VISION))
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
        loading.save_merged(self.model.path, self._lora_cfg, self._lora, directory)

    def save_adapter(self, directory: str | Path) -> None:
        """Writes the adapters alone, in PEFT's format."""
        model = nnx.merge(self.model.graphdef, self._lora, self.model.frozen)
        peft_adapters.save_adapter(model, directory, base_model=self.model.path.resolve())

    # ------------------------------------------------------------------------------------ inside

    def _with(self, parameters: Parameters | None) -> nnx.State:
        if parameters is None:
            return self._lora
        flat = {**qwen2_vl_weights.adapters_to_numpy(self._lora), **parameters}
        return qwen2_vl_weights.adapters_from_numpy(flat, self.model.lora)

    def _chat(self, action_format: str) -> Chat:
        name = action_format or self._chat_cfg.action_format
        if name not in self._chats:
            cfg = self._chat_cfg
            if name != cfg.action_format:
                cfg = ChatConfig(action_format=name)
            vision = self.model.cfg.vision
            self._chats[name] = Chat(
                self.model.path, cfg, vision.spatial_merge_size, vision.patch_size
            )
        return self._chats[name]

    def _engine(self, chat: Chat, tokens: int, patches: int, max_new_tokens: int) -> Engine:
        """One that has room for a context; sizes go by powers of two, so that few are compiled."""
        context, row_patches = _power_of_two(tokens), _power_of_two(patches)
        key = (chat.action_format.name, context, row_patches, max_new_tokens)
        if key not in self._engines:
            self._engines[key] = Engine(
                self.model.graphdef,
                self.model.frozen,
                self._lora,
                self._version,
                model_cfg=self.model.cfg,
                end_token_ids=chat.end_token_ids,
                forbidden_ids=forbidden_ids(chat, self.model),
                image_cfg=self.model.image_cfg,
                cfg=EngineConfig(
                    context_lengths=(context,),
                    max_new_tokens=max_new_tokens,
                    batch_sizes=(1,),
                    prefill_rows=(1,),
                    prefill_lengths=(min(context, 512),),
                    image_rows=(1,),
                    image_row_patches=row_patches,
                ),
            )
        engine = self._engines[key]
        if engine.policy_version != self._version:
            engine.set_policy(self._lora, self._version)
        return engine

    def _arrays(
        self,
        ids_bt: np.ndarray,
        mask_bt: np.ndarray,
        pixels_pf: np.ndarray,
        grids_n3: np.ndarray,
    ) -> Arrays:
        """What `qwen2_vl.hidden` and `encode_images` take; an image is a row of patches."""
        if ids_bt.ndim != 2 or ids_bt.shape != mask_bt.shape:
            raise ValueError(
                f"input_ids {ids_bt.shape} and attention_mask {mask_bt.shape}: expected [B,T] both"
            )
        merge_size = self.model.cfg.vision.spatial_merge_size
        placeholder = self.model.cfg.image_token_id
        grids = [(int(t), int(h), int(w)) for t, h, w in grids_n3]
        counts = [t * h * w for t, h, w in grids]
        if sum(counts) != len(pixels_pf):
            raise ImageError(
                f"pixel_values has {len(pixels_pf)} patches, image_grid_thw says {sum(counts)}"
            )
        most = max(counts, default=0)
        positions_3bt = np.zeros((3, *ids_bt.shape), np.int32)
        index_bt = np.full_like(ids_bt, -1)
        used = 0
        for row, mask_t in enumerate(mask_bt > 0):
            ids_c = ids_bt[row, mask_t]
            first, used = used, used + int(run_starts(ids_c, placeholder).sum())
            of_row = grids[first:used]
            positions_3bt[:, row, mask_t] = vision_inputs.rope_positions(
                ids_c, of_row, placeholder, merge_size
            )
            index_bt[row, mask_t & (ids_bt[row] == placeholder)] = [
                image * most // merge_size**2 + token
                for image, grid in enumerate(of_row, first)
                for token in range(vision_inputs.num_visual_tokens(grid, merge_size))
            ]
        if used != len(grids):
            raise ImageError(f"placeholders of {used} images, image_grid_thw has {len(grids)}")
        arrays = {"ids_bt": ids_bt, "segments_bt": mask_bt, "positions_3bt": positions_3bt}
        if not grids:
            return arrays
        pixels_ipf = np.zeros((len(grids), most, pixels_pf.shape[1]), np.float32)
        positions_ip2 = np.zeros((len(grids), most, 2), np.int32)
        segments_ip = np.zeros((len(grids), most), np.int32)
        images_pf = np.split(pixels_pf, np.cumsum(counts)[:-1])
        for n, (grid, image_pf) in enumerate(zip(grids, images_pf, strict=True)):
            pixels_ipf[n, : counts[n]] = image_pf
            positions_ip2[n, : counts[n]] = vision_inputs.patch_positions(grid, merge_size)
            segments_ip[n, : counts[n]] = 1
        return arrays | {
            "vision_index_bt": index_bt,
            "pixels_ipf": pixels_ipf,
            "patch_positions_ip2": positions_ip2,
            "patch_segments_ip": segments_ip,
        }


def _open(image: Picture) -> Image.Image:
    """RGB. Raises: ImageError for what is no image, or not there."""
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if not isinstance(image, bytes):
        try:
            image = Path(image).read_bytes()
        except OSError as error:
            raise ImageError(f"{image}: {error}") from error
    return vision_inputs.decode_image(image)


def _power_of_two(number: int) -> int:
    return max(64, 1 << (number - 1).bit_length())


def _hidden(model: qwen2_vl.Qwen2VL, arrays: Arrays) -> jax.Array:
    visual_md = None
    if "pixels_ipf" in arrays:
        visual_md = qwen2_vl.encode_images(
            model,
            jnp.asarray(arrays["pixels_ipf"], model.compute_dtype),
            arrays["patch_positions_ip2"],
            arrays["patch_segments_ip"],
        )
    return qwen2_vl.hidden(
        model,
        arrays["ids_bt"],
        visual_md,
        arrays.get("vision_index_bt"),
        arrays["positions_3bt"],
        arrays["segments_bt"],
    )


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    graphdef: nnx.GraphDef, lora: nnx.State, frozen: nnx.State, arrays: Arrays
) -> jax.Array:
    model = nnx.merge(graphdef, lora, frozen)
    return qwen2_vl.logits(model, _hidden(model, arrays))


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(
    graphdef: nnx.GraphDef, lora: nnx.State, frozen: nnx.State, arrays: Arrays
) -> jax.Array:
    model = nnx.merge(graphdef, lora, frozen)
    return scoring.token_logprobs(model, _hidden(model, arrays), arrays["ids_bt"])
