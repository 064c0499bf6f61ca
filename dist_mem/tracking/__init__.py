"""Run logging: metrics.jsonl, the progress bar, MLflow."""
