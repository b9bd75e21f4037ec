#!/bin/bash
# Broadcast two checkpoints by turns, as prime-rl's orchestrator does, while rollouts run, and check the version of each.
# Use it before a long run, and with nothing else on the server: it changes the weights.
#     examples/prime_rl/smoke_long.sh http://127.0.0.1:8000 http://127.0.0.1:8100 STEP_A STEP_B [MINUTES]
# The two directories must be marked as complete (STABLE), and be below the server's --output-dir.
set -euo pipefail

url=${1:?usage: smoke_long.sh URL ADMIN_URL STEP_A STEP_B [MINUTES]}
url=${url%/v1}
admin=${2:?an admin address is missing}
admin=${admin%/v1}
steps=("${3:?a directory is missing}" "${4:?a second directory is missing}")
seconds=$((60 * ${5:-30}))
answers=$(mktemp -d)
trap 'kill "${jobs[@]}" 2>/dev/null || true; wait; rm -rf "$answers"' EXIT

ask() { # ask PATH [BODY]
    curl --silent --show-error --fail-with-body --max-time 1800 --request POST "$1" \
        --header "authorization: Bearer ${VLLM_API_KEY:-EMPTY}" \
        ${2:+--header "content-type: application/json" --data "$2"}
}

read_version() { python3 -c 'import json, sys; print(json.load(sys.stdin)["weight_version"])'; }

sample() { # sample FILE: one rollout after another; every version that was seen
    local params='{"max_tokens": 64, "ignore_eos": true, "logprobs": 1, "stop_token_ids": []}'
    while true; do
        ask "$url/inference/v1/generate" "{\"token_ids\": [11, 12, 13], \"sampling_params\": $params}" |
            read_version >>"$1"
    done
}

jobs=()
for number in 1 2 3 4; do
    sample "$answers/$number" &
    jobs+=($!)
done

last=-1
count=0
while ((SECONDS < seconds)); do
    ask "$admin/pause?mode=keep&clear_cache=false" >/dev/null
    version=$(ask "$admin/update_weights" "{\"weight_dir\": \"${steps[count % 2]}\"}" | read_version)
    ask "$admin/resume" >/dev/null
    ((version > last)) || { echo "version $version came after $last" >&2; exit 1; }
    params='{"max_tokens": 1, "logprobs": 1}'
    served=$(ask "$url/inference/v1/generate" "{\"token_ids\": [11, 12], \"sampling_params\": $params}" | read_version)
    [[ $served == "$version" ]] || { echo "$served is served after the update to $version" >&2; exit 1; }
    for job in "${jobs[@]}"; do
        kill -0 "$job" 2>/dev/null || { echo "a rollout failed" >&2; exit 1; }
    done
    last=$version
    count=$((count + 1))
done
for file in "$answers"/*; do
    sort --check --numeric-sort "$file" || { echo "a later rollout had older weights" >&2; exit 1; }
done
echo "$count broadcasts, $(cat "$answers"/* | wc -l) rollouts beside them, versions up to $last"
