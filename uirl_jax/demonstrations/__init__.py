"""Episodes that a script or a person plays, as trajectories to learn from."""
