#!/usr/bin/env bash
# From a folder of your own text to a trained Mixture-of-Experts and a page about the run.
#
#   examples/quickstart.sh TEXT_FOLDER RUN_DIR [flags of Megatron or the plugin, which win]
#
# TEXT_FOLDER should hold a hundred documents or more (files, or lines of .jsonl files): 3 % of them
# are kept for validation. Called again with the same RUN_DIR it goes on from the newest checkpoint.
# RANKS (default 4) processes train, on as many GPUs if there are any, else on the CPU. The programs
# are those on PATH: activate their environment first (`source .venv/bin/activate`).
set -euo pipefail

text="${1:?folder of text}"
run_dir="${2:?folder for data, checkpoints and the report}"
shift 2
ranks="${RANKS:-4}"
data="$run_dir/data/text"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ ! -e "$data.idx" ]]; then
    mkdir -p "$run_dir/data"
    megatron-resilient prepare-data --input "$text" --train-tokenizer 4096 --append-eod \
        --output "$data"
fi

model=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 256
    --num-attention-heads 4
    --seq-length 256
    --max-position-embeddings 256
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall
)

training=(
    --expert-model-parallel-size "$ranks"
    --micro-batch-size 2
    --global-batch-size $((2 * ranks))
    --train-iters 400
    --lr 3e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --attention-dropout 0
    --hidden-dropout 0
)

data_and_checkpoints=(
    --data-path "$data"
    --split "97,3,0"
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$data.model"
    --save "$run_dir/checkpoints"
    --load "$run_dir/checkpoints"
    --save-interval 100
    --eval-interval 50
    --eval-iters 4
    --log-interval 10
    --resilient-run-dir "$run_dir"
)

# One thread a rank: on a CPU the ranks share the cores.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" torchrun --standalone --nproc-per-node "$ranks" \
    "$here/pretrain_moe.py" "${model[@]}" "${training[@]}" "${data_and_checkpoints[@]}" "$@"

megatron-resilient report "$run_dir"
