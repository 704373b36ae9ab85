"""Where rows and screenshots of a batch go on a mesh: a row reads its own part of the images."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from tests import packed_records
from tests.packed_records import INPUTS, LAYOUTS
from tools.bench import cluster_world
from uirl_jax.errors import ConfigError
from uirl_jax.families.border import Screen
from uirl_jax.families.screens import decode_image
from uirl_jax.models import sharding
from uirl_jax.roles.learner import check_batches
from uirl_jax.shards import batching, packing
from uirl_jax.shards.plan import BatchConfig, BatchPlan, part_images, plan_batches

PARTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]  # data, fsdp
ROW_TOKENS = 4  # visual tokens of a row of 16 patches


def piece(number: int, length: int, keys: tuple[str, ...]) -> packing.Piece:
    """Two tokens of context, then sampled ones. What placeholders stand where is not planned."""
    mask_t = np.r_[0, 0, np.ones(length - 2)].astype(np.float32)
    numbers_t = np.arange(length, dtype=np.int32)
    arrays = (numbers_t, mask_t, mask_t, numbers_t, numbers_t[None])
    return packing.Piece(*arrays, keys, 1, 0, 0, trajectory=number, sequence=0, first_token=0)


def planned(lengths_and_keys, parts: tuple[int, int], **changes) -> list[BatchPlan]:
    pieces = [
        piece(number, length, tuple(dict.fromkeys(f"s{key}" for key in keys)))
        for number, (length, keys) in enumerate(lengths_and_keys)
    ]
    screens = {key: Screen(key, (8, 8), (8, 8), 4, 16) for piece in pieces for key in piece[5]}
    cfg = BatchConfig(rows=8, row_lengths=(16,), image_rows=(8, 20), patch_lengths=(16,))
    return plan_batches(
        pieces, screens, inputs=INPUTS, cfg=dataclasses.replace(cfg, **changes), parts=parts
    )


def placed_keys(plan: BatchPlan) -> list[set[str]]:
    """Keys of the screenshots of each data part."""
    keys: list[set[str]] = []
    for part in range(plan.data_parts):
        rows = part_images(part, plan.data_parts, plan.image_rows)
        keys.append({screen.key for screen in plan.screens if screen.row in rows})
    return keys


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(3, 16), st.lists(st.integers(0, 11), max_size=5)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from(PARTS),
    st.booleans(),
    st.sampled_from([(20,), (8, 20), (25,)]),
)
def test_every_row_reads_screenshots_of_its_own_data_part(pieces, parts, pack, image_rows):
    plans = planned(pieces, parts, pack=pack, image_rows=image_rows)
    tokens = collections.Counter[int]()
    for plan in plans:
        assert plan.data_parts == parts[0]
        own = placed_keys(plan)
        read: list[set[str]] = [set() for _ in own]
        for row, spans in plan.rows.items():
            for span in spans:
                tokens[span.record] += span.stop - span.start
                read[row * plan.data_parts // 8] |= {f"s{key}" for key in pieces[span.record][1]}
        assert own == read, "all that are read, and no other"
        rows = [screen.row for screen in plan.screens]
        assert len(rows) == len(set(rows)) == sum(map(len, own)), "one row of images each"
        assert set(rows) <= set(range(plan.image_rows))
    assert tokens == {number: length for number, (length, _) in enumerate(pieces)}


def test_rows_of_one_screenshot_stay_in_one_data_part():
    """Two groups of four episodes: each group's screenshot is computed once."""
    (plan,) = planned([(16, [number % 2]) for number in range(8)], (2, 2))
    assert [sorted(keys) for keys in placed_keys(plan)] == [["s0"], ["s1"]]
    assert plan.image_rows == 8
    assert sorted(plan.rows) == list(range(8)), "four rows each"


def test_screenshot_that_rows_of_two_data_parts_read_is_placed_in_both():
    (plan,) = planned([(16, [0])] * 8, (2, 1))
    assert placed_keys(plan) == [{"s0"}, {"s0"}]
    # Of a record whose row is there: a host reads no other for it.
    for part, screen in enumerate(plan.screens):
        assert screen.record in {span.record for b in range(4) for span in plan.rows[4 * part + b]}


def test_rows_with_more_screenshots_than_a_part_holds_go_to_another_batch():
    pieces = [(16, [2 * number, 2 * number + 1]) for number in range(8)]
    assert len(planned(pieces, (1, 1), image_rows=(16,))) == 1
    assert len(planned(pieces, (2, 1), image_rows=(16,))) == 1
    two = planned(pieces, (2, 1), image_rows=(8,))
    assert [len(plan.rows) for plan in two] == [4, 4]
    # Sequences that would fit one row are kept apart as well.
    short = [(5, [2 * number, 2 * number + 1]) for number in range(3)]
    assert len(planned(short, (2, 1), image_rows=(8,))[0].rows) == 2
    assert len(planned(short, (1, 1), image_rows=(8,))[0].rows) == 1


def test_sequence_with_more_screenshots_than_a_part_holds_is_refused():
    pieces = [(16, [0, 1, 2])]
    assert len(planned(pieces, (2, 1), image_rows=(6,))) == 1
    with pytest.raises(ConfigError) as caught:
        planned(pieces, (2, 1), image_rows=(2, 5))
    assert str(caught.value) == (
        "3 distinct screenshots of a sequence, learner.batch.image_rows=(2, 5) accepts at most 2 "
        "in each of the 2 parts of mesh.data: add a larger one, e.g. 6"
    )


def test_data_parts_that_do_not_divide_the_rows_are_one():
    (plan,) = planned([(16, [0])] * 7, (2, 2), rows=7)
    assert plan.data_parts == 1 and len(plan.screens) == 1


def abstract_mesh(data: int, fsdp: int) -> AbstractMesh:
    return AbstractMesh((data, fsdp, 1), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def test_limited_history_limits_the_screenshots_that_a_batch_must_hold():
    cfg = cluster_world.config_of({})
    batch = dataclasses.replace(cfg.learner.batch, rows=8, image_rows=(2,))
    cfg = dataclasses.replace(
        cfg,
        learner=dataclasses.replace(cfg.learner, batch=batch),
        chat=dataclasses.replace(cfg.chat, max_screenshots=5, history_turns=1),
        tasks=(dataclasses.replace(cfg.tasks[0], max_turns=7),),
    )
    check_batches(cfg, abstract_mesh(1, 2))
    longer = dataclasses.replace(cfg, chat=dataclasses.replace(cfg.chat, history_turns=2))
    with pytest.raises(ConfigError, match="a context may have 3 screenshots"):
        check_batches(longer, abstract_mesh(1, 2))


@pytest.mark.parametrize(
    ("data", "changes", "said"),
    [
        (2, {}, ""),
        (2, {"image_rows": (2, 9)}, "(2, 9): a context may have 5 screenshots, each of the 2 parts "
         "of mesh.data holds 4; set (10,)"),
        (1, {"image_rows": (4,)}, "(4,): a context may have 5 screenshots, a batch holds 4; set "
         "(5,)"),
        (8, {"rows": 4}, ""),  # every device has all rows
    ],
)  # fmt: skip
def test_run_whose_contexts_do_not_fit_a_data_part_is_refused_at_its_start(
    data, changes, said, capsys
):
    cfg = cluster_world.config_of({})
    batch = dataclasses.replace(cfg.learner.batch, rows=8, image_rows=(4, 10))
    cfg = dataclasses.replace(
        cfg,
        learner=dataclasses.replace(cfg.learner, batch=dataclasses.replace(batch, **changes)),
        chat=dataclasses.replace(cfg.chat, max_screenshots=5),
        tasks=(dataclasses.replace(cfg.tasks[0], max_turns=7),),
    )
    mesh = abstract_mesh(data, 2)
    if not said:
        check_batches(cfg, mesh)
        warned = "event=rows_not_divided rows=4 parts=16 " in capsys.readouterr().out
        assert warned == (data == 8)
        return
    with pytest.raises(ConfigError) as caught:
        check_batches(cfg, mesh)
    assert str(caught.value) == f"learner.batch.image_rows={said}"


@pytest.mark.parametrize(("asked", "said"), [(2, False), (3, True)])
def test_more_minibatches_than_groups_are_said(asked, said, capsys):
    cfg = cluster_world.config_of({})
    cfg = dataclasses.replace(
        cfg,
        learner=dataclasses.replace(cfg.learner, groups_per_step=2),
        algorithm=dataclasses.replace(cfg.algorithm, minibatches=asked),
    )
    check_batches(cfg, abstract_mesh(1, 1))
    line = "event=fewer_minibatches minibatches=2 asked=3 "
    assert (line in capsys.readouterr().out) == said


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("layout", ["one sequence a row", "packed", "prompts shared"])
def test_visual_tokens_of_every_row_are_its_screenshots_and_its_parts(parts, layout, monkeypatch):
    records, _ = packed_records.records()
    cfg = dataclasses.replace(LAYOUTS[layout], rows=8, image_rows=(16,))
    pieces = batching.cut(dict(enumerate(records)), INPUTS)
    patches = {
        key: INPUTS.cut_screen(decode_image(image)).arrays["patches_pc"]
        for record in records
        for key, image in record.images.items()
    }
    read, read_planned = [], batching.read_planned
    monkeypatch.setattr(
        batching, "read_planned", lambda *a: read.append(a[1].key) or read_planned(*a)
    )
    twice = 0
    for plan in batching.plan_of(pieces, cfg, parts):
        read.clear()
        batch = batching.assemble(plan, pieces, cfg)
        keys = [screen.key for screen in plan.screens]
        assert sorted(read) == sorted(set(keys)), "decoded once"
        twice += len(keys) - len(set(keys))
        rows, tokens = cfg.rows // parts[0], ROW_TOKENS * plan.image_rows // parts[0]
        for b, t in zip(*np.nonzero(batch.vision_index_bt >= 0), strict=True):
            assert batch.vision_index_bt[b, t] // tokens == b // rows
        for b, spans in plan.rows.items():
            for span in spans:
                own = pieces.of[span.record, span.sequence]
                expected = [key for key in own.image_keys for _ in range(ROW_TOKENS)]
                at = np.flatnonzero(own.token_ids == packed_records.PLACEHOLDER)
                for key, t in zip(expected, at, strict=True):
                    if span.start <= t < span.stop:
                        image = batch.vision_index_bt[b, span.column + t - span.start] // ROW_TOKENS
                        np.testing.assert_array_equal(
                            batch.vision["patches_ipc"][image], patches[key]
                        )
    if layout == "packed":  # groups are mixed: their first screenshots are read in several parts
        assert (twice > 0) == (parts[0] > 1)
