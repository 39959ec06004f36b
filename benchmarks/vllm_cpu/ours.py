"""Our engine in a process of its own: requests as lines of JSON in, seconds out."""

import json
import sys
import time


def main(folder: str, dtype: str) -> None:
    from symbiosis.serving.engine import Engine
    from symbiosis.serving.scheduling.sequence import Sampling

    engine = Engine(folder, dtype=dtype, cache_bytes=1 << 30)
    print(json.dumps("ready"), flush=True)
    added: set[str] = set()
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, paths = asked["prompts"], asked["adapters"]
        for path in paths:
            if path not in added:
                engine.add_adapter(path, path)
                added.add(path)
        names = [paths[index % len(paths)] if paths else None for index in range(len(prompts))]
        sampling = Sampling(temperature=0.0, max_tokens=asked["new"], ignore_eos=True)
        start = time.monotonic()
        answers = engine.generate(prompts, names, sampling)
        seconds = time.monotonic() - start
        tokens = sum(len(answer.tokens) for answer in answers)
        print(json.dumps({"seconds": seconds, "tokens": tokens, "first": answers[0].tokens}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
