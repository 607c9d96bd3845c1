"""`shardwise bench`: runs the comparison with other engines, which is in the source tree but not in the package."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import UserError

SCRIPT = Path("benchmarks") / "__main__.py"


def run(arguments: Sequence[str]) -> int:
    """Run the comparison in another process; return its exit status.

    Raises:
        UserError: shardwise was not installed from a source tree, and the working directory is not one.
    """
    environment = {**os.environ, "SHARDWISE_COMMAND": "shardwise bench"}
    command = [sys.executable, str(find_script()), "peers", *arguments]
    return subprocess.run(command, check=False, env=environment).returncode


def find_script() -> Path:
    """Return the path of the script in the source tree of an editable install, or else in the working directory.

    Raises:
        UserError: the script is in neither.
    """
    tree = Path(__file__).resolve().parents[3]
    for root in (tree, Path.cwd()):
        if (root / SCRIPT).is_file():
            return root / SCRIPT
    raise UserError(f"the benchmarks are not part of the installed package; run this in a source tree ({SCRIPT})")
