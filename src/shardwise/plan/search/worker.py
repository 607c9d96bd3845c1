"""One process of a search: families come on standard input, their candidates go to standard output, pickled."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from typing import IO, Any

from shardwise.plan.models.source import quiet_transformers, resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import explore_family
from shardwise.plan.search.processes import Setting


def main() -> None:
    """Answer what comes, until that ends. The first message is the setting."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the model's code prints must not be taken for an answer
    quiet_transformers()
    messages = _messages(sys.stdin.buffer)
    setting: Setting = next(messages)
    evaluator: Evaluator | None = None
    for family in messages:
        try:
            if evaluator is None:
                evaluator = Evaluator(resolve(setting.model), setting.scale)
            for candidate in explore_family(family, evaluator, setting.budget_bytes, setting.objective):
                _say(candidate, answers)
            _say(None, answers)
        except Exception as error:
            _say(error, answers)


def _say(answer: Any, answers: IO[bytes]) -> None:
    pickle.dump(answer, answers)
    answers.flush()


def _messages(stream: IO[bytes]) -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(stream)
        except EOFError:
            return


if __name__ == "__main__":
    main()
