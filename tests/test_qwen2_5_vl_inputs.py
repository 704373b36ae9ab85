"""Qwen2.5-VL's screens, windows, positions and chat against transformers; its coordinates."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests import family_world as world
from tests.published_chats import QWEN2_VL as PUBLISHED_TEMPLATE
from tools.base_models import qwen_tokenizer
from uirl_jax import actions
from uirl_jax.errors import ImageError
from uirl_jax.families import qwen2_5_vl
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.qwen import images
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_5_vl.inputs import Qwen25VLInputs, window_order
from uirl_jax.types import Action

# As in the directories of Qwen2.5-VL on the hub.
PUBLISHED_FILE = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
# As UI-TARS-1.5's clients ask for it.
UI_TARS_FILE = PUBLISHED_FILE | {"max_pixels": 2_116_800}
IMAGE_TOKEN = 290
SIZES = [
    *((224, 168), (640, 480), (800, 600), (1024, 768), (1280, 720)),
    *((1280, 800), (1366, 768), (1440, 900), (1920, 1080), (390, 844)),
]


def inputs_of(file: dict, window_tokens: int = 4) -> Qwen25VLInputs:
    return Qwen25VLInputs(ImageConfig.from_dict(file), IMAGE_TOKEN, window_tokens=window_tokens)


PUBLISHED, UI_TARS = inputs_of(PUBLISHED_FILE), inputs_of(UI_TARS_FILE)
SMALL = inputs_of(PUBLISHED_FILE | {"patch_size": 4, "min_pixels": 64}, window_tokens=2)


# ------------------------------------------------------------------------------------ screens


@pytest.mark.parametrize(
    ("inputs", "file", "size", "grid"),
    [
        (PUBLISHED, PUBLISHED_FILE, (40, 30), (1, 4, 6)),  # below min_pixels
        (PUBLISHED, PUBLISHED_FILE, (224, 168), (1, 12, 16)),
        (PUBLISHED, PUBLISHED_FILE, (333, 517), (1, 36, 24)),
        (PUBLISHED, PUBLISHED_FILE, (448, 448), (1, 32, 32)),
        (PUBLISHED, PUBLISHED_FILE, (1280, 800), (1, 58, 92)),
        (PUBLISHED, PUBLISHED_FILE, (1920, 1080), (1, 78, 138)),
        (UI_TARS, UI_TARS_FILE, (1366, 768), (1, 54, 98)),
        (UI_TARS, UI_TARS_FILE, (2560, 1440), (1, 76, 138)),  # above max_pixels
    ],
)
def test_screens_with_the_published_files_equal_transformers_bit_for_bit(inputs, file, size, grid):
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    screen = inputs.cut_screen(world.picture(*size))
    processor = reference.Qwen2VLImageProcessorPil.from_dict(file)
    expected = processor(world.picture(*size), return_tensors="np")
    assert screen.layout == grid == tuple(expected["image_grid_thw"][0])
    assert (screen.patches, screen.tokens) == (grid[1] * grid[2], grid[1] * grid[2] // 4)
    pixels_pf = images.pixel_values(screen.arrays["patches_pc"], inputs.images)
    np.testing.assert_array_equal(pixels_pf, expected["pixel_values"], strict=True)


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1)])
def test_picture_of_1x4000_is_refused_in_one_line(size):
    with pytest.raises(ImageError, match="200 to 1") as error:
        PUBLISHED.plan_screen(size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"pixel_values": np.zeros((32, 96)), "image_grid_thw": np.array([[2, 4, 4]])},
        {"pixel_values_videos": np.zeros((32, 96)), "video_grid_thw": np.array([[2, 4, 4]])},
        {"pixel_values": np.zeros((6, 96)), "image_grid_thw": np.array([[1, 2, 3]])},
        {"pixel_values": np.zeros((4, 96))},
    ],
)
def test_from_processor_of_a_video_or_half_of_the_arrays_is_refused_in_one_line(given):
    with pytest.raises(ImageError, match="videos are not supported") as error:
        SMALL.from_processor(**given)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------ windows


def test_window_order_table_worked_by_hand():
    order_m, counts_w = window_order((1, 6, 10), 2, 2)
    assert order_m.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert counts_w.tolist() == [4, 4, 2, 2, 2, 1]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), window=st.integers(1, 5))
def test_window_order_of_any_grid_equals_transformers(rows, columns, window):
    torch = pytest.importorskip("torch")
    from transformers.vision_utils import get_vision_window_index

    grid = (1, 2 * rows, 2 * columns)
    order_m, counts_w = window_order(grid, 2, window)
    expected, ends = get_vision_window_index(torch.tensor([grid]), 2, window * 28, 14)
    np.testing.assert_array_equal(order_m, expected.numpy())
    np.testing.assert_array_equal(4 * np.cumsum(counts_w), ends.numpy()[1:])


@pytest.mark.parametrize(
    ("size", "windows"), [((1280, 800), 96), ((448, 448), 16), ((224, 168), 4), ((112, 112), 1)]
)
def test_windows_of_published_screens(size, windows):
    screen = PUBLISHED.plan_screen(size)
    _, counts_w = window_order(screen.layout, 2, PUBLISHED.window_tokens)
    assert (len(counts_w), counts_w.sum(), counts_w.max()) == (windows, screen.tokens, 16)


def test_pack_screens_puts_patches_in_windows_and_says_where_the_tokens_are():
    first, second = (SMALL.cut_screen(world.picture(*size)) for size in ((40, 24), (16, 8)))
    assert (first.layout, second.layout) == ((1, 6, 10), (1, 2, 4))
    absent = dataclasses.replace(second, arrays=None)  # another host has its pixels
    placed = [
        PlacedScreen(second, 0, 0, 1),
        PlacedScreen(first, 0, 8, 2),
        PlacedScreen(absent, 1, 4, 1),
    ]
    packed = SMALL.pack_screens(placed, 2, 76)
    assert packed.first_tokens == [0, 2, 19 + 1]
    windows_ip = packed.arrays["patch_windows_ip"]
    counts = [8, 16, 16, 8, 8, 8, 4, 8]  # the second screen, six windows of the first, padding
    starts = np.cumsum([0, *counts])[:-1]
    numbers = [*(1 + start for start in starts[:-1]), 0]
    assert windows_ip[0].tolist() == np.repeat(numbers, counts).tolist()
    assert not windows_ip[1].any()
    order_m = packed.arrays["token_order_im"]
    assert order_m[0, :2].tolist() == [0, 1]
    assert order_m[0, 2:17].tolist() == [2, 3, 6, 7, 10, 4, 5, 8, 9, 11, 12, 13, 14, 15, 16]
    assert order_m[1].tolist() == list(range(19))
    # Read in the text's order, the row holds the patches as they were cut.
    for screen, token in ((second, 0), (first, 2)):
        order = order_m[0, token : token + screen.tokens]
        patches_mac = packed.arrays["patches_ipc"][0].reshape(19, 4, -1)
        got_pc = patches_mac[order].reshape(screen.patches, -1)
        np.testing.assert_array_equal(got_pc, screen.arrays["patches_pc"])
        rows_columns = packed.arrays["patch_positions_ip2"][0].reshape(19, 4, 2)[order]
        rows, columns = screen.layout[1] // 2, screen.layout[2] // 2
        corners = 2 * np.stack(np.indices((rows, columns)), -1).reshape(-1, 2)
        np.testing.assert_array_equal(rows_columns[:, 0], corners)


def test_from_processor_equals_pack_screens_of_the_same_images():
    screens = [SMALL.cut_screen(world.picture(*size)) for size in ((40, 24), (16, 8))]
    pixels = [images.pixel_values(one.arrays["patches_pc"], SMALL.images) for one in screens]
    returned, packed = SMALL.from_processor(
        pixel_values=np.concatenate(pixels),
        image_grid_thw=np.array([one.layout for one in screens]),
    )
    assert [one.layout for one in returned] == [one.layout for one in screens]
    placed = [PlacedScreen(one, row, 0, 1) for row, one in enumerate(screens)]
    expected = SMALL.pack_screens(placed, 2, 60)
    assert packed.first_tokens == expected.first_tokens
    assert packed.arrays.keys() - {"pixels_ipf"} == expected.arrays.keys() - {"patches_ipc"}
    for name in expected.arrays.keys() - {"patches_ipc"}:
        np.testing.assert_array_equal(packed.arrays[name], expected.arrays[name], err_msg=name)
    counts = [one.patches for one in screens]
    for row, count in enumerate(counts):
        patches_pc = expected.arrays["patches_ipc"][row, :count]
        expected_pf = images.pixel_values(patches_pc, SMALL.images)
        np.testing.assert_array_equal(packed.arrays["pixels_ipf"][row, :count], expected_pf)


# ---------------------------------------------------------------------------------- positions


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)), max_size=4),
    tail=st.integers(0, 5),
)
def test_positions_of_any_sequence_equal_get_rope_index(parts, tail):
    torch = pytest.importorskip("torch")
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    ids, grids = [5], []
    for text, h, w in parts:
        ids += [3] * text + [IMAGE_TOKEN] * (h * w)
        grids.append((1, 2 * h, 2 * w))
    ids += [4] * tail
    # get_rope_index reads nothing of the model but the merge size and tokens_per_second.
    holder = type("Holder", (), {"config": Qwen2_5_VLConfig()})()
    holder.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(holder)
    ids_1t = torch.tensor([ids])
    expected, _ = Qwen2_5_VLModel.get_rope_index(
        holder, ids_1t, (ids_1t == IMAGE_TOKEN).int(), torch.tensor(grids) if grids else None
    )
    screens = [SMALL.plan_screen((4 * w, 4 * h)) for _, h, w in grids]
    np.testing.assert_array_equal(SMALL.positions(np.array(ids), screens), expected.numpy()[:, 0])


# --------------------------------------------------------------------------------------- chat


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    texts = ["Click the red button", "Action: click(start_box='(100,200)')", "user\n"] * 20
    qwen_tokenizer.save(qwen_tokenizer.train_tokenizer(texts, 400), directory)
    (directory / "chat_template.jinja").write_text(PUBLISHED_TEMPLATE)
    return directory


@pytest.mark.parametrize("system", ["You are a helpful assistant.", "You see a screen."])
def test_context_of_three_turns_equals_the_published_template(model_dir, system):
    cfg = ChatConfig(system_prompt=system, prompt_template="{instruction}")
    chat = Chat(model_dir, cfg, qwen2_5_vl.FAMILY.chat)
    screens = [
        dataclasses.replace(PUBLISHED.plan_screen(size), key=str(size))
        for size in ((140, 84), (112, 112), (56, 84))
    ]
    texts = ["Action: wait()", "Thought: naïve 漢字\nAction: click(start_box='(100,200)')"]
    context = chat.context("Naïve: 12 apples", screens, [chat.completion_ids(t) for t in texts])
    image = {"type": "image"}
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": [image, {"type": "text", "text": "Naïve: 12 apples"}]},
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": [{"type": "text", "text": texts[1]}]},
        {"role": "user", "content": [image]},
    ]
    if system == "You are a helpful assistant.":
        del messages[0]  # the template's own
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    first, *rest = text.split("<|image_pad|>")
    tokens = [screen.tokens for screen in screens]
    repeated = ("<|image_pad|>" * n + piece for n, piece in zip(tokens, rest, strict=True))
    assert context.ids.tolist() == tokenizer(first + "".join(repeated))["input_ids"]


# ------------------------------------------------------------------------------- coordinates


@pytest.mark.parametrize("name", ["ui_tars", "computer_use", "text"])
@pytest.mark.parametrize("size", SIZES)
def test_pixel_to_text_to_pixel_is_within_a_pixel(name, size):
    """Pixels of the resized image, which differs from the screen by half a visual token at most."""
    action_format = actions.find_format(name, qwen2_5_vl.FAMILY.coordinates)
    assert action_format.coordinates == "image"
    seen_px = (UI_TARS if name == "ui_tars" else PUBLISHED).plan_screen(size).seen_px
    width, height = size
    corners = [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)]
    points = np.random.default_rng(size).integers((0, 0), size, (200, 2)).tolist()
    for x, y in [*corners, *points]:
        action = Action("click", x=int(x), y=int(y))
        text = actions.format_action(action, size, action_format, image_size=seen_px)
        back = actions.parse(text, size, action_format, image_size=seen_px)
        assert abs(back.x - x) <= 1 and abs(back.y - y) <= 1, (text, x, y)


def test_action_of_ui_tars_is_in_pixels_of_the_resized_image():
    """1280x800 is seen as 1288x812, whose middle is the screen's."""
    action_format = actions.find_format("ui_tars")
    assert UI_TARS.plan_screen((1280, 800)).seen_px == (1288, 812)
    action = Action("click", x=640, y=400)
    text = actions.format_action(action, (1280, 800), action_format, image_size=(1288, 812))
    assert "(644,406)" in text
    back = actions.parse(text, (1280, 800), action_format, image_size=(1288, 812))
    assert (back.x, back.y) == (640, 400)
