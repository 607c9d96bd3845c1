"""The report of `shardwise convert`."""

from shardwise.checkpoint import Converted
from shardwise.tables import format_bytes

KINDS = {
    "shardwise": "a shardwise checkpoint",
    "parts": "a shardwise checkpoint in files per rank",
    "dcp": "a torch DCP directory",
    "pt": "a full .pt file",
    "hf": "a Hugging Face directory",
    "peft": "a PEFT adapter",
}
_SHOWN = 6


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 file", "2 files"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def report(target: str, converted: Converted) -> str:
    """Return a few lines: kinds, sizes, and the names of what the target format cannot hold."""
    optimizer = "no optimizer"
    if converted.optimizer_parameters is not None:
        optimizer = f"optimizer state of {counted(converted.optimizer_parameters, 'parameter')}"
    step = f", step {converted.step}" if converted.step or converted.source.is_own else ""  # others may not tell it
    merged = ", merged into its base" if converted.source.value == "peft" else ""
    lines = [
        f"{target}: {KINDS[converted.target.value]}, from {KINDS[converted.source.value]}{merged}",
        f"{counted(converted.tensors, 'tensor')}, {optimizer}, {format_bytes(converted.nbytes)}{step}",
    ]
    shown = converted.left_out[:_SHOWN]
    if shown:
        more = len(converted.left_out) - len(shown)
        lines.append(f"left out: {', '.join(shown)}" + (f" and {more} more" if more else ""))
    return "\n".join(lines)
