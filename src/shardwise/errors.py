"""Every exception that shardwise raises on purpose.

    ShardwiseError
    ├── UserError              a mistake in what was asked for; the CLI prints one line and exits 2
    │   ├── ConfigError        a configuration key or value
    │   ├── CheckpointError    a checkpoint that is missing, damaged, cannot be written or does not fit the model
    │   │   ├── UnreadableError    storage that did not answer: what it holds may be well
    │   │   └── PeerError          another rank failed or is gone: a consequence, not a cause
    │   ├── LayoutError        a model that cannot be laid out as asked (no parameters, meta tensors, ...)
    │   ├── MeshError          ranks, groups and meshes that do not fit together
    │   ├── PlanError          a plan that cannot be made: an unknown model or device, nothing fits, untraceable code
    │   └── UsageError         a call that would be silently wrong on a sharded model
    │       └── NotOnPiecesError   an operation that needs a whole parameter
    ├── MismatchError          ranks disagree (different models, different order)
    │   └── DifferentModelsError  before the first collective on the model; a UserError too
    ├── StaleWeightsError      backward met weights newer than those its forward used
    ├── OutOfMemory            a step needed more memory than there is; its message is several lines
    └── CollectiveTimeout      a peer did not arrive, or died

Messages name the value, the rank or the fully qualified name at fault, and the way out.
"""


class ShardwiseError(Exception):
    """Base class of every error raised on purpose."""


class UserError(ShardwiseError):
    """A mistake in what was asked for. The command line prints it as one line and exits with status 2."""


class ConfigError(UserError):
    """A configuration key or value that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, cannot be written or does not fit the model."""


class UnreadableError(CheckpointError):
    """Storage did not answer, or did not let this process read. That says nothing about what the checkpoint holds."""


class PeerError(CheckpointError):
    """Another rank failed or is gone, as the message says. Where it failed, it raises an error of its own."""


class LayoutError(UserError):
    """A model whose parameters cannot be laid out as asked."""


class MeshError(UserError):
    """Ranks, groups and meshes that do not fit together."""


class PlanError(UserError):
    """A plan that cannot be made: an unknown model or device, nothing fits, model code that cannot be traced."""


class UsageError(UserError, RuntimeError):
    """A call that would be silently wrong on a sharded model; the message names the call to make instead."""


class NotOnPiecesError(UsageError):
    """An operation that this rank's piece of a parameter cannot answer. The whole could, but is not gathered now."""


class MismatchError(ShardwiseError):
    """Ranks disagree about the model or the order of units. Raised on every rank."""


class DifferentModelsError(MismatchError, UserError):
    """Ranks built different models, or sharded one with different arguments. Raised on every rank, before any waits."""


class StaleWeightsError(ShardwiseError, RuntimeError):
    """Backward met weights that were updated after the forward that saved them."""


class OutOfMemory(ShardwiseError, RuntimeError):
    """A step needed more memory than its device has. The message tells what is where and names ways out."""


class CollectiveTimeout(ShardwiseError, RuntimeError):
    """A peer did not arrive at a collective in time, or its process is gone."""


_LONGEST_LINE = 240


def one_line(error: BaseException, with_type: bool = False) -> str:
    """What an error says, on one line and not too long, to go into a message of ours. `with_type`: its type first."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:_LONGEST_LINE] if with_type else said[:_LONGEST_LINE]
