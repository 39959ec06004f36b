"""The grammar of --tenants and --devices, and quantities."""

from __future__ import annotations

import pytest

from symbiosis.errors import SymbiosisError
from symbiosis.planning.devices import parse_devices
from symbiosis.planning.quantities import format_bytes, parse_bytes, parse_rate, parse_tokens
from symbiosis.planning.tenants import Workload, parse_tenants


def test_tenants():
    train, serve, job = parse_tenants(
        ["8 x lora:r=16,train,batch=4x512,sgd", "serve,context=8k,streams=64,adapters=3", "2 x job ia3 length=1k"]
    )
    assert (train.count, train.workload, train.method, train.rank, train.optimizer) == (8, Workload.TRAIN, "lora", 16, "sgd")
    assert (train.batch, train.length) == (4, 512)
    assert (serve.context, serve.streams, serve.adapters, serve.is_split) == (8192, 64, 3, False)
    assert (job.count, job.method, job.length) == (2, "ia3", 1024)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "expected"),
        ("8 x", "is unknown"),
        ("fly", "'fly' is unknown"),
        ("lora,r=8", "expected"),
        ("train,serve", "workload is given twice"),
        ("train,batch=2,batch=3", "batch is given twice"),
        ("train,batch=0x4", "expected batch=SEQUENCES"),
        ("train,batch=4x0", "not a number of tokens"),
        ("train,r=0", "from 1 to 4096"),
        ("train,r=99999", "from 1 to 4096"),
        ("train,context=8k", "'context=8k' does not apply to train"),
        ("serve,batch=4", "does not apply to serve"),
        ("job,checkpointing", "does not apply to job"),
        ("train,targets=", "expected names of layers"),
        ("train,size=4", "unknown option"),
        ("0 x train", "0 tenants, expected 1"),
        ("999999 x train", "expected 1 to 100000"),
        ("generate,context=99999999", "not a number of tokens"),
    ],
)
def test_bad_tenants_are_an_error_with_what_was_expected(spec, said):
    with pytest.raises(SymbiosisError, match=said):
        parse_tenants([spec])


def test_devices():
    first, second, cpu = parse_devices(["cuda:80GB:2TB/s:300TFLOPS x 2, cpu:64GiB"])
    assert (first.name, second.name, cpu.name) == ("cuda:0", "cuda:1", "cpu")
    assert (first.memory, first.bandwidth, first.flops, cpu.memory) == (80 * 10**9, 2e12, 3e14, 64 << 30)
    (known,) = parse_devices(["h200"])
    assert (known.kind, known.model, known.memory) == ("cuda", "h200", 141 * 10**9)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tpu:8GB", "unknown kind 'tpu'"),
        ("cuda", "the memory is missing"),
        ("cuda:fast", "'fast' is neither memory"),
        ("cuda:80GB x 0", "expected 1 to 1024"),
        ("cuda:80GB x 99999", "expected 1 to 1024"),
        ("cuda:80GB y 2", "expected KIND"),
        ("cpu:8GB, cpu:8GB", "two CPUs"),
        ("cpu:9999999TB", "not a size of memory"),
        ("", "expected KIND"),
    ],
)
def test_bad_devices_are_an_error_with_what_was_expected(spec, said):
    with pytest.raises(SymbiosisError, match=said):
        parse_devices([spec])


def test_quantities():
    assert (parse_bytes("1.5GB"), parse_bytes("2GiB"), parse_bytes("fast")) == (1_500_000_000, 2 << 30, None)
    assert (parse_rate("10Gbit/s", "bit/s"), parse_rate("2TB/s", "B/s"), parse_rate("2GB", "B/s")) == (1e10, 2e12, None)
    assert (parse_tokens("512"), parse_tokens("8k")) == (512, 8192)
    assert [format_bytes(size) for size in (1_345_000_000, 999_999_999, 420e6, 12e3)] == ["1.34 GB", "1 GB", "420 MB", "12 kB"]
