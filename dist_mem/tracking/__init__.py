"""What is told of a run: metrics.jsonl, the progress bar, MLflow."""
