"""Changes to a config that the planner tries: the nearest one that fits, and the best one."""

import dataclasses
import itertools
from collections.abc import Iterator

from uirl_jax.run_config import MeshConfig, RunConfig


def nearest_changes(cfg: RunConfig, program: str, across: int) -> Iterator[tuple[str, RunConfig]]:
    """What may make a program fit that does not, the cheapest for the run first.

    Args:
      program: score, update or sample.
      across: chips that the rows are cut over (data x fsdp).
    """
    learner, batch, engine = cfg.learner, cfg.learner.batch, cfg.engine
    if program == "sample":
        rows, images = engine.batch_sizes[-1], engine.image_rows[-1]
        while rows % 2 == 0 and rows > across:
            rows, images = rows // 2, max(1, images // 2)
            smaller = dataclasses.replace(engine, batch_sizes=(rows,), image_rows=(images,))
            yield (
                f"engine.batch_sizes=({rows},), engine.image_rows=({images},)",
                dataclasses.replace(cfg, engine=smaller),
            )
        return
    if program == "update":
        if cfg.model.remat != "full":
            yield "model.remat=full", with_changes(cfg, remat="full")
        parts = 2 * learner.microbatches
        while batch.rows % (parts * across) == 0:
            yield f"learner.microbatches={parts}", with_changes(cfg, microbatches=parts)
            parts *= 2
    groups, rows, images, parts = (
        learner.groups_per_step,
        batch.rows,
        batch.image_rows[-1],
        learner.microbatches,
    )
    while groups % 2 == 0 and rows % (2 * across) == 0:
        groups, rows, images, parts = groups // 2, rows // 2, images // 2, max(1, parts // 2)
        yield (
            f"learner.groups_per_step={groups}, learner.batch.rows={rows}, "
            f"learner.batch.image_rows=({images},), learner.microbatches={parts}",
            with_changes(cfg, groups=groups, rows=rows, images=images, microbatches=parts),
        )
    if across % 2 == 0:
        yield "mesh.model=2", with_changes(cfg, mesh=MeshConfig(data=1, fsdp=-1, model=2))


def candidates(cfg: RunConfig, chips: int) -> Iterator[tuple[str, RunConfig]]:
    """Every mesh, remat policy, number of microbatches and of groups within bounds."""
    batch = cfg.learner.batch
    meshes = [
        MeshConfig(data, chips // (data * model), model)
        for data, model in itertools.product((1, 2, 4), (1, 2, 4))
        if chips % (data * model) == 0
    ]
    for mesh, remat, more, parts in itertools.product(
        meshes, ("full", "dots", "none"), (1, 2, 4), (1, 2, 4, 8)
    ):
        rows, across = batch.rows * more, mesh.data * mesh.fsdp
        if rows % (parts * across):
            continue
        changed = with_changes(
            cfg,
            mesh=mesh,
            remat=remat,
            microbatches=parts,
            rows=rows,
            images=batch.image_rows[-1] * more,
            groups=cfg.learner.groups_per_step * more,
        )
        yield (
            f"mesh data={mesh.data} fsdp={mesh.fsdp} model={mesh.model}, remat {remat}, "
            f"{rows} rows in {parts} microbatches",
            changed,
        )


def with_changes(
    cfg: RunConfig,
    *,
    mesh: MeshConfig | None = None,
    remat: str | None = None,
    microbatches: int | None = None,
    rows: int | None = None,
    images: int | None = None,
    groups: int | None = None,
) -> RunConfig:
    """The config with what is given changed."""
    batch, learner = cfg.learner.batch, cfg.learner
    if rows is not None:
        batch = dataclasses.replace(batch, rows=rows)
    if images is not None:
        batch = dataclasses.replace(batch, image_rows=(images,))
    learner = dataclasses.replace(
        learner,
        batch=batch,
        microbatches=learner.microbatches if microbatches is None else microbatches,
        groups_per_step=learner.groups_per_step if groups is None else groups,
    )
    model = cfg.model if remat is None else dataclasses.replace(cfg.model, remat=remat)
    return dataclasses.replace(cfg, model=model, learner=learner, mesh=mesh or cfg.mesh)
