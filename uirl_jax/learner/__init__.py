"""The learner: what is trained (state), one optimizer step (step), the run around it (loop)."""
