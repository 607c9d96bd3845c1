"""Many random programs, compared with plain torch on ranks: prints what goes wrong and how to see it again.

    python tests/programs/survey.py --programs 5000 --seed 0 [--uneven | --joined] [--tensor] [--muon | --lora]
                                    [--without FEATURE ...]
    python tests/programs/survey.py --replay SEED
    python tests/programs/survey.py --shrink SEED
    python tests/programs/survey.py --program "Program(...)"

Exits with 1 if any program ended in anything but OK.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]

from tests.programs import program as language
from tests.programs.drawing import program_of
from tests.programs.features import features
from tests.programs.fleet import Fleet, Result
from tests.programs.program import Program
from tests.programs.running import Outcome
from tests.programs.shrinking import shrink

EVERY = 100
"""Programs between lines of progress."""


def main(arguments: list[str]) -> int:
    options = _parsed(arguments)
    with Fleet() as fleet:
        if options.program is not None:
            return _show(fleet, eval(options.program, vars(language)))
        if options.replay is not None:
            return _show(fleet, _drawn(options.replay, options))
        if options.shrink is not None:
            return _shrink(fleet, _drawn(options.shrink, options))
        return _survey(fleet, options)


def _drawn(seed: int, options: argparse.Namespace) -> Program:
    return program_of(seed, options.uneven, options.tensor, options.joined, options.muon, options.lora)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=5000, help="how many to run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the next have the next seeds")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--uneven", action="store_true", help="ranks may skip parts of units that others run")
    parser.add_argument("--joined", action="store_true", help="ranks may skip units that others run")
    parser.add_argument("--tensor", action="store_true", help="meshes with a tensor axis, which cuts some of the model")
    parser.add_argument("--muon", action="store_true", help="Muon as the optimizer")
    parser.add_argument("--lora", action="store_true", help="PEFT's adapters beside linear layers")
    parser.add_argument("--without", nargs="+", default=[], metavar="FEATURE", help="leave out programs that have one")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one, with tracebacks")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="look for a smaller program that ends the same way")
    parser.add_argument("--program", help="as --replay, of a program as it is printed by --replay and --shrink")
    return parser.parse_args(arguments)


def _survey(fleet: Fleet, options: argparse.Namespace) -> int:
    start = time.monotonic()
    outcomes, by_feature, seeds = Counter[Outcome](), dict[str, Counter[Outcome]](), dict[int, Result]()
    for number, seed in enumerate(_seeds(options)):
        if number == options.programs or (options.minutes and time.monotonic() - start > 60 * options.minutes):
            break
        result = fleet.run(_drawn(seed, options))
        outcomes[result.outcome] += 1
        for feature in features(result.program):
            by_feature.setdefault(feature, Counter())[result.outcome] += 1
        if result.outcome is not Outcome.OK:
            seeds[seed] = result
            print(f"\nseed {seed}: {result}\n{result.program}\n", flush=True)
        if (number + 1) % EVERY == 0:
            rate = 60 * (number + 1) / (time.monotonic() - start)
            print(f"{number + 1} programs, {len(seeds)} not OK, {rate:.0f} a minute", flush=True)
    _summarise(outcomes, by_feature, seeds, time.monotonic() - start)
    return int(bool(seeds))


def _seeds(options: argparse.Namespace) -> Iterator[int]:
    without = set(options.without)
    seed = options.seed
    while True:
        if not without or without.isdisjoint(features(_drawn(seed, options))):
            yield seed
        seed += 1


def _summarise(
    outcomes: Counter[Outcome], by_feature: dict[str, Counter[Outcome]], seeds: dict[int, Result], took_s: float
) -> None:
    kinds = [outcome for outcome in Outcome if outcomes[outcome]]
    print(f"\n{'feature':26} {'programs':>8}" + "".join(f"{kind.name:>10}" for kind in kinds))
    for feature, counts in sorted(by_feature.items()):
        print(f"{feature:26} {counts.total():8}" + "".join(f"{counts[kind] or '-':>10}" for kind in kinds))
    total = outcomes.total()
    print(f"{'all':26} {total:8}" + "".join(f"{outcomes[kind]:>10}" for kind in kinds))
    print(f"{took_s:.0f} s, {60 * total / max(took_s, 1e-9):.0f} programs a minute")
    if seeds:
        print("not OK:", ", ".join(f"{seed} ({result.outcome.name})" for seed, result in seeds.items()))


def _show(fleet: Fleet, program: Program) -> int:
    result = fleet.run(program)
    print(f"{program}\n\n{program!r}\n\n{result}")
    for rank, report in enumerate(result.reports):
        if report.trace:
            print(f"\nOn rank {rank}:\n{report.trace}")
    return int(result.outcome is not Outcome.OK)


def _shrink(fleet: Fleet, program: Program) -> int:
    result = fleet.run(program)
    if result.outcome is Outcome.OK:
        print(f"{program}\n\nOK: nothing to look for")
        return 0
    return _show(fleet, shrink(program, lambda smaller: fleet.run(smaller).kind == result.kind))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
