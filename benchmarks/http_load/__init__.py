"""Is the server as fast over HTTP as its engine alone?

The server (engine and HTTP) in processes of its own, an engine alone with the same model in another, and a load client in
several more. The same requests go to both in turns, so ratios are within one run on one machine. Models have random weights
at the true shape (bf16 on a GPU), or are the embedded default model. Prompts are sent as token ids to /v1/completions, all
others in each repetition; answers are greedy and have a fixed number of tokens. The client counts frames as they come,
checks the end of each answer and every frame of one answer in 16.

Closed loop: so many streams at a time, streamed and as whole answers, against the engine with so many sequences. Burst: all
requests come at once. Open loop: Poisson arrivals, by default 0.5 and 0.8 of the requests/s of the engine in a closed loop.
Figures: tokens/s; time to the first token, between tokens, and to the whole answer (p50, p99); errors; busy cores of each
process. A soak (`soak.py`) has readers that stall and connections that are cut.

    python -m benchmarks.http_load 1b                              # 32, 128 and 256 streams, one H200
    python -m benchmarks.http_load 1b --burst
    python -m benchmarks.http_load 1b --open --rates 50 100
    python -m benchmarks.http_load 1b --lengths azure_conv --adapters 32
    python -m benchmarks.http_load 1b --text --streams 1 8 64 512
    python -m benchmarks.http_load 1b --soak 540
    python -m benchmarks.http_load qwen4b                          # another shape; 7b too
    python -m benchmarks.http_load default --cpu                   # 32 requests of 64 + 64 tokens, the default model
    python -m benchmarks.http_load tiny --cpu                      # seconds, for the tests
"""
