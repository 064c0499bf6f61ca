"""The command `dist-mem data build passkey` as a script: python shards/build_passkey.py --help."""

import sys

from dist_mem.__main__ import entry

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "build", "passkey"]
    entry()
