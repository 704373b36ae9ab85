"""What the engine holds beside a model's weights on the CPU: nothing, in float32 or bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.engine_world import CFG, MODEL_CFG, VOCAB, make_policy
from tests.policies import random_policy
from uirl_jax.engine import programs, weights
from uirl_jax.families.chat import Vocabulary
from uirl_jax.models.lora import LoraConfig


def test_layers_on_the_cpu_are_the_memory_of_the_stacked_weights():
    model = make_policy()
    prepared = weights.prepare(model, model.trainable, by_layer=True)
    stacked = model.frozen["text"]["blocks"]["gate_proj"]["kernel"].get_value()
    start = stacked.unsafe_buffer_pointer()
    for layer, frozen in enumerate(prepared.frozen_layers):
        leaf = frozen["gate_proj"]["kernel"].get_value()
        assert leaf.unsafe_buffer_pointer() == start + layer * leaf.nbytes
    # Where XLA cannot use the address, it is a copy; the values are equal everywhere.
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], model.frozen["text"]["blocks"]) for i in range(2)
    ]
    jax.tree.map(np.testing.assert_array_equal, list(prepared.frozen_layers), layers)
    del model, stacked  # the layers keep the memory alive
    assert np.isfinite(np.asarray(prepared.frozen_layers[1]["gate_proj"]["kernel"])).all()


def test_decoding_in_bfloat16_converts_one_layer_at_a_time():
    cfg = dataclasses.replace(
        MODEL_CFG, hidden_size=256, intermediate_size=1024, num_hidden_layers=8,
        mrope_section=(8, 12, 12),
        vision=dataclasses.replace(MODEL_CFG.vision, hidden_size=256),
    )  # fmt: skip
    model = random_policy(cfg, LoraConfig(rank=2, alpha=4.0))
    frozen = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.frozen)
    model = dataclasses.replace(model, frozen=frozen)
    blocks = sum(leaf.size for leaf in jax.tree.leaves(frozen["text"]["blocks"]))
    options = weights.compiler_options(model, by_layer=True)
    assert options and not weights.compiler_options(model, by_layer=False)
    assert not weights.compiler_options(make_policy(), by_layer=True)  # float32
    compiled = programs.make_programs(
        model, Vocabulary(end_token_ids=(1,), forbidden_ids=()), CFG, compiler_options=options
    )
    cache = model.family.init_cache(cfg, CFG.num_slots, CFG.slot_positions, jnp.dtype("bfloat16"))
    temporary = (
        compiled.decode.lower(
            cache,
            weights.prepare(model, model.trainable, by_layer=True),
            programs.no_rows(1, CFG.num_slots),
            jnp.int32(3),
            jnp.bool_(False),
            span=CFG.slot_positions,
        )
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    whole = 4 * blocks  # of all layers in float32
    assert VOCAB < 100 and temporary < whole / 4, f"{temporary} of {whole} bytes"
