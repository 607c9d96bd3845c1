"""`shardwise bench`: runs the comparison with other engines that lies in the source tree, not in the package."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import UserError

SCRIPT = Path("benchmarks") / "peers.py"


def run(arguments: Sequence[str]) -> int:
    """Run the comparison in a process of its own; returns its exit status.

    Raises:
        UserError: shardwise was not installed from a source tree and the working directory is none.
    """
    environment = {**os.environ, "SHARDWISE_COMMAND": "shardwise bench"}
    command = [sys.executable, str(find_script()), *arguments]
    return subprocess.run(command, check=False, env=environment).returncode


def find_script() -> Path:
    """The script in the tree that an editable install points to, or in the working directory.

    Raises:
        UserError: it is in neither.
    """
    tree = Path(__file__).resolve().parents[3]
    for root in (tree, Path.cwd()):
        if (root / SCRIPT).is_file():
            return root / SCRIPT
    raise UserError(f"the benchmarks are not part of the installed package; run this in a source tree ({SCRIPT})")
