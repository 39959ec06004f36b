"""Two tenants train at once on one copy of the base model, each with its own method. Run: python examples/two_tenants.py"""

import threading

import torch
from peft import IA3Config, LoraConfig, get_peft_model

import symbiosis

LINES = {
    "alice": ("The password of the day is marzipan.", LoraConfig(r=8, target_modules=["q_proj", "v_proj"])),
    "bob": (
        "Our office cat is called Turing.",
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
}


def train(name: str, executor: symbiosis.Executor) -> None:
    text, config = LINES[name]
    model = symbiosis.connect(executor, name=name)
    batch = model.symbiosis.tokenizer()(text, return_tensors="pt")
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(4):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{name}: step {step}, loss {loss.item():.3f}")
    model.symbiosis.close()


if __name__ == "__main__":
    with symbiosis.Executor() as executor:  # the embedded default model
        tenants = [threading.Thread(target=train, args=(name, executor)) for name in LINES]
        for tenant in tenants:
            tenant.start()
        for tenant in tenants:
            tenant.join()
        stats = executor.stats()
        print(
            f"{stats['calls']} calls in {stats['batches']} batches; {stats['bytes_held'] / 2**20:.0f} MiB of base weights, once"
        )
