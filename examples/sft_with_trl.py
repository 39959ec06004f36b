"""TRL's SFTTrainer on a model whose base layers are in an executor. Run: python examples/sft_with_trl.py [ADDRESS]"""

import sys
import tempfile

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import symbiosis

CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in [
        ("Who keeps the lighthouse?", "Old Maren keeps the lighthouse."),
        ("What does Maren drink?", "Maren drinks black tea with salt."),
    ]
]


def main(address: str) -> None:
    model = symbiosis.connect(address)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(output_dir=folder, max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False),
            train_dataset=Dataset.from_list(CHATS),
            processing_class=model.symbiosis.tokenizer(),
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        print(f"loss {trainer.train().training_loss:.3f}")
        trainer.save_model(folder)  # a plain PEFT adapter
    model.symbiosis.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7777")
