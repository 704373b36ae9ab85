"""What must hold of the rows that `plays` returns, and the limits."""

from typing import Any

from tools.bench.faults import inputs
from tools.bench.faults.actor import LIMITS, ROLLOUT
from tools.bench.faults.plays import GROUP

SLACK_S = 3.0  # what a busy machine may add to a time-out before it counts as one that was missed
# One call fails in an episode, as often as it is tried, or its session does not come about.
ALONE_S = LIMITS.attempts * LIMITS.attempt_timeout_s + LIMITS.create_timeout_s + SLACK_S
MIXED_S = ROLLOUT.episode_timeout_s + ROLLOUT.delete_timeout_s + SLACK_S
MAX_PEAK_MIB = 100.0  # above what there was before
MAX_GROWTH_MIB = 24.0  # from a third of the mixed episodes to the last


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        **result["alone"],
        **result["inputs"],
        "mixed": result["mixed"],
        **result["dialects"],
    }


def check(result: dict[str, Any]) -> list[str]:
    """What does not hold, one line each."""
    wrong = []
    rows = rows_of(result)
    for name, row in rows.items():
        wrong += [f"{name}: {line}" for line in row.get("unlike", ())]
        is_mixed = name == "mixed" or name in result["dialects"]
        limit_s = MIXED_S if is_mixed else ALONE_S
        if row["slowest_s"] > limit_s:
            wrong.append(f"{name}: an episode took {row['slowest_s']:.1f} s, limit {limit_s:.0f} s")
        if row["peak_mib"] > MAX_PEAK_MIB:
            wrong.append(f"{name}: {row['peak_mib']:.0f} MiB on top, limit {MAX_PEAK_MIB:.0f} MiB")
        if row["paid_wrongly"]:
            wrong.append(f"{name}: {row['paid_wrongly']} episodes have a reward that nobody gave")
        if row["strays"]:
            wrong.append(f"{name}: {row['strays']} requests went where a redirect led")
        if not row["injected"] and name not in inputs.POLICY_TEXTS:
            wrong.append(f"{name}: was never injected")
    for name, row in result["dialects"].items():
        if not row["wanted"] == row["episodes"] == sum(row["ends"].values()):
            wrong.append(f"{name}: {row['wanted']} started, the accounts have {row['episodes']}")
        if bool(row["paid"]) == (name == "g1"):
            wrong.append(f"{name}: {row['paid']} episodes succeeded")
    mixed = result["mixed"]
    account = dict(mixed["account"])
    started, running = account.pop("started"), account["running"]
    ended = mixed["episodes"] + mixed["cancelled"]
    if running or started != sum(account.values()) or started != ended:
        wrong.append(f"mixed: {started} started, {ended} ended, but the account is {account}")
    published = account["published"]
    if not published == mixed["records"] == mixed["distinct"] == GROUP * mixed["groups_whole"]:
        wrong.append(
            f"mixed: {published} published, {mixed['records']} records in shards, "
            f"{mixed['distinct']} of them distinct, {mixed['groups_whole']} groups whole"
        )
    if published < mixed["wanted"]:
        wrong.append(f"mixed: {published} of {mixed['wanted']} episodes after its whole time")
    if mixed["env_errors_in_shards"]:
        wrong.append(f"mixed: {mixed['env_errors_in_shards']} env_errors were published")
    if mixed["growth_mib"] > MAX_GROWTH_MIB:
        wrong.append(f"mixed: grew by {mixed['growth_mib']:.0f} MiB, limit {MAX_GROWTH_MIB:.0f}")
    return wrong
