"""A custom training loop over shared batches: train, sample, save. Run: python examples/custom_training_loop.py FOLDER"""

import sys

from peft import LoraConfig

import symbiosis
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.optimizer import StepSettings

TEXTS = {"ann": "The password of the day is marzipan.", "bob": "Our office cat is called Turing."}

if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "adapters"
    with symbiosis.Studio() as studio:  # the embedded default model
        sessions = {name: studio.open(name, LoraConfig(r=8, task_type="CAUSAL_LM"), seed=42) for name in TEXTS}
        losses = {}
        for name, session in sessions.items():  # calls return futures: both sessions train in the same batches
            ids = tuple(studio.tokenizer(TEXTS[name])["input_ids"])
            for _ in range(8):
                losses[name] = session.forward_backward([Example(ids, labels=ids)])
                session.optim_step(StepSettings(learning_rate=5e-3))
        for name, session in sessions.items():
            prompt = " ".join(TEXTS[name].split()[:-1])
            completion = session.sample([prompt], max_tokens=4).result()[0]
            session.save(f"{folder}/{name}").result()  # a plain PEFT adapter
            print(f"{name}: loss {losses[name].result().loss:.3f}, {prompt} …{completion.text!r}")
