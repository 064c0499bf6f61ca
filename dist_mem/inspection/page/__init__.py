"""The report page: one HTML file with a summary, a book and its words, which needs no network."""
