"""`python -m benchmarks.vllm_cpu`."""

from benchmarks.vllm_cpu.benchmark import main

if __name__ == "__main__":
    main()
