"""Qwen3-VL's screens, positions and chat against transformers; its coordinates."""

import dataclasses
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests import family_world as world
from tools.base_models import qwen_tokenizer
from uirl_jax import actions
from uirl_jax.errors import ImageError
from uirl_jax.families import qwen3_vl
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.qwen import images
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen3_vl import inputs
from uirl_jax.families.qwen3_vl.inputs import Qwen3VLInputs
from uirl_jax.types import Action

# As in the directories of Qwen3-VL on the hub.
PUBLISHED_FILE = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
IMAGE_TOKEN = 290
PUBLISHED = Qwen3VLInputs(ImageConfig.from_dict(PUBLISHED_FILE), IMAGE_TOKEN, table_side=48)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((40, 30), (1, 14, 20)),  # below shortest_edge: enlarged
        ((224, 168), (1, 14, 20)),
        ((448, 448), (1, 28, 28)),
        ((333, 517), (1, 32, 20)),
        ((1280, 800), (1, 50, 80)),
        ((1366, 768), (1, 48, 86)),
        ((1920, 1080), (1, 68, 120)),
        ((4600, 4000), (1, 238, 274)),  # above longest_edge
    ],
)
def test_screens_with_the_published_file_equal_transformers_bit_for_bit(size, grid):
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    screen = PUBLISHED.cut_screen(world.picture(*size))
    processor = reference.Qwen2VLImageProcessorPil.from_dict(PUBLISHED_FILE)
    expected = processor(world.picture(*size), return_tensors="np")
    assert screen.layout == grid == tuple(expected["image_grid_thw"][0])
    assert (screen.patches, screen.tokens) == (grid[1] * grid[2], grid[1] * grid[2] // 4)
    pixels_pf = images.pixel_values(screen.arrays["patches_pc"], PUBLISHED.images)
    np.testing.assert_array_equal(pixels_pf, expected["pixel_values"], strict=True)


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1)])
def test_picture_of_1x4000_is_refused_in_one_line(size):
    with pytest.raises(ImageError, match="200 to 1") as error:
        PUBLISHED.plan_screen(size)
    assert "\n" not in str(error.value)


def test_pixels_of_another_models_processor_are_refused_in_one_line():
    """Patches of 14 pixels have 1,176 values, those of 16 pixels 1,536."""
    with pytest.raises(ImageError, match=r"\(16, 1176\), expected \(patches, 1536\)") as error:
        PUBLISHED.from_processor(
            pixel_values=np.zeros((16, 1176), np.float32), image_grid_thw=np.array([[1, 4, 4]])
        )
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 60), columns=st.integers(1, 60), side=st.sampled_from([3, 6, 48]))
def test_table_positions_of_any_grid_give_the_taps_and_weights_of_transformers(rows, columns, side):
    torch = pytest.importorskip("torch")
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    grid = (1, 2 * rows, 2 * columns)
    taps_p4, weights_p4 = get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), side, align_corners=True, spatial_merge_size=2
    )
    positions_p2 = inputs.table_positions(grid, 2, side)
    assert (positions_p2.dtype, positions_p2.shape) == (np.float32, (4 * rows * columns, 2))
    first_p2 = np.floor(positions_p2).astype(int)
    last_p2 = np.minimum(first_p2 + 1, side - 1)
    share_p2 = positions_p2 - first_p2
    corners = [
        (y_p, wy_p, x_p, wx_p)
        for y_p, wy_p in ((first_p2[:, 0], 1 - share_p2[:, 0]), (last_p2[:, 0], share_p2[:, 0]))
        for x_p, wx_p in ((first_p2[:, 1], 1 - share_p2[:, 1]), (last_p2[:, 1], share_p2[:, 1]))
    ]
    for corner, (y_p, wy_p, x_p, wx_p) in enumerate(corners):
        np.testing.assert_array_equal(y_p * side + x_p, taps_p4[:, corner])
        # Within rounding: the reference has 1 - |p - floor - 1| where this has p - floor.
        np.testing.assert_allclose(wy_p * wx_p, weights_p4[:, corner], atol=1e-5)


def test_pack_screens_and_from_processor_place_the_same_positions():
    small = world.policy_of("plain").inputs
    screens = [world.screen_of(small, size, 1) for size in ((3, 2), (1, 2))]
    returned, packed = small.from_processor(
        pixel_values=np.concatenate(world.pixels_of(small, screens)),
        image_grid_thw=np.array([screen.layout for screen in screens]),
    )
    assert [screen.layout for screen in returned] == [screen.layout for screen in screens]
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
    expected = small.pack_screens(placed, 2, 24)
    assert packed.first_tokens == expected.first_tokens
    name = "table_positions_ip2"
    np.testing.assert_array_equal(packed.arrays[name], expected.arrays[name])
    shared = small.pack_screens([PlacedScreen(screens[1], 0, 8, 3)], 1, 24).arrays[name]
    np.testing.assert_array_equal(shared[0, 8:16], expected.arrays[name][1, :8])
    assert not shared[0, :8].any() and not shared[0, 16:].any()
    assert shared.max() == small.table_side - 1  # the last patch is on the grid's corner


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)), max_size=4),
    tail=st.integers(0, 5),
)
def test_positions_of_any_sequence_equal_get_rope_index(parts, tail):
    torch = pytest.importorskip("torch")
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    ids, grids = [5], []
    for text, h, w in parts:
        ids += [3] * text + [IMAGE_TOKEN] * (h * w)
        grids.append((1, 2 * h, 2 * w))
    ids += [4] * tail
    # get_rope_index reads nothing of the model but the merge size.
    holder = type("Holder", (), {"config": Qwen3VLConfig()})()
    holder.get_vision_position_ids = Qwen3VLModel.get_vision_position_ids.__get__(holder)
    ids_1t = torch.tensor([ids])
    expected, _ = Qwen3VLModel.get_rope_index(
        holder, ids_1t, (ids_1t == IMAGE_TOKEN).int(), torch.tensor(grids) if grids else None
    )
    patch = PUBLISHED.images.patch_size
    plain = dataclasses.replace(
        PUBLISHED, images=dataclasses.replace(PUBLISHED.images, min_pixels=1)
    )
    screens = [plain.plan_screen((w * patch, h * patch)) for _, h, w in grids]
    np.testing.assert_array_equal(plain.positions(np.array(ids), screens), expected.numpy()[:, 0])


# -------------------------------------------------------------------------------------- chat

# The published Instruct template without tools, videos and numbered pictures: it has no system
# turn of its own, and treats user and assistant messages alike.
PUBLISHED_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].content is string %}
        {{- messages[0].content }}
    {%- else %}
        {%- for content in messages[0].content %}
            {%- if 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for content in message.content %}
                {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                    {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
                {%- elif 'text' in content %}
                    {{- content.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEXTS = ["Click the red button", "click(100, 200)", 'type("hello")', "user\n", "assistant\n"] * 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    qwen_tokenizer.save(qwen_tokenizer.train_tokenizer(TEXTS, 400), directory)
    (directory / "chat_template.jinja").write_text(PUBLISHED_TEMPLATE)
    return directory


def template_ids(model_dir, messages, tokens: list[int]) -> list[int]:
    """transformers' rendering, with placeholders repeated as Qwen3VLProcessor repeats them."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    first, *rest = text.split("<|image_pad|>")
    repeated = ("<|image_pad|>" * n + piece for n, piece in zip(tokens, rest, strict=True))
    return tokenizer(first + "".join(repeated))["input_ids"]


@pytest.mark.parametrize("system", ["", "You see a screen."])
def test_context_of_three_turns_equals_the_published_template(model_dir, system):
    cfg = ChatConfig(system_prompt=system, prompt_template="{instruction}")
    chat = Chat(model_dir, cfg, qwen3_vl.FAMILY.chat)
    screens = [
        dataclasses.replace(PUBLISHED.plan_screen(size), key=str(size))
        for size in ((320, 224), (288, 256), (256, 288))
    ]
    texts = ["click(100, 200)", 'type("naïve 漢字")']
    context = chat.context("Naïve: 12 apples", screens, [chat.completion_ids(t) for t in texts])
    image = {"type": "image"}
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": [image, {"type": "text", "text": "Naïve: 12 apples"}]},
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": [{"type": "text", "text": texts[1]}]},
        {"role": "user", "content": [image]},
    ]
    expected = template_ids(model_dir, messages, [screen.tokens for screen in screens])
    assert context.ids.tolist() == expected
    assert chat.decode(context.ids).startswith(f"<|im_start|>{'system' if system else 'user'}\n")


def test_template_that_is_written_says_the_same_as_the_published_one(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "ours")
    (tmp_path / "ours" / "chat_template.jinja").write_text(qwen3_vl.FAMILY.chat.template(""))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Go"}]},
        {"role": "assistant", "content": "wait(1)"},
        {"role": "user", "content": "On"},
    ]
    for chosen in (messages, messages[1:]):
        ours, theirs = (
            template_ids(directory, chosen, [4]) for directory in (tmp_path / "ours", model_dir)
        )
        assert ours == theirs


# ------------------------------------------------------------------------------- coordinates


@pytest.mark.parametrize("name", ["text", "computer_use_1000"])
@pytest.mark.parametrize(
    "size",
    [
        *((224, 168), (640, 480), (800, 600), (1024, 768), (1280, 720)),
        *((1280, 800), (1366, 768), (1440, 900), (1920, 1080), (390, 844)),
    ],
)
def test_pixel_to_text_to_pixel_is_within_a_pixel(name, size):
    """0 to 1000 of the screen: a step is 1.92 pixels at most, rounded to half of it."""
    action_format = actions.find_format(name, qwen3_vl.FAMILY.coordinates)
    width, height = size
    corners = [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)]
    points = np.random.default_rng(size).integers((0, 0), size, (200, 2)).tolist()
    for x, y in [*corners, *points]:
        action = Action("click", x=int(x), y=int(y))
        text = actions.format_action(action, size, action_format)
        back = actions.parse(text, size, action_format)
        assert abs(back.x - x) <= 1 and abs(back.y - y) <= 1, (text, x, y)
