"""The rules that every memory must keep, and the command that checks them."""
