"""Refit a real vLLM engine in this process by copies into its parameters; print what happened.

vLLM packs linear layers for CPU, so that their parameters are empty. Here it uses its own fallback,
torch's linear, as it does on CPUs without oneDNN: the parameters are then those of the checkpoint,
as on a GPU.

    python -m tests.stack.in_place_engine DIRECTORY [graphs]

It also runs on a GPU, there with CUDA graphs if `graphs` is given, and prints the memory that torch
holds after each refit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SECRET = "a secret of this test"
if __name__ == "__main__":  # before vLLM is imported, and not in a test that imports this module
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "ROLLWAY_WEIGHTS_SECRET": SECRET,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
STRATEGIES = ("device", "host", "direct", "reload")


def write_policies(directory: Path) -> list[Any]:
    """Write three checkpoints of one shape; return their transformers models."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    policies = []
    for number in range(1 + len(STRATEGIES)):
        torch.manual_seed(number)
        policies.append(Qwen3ForCausalLM(config).eval())
    policies[0].save_pretrained(directory)
    return policies


def deviate(llm: Any, policy: Any) -> float:
    """Return how far the engine's log-probs of its own greedy tokens are from transformers'."""
    import torch
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    with torch.no_grad():
        # On the CPU: transformers is the reference.
        logits = policy(torch.tensor([PROMPT + tokens])).logits[0].float()
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    return max(
        abs(step[token].logprob - float(row[token]))
        for step, token, row in zip(output.outputs[0].logprobs, tokens, expected, strict=True)
    )


def refit(llm: Any, publisher: Any, version: int, policy: Any) -> dict[str, Any]:
    import time

    import torch

    offer = publisher.publish(version, policy.named_parameters())
    llm.collective_rpc("rollway_stage", args=(offer.sign(SECRET).as_json(),))
    while True:
        (staging,) = llm.collective_rpc("rollway_staging", args=(offer.identity,))
        if staging["state"] != "running":
            break
        time.sleep(0.01)  # between two looks at the state
    if staging["state"] == "failed":
        return {"staging": staging}
    (swap,) = llm.collective_rpc("rollway_swap", args=(offer.identity,))
    llm.reset_prefix_cache()
    result = {"staging": staging, "swap": swap, "deviation": deviate(llm, policy)}
    if torch.cuda.is_available():
        time.sleep(0.5)  # a thread returns memory to the device
        result["torch_holds"] = torch.cuda.memory_reserved()
    return result


def patch(llm: Any, store: Path, version: int, policy: Any) -> dict[str, Any]:
    """Serve a policy from deltas, change it a little, and refit again."""
    import torch

    from rollway.weights.transports.delta import DeltaPublisher

    publisher = DeltaPublisher(store)
    refit(llm, publisher, version + 1, policy)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn(parameter.shape) * (torch.rand(parameter.shape) < 0.02)
    return refit(llm, publisher, version + 2, policy)


def main(directory: Path, *, graphs: bool) -> None:
    policies = write_policies(directory)
    from vllm import LLM, _custom_ops

    _custom_ops._supports_onednn = False
    from rollway.engine import memory
    from rollway.engine.memory import FreeMemory
    from rollway.weights.transports.shm import ShmPublisher, ShmReader

    llm = LLM(
        str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=not graphs,
        max_model_len=64,
        gpu_memory_utilization=0.3,
        worker_extension_cls="rollway.engine.worker.WorkerExtension",
    )
    results: dict[str, Any] = {"start": deviate(llm, policies[0])}
    nothing = FreeMemory("a full device", 0, 0)
    read_device, read_host = memory.read_device_memory, memory.read_host_memory
    with ShmPublisher() as publisher:
        for version, strategy in enumerate(STRATEGIES, 1):
            is_full = strategy in ("host", "reload")
            memory.read_device_memory = (lambda *_: nothing) if is_full else read_device
            memory.read_host_memory = (lambda *_: nothing) if strategy == "reload" else read_host
            ShmReader.shares_device = lambda *_, share=strategy == "direct": share
            results[strategy] = refit(llm, publisher, version, policies[version])
    memory.read_device_memory, memory.read_host_memory = read_device, read_host
    results["patch"] = patch(llm, directory / "deltas", len(STRATEGIES), policies[0])
    print(f"RESULTS {json.dumps(results)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), graphs="graphs" in sys.argv[2:])
