"""The papers' tables and figures: train and evaluate every row, then set them side by side."""
