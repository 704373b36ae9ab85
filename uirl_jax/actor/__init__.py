"""Episodes: one of them (`rollout`) and many of them, in groups, in spite of faults (`host`)."""
