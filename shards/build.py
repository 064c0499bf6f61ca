"""The command `dist-mem data build` for a source tree that is not installed: python shards/build.py NAME --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dist_mem.__main__ import entry

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "build"]
    entry()
