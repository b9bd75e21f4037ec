#!/bin/bash
# See in a minute whether prime-rl can use a server; it changes nothing.
#     examples/prime_rl/smoke.sh http://127.0.0.1:8000 [http://127.0.0.1:8100]
# VLLM_API_KEY has the server's token: `rollway prime-rl config URL` says where that is.
set -euo pipefail

url=${1:?usage: smoke.sh URL [ADMIN_URL]}
url=${url%/v1}
admin=${2:-$url}
admin=${admin%/v1}

ask() { # ask METHOD URL [BODY]
    curl --silent --show-error --fail-with-body --max-time 60 --request "$1" "$2" \
        --header "authorization: Bearer ${VLLM_API_KEY:-EMPTY}" \
        ${3:+--header "content-type: application/json" --data "$3"}
}

read_field() { # read_field KEY…: what is there in the JSON of the input; of a list, its length
    python3 -c '
import json, sys
value = json.load(sys.stdin)
for key in sys.argv[1:]:
    value = value[int(key) if key.isdigit() else key]
print(len(value) if isinstance(value, list) else value)' "$@"
}

for address in "$url" "$admin"; do
    ask GET "$address/health" >/dev/null
    echo "$address is healthy"
done
model=$(ask GET "$admin/v1/models" | read_field data 0 id)
length=$(ask GET "$admin/v1/models" | read_field data 0 max_model_len)
echo "it serves $model, with $length tokens of context"
[[ $model != /* || -d $model ]] || {
    echo "prime-rl loads the tokenizer by that name, and it is not on this machine" >&2
    exit 1
}

series=$(ask GET "$admin/metrics" | grep -c '^vllm:' || true)
echo "it has $series vllm:* series"
if ((series == 0)); then
    echo "without them prime-rl keeps one episode in flight" >&2
    exit 1
fi

params='{"max_tokens": 4, "min_tokens": 4, "logprobs": 1, "temperature": 1.0, "stop_token_ids": []}'
reply=$(ask POST "$url/inference/v1/generate" \
    "{\"model\": \"$model\", \"token_ids\": [11, 12, 13], \"sampling_params\": $params}")
tokens=$(read_field choices 0 logprobs content <<<"$reply")
version=$(read_field weight_version <<<"$reply")
[[ $tokens == 4 ]] || { echo "4 tokens were asked for, and $tokens came" >&2; exit 1; }
echo "it sampled $tokens tokens of weight version $version"
