"""From compiled programs to a plan: memory by kind, roofline times, and whether it fits.

A plan is a plain dictionary, which `--json` writes as it is and `format_plan` prints.
"""

import dataclasses
from typing import Any

import jax

from tools.planner import hlo as plan_hlo
from tools.planner import model as plan_model
from tools.planner.families import vision_sizes
from tools.planner.machines import Chip, Machine
from tools.planner.programs import SAMPLING, Compiled, Run, chip_bytes
from uirl_jax.families.loading import held_dtype

GIB = 2**30


def describe(run: Run, machine: Machine) -> dict[str, Any]:
    """What is planned, and what is known of it without a compiler."""
    cfg = run.cfg
    batch = cfg.learner.batch
    weights, state, resident_batch = plan_model.resident(run)
    flops = plan_model.batch_flops(run)
    return {
        "model": cfg.model.path,
        "topology": machine.topology,
        "chips": machine.chips,
        "chip": dataclasses.asdict(machine.chip),
        "mesh": dict(run.mesh.shape),
        "slices": machine.slices,
        "hosts": _hosts(run, machine),
        "lora_rank": cfg.model.lora.rank,
        "remat": cfg.model.remat,
        "rows": batch.rows,
        "row_length": batch.row_lengths[-1],
        "batches_a_step": plan_model.batches_a_step(run),
        "screenshots": batch.image_rows[-1],
        "patches": batch.patch_lengths[-1],
        "resident_bytes": {
            "weights": weights,
            "adapters and optimizer": state,
            "batch and visual tokens": resident_batch,
        },
        "model_flops": flops,
        "recomputed_flops": plan_model.recomputed_flops(run),
    }


def _hosts(run: Run, machine: Machine) -> dict[str, Any]:
    holds = plan_model.host_memory(run, machine)
    return {
        "count": machine.hosts,
        "machine_type": machine.host.name,
        "chips": min(machine.chips, machine.host.chips),
        "memory_bytes": machine.host.memory_bytes,
        "rows": plan_model.rows_on_a_host(run, machine),
        "holds_bytes": holds,
        "fits": max(holds.values()) <= machine.host.memory_bytes,
    }


def plan_by_formula(run: Run, machine: Machine) -> dict[str, Any]:
    """For machines without a compiler here, and to rank the candidates of a search."""
    plan = describe(run, machine)
    memory = plan_model.estimate_memory(run)
    chip = machine.chip
    flops = (sum(plan["model_flops"].values()) + plan["recomputed_flops"]) / machine.chips
    sent = _sent_by_formula(run)
    roofline = _roofline(flops, 0.0, sent, chip)
    return plan | {
        "how": "by formula: no compiler for this machine is used",
        "estimated_bytes": dataclasses.asdict(memory) | {"peak": memory.peak},
        "peak_bytes": memory.peak,
        "fits": memory.peak <= chip.hbm_bytes,
        "step": _step(plan, [roofline], machine),
    }


def _sent_by_formula(run: Run) -> float:
    """Bytes a chip sends in a batch: weights gathered every pass, activations summed over model."""
    sizes = dict(run.mesh.shape)
    passes = 3  # reference; forward and backward
    sent = 0.0
    if sizes["fsdp"] > 1:
        sent += passes * chip_bytes(run.model.frozen) * (sizes["fsdp"] - 1)
    if sizes["model"] > 1:
        batch, dim = run.cfg.learner.batch, run.model.cfg.hidden_size
        tokens = batch.rows * batch.row_lengths[-1] / (sizes["data"] * sizes["fsdp"])
        ring = 2 * (sizes["model"] - 1) / sizes["model"]
        sent += 4 * 2 * run.model.cfg.num_hidden_layers * tokens * dim * 2 * ring
    return sent


def plan_compiled(run: Run, machine: Machine, programs: list[Compiled]) -> dict[str, Any]:
    """From what the compiler says."""
    plan = describe(run, machine)
    resident = sum(plan["resident_bytes"].values())
    tower = vision_sizes(plan_model.planned_model(run))
    entries = {}
    for program in programs:
        # Only the tower branches on FLOPs: its blocks attend to windows or to the whole screen.
        whole_share = tower.whole_share if program.name in ("score", "encode") else 1.0
        own = 0.0  # the engine's buffers are no part of what the learner holds
        if program.name in SAMPLING and program.argument_bytes:
            own = program.argument_bytes - chip_bytes((run.model.frozen, run.state.trainable))
        peak = program.wanted_bytes or resident + own + program.new_bytes
        entry = {
            "compile_s": program.seconds,
            "peak_bytes": peak,
            "fits": not program.out_of_memory and peak <= machine.chip.hbm_bytes,
            "out_of_memory": program.out_of_memory,
            "saved_and_temporary_bytes": own + program.new_bytes,
        }
        if program.text:
            parsed = plan_hlo.Program(program.text, whole_share)
            entry |= {
                "saved_bytes": parsed.saved_bytes,
                "temporary_bytes": own + program.new_bytes - parsed.saved_bytes,
                "largest_array": str(parsed.largest_array),
                "largest_array_bytes": parsed.largest_array.size_bytes,
                "attention_kernels": parsed.kernels,
                "cost": _cost(parsed.cost, machine.chip),
            }
            if parsed.cost.open_loops:
                entry["decode_step"] = _cost(parsed.cost.open_loops, machine.chip)
        entries[program.name] = entry
    trained = [entries[name] for name in ("score", "gradients") if name in entries]
    plan |= {
        "how": "compiled by libtpu",
        "programs": entries,
        "peak_bytes": max(entry["peak_bytes"] for entry in entries.values()),
        "fits": all(entry["fits"] for entry in entries.values()),
    }
    if machine.slices > 1 and all("cost" in entry for entry in entries.values()):
        plan["between_slices"] = _between_slices(run, machine, plan)
    if len(trained) == 2 and all("cost" in entry for entry in trained):
        rooflines = [entry["cost"]["roofline_s"] for entry in trained]
        plan["step"] = _step(plan, rooflines, machine)
    if "decode_step" in entries.get("decode", {}) and "cost" in entries.get("prefill", {}):
        token_s = max(entries["decode"]["decode_step"]["roofline_s"].values())
        prefilled = run.cfg.engine.prefill_rows[-1] * run.cfg.engine.prefill_lengths[-1]
        prefill_s = max(entries["prefill"]["cost"]["roofline_s"].values())
        rows = run.cfg.engine.batch_sizes[-1]
        plan["sampling"] = {
            "rows": rows,
            "context": run.cfg.engine.context_lengths[-1],
            "prefill_tokens_per_s": prefilled / prefill_s,
            "token_s": token_s,
            "tokens_per_s": rows / token_s,
        }
    return plan


def _between_slices(run: Run, machine: Machine, plan: dict[str, Any]) -> dict[str, Any]:
    """Bytes that leave a slice in a step, and what the gradient of all weights would be."""
    chips = machine.chips // machine.slices
    programs = {
        name: {
            kind: plan["batches_a_step"] * chips * entry["sent_bytes"]
            for kind, entry in plan["programs"][name]["cost"]["between_slices"].items()
        }
        for name in ("score", "gradients")
        if name in plan["programs"]
    }
    # Summed over the slices by the ring, once for each batch. The compiler sums in the activations'
    # dtype, before the gradient becomes float32.
    ring = 2 * (machine.slices - 1) / machine.slices * plan["batches_a_step"]
    ring *= held_dtype(run.cfg.model.param_dtype).itemsize
    return {
        "sent_bytes": programs,
        "adapters_gradient_bytes": ring * _sizes(run.state.trainable),
        "all_weights_gradient_bytes": ring * _sizes(run.model.frozen),
    }


def _sizes(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _cost(cost: plan_hlo.Cost, chip: Chip) -> dict[str, Any]:
    return {
        "flops": cost.total_flops,
        "of_these_kernels_by_formula": cost.kernel_flops,
        "hbm_bytes": cost.hbm_bytes,
        "sent_bytes": cost.sent_bytes,
        "collectives": {
            kind: {"count": count, "sent_bytes": sent} for kind, count, sent in cost.collectives
        },
        "between_slices": {
            kind: {"count": count, "sent_bytes": sent} for kind, count, sent in cost.between_slices
        },
        "roofline_s": _roofline(cost.total_flops, cost.hbm_bytes, cost.sent_bytes, chip),
    }


def _roofline(flops: float, hbm_bytes: float, sent_bytes: float, chip: Chip) -> dict[str, float]:
    return {
        "compute": flops / chip.flops_per_s,
        "HBM": hbm_bytes / chip.hbm_bytes_per_s,
        "interconnect": sent_bytes / chip.link_bytes_per_s,
    }


def _step(
    plan: dict[str, Any], rooflines: list[dict[str, float]], machine: Machine
) -> dict[str, Any]:
    bound_s = sum(max(roofline.values()) for roofline in rooflines)
    needed = sum(plan["model_flops"].values()) / machine.chips
    return {
        "bound_s": plan["batches_a_step"] * bound_s,
        "mfu": needed / bound_s / machine.chip.flops_per_s,
        "tokens_per_s": plan["rows"] * plan["row_length"] / bound_s,
    }


# ------------------------------------------------------------------------------------- the print


def format_plan(plan: dict[str, Any]) -> str:
    chip = plan["chip"]
    mesh = " ".join(f"{name}={size}" for name, size in plan["mesh"].items())
    lines = [
        f"{plan['model']} on {plan['topology']}: {plan['chips']} x {chip['name']}, mesh {mesh}",
        f"  {plan['how']}; LoRA r={plan['lora_rank']}, remat {plan['remat']}, "
        f"{plan['batches_a_step']} x {plan['rows']} rows of {plan['row_length']} tokens, "
        f"{plan['screenshots']} screenshots of {plan['patches']} patches",
        f"  rates: {chip['flops_per_s'] / 1e12:.0f} TFLOP/s bf16, "
        f"{chip['hbm_bytes'] / GIB:.2f} GiB at {chip['hbm_bytes_per_s'] / 1e9:.0f} GB/s, links "
        f"{chip['link_bytes_per_s'] / 1e9:.0f} GB/s one way ({chip['source']})",
        *_format_hosts(plan),
        "",
        "HBM, GiB a chip",
    ]
    for kind, size in plan["resident_bytes"].items():
        lines.append(f"  {kind:28s}{size / GIB:8.2f}")
    if "programs" in plan:
        lines += _format_programs(plan)
    else:
        for kind in ("saved", "temporaries", "peak"):
            size = plan["estimated_bytes"][kind]
            lines.append(f"  {kind + ' (estimate)':28s}{size / GIB:8.2f}")
    lines += ["", "model FLOPs of a batch by formula, TFLOP over all chips"]
    for part, flops in plan["model_flops"].items():
        lines.append(f"  {part:28s}{flops / 1e12:8.0f}")
    lines.append(f"  {'recomputed (remat), on top':28s}{plan['recomputed_flops'] / 1e12:8.0f}")
    lines.append("")
    if "step" in plan:
        step = plan["step"]
        lines.append(
            f"a step takes at least {step['bound_s']:.2f} s: {step['tokens_per_s']:.0f} tokens/s, "
            f"MFU at most {step['mfu']:.1%}"
        )
    if "sampling" in plan:
        sampling = plan["sampling"]
        lines.append(
            f"sampling {sampling['rows']} rows of {sampling['context']} tokens: at most "
            f"{sampling['prefill_tokens_per_s']:.0f} tokens/s of prefill, a token at least "
            f"{1e3 * sampling['token_s']:.1f} ms ({sampling['tokens_per_s']:.0f} tokens/s)"
        )
    if "between_slices" in plan:
        lines += _format_between_slices(plan)
    verdict = "fits" if plan["fits"] else "does not fit"
    lines.append(
        f"{verdict}: peak {plan['peak_bytes'] / GIB:.2f} of {chip['hbm_bytes'] / GIB:.2f} GiB"
    )
    return "\n".join(lines)


def _format_hosts(plan: dict[str, Any]) -> list[str]:
    hosts = plan["hosts"]
    slices = f"{plan['slices']} slices, " if plan["slices"] > 1 else ""
    held = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in hosts["holds_bytes"].items())
    return [
        f"  hosts: {slices}{hosts['count']} x {hosts['machine_type']} of {hosts['chips']} chips, "
        f"{hosts['rows']} rows of a batch each",
        f"  a host's memory, GiB of {hosts['memory_bytes'] / GIB:.0f}"
        f"{'' if hosts['fits'] else ', which is too little'}: {held}",
    ]


def _format_between_slices(plan: dict[str, Any]) -> list[str]:
    between = plan["between_slices"]
    sent = ", ".join(
        f"{name} {kind} {size / 1e6:.1f}"
        for name, kinds in between["sent_bytes"].items()
        for kind, size in kinds.items()
    )
    what = "the sum of the gradients; rows and their visual tokens stay in their slice"
    if between["sent_bytes"].get("score"):
        what = (
            "more than the sum of the gradients: mesh.data does not divide rows and visual tokens"
        )
    return [
        f"a slice sends to the others in a step, MB: {sent or 'nothing'}",
        f"  {what}",
        f"  (by formula the adapters' gradient {between['adapters_gradient_bytes'] / 1e6:.1f}; "
        f"of all weights it would be {between['all_weights_gradient_bytes'] / 1e6:.0f})",
    ]


def _format_programs(plan: dict[str, Any]) -> list[str]:
    lines = [f"  {'program':28s}{'saved':>8s}{'temporaries':>13s}{'peak':>8s}"]
    for name, entry in plan["programs"].items():
        if "cost" not in entry:
            whole = f"{entry['saved_and_temporary_bytes'] / GIB:21.2f}"
            why = "its text cannot be read: no costs"
            if entry["out_of_memory"]:
                whole, why = " " * 21, f"does not compile: {entry['out_of_memory']}"
            lines.append(f"  {name:28s}{whole}{entry['peak_bytes'] / GIB:8.2f}  {why}")
            continue
        lines.append(
            f"  {name:28s}{entry['saved_bytes'] / GIB:8.2f}{entry['temporary_bytes'] / GIB:13.2f}"
            f"{entry['peak_bytes'] / GIB:8.2f}  largest array {entry['largest_array']}"
        )
    lines += [
        "  saved: what layers keep for the backward pass; in the engine's programs, the cache too",
        "",
        "compiled program of a batch, a chip, loops multiplied out; least time in ms",
        f"  {'':14s}{'TFLOP':>9s}{'HBM GB':>9s}{'sent GB':>9s}{'compute':>10s}{'HBM':>9s}"
        f"{'links':>9s}  collectives",
    ]
    for name, entry in plan["programs"].items():
        for label, cost in ((name, entry.get("cost")), ("decode step", entry.get("decode_step"))):
            if cost is None:
                continue
            times = cost["roofline_s"]
            kinds = ", ".join(
                f"{kind} {c['count']:.0f} x ({c['sent_bytes'] / 1e9:.2f} GB)"
                for kind, c in cost["collectives"].items()
            )
            lines.append(
                f"  {label:14s}{cost['flops'] / 1e12:9.2f}{cost['hbm_bytes'] / 1e9:9.2f}"
                f"{cost['sent_bytes'] / 1e9:9.2f}{1e3 * times['compute']:10.1f}"
                f"{1e3 * times['HBM']:9.1f}{1e3 * times['interconnect']:9.1f}  {kinds}"
            )
    kernels = sum(
        entry["cost"]["of_these_kernels_by_formula"]
        for entry in plan["programs"].values()
        if "cost" in entry
    )
    lines.append(
        f"  of the FLOPs {kernels / 1e12:.2f} TFLOP are attention kernels, counted by formula"
    )
    return lines
