"""Every exception that shardwise raises on purpose.

    ShardwiseError
    ├── UserError              a mistake in what was asked for; the CLI prints one line and exits 2
    │   ├── ConfigError        a configuration key or value
    │   ├── HubError           a name of a hub: no such repository, gated, not reached, no room, no readable weights
    │   ├── CheckpointError    a checkpoint that is missing, damaged, cannot be written or does not fit the model
    │   │   ├── UnreadableError    storage that did not answer: its contents may be intact
    │   │   └── PeerError          another rank failed or its process ended: a consequence, not a cause
    │   ├── LayoutError        a model that cannot be laid out as asked (no parameters, meta tensors, ...)
    │   ├── MeshError          ranks, groups and meshes that do not fit together
    │   ├── PlanError          a plan that cannot be made: an unknown model or device, nothing fits, untraceable code
    │   └── UsageError         a call that would be silently wrong on a sharded model
    │       └── NotOnPiecesError   an operation that needs a whole parameter
    ├── MismatchError          ranks disagree (different models, different order)
    │   └── DifferentModelsError  before the first collective on the model; a UserError too
    ├── StaleWeightsError      backward needs weights that were updated after its forward used them
    ├── OutOfMemory            a step needed more memory than the device has; its message is several lines
    └── CollectiveTimeout      a peer did not arrive in time, or its process ended

Messages name the value, the rank or the fully qualified name at fault, and how to fix it.
"""


class ShardwiseError(Exception):
    """Base class of every error raised on purpose."""


class UserError(ShardwiseError):
    """A mistake in what was asked for. The command line prints it as one line and exits with status 2."""


class ConfigError(UserError):
    """A configuration key or value that cannot be used."""


class HubError(UserError):
    """A name of a model hub whose files cannot be had, or a repository that cannot be written."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, cannot be written or does not fit the model."""


class UnreadableError(CheckpointError):
    """Storage did not answer, or did not let this process read. The checkpoint itself may be intact."""


class PeerError(CheckpointError):
    """Another rank failed or its process ended, as the message says. A rank that failed raises its own error."""


class LayoutError(UserError):
    """A model whose parameters cannot be laid out as asked."""


class MeshError(UserError):
    """Ranks, groups and meshes that do not fit together."""


class PlanError(UserError):
    """A plan that cannot be made: an unknown model or device, nothing fits, model code that cannot be traced."""


class UsageError(UserError, RuntimeError):
    """A call that would be silently wrong on a sharded model; the message names the call to make instead."""


class NotOnPiecesError(UsageError):
    """An operation that needs the full parameter, called where only this rank's piece is at hand."""


class MismatchError(ShardwiseError):
    """Ranks disagree about the model or the order of units. Raised on every rank."""


class DifferentModelsError(MismatchError, UserError):
    """Ranks built different models, or sharded one with different arguments. Raised on every rank, before any hangs."""


class StaleWeightsError(ShardwiseError, RuntimeError):
    """Backward needs weights that were updated after the forward that used them."""


class OutOfMemory(ShardwiseError, RuntimeError):
    """A step needed more memory than its device has. The message lists what holds it and what to change."""


class CollectiveTimeout(ShardwiseError, RuntimeError):
    """A peer did not arrive at a collective in time, or its process is gone."""


_LONGEST_LINE = 240


def one_line(error: BaseException, with_type: bool = False) -> str:
    """Return an error's message as one line of limited length, to quote in another message. `with_type`: type first."""
    said = " ".join(str(error).split())
    if with_type:
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return said[:_LONGEST_LINE]
