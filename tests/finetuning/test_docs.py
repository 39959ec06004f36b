"""The code in docs/training.md."""

from __future__ import annotations

import re
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

from symbiosis.models.default_model import default_model_folder

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_code_of_the_page_runs(real_cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(block, {})
    assert "LoopResult(step=3, total=3" in capsys.readouterr().out
    for name in ("by hand", "by a job"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(default_model_folder()), tmp_path / "adapters" / name)
