"""The learner: train state (state), one optimizer step (step) and the training run (loop)."""
