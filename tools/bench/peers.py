"""The peers: the same training step and sampling in torch, by transformers and peft.

No other module of the package imports torch; those that need this file import it in a function.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from tools.bench import work
from uirl_jax.families.qwen.images import pixel_values


def _read_base(directory: Path, device: str) -> Any:
    base = transformers.AutoModelForImageTextToText.from_pretrained(
        directory / "model",
        dtype=getattr(torch, work.read_size(directory).dtype),
        attn_implementation="sdpa",
    )
    return base.to(device)


def device_gib() -> float:
    """Most memory of the GPU that torch's arrays took; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def torch_step(
    directory: Path, *, encode_once: bool, device: str = "cpu"
) -> Callable[[], dict[str, float]]:
    """One optimizer step on the work that `work.write_work` wrote: what it computed, by name.

    Args:
      encode_once: the screenshot that all rows share goes through the vision tower once. Otherwise
        it stands in every row, as transformers' processor and TRL give it to the model.
      device: of torch: cpu or cuda.
    """
    torch.set_num_threads(work.THREADS)
    base = _read_base(directory, device)
    model = peft.PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True)
    model.train()
    arrays = np.load(directory / "arrays.npz")
    ids_bt = torch.tensor(arrays["token_ids_bt"], device=device).long()
    rows, first = len(ids_bt), int(arrays["prompt_length"])
    kinds_bt = (ids_bt == base.config.image_token_id).int()
    pixels = torch.tensor(arrays["patches_pf"], device=device, dtype=base.dtype)
    grid = torch.tensor(arrays["grid_thw"], device=device)[None]
    advantages_b1 = torch.tensor(arrays["advantages_g"], device=device)[:, None]
    attention_bt = torch.ones_like(ids_bt)
    positions_3bt, _ = base.model.get_rope_index(
        ids_bt, kinds_bt, grid.repeat(rows, 1), attention_mask=attention_bt
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=work.LEARNING_RATE,
        betas=(0.9, 0.99),
        weight_decay=0.0,
    )

    def inputs() -> dict[str, Any]:
        if not encode_once:
            return {
                "mm_token_type_ids": kinds_bt,  # without them positions would be 1-D
                "pixel_values": pixels.repeat(rows, 1),
                "image_grid_thw": grid.repeat(rows, 1),
            }
        with torch.no_grad():
            found = base.model.get_image_features(pixels, grid)
        found.pooler_output = found.pooler_output * rows  # a tuple with an entry for every image
        if "deepstack_features" in found:
            found.deepstack_features = [level * rows for level in found.deepstack_features]
        return {"mm_encoder_outputs": {"image": found}, "position_ids": positions_3bt}

    def logprobs(shared: dict[str, Any]) -> torch.Tensor:
        """Of the sampled tokens, [B, S]; logits of these positions alone, as TRL does."""
        kept = ids_bt.shape[1] - first + 1
        logits_bsv = (
            model(
                input_ids=ids_bt,
                attention_mask=attention_bt,
                use_cache=False,
                logits_to_keep=kept,
                **shared,
            )
            .logits[:, :-1]
            .float()
        )
        targets_bs = ids_bt[:, first:]
        picked_bs = logits_bsv.gather(-1, targets_bs[..., None])[..., 0]
        return picked_bs - logits_bsv.logsumexp(-1)

    def step() -> dict[str, float]:
        base.model.rope_deltas = None  # state between calls
        shared = inputs()
        with torch.no_grad(), model.disable_adapter():
            ref_bs = logprobs(shared)
        new_bs = logprobs(shared)
        # One update a batch: the old policy is the one before this very update.
        ratio_bs = torch.exp(new_bs - new_bs.detach())
        clipped_bs = ratio_bs.clamp(0.8, 1.2)
        surrogate_bs = torch.minimum(ratio_bs * advantages_b1, clipped_bs * advantages_b1)
        to_ref_bs = ref_bs - new_bs
        kl_bs = torch.exp(to_ref_bs) - to_ref_bs - 1
        loss = (-surrogate_bs + work.KL_COEFFICIENT * kl_bs).mean()
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.get_total_norm(parameter.grad for parameter in trained)
        optimizer.step()
        return {
            "loss": loss.item(),
            "nll": -new_bs.mean().item(),
            "kl": kl_bs.mean().item(),
            "grad_norm": grad_norm.item(),
        }

    return step


def torch_generate(directory: Path, device: str = "cpu") -> Callable[..., dict[str, Any]]:
    """A round of a case of `sample` by transformers' generate, all prompts as one batch.

    The adapters are merged into the weights: the tokens are those of the model with adapters, at
    the cost of the one without.
    """
    torch.set_num_threads(work.THREADS)
    base = _read_base(directory, device)
    size = work.read_size(directory)
    merged: Any = peft.PeftModel.from_pretrained(base, directory / "adapter")
    model = merged.merge_and_unload().eval()
    cfg, _ = work.config_and_inputs(directory)
    forbidden_ids = list(work.forbidden_ids(cfg))

    def generate(inputs: dict[str, torch.Tensor], tokens: int, greedy: bool) -> torch.Tensor:
        model.model.rope_deltas = None  # state between calls
        sampling = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        ids_bt = model.generate(
            **inputs,
            do_sample=not greedy,
            **sampling,
            suppress_tokens=forbidden_ids,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        return ids_bt[:, inputs["input_ids"].shape[1] :]

    def play_round(case: str, round_number: int, greedy: bool = False) -> dict[str, Any]:
        prompts = work.prompts(directory, case, round_number)
        contexts_bc = np.stack([prompt.token_ids_c for prompt in prompts])
        ids_bt = torch.tensor(contexts_bc, device=device).long()
        patches_pc = np.concatenate([p.screen.arrays["patches_pc"] for p in prompts])
        inputs = {
            "input_ids": ids_bt,
            "attention_mask": torch.ones_like(ids_bt),
            "mm_token_type_ids": (ids_bt == cfg.image_token_id).int(),
            "pixel_values": torch.tensor(
                pixel_values(patches_pc, cfg.images), device=device, dtype=model.dtype
            ),
            "image_grid_thw": torch.tensor([p.screen.layout for p in prompts], device=device),
        }
        if greedy:
            return {"token_ids": generate(inputs, size.sampled_tokens, greedy).tolist()}
        started_s = time.perf_counter()
        generate(inputs, 1, greedy).cpu()  # waits for a GPU
        first_s = time.perf_counter() - started_s
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        generate(inputs, size.sampled_tokens, greedy).cpu()
        seconds = time.perf_counter() - started_s
        return {
            "seconds": seconds,
            "cpu_s": time.process_time() - started_cpu_s,
            "tokens": len(prompts) * size.sampled_tokens,
            "decode_step_s": (seconds - first_s) / (size.sampled_tokens - 1),
        }

    return play_round
