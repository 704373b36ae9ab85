"""Changes to a config that the planner tries: the nearest one that fits, and the best one."""

import dataclasses
import itertools
from collections.abc import Iterator

from uirl_jax.config.schema import MeshConfig, RunConfig


def nearest_changes(
    cfg: RunConfig, program: str, across: int, slices: int = 1
) -> Iterator[tuple[str, RunConfig]]:
    """What may make a program fit that does not, the cheapest for the run first.

    Args:
      program: one of programs.TRAINING or SAMPLING.
      across: chips that the rows are cut over (data x fsdp).
    """
    batch, engine = cfg.learner.batch, cfg.engine
    if program not in ("score", "gradients"):
        rows, images = engine.batch_sizes[-1], engine.image_rows[-1]
        while rows % 2 == 0 and rows > across:
            rows, images = rows // 2, max(1, images // 2)
            smaller = dataclasses.replace(engine, batch_sizes=(rows,), image_rows=(images,))
            yield (
                f"engine.batch_sizes=({rows},), engine.image_rows=({images},)",
                dataclasses.replace(cfg, engine=smaller),
            )
        return
    if program == "gradients" and cfg.model.remat != "full":
        yield "model.remat=full", with_changes(cfg, remat="full")
    rows, images = batch.rows, batch.image_rows[-1]
    while rows % (2 * across) == 0:
        rows, images = rows // 2, -(-images // 2)
        yield (
            f"learner.batch.rows={rows}, learner.batch.image_rows=({images},)",
            with_changes(cfg, rows=rows, images=images),
        )
    if across % 2 == 0:
        mesh = MeshConfig(data=slices, fsdp=-1, model=2)
        yield "mesh.model=2", with_changes(cfg, mesh=mesh)


def candidates(cfg: RunConfig, chips: int, slices: int = 1) -> Iterator[tuple[str, RunConfig]]:
    """Every mesh, remat policy and number of rows a batch, within bounds."""
    batch = cfg.learner.batch
    images_a_row = -(-batch.image_rows[-1] // batch.rows)
    meshes = [
        MeshConfig(slices * data, chips // (slices * data * model), model)
        for data, model in itertools.product((1, 2, 4), (1, 2, 4))
        if chips % (slices * data * model) == 0
    ]
    for mesh, remat, rows_a_chip in itertools.product(
        meshes, ("full", "dots", "none"), (1, 2, 4, 8)
    ):
        rows = rows_a_chip * mesh.data * mesh.fsdp
        yield (
            f"mesh data={mesh.data} fsdp={mesh.fsdp} model={mesh.model}, remat {remat}, "
            f"{rows} rows a batch",
            with_changes(cfg, mesh=mesh, remat=remat, rows=rows, images=images_a_row * rows),
        )


def with_changes(
    cfg: RunConfig,
    *,
    mesh: MeshConfig | None = None,
    remat: str | None = None,
    rows: int | None = None,
    images: int | None = None,
) -> RunConfig:
    """The config with what is given changed."""
    batch = cfg.learner.batch
    if rows is not None:
        batch = dataclasses.replace(batch, rows=rows)
    if images is not None:
        batch = dataclasses.replace(batch, image_rows=(images,))
    learner = dataclasses.replace(cfg.learner, batch=batch)
    model = cfg.model if remat is None else dataclasses.replace(cfg.model, remat=remat)
    return dataclasses.replace(cfg, model=model, learner=learner, mesh=mesh or cfg.mesh)
