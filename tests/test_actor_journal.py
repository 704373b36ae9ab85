"""An actor's journal: every episode that was started has its fate, over kills and full disks."""

from uirl_jax.actor.journal import Journal

RUN, ACTOR = "run", "a0"


def test_journal_after_a_kill_settles_every_episode(tmp_path):
    journal = Journal(tmp_path, ACTOR, RUN)
    for event, group, episodes in (
        *[("started", 0, 1)] * 3,
        ("env_error", 0, 1),
        ("publishing", 0, 2),
        ("published", 0, 2),
        *[("started", 1, 1)] * 2,
        ("publishing", 1, 2),  # killed after the rename
        *[("started", 2, 1)] * 2,
        ("publishing", 2, 2),  # killed before it
        ("started", 3, 1),
        ("started", 6, 1),
        ("publishing", 6, 1),  # the disk was full
        ("publishing", 6, 1),
        ("abandoned", 9, 0),
    ):
        journal.add(event, group, episodes)
    journal.close()
    with open(journal.path, "ab") as file:
        file.write(b"started 4")  # killed within a line

    again = Journal(tmp_path, ACTOR, RUN)
    assert again.settle(lambda group: group in (1, 6)) == 3
    again.add("started", 5, 1)
    again.close()
    last = Journal(tmp_path, ACTOR, RUN)
    totals = {name: last.total(name) for name in ("started", "published", "env_error", "lost")}
    assert totals == {"started": 10, "published": 5, "env_error": 1, "lost": 3}
    assert last.settle(lambda group: False) == 1  # the one of group 5
    assert last.damaged_lines == 1
    last.close()


def test_journal_of_a_group_sampled_twice_does_not_count_its_shard_twice(tmp_path):
    journal = Journal(tmp_path, ACTOR, RUN)
    for _ in range(2):  # the second time after a disk that was full
        journal.add("started", 0, 1)
        journal.add("publishing", 0, 1)
        journal.add("publishing", 0, 1)
        journal.add("published", 0, 1)
    assert journal.settle(lambda group: True) == 0
    assert journal.total("published") == 2
    journal.close()
