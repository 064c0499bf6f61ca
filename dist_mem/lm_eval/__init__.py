"""Trained models as a model of lm-evaluation-harness (lm_eval), and the command that runs its tasks."""
