"""What a batch costs by formula: FLOPs that it needs, and an estimate of its memory.

FLOPs are of matrix products, two for a multiplication and an addition, and exclude what is computed
twice to save memory. Rows are taken as full, one episode each. The memory estimate ranks the
candidates of a search and plans the machines that have no compiler here; where a program was
compiled, the compiler's numbers count.
"""

import dataclasses
import math
from typing import Any

import jax

from tools.planner.families import PlannedModel, ResamplerSizes, VisionSizes, vision_sizes
from tools.planner.machines import Machine
from tools.planner.programs import Run, chip_bytes
from uirl_jax.families.loading import held_dtype
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig

_LOGITS_BYTES = 256 * 2**20  # of a chip's logits that are held at once (scoring.token_logprobs)


@dataclasses.dataclass(frozen=True)
class TextFlops:
    """One forward pass of the text tower."""

    projections: float
    adapters: float
    attention: float
    vocabulary: float

    @property
    def base(self) -> float:
        return self.projections + self.attention + self.vocabulary


def text_projections(cfg: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a block's projections."""
    dim, mlp = cfg.hidden_size, cfg.intermediate_size
    q, kv = (heads * cfg.head_dim for heads in (cfg.num_attention_heads, cfg.num_key_value_heads))
    return {
        "q_proj": (dim, q),
        "k_proj": (dim, kv),
        "v_proj": (dim, kv),
        "o_proj": (q, dim),
        "gate_proj": (dim, mlp),
        "up_proj": (dim, mlp),
        "down_proj": (mlp, dim),
    }


def text_forward(
    model: PlannedModel, lora: LoraConfig | None, tokens: int, episode_tokens: int, scored: int
) -> TextFlops:
    """Args: tokens in all; of an episode, which attends to itself; that meet the vocabulary."""
    cfg = model.cfg
    layers, projections = cfg.num_hidden_layers, text_projections(cfg)
    per_token = sum(a * b for a, b in projections.values())
    adapted = model.family.weights.projections_of(lora.targets) if lora else ()
    per_token_lora = sum(
        lora.rank * (a + b) for name, (a, b) in projections.items() if name in adapted
    )
    return TextFlops(
        projections=2.0 * layers * tokens * per_token,
        adapters=2.0 * layers * tokens * per_token_lora,
        # Scores and values, each against half of the episode: 2 x 2 x T / 2.
        attention=2.0 * layers * tokens * episode_tokens * projections["q_proj"][1],
        vocabulary=2.0 * scored * cfg.hidden_size * cfg.vocab_size,
    )


def vision_forward(vision: VisionSizes, images: int, patches: int) -> float:
    """The vision tower over screenshots of so many patches; attention within a screenshot, or
    within its windows."""
    dim, merged = vision.width, vision.width * vision.merge_area
    per_patch = vision.patch_features * dim
    per_patch += vision.depth * (4 * dim**2 + vision.mlp_matrices * dim * vision.mlp_width)
    full_blocks = vision.depth - vision.windowed_blocks
    keys = full_blocks * patches + vision.windowed_blocks * min(vision.window_patches, patches)
    per_patch += 2 * keys * dim
    inner = vision.merger_width or merged
    into = (vision.merger_matrices - 1) * merged
    per_visual_token = vision.mergers * inner * (into + vision.out_width)
    flops = 2.0 * images * patches * (per_patch + per_visual_token / vision.merge_area)
    if vision.resampler is None:
        return flops
    return flops + images * _resampler_forward(vision.resampler, vision.out_width, patches)


def _resampler_forward(sizes: ResamplerSizes, width: int, patches: int) -> float:
    """Of one image."""
    latents, read = sizes.latents, patches + sizes.latents
    products = latents * width * (2 * sizes.q_width + 3 * sizes.mlp_width)
    products += read * (2 * width * sizes.kv_width + 2 * latents * sizes.q_width)
    return 2.0 * sizes.blocks * products


def planned_model(run: Run) -> PlannedModel:
    return PlannedModel(run.model.family, run.model.cfg)


def _text_pass(run: Run) -> TextFlops:
    """One forward pass over a whole batch; sampled positions meet the vocabulary."""
    batch, lora = run.cfg.learner.batch, run.cfg.model.lora
    tokens = batch.rows * batch.row_lengths[-1]
    scored = math.prod(run.batch["sampled_index_bs"].shape)
    return text_forward(planned_model(run), lora, tokens, batch.row_lengths[-1], scored=scored)


def batches_a_step(run: Run) -> int:
    """A row holds one episode: a step of more of them has several batches."""
    episodes = run.cfg.learner.groups_per_step * run.cfg.actor.group_size
    return -(-episodes // run.cfg.learner.batch.rows)


def batch_flops(run: Run) -> dict[str, float]:
    """By part, over all chips. Frozen weights have no gradient: backward is once forward for them,
    twice for adapters and attention."""
    batch, text = run.cfg.learner.batch, _text_pass(run)
    backward = text.projections + text.vocabulary + 2 * text.adapters + 2 * text.attention
    parts = {
        "vision tower": vision_forward(
            vision_sizes(planned_model(run)), batch.image_rows[-1], batch.patch_lengths[-1]
        ),
        "new policy, forward": text.base + text.adapters,
        "new policy, backward": backward,
    }
    if run.cfg.algorithm.use_reference:
        parts["reference"] = text.base
    return parts


def recomputed_flops(run: Run) -> float:
    """What remat computes a second time: no part of the model's FLOPs."""
    text = _text_pass(run)
    blocks = {
        "none": 0.0,
        "dots": text.attention,
        "full": text.projections + text.adapters + text.attention,
    }
    return text.vocabulary + blocks[run.cfg.model.remat]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one chip."""

    weights: float
    state: float  # adapters and optimizer
    batch: float  # with the table of visual tokens
    saved: float  # what layers keep for the backward pass
    temporaries: float  # the rest of a step's working set

    @property
    def peak(self) -> float:
        return self.weights + self.state + self.batch + self.saved + self.temporaries


def resident(run: Run) -> tuple[float, float, float]:
    """Weights, state, and batch with the table of visual tokens: exact, from the shardings."""
    batch = run.cfg.learner.batch
    vision = vision_sizes(planned_model(run))
    tokens = batch.image_rows[-1] * run.model.inputs.row_tokens(batch.patch_lengths[-1])
    # Every chip holds the rows of its part of the data axis, which its rows of text may look up.
    table = tokens * vision.mergers * vision.out_width * _activation_bytes(run)
    if tokens % run.mesh.shape["data"] == 0:
        table /= run.mesh.shape["data"]
    return chip_bytes(run.model.frozen), chip_bytes(run.state), chip_bytes(run.batch) + table


def rows_on_a_host(run: Run, machine: Machine) -> int:
    """Rows of a batch that the chips of one host compute; chips along the model axis share rows."""
    sizes = dict(run.mesh.shape)
    across = sizes["data"] * sizes["fsdp"]
    parts = max(1, min(machine.chips, machine.host.chips) // sizes["model"])
    return run.cfg.learner.batch.rows * min(parts, across) // across


def host_memory(run: Run, machine: Machine) -> dict[str, float]:
    """Bytes that a learner's process holds on one host beside Python and the TPU's runtime.

    Not at once: the weights come and go before the first batch.
    """
    rows, share = run.cfg.learner.batch.rows, rows_on_a_host(run, machine)
    leaves = weights.leaves_of(run.model.cfg, run.model.frozen, run.model.family.weights)
    state = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.state) if leaf.shape]
    stored_bytes = 2  # of a bfloat16 weight, as published
    largest = max(math.prod(leaf.tensor_shape) for leaf in leaves) * stored_bytes
    return {
        "its rows of a step": batches_a_step(run) * _whole_bytes(run.batch) * share / rows,
        "loading: largest tensor, twice": 2.0 * largest,  # as read, and cut for its chips
        "checkpoint: largest leaf, whole": float(max(state)),
        "publication: adapters, whole": float(_whole_bytes(run.state.trainable)),
    }


def _whole_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def estimate_memory(run: Run) -> Memory:
    """Saved and temporaries are estimates: a third off is normal."""
    cfg, model = run.cfg, run.model.cfg
    sizes, item = dict(run.mesh.shape), _activation_bytes(run)
    across, wide = sizes["data"] * sizes["fsdp"], sizes["model"]
    batch = cfg.learner.batch
    tokens = batch.rows / across * batch.row_lengths[-1]
    dim, mlp = model.hidden_size, model.intermediate_size
    kv = model.num_key_value_heads * model.head_dim
    q = model.num_attention_heads * model.head_dim
    outputs = (2 * q + 2 * kv + 2 * mlp) / wide + dim  # of the projections of a block
    kept = {"full": dim, "dots": 2 * dim + outputs, "none": 6 * dim + 2 * outputs}
    saved = model.num_hidden_layers * tokens * kept[cfg.model.remat] * item
    # Backward through one block, the logits of a chunk with their gradient, gathered weights.
    block = tokens * (4 * mlp / wide + 8 * dim) * item
    logits = 3 * _LOGITS_BYTES
    gathered = 2 * model.vocab_size * dim * item / wide
    images = batch.image_rows[-1] / across * batch.patch_lengths[-1]
    # 2 mlp + 10 width: 47 kB a patch was what libtpu took for 40 screenshots a chip of Qwen2-VL.
    tower = vision_sizes(planned_model(run))
    vision = images * (tower.mlp_matrices * tower.mlp_width + 10 * tower.width) * item
    scoring = block / 2 + logits * 2 / 3 + gathered
    gradients = saved + block + logits + gathered
    weights, state, resident_batch = resident(run)
    peak = max(gradients, scoring, vision)
    return Memory(weights, state, resident_batch, saved, max(peak - saved, 0.0))


def _activation_bytes(run: Run) -> int:
    return held_dtype(run.cfg.model.param_dtype).itemsize
