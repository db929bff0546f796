#!/usr/bin/env bash
# Sourced by the models' scripts beside it, which say what to train; here stands how it is started.
# On every node of a cluster, to be called by itself:
#
#   COORDINATOR=HOST:29400 NNODES=MIN:MAX MEGATRON_RESILIENT_TOKEN=... \
#   DATA_PREFIX=/data/corpus TOKENIZER=/data/tokenizer.model examples/models/MODEL.sh RUN_DIR
#
# See docs/operations.md for the coordinator. With SMALL=1 none of this is needed: four emulated
# nodes train on this machine's CPU, on sequences that Megatron makes up, and a report is made. What
# they print is in RUN_DIR/logs.
# The programs are those on PATH: activate their environment first (`source .venv/bin/activate`).
set -euo pipefail

pretrain="$(dirname "${BASH_SOURCE[0]}")/../pretrain_moe.py"

# launch RUN_DIR FLAGS...: those of the model; of two equal flags the last one wins.
launch() {
    local run_dir="${1:?folder for checkpoints, events and the report}"
    shift
    local common=(
        --position-embedding-type rope
        --normalization RMSNorm
        --swiglu
        --disable-bias-linear
        --untie-embeddings-and-output-weights
        --moe-token-dispatcher-type alltoall
        --attention-dropout 0.0
        --hidden-dropout 0.0
        --weight-decay 0.1
        --adam-beta2 0.95
        --lr-decay-style cosine
        --save "$run_dir/checkpoints"
        --load "$run_dir/checkpoints"
        --resilient-run-dir "$run_dir"
        --resilient-checkpoint-format experts
    )
    if [[ -n "${SMALL:-}" ]]; then
        local made_up=(
            --mock-data
            --tokenizer-type NullTokenizer
            --vocab-size 512
            --split "100,0,0"
            --eval-iters 0
            --eval-interval 1000
            --seq-length 64
            --max-position-embeddings 64
            --micro-batch-size 1
            --global-batch-size 8
            --train-iters 30
            --lr 3e-3
            --min-lr 3e-4
            --log-interval 10
            --save-interval 10
        )
        OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" megatron-resilient run --emulate-nodes 4 \
            --rejoin-after 2 --log-dir "$run_dir/logs" "$pretrain" "${common[@]}" "${made_up[@]}" "$@"
        megatron-resilient report "$run_dir"
        return
    fi
    local real=(
        --data-path "${DATA_PREFIX:?path of the .bin/.idx pair without its ending}"
        --tokenizer-type SentencePieceTokenizer
        --tokenizer-model "${TOKENIZER:?path of the SentencePiece model}"
        --split "99,1,0"
        --eval-iters 10
        --eval-interval 1000
        --seq-length 4096
        --max-position-embeddings 4096
        --micro-batch-size 1
        --train-iters 500000
        --lr-warmup-iters 2000
        --clip-grad 1.0
        --bf16
        --use-distributed-optimizer
        --moe-grouped-gemm
        --log-interval 10
        --save-interval 500
        # Refuses to start if the slots of a rank take more: one GPU has 80 GB.
        --resilient-max-expert-gib 56
    )
    megatron-resilient run --coordinator "${COORDINATOR:?HOST:PORT of the coordinator}" \
        --nnodes "${NNODES:?fewest and most nodes, MIN:MAX}" \
        --nproc-per-node "${GPUS_PER_NODE:-8}" \
        "$pretrain" "${common[@]}" "${real[@]}" "$@"
}
