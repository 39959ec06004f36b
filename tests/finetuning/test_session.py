"""Sessions: in order, once, gathered until a step; one that fails fails alone."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import weakref
from concurrent.futures import wait

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Phi3ForCausalLM

from symbiosis.errors import (
    BadAdapter,
    BadCall,
    Closed,
    Diverged,
    OutOfOrder,
    OutOfRange,
    PassFailed,
    TooLarge,
    TooManyRequests,
    UnsupportedAdapter,
    Withdrawn,
)
from symbiosis.finetuning.adapter_factory import AdapterFactory
from symbiosis.finetuning.checkpoint import STATE
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.optimizer import Optimizer, StepSettings
from symbiosis.finetuning.packed.model import PackedModel
from symbiosis.finetuning.scheduling import batch_planner
from symbiosis.finetuning.trainer import Trainer
from tests.configs import lora
from tests.finetuning.concurrent_runs import all_equal, values
from tests.finetuning.peft_reference import examples, max_relative_error, run_peft
from tests.finetuning.trainer_reference import base

STEP = StepSettings(learning_rate=1e-2)


@pytest.fixture
def trainer():
    with Trainer(base(), TrainerConfig(max_rows=32, max_waiting=8, tenant_sessions=3)) as trainer:
        yield trainer


def gathered(session):
    """The gradients so far, once everything asked for is done."""
    return dict(session.optimizer.gradients)


def test_gradients_gather_until_a_step(trainer):
    session, data = trainer.open("ann", lora(init_lora_weights=False), seed=7), examples(5, 8, 9)
    first = session.forward_backward(data[:1], items=5.0)
    second = session.forward_backward(data[1:], items=5.0)
    _, losses, gradients = run_peft(base(), lora(init_lora_weights=False), data)
    assert first.result(60).loss == pytest.approx(losses[0], rel=1e-5)
    assert second.result(60).loss == pytest.approx(losses[1] + losses[2], rel=1e-5)
    assert (first.result().tokens, second.result().tokens) == (4, 15)
    assert max_relative_error(gathered(session), gradients) < 5e-5
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    step = session.optim_step(STEP).result(60)
    assert step.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    assert step.number == 1
    assert not gathered(session)


def test_without_items_the_loss_is_the_mean_over_the_batch(trainer):
    data = examples(5, 8)
    for config in (lora(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")):
        found = trainer.open("ann", config, seed=7).forward_backward(data).result(60)
        ids, mask = (torch.zeros(2, 8, dtype=torch.long) for _ in range(2))
        labels = torch.full((2, 8), -100)
        for row, example in enumerate(data):
            for tensor, value in ((ids, example.ids), (labels, example.labels), (mask, [1] * len(example.ids))):
                tensor[row, : len(value)] = torch.tensor(value)
        model, _, _ = run_peft(base(), config, data)
        with torch.no_grad():
            expected = float(model(input_ids=ids, labels=labels, attention_mask=mask).loss)
        assert found.loss == pytest.approx(expected, rel=1e-5)


def test_a_batch_larger_than_a_pass_takes_several(trainer):
    session, data = trainer.open("ann", lora(init_lora_weights=False), seed=7), examples(30, 20, 12, 9, 25)
    assert session.forward_backward(data, items=5.0).result(60).tokens == 30 + 20 + 12 + 9 + 25 - 5
    assert trainer.stats.passes >= 3
    _, _, gradients = run_peft(base(), lora(init_lora_weights=False), data)
    assert max_relative_error(gathered(session), gradients) < 5e-5
    with pytest.raises(OutOfRange, match="33 tokens"):
        session.forward_backward(examples(33))


def test_short_sequences_and_steps_have_their_price(trainer):
    session = trainer.open("ann", lora())
    session.forward_backward(examples(2, 2, 2)).result(60)
    assert (trainer.stats.passes, trainer.stats.rows) == (2, 6)
    before = trainer._planner.fairness.virtual_time("ann")
    assert before == 3 * 16
    session.optim_step(STEP).result(60)
    assert trainer._planner.fairness.virtual_time("ann") > before


def test_a_prefix_counts_though_it_is_no_row(trainer):
    session = trainer.open("ann", peft.PrefixTuningConfig(num_virtual_tokens=12, task_type="CAUSAL_LM"))
    session.forward_backward(examples(4, 4, 4)).result(60)
    assert (trainer.stats.passes, trainer.stats.rows) == (2, 12)  # two of 16 fit into 32
    session.forward_backward(examples(20)).result(60)
    with pytest.raises(OutOfRange, match="21 tokens"):
        session.forward_backward(examples(21))


def test_a_call_asked_again_is_not_computed_again(trainer):
    session, data = trainer.open("ann", lora(), seed=7), examples(5, 8)
    first = session.forward_backward(data, number=1)
    assert session.forward_backward(data, number=1) is first
    first.result(60)
    once = {name: g.clone() for name, g in gathered(session).items()}
    assert session.forward_backward(data, number=1).result(60) == first.result()
    assert all_equal(gathered(session), once)
    with pytest.raises(OutOfOrder, match="another"):
        session.forward_backward(data[:1], number=1)
    with pytest.raises(OutOfOrder, match="another"):
        session.optim_step(STEP, number=1)
    assert session.optim_step(STEP, number=2).result(60).number == 1
    for _ in range(100):
        session.forward_backward(data[:1]).result(60)
    with pytest.raises(OutOfOrder, match="too old"):
        session.forward_backward(data, number=1)


def test_calls_that_overtook_others_wait_for_them(trainer):
    session, data = trainer.open("ann", lora(), seed=7), examples(5, 8)
    step = session.optim_step(STEP, number=3)
    second = session.forward_backward(data[1:], number=2)
    done, _ = wait([step, second], timeout=0.2)
    assert not done
    first = session.forward_backward(data[:1], number=1)
    assert step.result(60).number == 1
    assert first.done()
    assert second.done()


def test_a_session_that_is_stopped_learns_to_the_end_of_the_step_under_way(trainer, monkeypatch, tmp_path):
    data, reached, go_on, launch = examples(5, 8), threading.Event(), threading.Event(), PackedModel.launch

    def held(self, shares):
        reached.set()
        assert go_on.wait(60)
        return launch(self, shares)

    monkeypatch.setattr(PackedModel, "launch", held)
    session, other = trainer.open("ann", lora(), seed=7), trainer.open("bob", lora(), seed=7)
    with session.gathering():
        first = [session.forward_backward(data[:1]), session.forward_backward(data[1:])]
    assert reached.wait(60)
    first += [session.optim_step(STEP), session.forward(data), session.save(tmp_path / "after", optimizer=True)]
    later = [session.forward_backward(data), session.optim_step(STEP), session.save(tmp_path / "never")]
    session.stop()
    for call in later:
        with pytest.raises(Withdrawn):
            call.result(0)
    for ask in (lambda: session.forward_backward(data), lambda: session.optim_step(STEP)):
        with pytest.raises(Withdrawn, match="was stopped"):
            ask()
    session.stop()
    go_on.set()
    for call in first:
        call.result(60)
    assert session.queue.tokens == 0
    assert not gathered(session)
    assert not (tmp_path / "never").exists()
    session.save(tmp_path / "then", optimizer=True).result(60)  # everything but learning goes on
    session.forward(data).result(60)
    other.load(tmp_path / "then").result(60)
    assert (other.progress.steps, other.progress.batches) == (1, 2)
    other.forward_backward(data).result(60)


def test_a_step_that_is_half_asked_for_is_under_way(trainer):
    session, data = trainer.open("ann", lora(), seed=7), examples(5, 8)
    with session.gathering():
        calls = [session.forward_backward(data[:1])]
        session.stop()
        calls += [session.forward_backward(data[1:]), session.optim_step(STEP)]
    assert calls[-1].result(60).number == 1
    with pytest.raises(Withdrawn):
        session.forward_backward(data)


def test_what_is_wrong_in_itself_is_refused_at_once(trainer):
    session = trainer.open("ann", lora(), seed=7)
    for batch in ([], [Example((), ())], [Example((1, 2), (1,))], [Example((1, 500), (1, 2))], [Example((1, 2), (1, -5))]):
        with pytest.raises(OutOfRange):
            session.forward_backward(batch)
    with pytest.raises(OutOfRange, match="nothing to learn"):
        session.forward_backward([Example((1, 2), (-100, -100))])
    with pytest.raises(OutOfRange, match="items"):
        session.forward_backward([Example((1, 2), (1, 2))], items=0)
    with pytest.raises(OutOfRange):
        StepSettings(learning_rate=float("nan"))
    with pytest.raises(BadCall, match="forward_backward first"):
        session.optim_step(STEP).result(60)
    for seed in (-1, 1.5, True):
        with pytest.raises(OutOfRange):
            trainer.open("ann", lora(), seed=seed)
    session.forward_backward(examples(5)).result(60)  # none of it has harmed the session


def test_positions_that_change_for_all_are_not_reached_by_anybody():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 16, "vocab_size": 128, "pad_token_id": 0}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Phi3ForCausalLM(Phi3Config(**lengths, **sizes, rope_parameters=rope, tie_word_embeddings=False)).eval()
    with Trainer(model) as trainer:
        session = trainer.open("ann", peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
        session.forward_backward(examples(13)).result(60)
        with pytest.raises(OutOfRange, match="14 tokens"):
            session.forward_backward(examples(14))


def test_there_are_limits(trainer):
    sessions = [trainer.open("ann", lora()) for _ in range(3)]
    with pytest.raises(TooManyRequests):
        trainer.open("ann", lora())
    trainer.open("bob", lora())
    sessions[0].close()
    session = trainer.open("ann", lora())
    with pytest.raises(TooManyRequests):
        session.forward_backward(examples(5), number=9)
    for number in range(2, 9):
        session.forward_backward(examples(5), number=number)
    with pytest.raises(TooManyRequests):
        session.forward_backward(examples(5), number=10)


def test_tokens_that_wait_are_limited_and_forgotten_once_computed():
    with Trainer(base(), TrainerConfig(max_rows=32, max_waiting_tokens=20, tenant_waiting_tokens=30)) as trainer:
        mine, other = trainer.open("ann", lora()), trainer.open("ann", lora())
        with pytest.raises(OutOfRange, match="11 tokens"):
            mine.forward_backward(examples(5, 6))
        mine.forward_backward(examples(8), number=2)
        with pytest.raises(TooManyRequests, match="tokens"):
            mine.forward_backward(examples(3), number=3)  # more than half of the session's
        with pytest.raises(TooManyRequests, match="tokens"):
            other.forward_backward(examples(8), number=2)  # more than half of the tenant's
        trainer.open("bob", lora()).forward_backward(examples(10)).result(60)
        mine.forward_backward(examples(10), number=1)  # the one that is missing has room
        assert mine.forward_backward(examples(8), number=2).result(60).tokens == 7
        assert mine.queue.tokens == 0
        assert not any(call.examples for call in mine.queue._known.values())
        assert mine.forward_backward(examples(8), number=2).done()
        with pytest.raises(OutOfOrder, match="another"):
            mine.forward_backward(examples(9), number=2)


def test_parameters_are_limited():
    size = AdapterFactory(base()).create(lora(), seed=1).size
    with Trainer(base(), TrainerConfig(tenant_parameters=2 * size, max_parameters=3 * size)) as trainer:
        first, _ = trainer.open("ann", lora()), trainer.open("ann", lora())
        with pytest.raises(TooManyRequests, match="parameters"):
            trainer.open("ann", lora(r=1))
        trainer.open("bob", lora())
        with pytest.raises(TooManyRequests, match="parameters"):
            trainer.open("eve", lora())
        with pytest.raises(TooLarge):
            trainer.open("eve", lora(r=12))
        first.close()
        trainer.open("eve", lora())


def test_everybody_gets_an_answer_when_a_session_or_the_host_is_closed(trainer):
    sessions = [trainer.open("ann", lora()) for _ in range(2)]
    early = sessions[0].optim_step(STEP, number=2)
    sessions[0].close()
    with pytest.raises(Closed):
        early.result(60)
    with pytest.raises(Closed):
        sessions[0].forward_backward(examples(5))
    late = sessions[1].optim_step(STEP, number=2)
    trainer.close()
    with pytest.raises(Closed):
        late.result(60)
    with pytest.raises(Closed):
        sessions[1].forward_backward(examples(5))
    with pytest.raises(Closed):
        trainer.open("ann", lora())


def test_when_a_pass_fails_only_who_is_at_fault_fails(trainer, monkeypatch):
    good, bad = trainer.open("ann", lora(), seed=7), trainer.open("bob", lora(), seed=7)
    launch = PackedModel.launch

    def fail_with_bad(self, shares):
        if any(share.adapter is bad.adapter for share in shares):
            raise RuntimeError("out of memory")
        return launch(self, shares)

    monkeypatch.setattr(PackedModel, "launch", fail_with_bad)
    with trainer._changed:  # both are there before the next pass
        mine, theirs = good.forward_backward(examples(5)), bad.forward_backward(examples(5))
    assert mine.result(60).tokens == 4
    with pytest.raises(PassFailed, match="out of memory"):
        theirs.result(60)
    with pytest.raises(PassFailed):
        bad.forward_backward(examples(5))


def test_a_pass_that_does_not_fit_into_memory_is_computed_in_smaller_ones(trainer, monkeypatch):
    session, other = trainer.open("ann", lora(init_lora_weights=False), seed=7), trainer.open("bob", lora(), seed=7)
    data = examples(5, 8, 9)
    launch, rows = PackedModel.launch, []

    def small(self, shares):
        rows.append(sum(share.rows for share in shares))
        if rows[-1] > 9:
            raise torch.OutOfMemoryError("no memory")
        return launch(self, shares)

    monkeypatch.setattr(PackedModel, "launch", small)
    with trainer._changed:
        mine, theirs = session.forward_backward(data, items=5.0), other.forward_backward(examples(5))
        too_long = other.forward_backward(examples(20))
    _, losses, gradients = run_peft(base(), lora(init_lora_weights=False), data)
    assert mine.result(60).loss == pytest.approx(sum(losses), rel=1e-5)
    assert theirs.result(60).tokens == 4
    with pytest.raises(PassFailed, match="no memory"):
        too_long.result(60)
    assert rows[0] > 9
    assert max_relative_error(gathered(session), gradients) < 1e-5


def test_a_lack_of_memory_that_passes_harms_nobody(trainer, monkeypatch):
    """What is kept for later passes is given back and the example computed again; later, passes are large again."""
    session, launch, failures = trainer.open("ann", lora()), PackedModel.launch, [1]

    def once(self, shares):
        if failures:
            raise torch.OutOfMemoryError(f"no memory, {failures.pop()}")
        return launch(self, shares)

    monkeypatch.setattr(PackedModel, "launch", once)
    monkeypatch.setattr(batch_planner, "_PASSES_BEFORE_GROWTH", 3)
    most = trainer.sharing_stats()["pass_rows"]
    assert session.forward_backward(examples(5)).result(60).tokens == 4
    failures.append(2)
    assert session.forward_backward(examples(5, 6)).result(60).tokens == 9
    assert trainer.sharing_stats()["pass_rows"] < most
    for _ in range(30):
        session.forward_backward(examples(5)).result(60)
    assert trainer.sharing_stats()["pass_rows"] == most


def test_small_batches_of_one_step_beside_large_ones_hold_up_nobody():
    """Each of a step's batches by itself would never show how long all of them take."""
    ended = []
    with Trainer(base(), TrainerConfig(max_rows=1024, pass_rows=1024)) as trainer:
        small, large = trainer.open("ann", lora()), trainer.open("bob", lora())
        with trainer._changed:  # all are there before the first pass
            for step in range(12):
                for _ in range(4):
                    small.forward_backward(examples(5))
                small.optim_step(STEP).add_done_callback(lambda _, step=step: ended.append(("small", step)))
            for batch in range(3):
                asked = large.forward_backward(examples(*[60] * 16))
                asked.add_done_callback(lambda _, batch=batch: ended.append(("large", batch)))
        for session in (small, large):
            session.forward(examples(5)).result(60)  # after all others
    assert ended.index(("large", 2)) < ended.index(("small", 11))


def test_when_the_device_is_lost_the_host_stops_with_one_error(trainer, monkeypatch):
    sessions = [trainer.open("ann", lora()), trainer.open("bob", lora()), trainer.open("eve", lora())]

    def fail(*_):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(PackedModel, "launch", fail)
    monkeypatch.setattr(PackedModel, "is_sound", lambda _: False)
    asked = [sessions[2].optim_step(STEP, number=2)]
    with trainer._changed:
        asked += [session.forward_backward(examples(5)) for session in sessions[:2]]
    errors = [future.exception(60) for future in asked]
    assert {type(error) for error in errors} == {PassFailed}
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(Closed):
        trainer.open("ann", lora())


def test_what_ended_a_session_is_raised_anew_each_time(trainer):
    session = trainer.open("ann", lora())
    waiting = [session.optim_step(STEP, number=number) for number in (2, 3)]
    session.close()
    errors = [future.exception(60) for future in waiting]
    for _ in range(2):
        with pytest.raises(Closed, match="was closed") as raised:
            session.forward_backward(examples(5))
        errors.append(raised.value)
    assert len({id(error) for error in errors}) == 4


def test_a_closed_session_keeps_no_tensor(trainer):
    session, other = trainer.open("ann", lora()), trainer.open("bob", lora())
    session.forward_backward(examples(5))
    session.optim_step(STEP).result(60)
    kept = [weakref.ref(parameter) for parameter in session.adapter.parameters.values()]
    session.close()
    other.forward_backward(examples(5)).result(60)  # the loop went round
    gc.collect()
    assert not [each for each in kept if each() is not None]
    with pytest.raises(Closed):
        session.forward_backward(examples(5))


def test_steps_without_end_hold_up_nobody(trainer):
    session, pest, over = trainer.open("ann", lora()), trainer.open("bob", lora()), threading.Event()

    def annoy():
        while not over.is_set():
            with contextlib.suppress(TooManyRequests):
                pest.optim_step(STEP)

    thread = threading.Thread(target=annoy)
    thread.start()
    try:
        for _ in range(5):
            session.forward_backward(examples(5)).result(20)
    finally:
        over.set()
        thread.join()


CONFIGS = {
    "LoRA": lora(init_lora_weights=False, lora_bias=True),
    "DoRA": lora(use_dora=True, init_lora_weights=False),
    "IA3": peft.IA3Config(task_type="CAUSAL_LM"),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "encoder": peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, task_type="CAUSAL_LM"),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_session_goes_on_where_another_was_saved(name, trainer, tmp_path):
    first, data = trainer.open("ann", CONFIGS[name], seed=7), examples(5, 8)
    first.forward_backward(data)
    first.optim_step(STEP)
    first.save(tmp_path / "it", optimizer=True).result(60)
    other = trainer.open("ann", CONFIGS[name], seed=8)
    other.load(tmp_path / "it").result(60)
    assert all_equal(values(other), values(first))
    for session in (first, other):
        session.forward_backward(data)
        assert session.optim_step(STEP).result(60).number == 2
    assert all_equal(values(other), values(first))


def test_an_adapter_without_its_optimizer_starts_afresh(trainer, tmp_path):
    first = trainer.open("ann", CONFIGS["LoRA"], seed=7)
    first.forward_backward(examples(5))
    first.optim_step(STEP)
    first.save(tmp_path / "plain").result(60)
    assert sorted(file.name for file in (tmp_path / "plain").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    other = trainer.open("bob", CONFIGS["LoRA"], seed=8)
    other.load(tmp_path / "plain").result(60)
    assert all_equal(values(other), values(first))
    assert other.progress.steps == 0


def test_moments_come_back_in_the_parameters_dtype():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    first, again = Optimizer({"p": parameter}), Optimizer({"p": parameter})
    first.accumulate({"p": torch.ones_like(parameter)})
    first.step(STEP)
    again.restore(first.state())
    assert {name: each.dtype for name, each in again.state().items()} == {name: e.dtype for name, e in first.state().items()}


def test_what_a_step_has_spoilt_is_not_saved(trainer, tmp_path):
    session = trainer.open("ann", lora())
    with torch.no_grad():
        next(iter(session.adapter.parameters.values())).fill_(float("inf"))
    with pytest.raises(Diverged):
        session.save(tmp_path / "it").result(60)
    assert not list(tmp_path.iterdir())


def test_files_that_do_not_fit_change_nothing(trainer, tmp_path):
    session = trainer.open("ann", CONFIGS["LoRA"], seed=7)
    session.forward_backward(examples(5))
    with pytest.raises(BadCall, match="optim_step"):
        session.save(tmp_path / "early", optimizer=True).result(60)
    session.optim_step(STEP)
    session.save(tmp_path / "it", optimizer=True).result(60)
    with pytest.raises(OutOfRange, match="not empty"):
        session.save(tmp_path / "it").result(60)
    for config in (
        lora(r=5, lora_bias=True),
        lora(lora_alpha=3, lora_bias=True),
        lora(target_modules=["o_proj"]),
        CONFIGS["DoRA"],
    ):
        other = trainer.open("bob", config, seed=8)
        before = values(other)
        with pytest.raises((BadAdapter, UnsupportedAdapter)):
            other.load(tmp_path / "it").result(60)
        assert all_equal(values(other), before)
        other.forward_backward(examples(5)).result(60)
        other.close()
    state = tmp_path / "it" / "training_state.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(BadAdapter, match="training_state"):
        session.load(tmp_path / "it").result(60)
    with pytest.raises(BadAdapter):
        session.load(tmp_path / "nowhere").result(60)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_a_file_is_written_once_however_late_its_answer(trainer, tmp_path, monkeypatch):
    session, other, finish_call, written = (
        trainer.open("ann", lora()),
        trainer.open("bob", lora()),
        trainer._background._finish_call,
        [],
    )

    def late(whose, call, result):
        if whose is session:
            written.append(call)
            for _ in range(3):  # the loop goes round meanwhile
                other.forward_backward(examples(5)).result(60)
        finish_call(whose, call, result)

    monkeypatch.setattr(trainer._background, "_finish_call", late)
    saved = session.save(tmp_path / "it")
    loaded = session.load(tmp_path / "it")
    assert saved.result(60) is None
    assert loaded.result(60) is None
    assert len(written) == 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a session that has made a step."""
    folder = tmp_path_factory.mktemp("saved")
    with Trainer(base(), TrainerConfig(max_rows=32)) as trainer:
        session = trainer.open("ann", CONFIGS["encoder"], seed=7)
        session.forward_backward(examples(5))
        session.optim_step(STEP)
        session.save(folder / "it", optimizer=True).result(60)
    return folder / "it"


def without(ending):
    def drop(state, _):
        del state[next(name for name in state if name.endswith(ending))]

    return drop


def turned(ending, change):
    def turn(state, _):
        name = next(name for name in state if name.endswith(ending))
        state[name] = change(state[name])

    return turn


@pytest.mark.parametrize(
    "spoil",
    [
        without("/exp_avg"),
        without("/exp_avg_sq"),
        without("/step"),
        without("/value"),
        turned("/step", lambda step: -step),
        turned("/exp_avg_sq", lambda moment: moment - 1),
        turned("/exp_avg", lambda moment: moment.long()),
        turned("/exp_avg", lambda moment: moment * float("nan")),
        turned("/value", lambda value: value[:1]),
        lambda _, said: said.update(steps="-1"),
        lambda _, said: said.update(batches="many"),
        lambda state, _: state.update(large=torch.zeros(1 << 20)),
    ],
)
def test_a_state_that_is_not_whole_changes_nothing(spoil, trainer, saved, tmp_path):
    folder = tmp_path / "it"
    shutil.copytree(saved, folder)
    state, said = load_file(folder / STATE), {"steps": "1", "batches": "1"}
    spoil(state, said)
    save_file(state, folder / STATE, metadata=said)
    session = trainer.open("ann", CONFIGS["encoder"], seed=8)
    before = values(session)
    with pytest.raises(BadAdapter, match="training_state"):
        session.load(folder).result(60)
    assert all_equal(values(session), before)
    assert not session.optimizer.state()


def test_a_state_that_is_a_link_is_not_followed(trainer, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "it")
    (tmp_path / "it" / STATE).unlink()
    (tmp_path / "it" / STATE).symlink_to(saved / STATE)
    with pytest.raises(BadAdapter, match="plain file"):
        trainer.open("ann", CONFIGS["encoder"], seed=8).load(tmp_path / "it").result(60)


def test_many_threads_on_many_sessions(trainer):
    """Answers come to those who asked, and every tenant gets on."""
    data, answers = examples(5, 8, 11), {}

    def work(name):
        session = trainer.open(name, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), seed=7)
        answers[name] = [
            (session.forward_backward(data, items=5.0).result(60), session.optim_step(STEP).result(60).number) for _ in range(5)
        ]

    threads = [threading.Thread(target=work, args=(f"tenant {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    expected = answers["tenant 0"]
    assert [number for _, number in expected] == [1, 2, 3, 4, 5]
    assert len(answers) == 8
    for found in answers.values():
        assert [loss.loss for loss, _ in found] == pytest.approx([loss.loss for loss, _ in expected], rel=1e-5)
