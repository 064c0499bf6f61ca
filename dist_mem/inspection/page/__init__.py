"""The report page: one HTML file with settings, curves, tables, figures and a book, which needs no network."""
