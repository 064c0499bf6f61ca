"""Building blocks of memories."""
