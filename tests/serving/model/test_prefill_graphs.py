"""Batches with prefill as CUDA graphs against the plain way. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model

from symbiosis.kernels.tiles import Span
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter
from symbiosis.serving.model.model_input import InputChunk, ModelInput
from symbiosis.serving.model.pass_capture import PassCapture
from symbiosis.serving.model.prefill_graphs import PrefillGraphs, choose_size
from symbiosis.serving.scheduling.sequence import Sampling
from tests.parity.architectures import ARCHITECTURES, MORE

BY_NAME = {a.name: a for a in [*ARCHITECTURES, *MORE]}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
needs_kernels = pytest.mark.skipif(
    not ON_GPU and "TRITON_INTERPRET" not in os.environ, reason="needs a CUDA device or Triton's interpreter"
)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


# Sizes and rows: no kernels


def made_of(counts, segments=0):
    ids = list(range(sum(counts)))
    starts = itertools.accumulate(counts, initial=0)
    spans = [Span(start, count, 0, [0]) for start, count in zip(starts, counts, strict=False)]
    adapter = EngineAdapter("a", {})
    return ModelInput(ids=ids, spans=spans, segments=[AdapterSegment(adapter, n, n + 1) for n in range(segments)])


@pytest.mark.parametrize("rows", [2, 31, 32, 33, 128, 129, 255, 300, 513, 1025, 1800, 2048])
@pytest.mark.parametrize("sequences", [1, 2, 16, 17, 200])
def test_a_graph_holds_its_batch_with_few_spare_rows(rows, sequences):
    if sequences > rows:
        return
    counts = [1] * (sequences - 1) + [rows - sequences + 1]
    size = choose_size(made_of(counts), 16)
    assert size.rows >= rows
    assert size.rows >= size.sequences >= sequences
    assert size.decodes == (1 in counts)
    assert size.max_rank == 0, "no row has an adapter"
    if rows > 256:
        assert size.rows <= 1.25 * rows


def test_sizes_are_few_enough_to_be_captured():
    found = {choose_size(made_of([rows]), 0) for rows in range(2, 2049)}
    assert len(found) <= 24
    assert all(size.rows % 16 == 0 and size.sequences % 16 == 0 for size in found), "parts of buffers are aligned"


def test_batches_that_are_too_large_have_no_graph():
    assert choose_size(made_of([2049]), 0) is None
    assert choose_size(made_of([2] * 513), 0) is None
    assert choose_size(made_of([2] * 100, segments=64), 16).max_rank == 16
    assert choose_size(made_of([2] * 100, segments=65), 16) is None


def test_rows_of_a_batch_are_those_of_its_chunks():
    one, other = EngineAdapter("one", {}), EngineAdapter("other", {})
    chunks = [
        InputChunk(9, [5], [0, 1, 2], "", True),
        InputChunk(0, [7, 8, 9], [3], "one", False),
        InputChunk(4, [3], [4, 5], "one", True),
        InputChunk(2, [1, 2], [6], "other", True),
    ]
    made = ModelInput.of(chunks, {"one": one, "other": other})
    assert made.ids == [5, 7, 8, 9, 3, 1, 2]
    assert made.positions == [9, 0, 1, 2, 4, 2, 3]
    assert [(span.start, span.count, span.before) for span in made.spans] == [(0, 1, 9), (1, 3, 0), (4, 1, 4), (5, 2, 2)]
    assert made.sampled_rows == [0, 4, 6]
    assert made.segments == [AdapterSegment(one, 1, 5), AdapterSegment(other, 5, 7)]
    assert made.head_segments == [AdapterSegment(one, 1, 2), AdapterSegment(other, 2, 3)]
    assert made.reads_tables


# Engines: kernels


def write_adapters(base, folder):
    """Of several ranks and targets, one with DoRA and one that adapts the head."""
    for number, rank in enumerate((2, 16, 40)):
        torch.manual_seed(number)
        targets = (["q_proj", "down_proj"], ALL, [*ALL, "lm_head"])[number]
        config = LoraConfig(
            r=rank, target_modules=targets, init_lora_weights=False, use_dora=number == 1, task_type="CAUSAL_LM"
        )
        get_peft_model(copy.deepcopy(base), config).save_pretrained(folder / f"a{number}")


def make(architecture, folder=None, **limits):
    """An engine that captures a graph at its first use."""
    base = architecture.model().eval().to(DEVICE)
    if folder is not None:
        write_adapters(base, folder)
    fuse_projections(base)
    core = EngineCore(base, pages=128, page_size=16, **limits)
    for number in range(0 if folder is None else 3):
        core.add_adapter(f"a{number}", folder / f"a{number}")
    graphs = core._runner._prefill_graphs
    assert isinstance(graphs, PrefillGraphs)
    graphs._graphs._min_uses = 1
    return core


def requests(names, *, first=3):
    """Lengths at the edges of blocks and tiles, greedy and sampled, with and without logprobs; two share a prefix."""
    lengths = itertools.cycle([15, 16, 17, 33, 1, 64, 5, 65])
    for number, (name, length) in enumerate(zip(names, lengths, strict=False)):
        prompt = [first + (7 * number + token) % 90 for token in range(length)]
        sampling = {"temperature": 0.9, "seed": number} if number % 3 == 1 else {"temperature": 0.0}
        logprobs = 3 if number % 2 else None
        yield prompt, Sampling(max_tokens=5, ignore_eos=True, logprobs=logprobs, **sampling), name
        if number == 3:
            yield [*prompt, 11, 12, 13], Sampling(max_tokens=5, ignore_eos=True, temperature=0.0), name


def complete(core, asked, late=()):
    """Tokens and logprobs of requests, some of which come while the others run."""
    found = {}
    waves = [list(asked), list(late)]
    for steps in itertools.count():
        if steps in (0, 3) and waves:
            for prompt, sampling, name in waves.pop(0):
                core.add(prompt, sampling, adapter=name)
        if core.is_idle() and not waves:
            return found
        before = core.num_steps
        for sequence, token, logprobs in core.step():
            found.setdefault(sequence.id, []).append((token, logprobs))
        if core.num_steps == before and not core.is_idle():
            core.wait(1.0)
    return None


def compare_with_plain(core, compared):
    """Let every batch be computed without a graph too; `compared` gets the rows of those that ran as prefill graphs."""
    runner = core._runner
    compute, prefill, decode = runner.compute, runner._prefill_graphs, runner._decode_graphs

    def both(batch, adapters):
        replays = len(prefill.used)
        found = compute(batch, adapters).clone()
        runner._prefill_graphs = runner._decode_graphs = None
        plain = compute(batch, adapters)
        runner._prefill_graphs, runner._decode_graphs = prefill, decode
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
        if len(prefill.used) > replays:
            compared.append([chunk.count for chunk in batch.chunks])
        return found

    inner = prefill.compute
    prefill.used = []

    def counted(made):
        found = inner(made)
        if found is not None:
            prefill.used.append(len(made.ids))
        return found

    prefill.compute = counted
    runner.compute = both


@needs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "mixed"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_graph_gives_the_logits_of_the_plain_way(name, ahead, tmp_path):
    core = make(BY_NAME[name], tmp_path, max_rows=300, max_chunk=48)
    compared = []
    compare_with_plain(core, compared)
    if not ahead:  # decodes run with prefill in one batch
        core._async_decoder.run_ahead = lambda *_: None
    names = [None, "a0", "a2", "a1", "a2", "a2", None, "a1", "a0"][: 9 if ON_GPU else 4]
    complete(core, requests(names), requests(names, first=5))
    complete(core, requests(names))  # with hits in the prefix cache
    assert len(compared) >= 3
    assert any(1 not in counts for counts in compared) or not ahead
    assert ahead or any(1 in counts and max(counts) > 1 for counts in compared), "no batch mixes decodes and prefill"
    assert not core._runner._prefill_graphs._graphs.rejected


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "qwen3_moe"])
def test_an_engine_with_graphs_completes_as_one_without(name):
    cores = [make(BY_NAME[name], max_rows=300, max_chunk=48) for _ in range(2)]
    cores[1]._runner._prefill_graphs = None
    names = [None] * 12
    for _ in range(2):  # the second time with hits in the prefix cache
        found, expected = (complete(core, requests(names), requests(names, first=5)) for core in cores)
        check_equal(found, expected)


@needs_gpu
@pytest.mark.gpu
def test_completions_with_adapters_are_the_same(tmp_path):
    core = make(BY_NAME["llama"], tmp_path, max_rows=300, max_chunk=48)
    names = [None, "a0", "a0", "a1", "a2", "a2", None, "a1", "a0"] * 3
    found = complete(core, requests(names), requests(names, first=5))
    assert len(core._runner._prefill_graphs._graphs) > 1
    plain = make(BY_NAME["llama"], None, max_rows=300, max_chunk=48)
    for number in range(3):
        plain.add_adapter(f"a{number}", tmp_path / f"a{number}")
    plain._runner._prefill_graphs = None
    check_equal(found, complete(plain, requests(names), requests(names, first=5)))


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for id, each in found.items():
        assert [token for token, _ in each] == [token for token, _ in expected[id]]
        for (_, one), (_, other) in zip(each, expected[id], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.chosen == pytest.approx(other.chosen, abs=1e-3)


class Uncaptured(PassCapture):
    """Launches kernel by kernel."""

    def capture(self, compute):
        return compute


def compare_bits(runner, one, other, resident, hashes, shift):
    """Results and KV cache of one batch: replayed twice, launched kernel by kernel, and the plain way."""
    counts = [1, 40, 17 + shift, 1, 33, 64]
    chunks = [
        InputChunk(shift, [3 + n] * count, [8 * n + block for block in range(5)], hash, n != 2)
        for n, (count, hash) in enumerate(zip(counts, hashes, strict=True))
    ]
    made = ModelInput.of(chunks, resident)
    found, stored = one.compute(made).clone(), runner.kv_cache._memory.clone()
    again, expected = one.compute(made).clone(), other.compute(made)
    assert found.isfinite().all()
    assert found.shape == (5, runner.model.config.vocab_size)
    assert torch.equal(found, again)
    assert torch.equal(found, expected)
    assert torch.equal(runner.kv_cache._memory, stored)
    plain = runner._run(made)
    tolerance = (1e-4 if plain.dtype is torch.float32 else 5e-2) * float(plain.abs().max())
    torch.testing.assert_close(found, plain, rtol=0, atol=tolerance)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_computes_bit_by_bit_what_its_launches_compute(dtype, tmp_path):
    base = BY_NAME["llama"].model().eval()
    write_adapters(base, tmp_path)
    base = base.to(DEVICE, dtype)
    fuse_projections(base)
    core = EngineCore(base, pages=128, page_size=16)
    runner = core._runner
    for number in range(3):
        core.add_adapter(f"a{number}", tmp_path / f"a{number}")
    list(complete(core, requests(["a0", "a1", "a2"])))
    resident = core._adapter_cache.resident
    hashes = ["", "", *(core.adapters[f"a{number}"] for number in range(3)), core.adapters["a2"]]
    assert set(hashes) - {""} <= resident.keys()
    arguments = (runner.model, runner.kv_cache, runner._adapters, 8)
    one, other = PrefillGraphs(*arguments, PassCapture(base.device)), PrefillGraphs(*arguments, Uncaptured(base.device))
    one._graphs._min_uses = other._graphs._min_uses = 1
    with torch.inference_mode():
        for shift in range(3):
            compare_bits(runner, one, other, resident, hashes, shift)
    assert not one._graphs.rejected
    assert len(one._graphs) == 1


@needs_gpu
@pytest.mark.gpu
def test_spare_rows_store_nothing():
    core = make(BY_NAME["llama"])
    memory = core._runner.kv_cache._memory
    memory.fill_(float("nan"))
    sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
    sequences = [core.add([4 + n] * 20, sampling) for n in range(2)]
    core.step()
    assert len(core._runner._prefill_graphs._graphs) == 1
    assert all(sequence.outputs[0] >= 0 for sequence in sequences)
    written = ~memory.isnan().any(-1).any(-1)  # [layers, 2, slots]
    assert (written.sum(-1) == 40).all()


@needs_gpu
@pytest.mark.gpu
def test_graphs_of_larger_ranks_replace_others(tmp_path):
    base = BY_NAME["llama"].model().eval()
    core = make(BY_NAME["llama"])
    for rank in (8, 40):
        config = LoraConfig(r=rank, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / str(rank))
        core.add_adapter(str(rank), tmp_path / str(rank))
        complete(core, [([1, 2, 3], Sampling(temperature=0.0, max_tokens=2, ignore_eos=True), str(rank))])
    assert [size.max_rank for size in core._runner._prefill_graphs._graphs] == [64]
