"""Inspection: what a memory holds, where a model looks in it, and what it changes."""
