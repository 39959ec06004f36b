"""vLLM in a process of its own: requests as lines of JSON in, seconds out. Needs nothing but vLLM."""

import json
import os
import sys
import time
from typing import Any


def main(folder: str, dtype: str, adapters: int, longest: int, cores: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

    lora: dict[str, Any] = {"enable_lora": True, "max_loras": adapters, "max_lora_rank": 16} if adapters else {}
    model = LLM(folder, dtype=dtype, max_model_len=longest, enable_prefix_caching=False, **lora)
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        sampling = SamplingParams(temperature=0.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
        requests = None
        if asked["adapters"]:
            numbers = [index % len(asked["adapters"]) for index in range(len(prompts))]
            requests = [LoRARequest(f"a{number}", number + 1, asked["adapters"][number]) for number in numbers]
        start = time.monotonic()
        answers = model.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
        seconds = time.monotonic() - start
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        first = list(answers[0].outputs[0].token_ids)
        print(json.dumps({"seconds": seconds, "tokens": tokens, "first": first}), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
