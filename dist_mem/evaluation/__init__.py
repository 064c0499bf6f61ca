"""A trained model: loaded, scored on whole documents, compared, exported."""
