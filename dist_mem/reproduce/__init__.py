"""The papers' tables and figures: every row trained and evaluated by the commands a user has, then set side by side."""
