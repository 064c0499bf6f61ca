"""The command `dist-mem data build characters` as a script: python shards/build_characters.py --help."""

import sys

from dist_mem.__main__ import entry

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "build", "characters"]
    entry()
