"""The command line: argument types, and one function per command."""
