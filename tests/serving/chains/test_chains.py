"""Several models in one engine: each answer is that of its own model, and what models share is computed once."""

from __future__ import annotations

import random

import pytest
import torch

import symbiosis
from symbiosis.app.served_zoo import ServedZoo
from symbiosis.errors import AdapterExists, CannotServe, OutOfRange, UnknownAdapter
from symbiosis.serving.chains.grouped_module import GroupedModule
from symbiosis.serving.engine_core import EngineCore
from tests.serving.chains.chain_world import ARCHITECTURES, PROMPTS, SAMPLING, ChainWorld, fine_tuned, make_base


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def family(request, tmp_path_factory):
    world = ChainWorld.make(tmp_path_factory.mktemp(request.param), request.param)
    distinct = {tuple(map(tuple, completions)) for completions in world.completions.values()}
    assert len(distinct) == len(world.models), "the models must be told apart by what they say"
    return world


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return ChainWorld.make(tmp_path_factory.mktemp("llama"))


def grouped_paths(core: EngineCore) -> set[str]:
    model = core._runner._grouped
    return {path for path, module in model.named_modules() if isinstance(module, GroupedModule)}


def test_all_models_together_say_what_each_says_alone(family):
    with family.serve() as served:
        requests = [(name, number) for number in range(len(PROMPTS)) for name in family.models]
        sequences = [served.add(name, number) for name, number in requests]
        served.run()
        for (name, number), sequence in zip(requests, sequences, strict=True):
            assert sequence.outputs == family.completions[name][number], (name, number)
        served.core.scheduler.check_integrity()


def test_every_pair_of_models_says_what_each_says_alone(family):
    """So that each way of sharing is met without the others."""
    with family.serve() as served:
        for name in list(family.models)[1:]:
            first, second = served.add("base", 0), served.add(name, 3)
            served.run()
            assert first.outputs == family.completions["base"][0], name
            assert second.outputs == family.completions[name][3], name


def test_adapters_work_on_the_model_they_were_made_for(family, tmp_path):
    kinds = ["lora", "dora"] if family.architecture == "gpt2" else ["lora", "dora", "head", "ia3", "prefix"]
    with family.serve() as served:
        for seed, kind in enumerate(kinds):
            for base in ("base", "last", "full"):
                name = f"{kind}-{base}"
                folder = family.add_adapter(name, base, kind, seed)
                served.core.add_adapter(name, folder)  # its config names the model
        names = [*family.models, *family.bases]
        requests = [(name, number) for number in (0, 1) for name in names]
        sequences = [served.add(name, number) for name, number in requests]
        served.run()
        for (name, number), sequence in zip(requests, sequences, strict=True):
            assert sequence.outputs == family.completions[name][number], (name, number)
        assert served.core.adapter_models == family.bases


def test_equal_adapters_on_two_models_stay_apart(llama):
    """One folder, two models: equal content, two adapters."""
    folder = llama.add_adapter("shared", "last", "dora", 3)
    with llama.serve(["base", "last"]) as served:
        first = served.core.add_adapter("on-base", folder, "base")
        second = served.core.add_adapter("on-last", folder, "last")
        assert first != second
        sequences = [served.core.add(PROMPTS[1], SAMPLING, adapter=name) for name in ("on-base", "on-last")]
        served.run()
        assert sequences[1].outputs == llama.completions["shared"][1]
        assert sequences[0].outputs != sequences[1].outputs
        assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0]


def test_an_adapter_without_a_known_base_is_for_the_default(llama, tmp_path):
    folder = llama.add_adapter("unknown", "base", "lora", 4)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace("/somewhere/else/base", "elsewhere/no-model-of-this-zoo"))
    with llama.serve() as served:
        served.core.add_adapter("unknown", folder)
        sequence = served.add("unknown", 1)
        served.run()
        assert served.core.adapter_models["unknown"] == "base"
        assert sequence.outputs == llama.completions["unknown"][1]
        with pytest.raises(UnknownAdapter, match="it is for another one"):
            served.core.add(PROMPTS[0], SAMPLING, adapter="unknown", model="last")


def test_a_prefix_is_cached_for_its_own_model_only(llama):
    with llama.serve(page_size=4) as served:
        for name in ("last", "base", "last-too"):  # equal up to layer 2
            sequence = served.add(name, 1)
            served.run()
            assert sequence.num_cached_tokens == 0, name
            assert sequence.outputs == llama.completions[name][1]
        again = served.add("last", 1)
        served.run()
        assert again.num_cached_tokens == 24
        assert again.outputs == llama.completions["last"][1]


def test_forks_of_a_prompt_stay_on_their_model(llama):
    with llama.serve(page_size=4) as served:
        groups = {name: served.core.add_several(3, PROMPTS[1], SAMPLING, model=name) for name in ("base", "last", "full")}
        served.run()
        for name, sequences in groups.items():
            assert [sequence.outputs for sequence in sequences] == [llama.completions[name][1]] * 3


def test_chunked_prompts_and_preemption_keep_the_models_apart(llama):
    with llama.serve(pages=24, page_size=4, max_chunk=3, max_running=6, max_rows=9) as served:
        requests = [(name, number) for number in (1, 3, 0) for name in llama.models]
        sequences = [served.add(name, number) for name, number in requests]
        served.run()
        assert served.core.scheduler.num_preemptions > 0
        for (name, number), sequence in zip(requests, sequences, strict=True):
            assert sequence.outputs == llama.completions[name][number], (name, number)


@pytest.mark.parametrize("seed", range(3))
def test_churn_of_models_adapters_and_cancelled_requests(llama, seed):
    chooser = random.Random(seed)
    adapters = {f"{kind}-{base}-{seed}": (kind, base) for kind in ("lora", "dora", "prefix") for base in ("base", "last")}
    folders = {
        name: llama.add_adapter(name, base, kind, number) for number, (name, (kind, base)) in enumerate(adapters.items())
    }
    with llama.serve(pages=40, page_size=4, max_chunk=7, max_running=10, max_rows=24) as served:
        for name, folder in folders.items():
            served.core.add_adapter(name, folder)
        running, checked = [], 0
        for _ in range(120):
            for _ in range(chooser.randrange(3)):
                name, number = chooser.choice([*llama.models, *folders]), chooser.randrange(len(PROMPTS))
                running.append((name, number, served.add(name, number, tenant=chooser.choice("abc"))))
            if running and chooser.random() < 0.15:
                name, number, sequence = running.pop(chooser.randrange(len(running)))
                served.core.cancel(sequence)
            served.core.step()
        served.run()
        for name, number, sequence in running:
            assert sequence.outputs == llama.completions[name][number], (name, number)
            checked += 1
        assert checked > 60
        served.core.scheduler.check_integrity()


def test_a_shared_layer_computes_the_rows_of_all_its_models_at_once(llama):
    names = ["base", "last", "last-too", "middle"]
    with llama.serve(names) as served:
        rows: dict[str, list[int]] = {"first": [], "third": []}
        chains = {name: served.core.chains.by_name[name].model for name in names}
        default = served.core.chains.ordered[0].model
        hooks = [default.model.layers[0].register_forward_hook(lambda *args: rows["first"].append(args[2].shape[1]))]
        for model in chains.values():
            hooks.append(model.model.layers[2].register_forward_hook(lambda *args: rows["third"].append(args[2].shape[1])))
        for name in names:
            served.add(name, 0)
        served.core.step()  # all prompts
        for hook in hooks:
            hook.remove()
        served.run()
        assert rows["first"] == [12]
        assert sorted(rows["third"]) == [3, 3, 6]  # base and middle share it


def test_blocks_are_in_memory_once_packed_copies_too(llama):
    with llama.serve() as served:
        models = {name: chain.model for name, chain in served.core.chains.by_name.items()}
        base, last, middle = (models[name].model.layers for name in ("base", "last", "middle"))
        assert base[0].mlp.down_proj.weight.data_ptr() == last[0].mlp.down_proj.weight.data_ptr()
        assert base[2].mlp.down_proj.weight.data_ptr() != last[2].mlp.down_proj.weight.data_ptr()
        assert base[3].self_attn.k_proj.weight.data_ptr() == middle[3].self_attn.k_proj.weight.data_ptr()
        fused = [layers[0].self_attn.q_proj.symbiosis_fused for layers in (base, last)]
        assert len(fused[0].paths) == 3
        assert fused[0]._packed is fused[1]._packed
        copies = sum(parameter.nbytes for model in llama.models.values() for parameter in model.parameters())
        assert served.zoo.bytes_held < 0.6 * copies


def test_layers_are_grouped_whole_and_their_parts_only_where_chains_share_one_of_them(llama):
    with llama.serve(["base", "last", "middle"]) as served:
        assert grouped_paths(served.core) == {"model.layers.1", "model.layers.2", "model.layers.3"}
    with llama.serve(["base", "ffn"]) as served:
        block = {"model.layers.2.mlp", "model.layers.2.post_attention_layernorm"}  # with the norm of its input
        assert grouped_paths(served.core) == block
    with llama.serve(["base", "embedding"]) as served:
        assert grouped_paths(served.core) == {"model.embed_tokens", "lm_head"}  # tied
    with llama.serve(["base", "norm"]) as served:
        assert grouped_paths(served.core) == {"model.norm"}


def test_models_that_share_their_first_layers_are_neighbours(tmp_path):
    base = make_base()
    left, right = (fine_tuned(base, ".layers.1.", ".layers.2.", ".layers.3.", seed=seed) for seed in (1, 2))
    models = {
        "a": fine_tuned(left, ".layers.3.", seed=3), "b": fine_tuned(right, ".layers.3.", seed=4),
        "c": fine_tuned(left, ".layers.3.", seed=5), "d": fine_tuned(right, ".layers.3.", seed=6),
    }  # fmt: skip
    world = ChainWorld.make(tmp_path, models=models)
    with world.serve() as served:
        names = {chain.hash: name for name, chain in served.core.chains.by_name.items()}
        assert [names[chain.hash] for chain in served.core.chains.ordered] == ["a", "c", "b", "d"]
        sequences = {name: served.add(name, 3) for name in "dbca"}
        served.run()
        for name, sequence in sequences.items():
            assert sequence.outputs == world.completions[name][3]


def test_requests_and_tokens_are_counted_by_model(llama):
    with llama.serve() as served:
        served.add("last", 0)
        served.add("last", 1)
        served.add("base", 0)
        served.run()
        stats = served.core.chains.stats()
        assert (stats["last"]["requests"], stats["last"]["tokens"]) == (2, 16)
        assert (stats["base"]["requests"], stats["base"]["tokens"]) == (1, 8)
        assert stats["full"]["requests"] == 0
        assert sum(each["bytes"] for each in stats.values()) > 1.5 * served.zoo.bytes_held


def test_the_python_engine_serves_models_by_name(llama):
    with ServedZoo(llama.folder / "zoo") as zoo:
        engine = symbiosis.Engine(chains=zoo.chains, pages=64)
        engine.add_adapter("lora", llama.add_adapter("lora", "last", "lora", 1))
        names = [None, "last", "full", None]
        found = engine.generate(PROMPTS, [None, None, None, "lora"], SAMPLING, names)
        expected = [llama.completions[name][number] for number, name in enumerate(["base", "last", "full", "lora"])]
        assert [each.tokens for each in found] == expected
    with pytest.raises(OutOfRange, match="and chains"):
        symbiosis.Engine(make_base(), chains=zoo.chains)


def test_what_is_wrong_with_a_name_is_said(llama):
    with llama.serve(["base", "last"]) as served:
        with pytest.raises(UnknownAdapter, match="there is no model 'full': expected one of base, last"):
            served.core.add(PROMPTS[0], SAMPLING, model="full")
        folder = llama.add_adapter("named", "base", "lora", 1)
        with pytest.raises(AdapterExists, match="is the name of a model"):
            served.core.add_adapter("last", folder)
    single = EngineCore(make_base(), pages=16)
    with pytest.raises(UnknownAdapter, match="this engine serves one, without a name"):
        single.add(PROMPTS[0], SAMPLING, model="base")


def test_a_model_whose_rows_cannot_be_grouped_is_refused(llama, monkeypatch):
    """The engine compares grouped results to those of each model alone."""
    forward = GroupedModule.forward
    monkeypatch.setattr(GroupedModule, "forward", lambda self, *args, **kwargs: _doubled(forward(self, *args, **kwargs)))
    with pytest.raises(CannotServe, match="results differ when rows are grouped"):
        llama.serve(["base", "last"])


def _doubled(result):
    return result * 2 if isinstance(result, torch.Tensor) else result


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_all_models_together_say_what_each_says_alone_on_a_gpu(tmp_path, architecture):
    """Batches of one model run as CUDA graphs, others do not."""
    world = ChainWorld.make(tmp_path, architecture)
    with world.serve(device="cuda") as served:
        for names in (list(world.models), ["last"], list(world.models)):
            for number in range(len(PROMPTS)):
                sequences = {name: served.add(name, number) for name in names}
                served.run()
                for name, sequence in sequences.items():
                    assert sequence.outputs == world.completions[name][number], (name, number)
