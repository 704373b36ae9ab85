"""Tables of names: Qwen2-VL's, and a small one with what a family may need."""

import pytest

from tests import small_model
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.models.weight_table import Leaf, Stack, WeightTable

TOY = WeightTable(
    stacks={"decoder/blocks": Stack("layers", {"q_proj": "attn.q", "attn/norm": "attn.norm"})},
    single={
        "embedding": "embed.weight",
        "head/kernel": "head.weight",
        "head/bias": "head.bias",
        "patches/kernel": "conv.weight",
    },
    lora_groups={"attention": ("q_proj", "k_proj"), "head": ("head",), "all": ("q_proj", "k_proj")},
    sharding_rules={},
    shapes={"patches/kernel": lambda cfg: (8, 3, cfg, cfg)},
)


@pytest.mark.parametrize("targets", [("attention", "tail"), ("tail",)])
def test_projections_of_an_unknown_target_is_refused_with_the_known_ones(targets):
    with pytest.raises(ConfigError) as error:
        TOY.projections_of(targets)
    message = str(error.value)
    assert message.startswith(f"lora.targets={targets}: 'tail' is unknown")
    assert "\n" not in message
    for known in ("attention", "head", "all", "q_proj", "k_proj"):
        assert f"'{known}'" in message
    with pytest.raises(ConfigError, match=r"'attn\.qkv' is unknown"):  # published, not ours
        WEIGHTS.projections_of(("attn.qkv",))


def test_projections_of_groups_and_single_projections_is_their_union():
    assert TOY.projections == ("q_proj", "k_proj", "head")
    assert TOY.projections_of(()) == frozenset()
    assert TOY.projections_of(("q_proj", "head")) == {"q_proj", "head"}
    assert TOY.projections_of(("all", "q_proj")) == {"q_proj", "k_proj"}
    merger = {"merger_fc1", "merger_fc2"}
    assert WEIGHTS.projections_of(("merger", "fc1")) == merger | {"fc1"}


@pytest.mark.parametrize("table", [TOY, WEIGHTS], ids=["toy", "qwen2_vl"])
def test_targets_of_is_the_reverse_of_projections_of(table):
    # Every union of two targets, groups and single projections alike.
    names = (*table.lora_groups, *table.projections)
    for first in names:
        for second in names:
            projections = table.projections_of((first, second))
            assert table.projections_of(table.targets_of(projections)) == projections
    assert table.targets_of(()) == ()


def test_targets_of_names_groups_before_single_projections():
    assert WEIGHTS.targets_of({"v_proj", "fc1", "merger_fc2", "merger_fc1"}) == (
        "merger",
        "v_proj",
        "fc1",
    )
    assert WEIGHTS.targets_of(WEIGHTS.projections_of(("all",))) == ("attention", "mlp")


def test_leaf_of_a_stack_has_a_tensor_a_layer():
    assert TOY.leaf(14, "decoder/blocks/q_proj/kernel", (2, 6, 4)) == Leaf(
        path="decoder/blocks/q_proj/kernel",
        tensors=("layers.0.attn.q.weight", "layers.1.attn.q.weight"),
        shape=(2, 6, 4),
        stacked=True,
        transposed=True,
        tensor_shape=(4, 6),
    )
    scale = TOY.leaf(14, "decoder/blocks/attn/norm/scale", (2, 6))
    assert scale.tensors == ("layers.0.attn.norm.weight", "layers.1.attn.norm.weight")
    assert (scale.stacked, scale.transposed, scale.tensor_shape) == (True, False, (6,))
    bias = WEIGHTS.leaf(small_model.CONFIG, "visual/blocks/qkv/bias", (2, 48))
    assert bias.tensors == ("visual.blocks.0.attn.qkv.bias", "visual.blocks.1.attn.qkv.bias")
    assert (bias.stacked, bias.transposed, bias.tensor_shape) == (True, False, (48,))


def test_single_leaf_is_one_tensor_and_only_kernels_are_transposed():
    kernel = TOY.leaf(14, "head/kernel", (6, 50))
    assert (kernel.tensors, kernel.stacked, kernel.transposed) == (("head.weight",), False, True)
    assert kernel.tensor_shape == (50, 6)
    bias = TOY.leaf(14, "head/bias", (50,))
    assert (bias.tensors, bias.tensor_shape, bias.transposed) == (("head.bias",), (50,), False)
    embedding = TOY.leaf(14, "embedding", (50, 6))
    assert (embedding.tensor_shape, embedding.transposed) == ((50, 6), False)


def test_leaf_of_a_convolution_has_the_published_shape():
    kernel = TOY.leaf(14, "patches/kernel", (3 * 14 * 14, 8))
    assert (kernel.shape, kernel.tensor_shape) == ((588, 8), (8, 3, 14, 14))
    assert kernel.transposed and not kernel.stacked
    vision = small_model.CONFIG.vision
    shape = (vision.patch_features, vision.embed_dim)
    patch_embed = WEIGHTS.leaf(small_model.CONFIG, "visual/patch_embed/kernel", shape)
    assert patch_embed.tensor_shape == (16, 3, 2, 4, 4)
    with pytest.raises(AssertionError):
        TOY.leaf(13, "patches/kernel", (588, 8))


@pytest.mark.parametrize("path", ["tail/kernel", "decoder/blocks/k_proj/kernel"])
def test_leaf_that_the_table_does_not_know_is_named(path):
    with pytest.raises(ModelError, match=f"{path}: a leaf without a name in WeightTable"):
        TOY.leaf(14, path, (2, 6, 4))


@pytest.mark.parametrize(
    ("current", "published"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.visual.merger.ln_q.bias", "visual.merger.ln_q.bias"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_names_of_qwen2_vl_in_both_layouts_and_back(current, published):
    assert WEIGHTS.published_name(current) == WEIGHTS.published_name(published) == published
    assert WEIGHTS.current_name(published) == current
    assert WEIGHTS.published_name("model.rotary_emb.inv_freq") is None
    assert TOY.published_name(current) == TOY.current_name(current) == current
