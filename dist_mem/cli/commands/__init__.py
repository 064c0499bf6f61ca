"""The commands of `dist-mem`, a file each; there is no list to edit.

The name of the file is that of the command, with `_` for `-`; the first line of its text is the help. `PLACE` is the
group of `dist-mem --help` and the command's number in it, `EXAMPLE` what follows the command in an example,
`add_arguments` adds its arguments, and `run` runs it and returns the exit code. `run` imports what it needs, so that
help and errors appear at once.
"""
