"""Changes of weights and modules have the same effect as on a plain model, or raise an error that says why not."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import symbiosis
from symbiosis.errors import BadCall, ModelChanged
from tests.parity.architectures import ARCHITECTURES
from tests.parity.pair import assert_same_gradients, connected, gradients, trainable, twin

BY_NAME = {a.name: a for a in ARCHITECTURES}
LLAMA, GPT2, MIXTRAL = BY_NAME["llama"], BY_NAME["gpt2"], BY_NAME["mixtral"]


def q(model):
    return model.model.layers[0].self_attn.q_proj


def up(model):
    return model.model.layers[0].mlp.up_proj


def experts(model):
    return next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")


def logits_alike(architecture, change, **options):
    """The same change to a plain model and to a connected one."""
    plain = architecture.model()
    with connected(twin(plain), "inproc", **options) as model:
        for each in (plain, model):
            change(each)
        with torch.no_grad():
            expected, found = (each(**architecture.batch()).logits for each in (plain, model))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def held_cast(model):
    weight = q(model).weight.data.double()
    weight.div_(3.0).round_().clamp_(-0.02, 0.02)
    weight[0] = 3.0
    q(model).weight.data.copy_(weight)


def earlier_copy(model):
    before = up(model).weight.double()
    up(model).weight.data.mul_(2)
    up(model).weight.data.sub_(before.float())


def sums(model):
    change = torch.full_like(q(model).weight, 0.01)
    changed = q(model).weight + change
    q(model).weight.data.mul_(10)
    changed.clamp_(-0.02, 0.02)
    q(model).weight.data.add_(changed)


def numpy_write(model):
    q(model).weight.detach().numpy()[0] = 9.0


def added_in_place(model):
    q(model).weight += 0.1


WRITES = {
    "a view": lambda model: q(model).weight.view(4, 8, 32)[1].zero_(),
    "a row": lambda model: q(model).weight[3].mul_(5),
    "rows of data": lambda model: up(model).weight.data[3:9].mul_(5),
    "a chunk": lambda model: q(model).weight.chunk(2)[0].mul_(5),
    "flat": lambda model: q(model).weight.reshape(-1).mul_(5),
    "set by a view of data": lambda model: q(model).weight.data.view(4, 8, 32)[1].fill_(0.0),
    "several at once": lambda model: torch._foreach_mul_([q(model).weight, up(model).weight], 3.0),
    "numpy": numpy_write,
    "+=": added_in_place,
    "a cast that is written to and copied back": held_cast,
    "a copy from before": earlier_copy,
    "a sum": sums,
    "data of a transpose": lambda model: setattr(q(model).weight.T, "data", torch.zeros(32, 32)),
    "data of an alias": lambda model: setattr(q(model).weight.detach(), "data", torch.zeros(32, 32)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("direct", [False, True], ids=["executor", "direct"])
def test_writes_of_any_kind_make_the_weight_the_tenants_own(write, direct):
    plain = LLAMA.model()
    with connected(twin(plain), "inproc") as other, torch.no_grad():
        untouched = other(**LLAMA.batch()).logits
        logits_alike(LLAMA, torch.no_grad()(write))
        assert torch.equal(other(**LLAMA.batch()).logits, untouched)
    if direct:
        with symbiosis.Executor(twin(plain)) as executor, torch.no_grad():
            model, other = (symbiosis.connect(executor, mode="direct") for _ in range(2))
            for each in (plain, model):
                write(each)
            torch.testing.assert_close(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits, atol=1e-5, rtol=0)
            assert torch.equal(other(**LLAMA.batch()).logits, untouched), "another tenant sees the change"


def test_inference_mode_which_counts_no_versions():
    plain = LLAMA.model()
    with connected(twin(plain), "inproc") as model, torch.inference_mode():
        found = []
        for each in (plain, model):
            torch.manual_seed(0)
            config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
            with torch.inference_mode(False):
                adapted = get_peft_model(each, config).eval()
            found.append(adapted(**LLAMA.batch()).logits)
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)
    plain = LLAMA.model()
    with connected(twin(plain), "inproc") as model, torch.inference_mode():
        q(model).weight.sum()
        model.to(torch.float64)
        torch.testing.assert_close(model(**LLAMA.batch()).logits.float(), plain(**LLAMA.batch()).logits, atol=1e-5, rtol=0)


def test_a_sum_whose_change_was_written_to_is_refused():
    with connected(LLAMA.model(), "inproc") as model, torch.no_grad():
        change = torch.ones(32, 32)
        changed = q(model).weight + change
        change.zero_()
        with pytest.raises(BadCall, match="Clone"):
            changed.sum()


@pytest.mark.parametrize("method", ["held", "returned", "set"])
def test_weights_that_were_held_before_they_were_trained_are_trained(method):
    plain = LLAMA.model()
    with connected(twin(plain), "inproc") as model:
        for each in (plain, model):
            each.requires_grad_(False)
            weights = [q(each).weight, up(each).weight]
            if method == "returned":
                weights = [weight.requires_grad_(True) for weight in weights]
            elif method == "set":
                for weight in weights:
                    weight.requires_grad = True
            else:
                for weight in weights:
                    weight.requires_grad_()
            optimizer = torch.optim.SGD(weights, lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                each(**LLAMA.batch(seed=step)).loss.backward()
                optimizer.step()
            assert all(weight.grad is not None and weight.requires_grad for weight in weights)
        with torch.no_grad():
            torch.testing.assert_close(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits, atol=1e-5, rtol=0)


def test_requires_grad_false_trains_nothing():
    with connected(LLAMA.model(), "inproc") as model:
        q(model).weight.requires_grad_(requires_grad=False)
        assert not q(model).is_local
        alias = q(model).weight.detach().requires_grad_()
        assert type(alias) is torch.Tensor
        assert alias.is_leaf
        assert not q(model).weight.requires_grad


@pytest.mark.parametrize("scope", ["model", "layer", "names"])
def test_full_fine_tuning_is_refused_rather_than_done_in_part(scope):
    with connected(LLAMA.model(), "inproc") as model:
        model.requires_grad_(False)
        layer = q(model)
        if scope == "model":
            model.requires_grad_(True)
        elif scope == "layer":
            model.model.layers[1].requires_grad_(True)
        else:
            for name, parameter in model.named_parameters():
                parameter.requires_grad = "layers.1" in name
        with pytest.raises(BadCall, match=r"requires_grad_\(True\) on this very layer"):
            model(**LLAMA.batch())
        with torch.no_grad():
            model(**LLAMA.batch())
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        adapted(**LLAMA.batch()).loss.backward()
        layer.requires_grad_(True)
        assert layer.is_local


def test_dropout_inside_a_block_is_applied():
    def only_dropout(model):
        model.eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()

    def other_dropout(model):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3

    for change in (only_dropout, other_dropout):
        plain = GPT2.model()
        with connected(twin(plain), "inproc") as model, torch.no_grad():
            found = []
            for each in (plain, model):
                change(each)
                torch.manual_seed(0)
                found.append(each(**GPT2.batch()).logits)
            torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


def test_code_that_is_patched_is_run(monkeypatch):
    kind = type(LLAMA.model().model.layers[0].mlp)
    plain = LLAMA.model()
    with connected(twin(plain), "inproc") as model, torch.no_grad():
        model(**LLAMA.batch())
        forward = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, x: 2 * forward(self, x))
        torch.testing.assert_close(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits, atol=1e-5, rtol=0)


EXPERTS = {
    "weights": lambda model: [p.data.mul_(2) for p in experts(model).parameters()],
    "one of an expert": lambda model: experts(model).gate_up_proj[0].mul_(20),
    "the activation": lambda model: setattr(experts(model), "act_fn", nn.GELU()),
    "a hook on the activation": lambda model: experts(model).act_fn.register_forward_hook(lambda *call: 2 * call[-1]),
}


@pytest.mark.parametrize("change", EXPERTS.values(), ids=EXPERTS)
def test_experts_that_a_tenant_changes_are_its_own(change):
    logits_alike(MIXTRAL, torch.no_grad()(change))


def test_adapters_on_all_parameters_of_experts():
    plain = MIXTRAL.model()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with connected(twin(plain), "inproc") as model:
        found = []
        for each in (plain, model):
            torch.manual_seed(0)
            config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
            adapted = get_peft_model(each, config)
            found.append(gradients(adapted, MIXTRAL.batch()))
            assert trainable(adapted)
        assert_same_gradients(*found)
    with connected(MIXTRAL.model(), "inproc") as model:
        experts(model).requires_grad_(True)
        assert all(p.requires_grad for p in experts(model).parameters())


def test_second_derivatives_are_right_or_refused():
    plain = LLAMA.model().requires_grad_(False)
    with connected(twin(plain), "inproc") as model:
        model.requires_grad_(False)
        x = torch.randn(3, 32)
        found = [torch.autograd.functional.hvp(lambda x, m=m: q(m)(x).pow(3).sum(), x, x)[1] for m in (model, plain)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        block = model.model.layers[0].mlp
        with pytest.raises(BadCall, match="second derivatives"):
            torch.autograd.functional.hvp(lambda x: block(x).sum(), x, x)
        rows = x.clone().requires_grad_()
        with pytest.raises(BadCall, match="second derivatives"):
            torch.autograd.grad((rows + block(rows)).sum(), rows, create_graph=True)


def test_forward_mode_and_transforms_are_refused():
    with connected(LLAMA.model(), "inproc") as model, torch.no_grad():
        x = torch.randn(3, 32)
        for part in (q(model), model.model.layers[0].mlp):
            with forward_ad.dual_level(), pytest.raises(BadCall, match="forward mode"):
                part(forward_ad.make_dual(x, x))
            with pytest.raises(BadCall, match=r"torch\.func"):
                torch.func.vmap(part)(x[:, None])
            with pytest.raises(BadCall, match="meta"):
                part(x.to("meta")) + 1.0


@pytest.mark.parametrize("link", ["inproc", "shm", "tcp"])
def test_batched_gradients_are_refused_without_a_hang(link):
    with connected(LLAMA.model(), link) as model:
        x = torch.randn(3, 32, requires_grad=True)
        for part in (q(model), model.model.layers[0].mlp):
            result = part(x)
            with pytest.raises(BadCall, match=r"torch\.func"):
                torch.autograd.grad(result, x, torch.randn(4, *result.shape), is_grads_batched=True)
            part(x).sum().backward()


@pytest.mark.parametrize("link", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 3, 32), (2, 1, 3, 32)], ids=str)
def test_results_may_be_written_to_whatever_shape_their_rows_are_in(link, shape):
    plain = LLAMA.model()
    with connected(twin(plain), link) as model:
        for seed in range(3):
            outcomes = []
            for each in (plain, model):
                torch.manual_seed(seed)
                x, weights = torch.randn(shape, requires_grad=True), torch.randn(shape)
                attention = each.model.layers[0].self_attn
                one, other = attention.q_proj(x), attention.v_proj(x)
                one += weights
                other.mul_(2.0)
                (one.sin().sum() + other.sin().sum()).backward()
                outcomes.append((one.detach(), other.detach(), x.grad))
            for found, expected in zip(*reversed(outcomes), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_removed_bias_and_forms_of_a_product():
    logits_alike(BY_NAME["qwen2"], lambda model: setattr(q(model), "bias", None))
    with connected(LLAMA.model(), "inproc") as model, torch.no_grad():
        x, weight = torch.randn(3, 32), q(model).weight
        expected = q(model)(x)
        torch.testing.assert_close(F.linear(input=x, weight=weight), expected)
        place = torch.empty(3, 32)
        assert torch.matmul(x, weight.T, out=place) is place
        torch.testing.assert_close(place, expected)


def test_rows_in_other_memory_are_other_rows():
    plain = LLAMA.model()
    with connected(twin(plain), "inproc") as model, torch.no_grad():
        for _ in range(3):
            start = torch.randn(3, 32)
            found = []
            for each in (plain, model):
                x = copy.deepcopy(start)
                attention = each.model.layers[0].self_attn
                first = attention.q_proj(x)
                x.data = 2 * start
                found.append(torch.cat([first, attention.k_proj(x), attention.v_proj(x)], dim=1))
            torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("architecture", [LLAMA, GPT2, MIXTRAL], ids=lambda a: a.name)
def test_a_whole_checkpoint_that_is_loaded_is_what_is_computed(architecture, strict):
    other = architecture.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights = other.state_dict()

    def load(model):
        assert not model.load_state_dict(weights, strict=strict).unexpected_keys

    logits_alike(architecture, load)


def test_a_checkpoint_without_base_weights_leaves_the_executors():
    plain = LLAMA.model()
    with connected(twin(plain), "inproc") as model:
        model.load_state_dict(model.state_dict())
        assert not q(model).is_local
        found = model.load_state_dict({"model.norm.weight": plain.model.norm.weight}, strict=False)
        assert not q(model).is_local
        assert not any(key.endswith(".like") for key in found.missing_keys)


@pytest.mark.parametrize("targets", [["c_attn"], ["c_fc", "c_proj"]])
@pytest.mark.parametrize("init", [True, False])
def test_dora_on_layers_whose_inputs_come_first(init, targets):
    plain, found = GPT2.model(), []
    options = {"target_modules": targets, "use_dora": True, "init_lora_weights": init, "fan_in_fan_out": True}
    with connected(twin(plain), "inproc") as model:
        for each in (plain, model):
            torch.manual_seed(1)
            found.append(gradients(get_peft_model(each, LoraConfig(r=3, task_type="CAUSAL_LM", **options)), GPT2.batch()))
    assert_same_gradients(found[1], found[0])


def test_rows_that_are_cut_off_between_two_layers_have_a_gradient_of_their_own():
    plain = LLAMA.model().requires_grad_(False)
    with connected(twin(plain), "inproc") as model:
        for _ in range(2):  # the second time the groups are known
            for each in (plain, model.requires_grad_(False)):
                attention, start = each.model.layers[0].self_attn, torch.ones(1, 2, each.config.hidden_size, requires_grad=True)
                rows = start * 2.0
                attention.q_proj(rows)
                rows.detach_().requires_grad_()
                attention.k_proj(rows).sum().backward()
                assert start.grad is None
                assert rows.grad is not None


def test_an_executor_that_restarts_with_other_biases_is_not_used():
    plain = BY_NAME["qwen2"].model()
    other = twin(plain)
    with torch.no_grad():
        q(other).bias.add_(1.0)
    with symbiosis.Executor(plain) as executor:
        address = executor.listen("tcp://127.0.0.1:0")
        model = symbiosis.connect(address, grace_s=20)
    with symbiosis.Executor(other) as executor:
        executor.listen(address)
        with pytest.raises(ModelChanged, match="connect again"):
            model(torch.ones(1, 3, dtype=torch.int64))
        model.symbiosis.close()
