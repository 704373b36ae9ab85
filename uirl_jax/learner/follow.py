"""The learner in the processes after the first one, on several hosts.

Process 0 (`loop`) decides what each step trains on and writes all files of the run; here the same
programs run on the rows of this process's devices. The calls that touch devices or checkpoints
stand in the same order as in `loop`: each of them is one of all processes together.
"""

import time
from collections.abc import Callable

import jax

from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner import algorithm, bookkeeping
from uirl_jax.learner.bookkeeping import RunDirectory, policy_of
from uirl_jax.learner.cluster import Cluster, ClusterConfig
from uirl_jax.learner.hosts import ENDED, PUBLISHED, Hosts
from uirl_jax.learner.loop import LearnerResult
from uirl_jax.learner.training import TrainingConfig, prepare
from uirl_jax.log_lines import key_values
from uirl_jax.shards.layout import layout_of
from uirl_jax.store import open_store


def follow_learner(
    cfg: TrainingConfig,
    model: PolicyModel,
    run: RunDirectory,
    cluster: Cluster,
    cluster_cfg: ClusterConfig,
    *,
    mesh: jax.sharding.Mesh,
    on_ready: Callable[[], None] = lambda: None,
) -> LearnerResult:
    """Takes part in every step until process 0 ends the run.

    Args:
      on_ready: as of `loop.Hooks`.
    Returns: how the run ended; its accounting is process 0's and empty here.
    Raises:
      CheckpointError: as `run_learner`.
      RestartError: a file that process 0 has named is not visible here.
    """
    timeout_s = cluster_cfg.records_timeout_s
    steps, _, state = prepare(cfg, model, mesh)
    hosts = Hosts(
        cluster, open_store(run.workdir), run.run_id, mesh, model.inputs, cfg.learner.batch
    )
    with bookkeeping.restored_state(run, model, state, cfg.learner.keep) as restored:
        checkpointer, state, _, is_fresh = restored
        step = int(state.step)
        if is_fresh:
            checkpointer.save(step, state, {})
        policy_of(state, model)
        cluster.wait_for(PUBLISHED)
        on_ready()
        first_step, host_cpu_s = step, 0.0
        while not (decision := hosts.next_decision(timeout_s)).ends:
            started_s = time.process_time()
            batches = hosts.build(decision, layout_of(model.cfg), timeout_s)
            host_cpu_s += time.process_time() - started_s
            state, _, _ = algorithm.update(
                None, batches, cfg.algorithm, steps, state, model.frozen, mesh=mesh, seed=cfg.seed
            )
            step += 1
            policy_of(state, model)
            checkpointer.save(step, state, {})
        steps_here = max(1, step - first_step)
        line = key_values("followed", step=step, host_cpu_s_a_step=host_cpu_s / steps_here)
        print(line, flush=True)
        return LearnerResult(decision.step, decision.ends == ENDED, {}, 0.0)
