"""Makes the benchmarks importable: they belong to the checkout, not to the installed package."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
