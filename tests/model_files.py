"""Qwen2-VL's model directories and adapters for tests, which need no preprocessor_config.json."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from uirl_jax.families import loading, qwen2_vl
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, read_model_config
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.models import peft_adapters


def load_pretrained(model_dir: str | Path, **options: Any) -> Qwen2VL:
    """In float32 and without adapters, where the options of loading.read_model say nothing else."""
    model_dir = Path(model_dir)
    options = {"lora": None, "param_dtype": jnp.float32, "init_key": jax.random.key(0)} | options
    return loading.read_model(qwen2_vl.FAMILY, model_dir, read_model_config(model_dir), **options)


def save_pretrained(model: Qwen2VL, model_dir: str | Path, **options: Any) -> None:
    loading.save_model(qwen2_vl.FAMILY, model, model_dir, **options)


def load_adapter(directory: str | Path, cfg: Qwen2VLConfig) -> peft_adapters.Adapter:
    return loading.load_adapter(directory, qwen2_vl.FAMILY, cfg)


def save_adapter(
    model: Qwen2VL, directory: str | Path, *, base_model: str | Path | None = None
) -> None:
    peft_adapters.save_adapter(model, directory, qwen2_vl.FAMILY.weights, base_model=base_model)
