"""The rules of the memory contract, and the command that checks them."""
