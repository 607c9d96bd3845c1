#!/bin/sh
# Several machines without a scheduler. Run the same line on each of them, in any order:
#
#     sh torchrun.sh FIRST HOSTS run.toml [section.key=value ...]
#
# FIRST: the host name of one of the machines, as `hostname` prints it there, by which the others reach it.
# HOSTS: how many machines there are; "2:4" trains on as many of 2 to 4 as there are, and goes on with fewer or more.
#
# All machines need the same run.toml, the same data and a shared directory for runs (log.directory). After a failure the ranks
# start again, up to RESTARTS times, and resume from the newest checkpoint. A machine that was lost joins again when its
# line is started again. If FIRST itself is lost, start the line again on all machines.
set -eu
if [ "$#" -lt 3 ]; then
    echo "usage: sh torchrun.sh FIRST HOSTS run.toml [section.key=value ...]" >&2
    exit 2
fi
first=$1 hosts=$2
shift 2

# Ranks that wait for one that stands still, or is cut off, end after so many seconds.
export SHARDWISE_HANG_TIMEOUT_S="${SHARDWISE_HANG_TIMEOUT_S:-60}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # seconds for the last save; torchrun kills ranks after 30 otherwise
# A host that was lost and started anew can join again (https://github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes="$hosts" --nproc-per-node="${RANKS_PER_HOST:-auto}" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:${PORT:-29500}" --rdzv-id="${JOB:-shardwise}" \
    -m shardwise train "$@"
