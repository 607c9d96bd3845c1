"""Which architectures of the installed transformers can be planned, and why the others cannot.

    python benchmarks architectures                          # all, about five minutes of processor time
    python benchmarks architectures --names qwen3_next,t5    # some model types
    python benchmarks architectures --out architectures      # and write results/DATE-architectures.{json,md}

Every class of transformers' tables of causal, masked, sequence-to-sequence, vision and image-text models, at its
default configuration with four layers (or all, where the configuration does not allow fewer) and its own widths: a dry
run takes as long for wide layers as for narrow ones. A row is either planned or refused by one sentence.
"""

import argparse
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.common import facts, report

HEADS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequence to sequence": "AutoModelForSeq2SeqLM",
    "vision": "AutoModelForImageClassification",
    "image and text": "AutoModelForImageTextToText",
}
LAYERS = 4
DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "depth",
)  # fmt: skip
"""Names that configurations have for a number of layers."""
SEQ_LEN = 256
MOST_S = 120
REFUSED_LATE = "took more than {most} s"


class Architecture(NamedTuple):
    """A class of transformers that trains a model type."""

    model_type: str
    kind: str
    """One of `HEADS`."""
    class_name: str


class Row(NamedTuple):
    """What became of an architecture."""

    model_type: str
    kind: str
    class_name: str
    parameters: int | None
    """None: refused."""
    seconds: float
    """Of the processor, for the dry run and the forecast."""
    refusal: str | None


def architectures() -> list[Architecture]:
    """Return every class of the five tables once, under the first of its kinds."""
    import transformers

    found: dict[str, Architecture] = {}
    for kind, head in HEADS.items():
        for model_type, names in getattr(transformers, head)._model_mapping._model_mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, Architecture(model_type, kind, name))
    return sorted(found.values())


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with at most `LAYERS` layers in each of its parts: lists by layer are cut too."""
    lengths = {config[name] for name in DEPTHS if type(config.get(name)) is int and config[name] > LAYERS}
    smaller: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            smaller[name] = reduced(value)
        elif name in DEPTHS and type(value) is int and value in lengths:
            smaller[name] = LAYERS
        elif isinstance(value, list) and len(value) in lengths:
            smaller[name] = value[:LAYERS]
        else:
            smaller[name] = value
    return smaller


def planned(one: Architecture) -> Row:
    """Plan one architecture. Errors other than the planner's own reach the caller: they are mistakes of the planner."""
    from shardwise.errors import PlanError

    begun = time.process_time()
    parameters, refusal = None, None
    try:
        parameters = _within(MOST_S, lambda: _parameters(one))
    except PlanError as error:
        refusal = str(error)
    except TimeoutError:
        refusal = REFUSED_LATE.format(most=MOST_S)
    return Row(*one, parameters, round(time.process_time() - begun, 1), refusal)


def _parameters(one: Architecture) -> int:
    from transformers import CONFIG_MAPPING

    import shardwise as sw
    from shardwise.errors import PlanError, one_line

    try:
        default = CONFIG_MAPPING[one.model_type]()
    except Exception as error:
        raise PlanError(f"transformers has no default configuration: {one_line(error, with_type=True)}") from error
    whole = {**json.loads(default.to_json_string(use_diff=False)), "architectures": [one.class_name]}
    refused: list[PlanError] = []
    for config in (reduced(whole), whole):
        try:
            return sw.plan.forecast(config, gpus_per_node=8, micro_batch=2, seq_len=_seq_len(config)).parameters
        except PlanError as error:
            refused.append(error)
    raise refused[-1]


def _seq_len(config: dict[str, Any]) -> int:
    from shardwise.plan.models.source import resolve

    longest = resolve(config).positions
    return SEQ_LEN if longest is None else min(SEQ_LEN, longest)


def _within(seconds: int, run: Callable[[], int]) -> int:
    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        return run()
    finally:
        signal.alarm(0)


def rows(names: list[str]) -> Iterator[Row]:
    """Plan the architectures of some model types, or of all."""
    for one in architectures():
        if not names or one.model_type in names:
            yield planned(one)


def summary(found: list[Row]) -> str:
    """Return, by kind, how many are planned and refused."""
    counts = {kind: Counter(row.refusal is None for row in found if row.kind == kind) for kind in HEADS}
    return ", ".join(f"{kind}: {count[True]} planned, {count[False]} refused" for kind, count in counts.items())


def write(name: str, found: list[Row]) -> None:
    """Write the dated result files."""
    machine = facts.machine()
    table = report.table(
        ["model type", "class", "kind", "parameters", "s", "refused because"],
        [
            [
                row.model_type,
                row.class_name,
                row.kind,
                "" if row.parameters is None else f"{row.parameters:,}",
                f"{row.seconds:.1f}",
                row.refusal or "",
            ]
            for row in found
        ],
    )
    heading = f"# Architectures that can be planned\n\n{report.facts_line(machine)}"
    told = (
        f"transformers {facts.version('transformers')}. Default configurations with {LAYERS} layers, 2 sequences of "
        f"{SEQ_LEN} tokens, 8 H100; seconds of the processor."
    )
    report.write(
        name,
        {"machine": machine, "transformers": facts.version("transformers"), "rows": [row._asdict() for row in found]},
        f"{heading}\n\n{told} {summary(found)}.\n\n{table}\n",
    )


def main() -> int:
    import os
    import warnings

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--names", default="", help="model types, comma-separated (all)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    os.environ["SHARDWISE_PLAN_CACHE"] = "0"
    warnings.simplefilter("ignore")
    from shardwise.plan.models.transformers_models import quiet_transformers

    quiet_transformers()
    found: list[Row] = []
    for row in rows([name for name in args.names.split(",") if name]):
        found.append(row)
        said = f"{row.parameters:,} parameters" if row.parameters is not None else f"refused: {row.refusal}"
        print(f"{row.model_type:28} {row.class_name:44} {row.seconds:5.1f} s  {said}", flush=True)
    print(summary(found))
    if args.out:
        write(args.out, found)
    return 0
