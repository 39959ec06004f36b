"""One step of the engine: schedule a batch, run the model, sample, update. Requests of many adapters share batches."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedModel

from symbiosis import kernels
from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import Adapter
from symbiosis.common.free_cores import FreeCores
from symbiosis.distributed.operations import FirstShard
from symbiosis.errors import AdapterExists, CannotServe, PassFailed, SymbiosisError, UnknownAdapter
from symbiosis.models.max_length import max_sequence_length
from symbiosis.serving.block_exchange.block_fetches import BlockFetches
from symbiosis.serving.chains.chain import Chain, ServedChains
from symbiosis.serving.chains.chain_runner import ChainRunner
from symbiosis.serving.engine_settings import check_settings
from symbiosis.serving.host_tier import HostTier
from symbiosis.serving.lora.adapter_cache import AdapterCache, AdapterCacheConfig, AdapterCacheStats
from symbiosis.serving.lora.adapter_registry import AdapterVersion, PreparedAdapter
from symbiosis.serving.model.async_decode import AsyncDecoder
from symbiosis.serving.model.block_memory import BlockMemory
from symbiosis.serving.model.model_runner import ModelRunner
from symbiosis.serving.model.paged_attention import create_kv_cache
from symbiosis.serving.model.sampler import SampledBatch, has_logprobs, report, sample, sample_tokens
from symbiosis.serving.scheduling.batch import Batch
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.scheduler import Scheduler, SchedulerConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Logprobs, Sampling, Sequence, check_range
from symbiosis.serving.sharding.sharded_runner import ShardedRunner
from symbiosis.store.artifact_folders import ArtifactFolders, LocalFolders
from symbiosis.transport.engine_ipc import EngineAddress

_log = logging.getLogger("symbiosis")
_MAX_ADAPTERS = 64  # in one batch
_MAX_GRAPH_BLOCKS = 1 << 14  # longer sequences run without CUDA graphs: block tables of 100 MB
_UNNAMED = ""  # name of an adapter while its request is queued
_VIRTUAL_TOKEN = 0  # placeholder: the adapter supplies its embedding, or its keys and values


class EngineCore:
    """A model, its KV cache and its adapters; `step` runs one batch. Used by one thread."""

    def __init__(
        self,
        model: PreTrainedModel | FirstShard,
        *,
        pages: int = 1024,
        page_size: int = 16,
        cache_bytes: int | None = None,
        host_cache_bytes: int = 0,
        residency: AdapterCacheConfig = AdapterCacheConfig(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        device_share: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - stateless
        folders: ArtifactFolders = LocalFolders(),  # noqa: B008 - stateless
        chains: Mapping[str, Chain] = MappingProxyType({}),
        **limits: int,
    ) -> None:
        """`model` may be the first shard of one. `chains` are models by name that are served together, the first one instead of
        `model`.

        `pages` is the number of KV-cache blocks, `page_size` the tokens of one; `cache_bytes` replaces `pages`.
        `host_cache_bytes` is host memory for blocks that do not fit: see `host_tier`.

        `residency` configures the adapter cache, `limits` the scheduler. Each batch is computed within `device_share`, which
        co-located work may share. Adapters are read from `folders`.

        Raises `CannotServe` if this model cannot be served, `OutOfRange` if a setting is wrong.
        """
        self.folders = folders
        check_settings(pages, page_size, cache_bytes, residency, limits)
        check_range("host_cache_bytes", host_cache_bytes, 0, 1 << 50, integer=True)
        shard = model if isinstance(model, FirstShard) else None
        if isinstance(model, FirstShard):
            model = model.parallel.model
            if host_cache_bytes or chains:
                what = "several models" if chains else "host blocks of the KV cache"
                raise CannotServe(f"{what} need the whole model on one device: serve without shards")
        self.chains = ServedChains(model, chains)
        model = self.chains.default.model
        self.facts = ModelFacts.from_model(model) if shard is None else shard.parallel.facts
        if not self.facts.decoder_only or not self.facts.kv_heads or not model.can_generate():
            raise CannotServe(
                f"{type(model).__name__} cannot be served: expected a decoder whose layers all have key-value heads"
            )
        kv_heads = self.facts.kv_heads if shard is None else shard.parallel.local_kv_heads
        num_blocks, block_size = pages, page_size
        block_bytes = self.facts.layers * 2 * kv_heads * self.facts.head_dim * block_size * model.dtype.itemsize
        if cache_bytes is not None:
            num_blocks = cache_bytes // block_bytes
            if num_blocks < 8:
                raise CannotServe(f"KV cache too small: {cache_bytes} bytes are {num_blocks} blocks, expected at least 8")
        kv_cache = create_kv_cache(model.eval(), self.facts, kv_heads, num_blocks, block_size)
        divide = None
        self._runner: ModelRunner
        if chains:
            self._runner = ChainRunner(self.chains.ordered, self.facts, kv_cache)
        elif shard is None:
            self._runner = ModelRunner(model, kv_cache)
        else:
            self._runner = sharded = ShardedRunner(shard, kv_cache, num_blocks, residency.slots)
            divide = sharded.divide
        max_length = max_sequence_length(model.config.get_text_config())
        config = SchedulerConfig(
            vocab_size=self.facts.vocab, max_length=max_length, max_adapters=min(_MAX_ADAPTERS, residency.slots), **limits
        )
        self._adapter_cache = AdapterCache(
            model,
            self.facts,
            residency,
            running=lambda: self.scheduler.adapters,
            on_load=self._runner.add,
            on_evict=self._runner.forget,
            divide=divide,
            folders=folders,
            chains=self.chains.models,
            choose_chain=self.chains.find_base,
        )
        if kernels.run_on(model.device):
            max_blocks = min(num_blocks, -(-max_length // block_size), _MAX_GRAPH_BLOCKS)
            self._runner.use_kernels(self._adapter_cache.slots, max_blocks)
        block_manager = BlockManager(num_blocks, block_size, host_cache_bytes // block_bytes)
        self.host_tier = HostTier(block_manager, kv_cache)
        self.block_memory = None if shard is not None else BlockMemory(kv_cache.by_block, self.host_tier.memory)
        """For other engines; None: a shard has only a part of each block."""
        self.block_fetches = None if self.block_memory is None else BlockFetches(block_manager, self.block_memory, clock)
        self.scheduler = Scheduler(config, block_manager, self._adapter_cache.touch, self.chains.order)
        self._async_decoder = AsyncDecoder(self._runner, block_manager, self.host_tier.flush)
        self._failed: list[tuple[Sequence, SymbiosisError]] = []
        self._preempted: list[Sequence] = []
        self.num_steps = 0
        """Steps that computed a batch."""
        self.num_rows = 0
        """Rows of these batches."""
        self.num_sampled = 0
        """Tokens sampled from them."""
        self._clock, self._device_share = clock, device_share
        self._free_cores = FreeCores() if model.device.type == "cpu" else nullcontext()
        self._ids = itertools.count()

    # Adapters

    def prepare(self, folder: str | Path, model: str | None = None) -> PreparedAdapter:
        """Read and check an adapter. Thread-safe. Raises what is wrong with it.

        Of several models, it is for `model`; None: the one that its config names, or the default.
        """
        return self._adapter_cache.prepare(Path(folder), None if model is None else self.chains.hash_of(model))

    def prepare_held(self, adapter: Adapter, folder: Path | None = None) -> PreparedAdapter:
        """The same for an adapter in memory; `folder` is where it can be read again. Thread-safe."""
        return self._adapter_cache.prepare_loaded(adapter, folder, self.chains.default.hash)

    def put_adapter(self, name: str, prepared: PreparedAdapter) -> AdapterVersion:
        """Serve a prepared adapter under `name` from now on. Accepted requests keep their version.

        Raises `AdapterExists` for a name of a model.
        """
        if name in self.chains.by_name:
            raise AdapterExists(f"{name!r} is the name of a model: choose another for the adapter")
        return self._adapter_cache.register(name, prepared)

    def add_adapter(self, name: str, folder: str | Path, model: str | None = None) -> str:
        """Serve the PEFT adapter in this folder under `name`, on one of several `model`s; its content hash."""
        return self.put_adapter(name, self.prepare(folder, model)).hash

    def remove_adapter(self, name: str) -> None:
        """Remove the name; the memory is free after its last request. Raises `UnknownAdapter`."""
        self._adapter_cache.unregister(name)

    def pin_adapter(self, name: str, pinned: bool = True) -> None:
        """Keep the adapter on the device without requests, if possible. Raises `UnknownAdapter`."""
        self._adapter_cache.registry.pin(name, pinned)

    @property
    def adapters(self) -> dict[str, str]:
        """The content hash of each name."""
        return {name: version.hash for name, version in self._adapter_cache.registry.versions.items()}

    @property
    def adapter_models(self) -> dict[str, str]:
        """The model of each adapter's name, of several models."""
        return self.chains.name_adapters(self._adapter_cache.registry)

    @property
    def adapter_names(self) -> Collection[str]:
        return self._adapter_cache.registry.versions

    @property
    def adapters_on_device(self) -> list[str]:
        resident, versions = self._adapter_cache.resident, self._adapter_cache.registry.versions
        return sorted(name for name, version in versions.items() if version.hash in resident)

    @property
    def pinned(self) -> frozenset[str]:
        """Names of pinned adapters."""
        return self._adapter_cache.registry.pinned

    def adapter_stats(self) -> AdapterCacheStats:
        return self._adapter_cache.stats()

    @property
    def kv_cache_bytes(self) -> int:
        return self._runner.kv_cache.nbytes

    @property
    def packed_bytes(self) -> int:
        """Of packed copies of weights on a CPU."""
        return self._runner.packed_bytes

    def poll_adapters(self) -> None:
        """Take over adapters that other threads have loaded; sequences of failed ones finish. `step` does this too."""
        for hash, error in self._adapter_cache.poll_loads():
            for sequence in self.scheduler.find_sequences(hash):
                self._fail(sequence, error)

    def on_adapter_change(self, callback: Callable[[], None]) -> None:
        """Set a callback that other threads call when `poll_adapters` has something to do."""
        self._adapter_cache.set_load_callback(callback)

    def wait(self, seconds: float) -> None:
        """Wait until `poll_adapters` has something to do, or for this long."""
        self._adapter_cache.wait(seconds)

    # Requests

    def add(
        self,
        prompt: Iterable[int],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        tenant: str = "",
        model: str | None = None,
    ) -> Sequence:
        """Queue one completion. Raises what is wrong with the request."""
        return self.add_several(1, prompt, sampling, adapter=adapter, tenant=tenant, model=model)[0]

    def add_several(
        self,
        n: int,
        prompt: Iterable[int],
        sampling: Sampling,
        *,
        adapter: str | PreparedAdapter | None = None,
        tenant: str = "",
        resume: Seq[Seq[int] | None] | None = None,
        source: EngineAddress | None = None,
        model: str | None = None,
    ) -> list[Sequence]:
        """Queue `n` completions of one prompt: all, or none and an error.

        Of several models, `model` computes them; None: that of the adapter, or the default.

        `resume` continues completions that another engine has begun: the tokens of each so far, None for those that have
        finished. Equal seeds give the tokens that the other engine would have given. A completion whose tokens are complete
        has finished when this returns. Blocks that the engine `source` has are fetched from it.

        An adapter without a name, as prepared, is unloaded after the last of its requests.
        """
        if isinstance(adapter, PreparedAdapter):
            self._adapter_cache.register(_UNNAMED, adapter)
            try:
                return self.add_several(
                    n, prompt, sampling, adapter=_UNNAMED, tenant=tenant, resume=resume, source=source, model=model
                )
            finally:
                self._adapter_cache.unregister(_UNNAMED)
        record = None if adapter is None else self._adapter_cache.lookup(adapter)
        chain = self.chains.hash_of(model) if record is None or model is not None else record.chain
        if record is not None and record.chain != chain:
            raise UnknownAdapter(f"there is no adapter {adapter!r} of the model {model!r}: it is for another one")
        sequence = Sequence(
            id=str(next(self._ids)),
            tenant=tenant,
            prompt=[_VIRTUAL_TOKEN] * (record.virtual_tokens if record else 0) + list(prompt),
            sampling=sampling,
            arrival=self._clock(),
            adapter=record.hash if record else "",
            chain=chain,
            cache_salt=tenant.encode(),
            eos_ids=self.chains.eos_ids[chain],
        )
        sequences = sequence.fork(n)
        if resume is not None:
            for one, delivered in zip(sequences, resume, strict=True):
                one.resume(delivered or ())
            sequences = [one for one, delivered in zip(sequences, resume, strict=True) if delivered is not None]
            for one in sequences:
                one.parent = None if one is sequences[0] else sequences[0]
        self.scheduler.add(*sequences)
        self.chains.count_request(chain, len(sequences))
        if record is not None:
            self._adapter_cache.acquire(record.hash, len(sequences))
        for one in sequences:
            if one.reason is not None:
                self._release_adapter(one)
            elif source is not None and self.block_fetches is not None:
                self.block_fetches.add(one, source)
        return sequences

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Finish a sequence now; False if it has finished."""
        if not self.scheduler.cancel(sequence.id, reason):
            return False
        self._release_adapter(sequence)
        return True

    def _release_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter:
            self._adapter_cache.release(sequence.adapter)

    def _fail(self, sequence: Sequence, error: SymbiosisError) -> None:
        self.cancel(sequence, FinishReason.FAILED)
        self._failed.append((sequence, error))

    def take_failed(self) -> list[tuple[Sequence, SymbiosisError]]:
        """The sequences that failed since the last call, and why: their adapter could not be loaded, or their step failed."""
        failed, self._failed = self._failed, []
        return failed

    def take_preempted(self) -> list[Sequence]:
        """The sequences that were preempted for lack of KV cache since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def step(self) -> list[tuple[Sequence, int, Logprobs | None]]:
        """Run one batch. Returns each sequence with its sampled token (-1: no token could be sampled, it failed).

        Empty if there was nothing to compute. If the batch fails, its chunks are computed one by one, and only those that
        fail again finish, for `take_failed`. Raises `PassFailed` if the device has failed; the batch's sequences have
        finished then.
        """
        self.poll_adapters()
        now = self._clock()
        if self.block_fetches is not None:
            self.block_fetches.prepare(self.num_rows)
        batch = self.scheduler.schedule(now)
        self._adapter_cache.start_loads(batch.missing_adapters, now)
        self.scheduler.draining = self._adapter_cache.draining
        self._preempted += batch.preempted
        if not batch.chunks:
            self.scheduler.update(batch, [])
            return []
        if self.block_fetches is not None:
            self.block_fetches.start(batch)
        self.num_steps += 1
        self.num_rows += batch.num_rows
        self.num_sampled += len(batch.sampled)
        if self.chains.by_name:
            self.chains.count_tokens(sequence.chain for sequence in batch.sampled)
        with self._device_share, self._free_cores:
            started = self._clock()
            sampled = self._run(batch)
            self.host_tier.observe(batch, self._clock() - started)
        failed = {sequence.id for sequence, _ in self._failed}
        for sequence in self.scheduler.update(batch, sampled.tokens):
            self._release_adapter(sequence)
        results = list(zip(batch.sampled, sampled.tokens, sampled.logprobs, strict=True))
        return [each for each in results if each[0].id not in failed] if failed else results

    def _run(self, batch: Batch) -> SampledBatch:
        """Compute and sample; chunks that fail on their own have no token."""
        copied = False
        try:
            # once: a retry might read sources that were overwritten
            self.host_tier.flush(lambda: self._runner.copy_blocks(batch.copies))
            copied = True
            return self._compute(replace(batch, copies=()))
        except Exception as error:
            self._async_decoder.forget()
            if not copied or not self.is_sound():
                raise self._fail_batch(batch, error) from error
            _log.exception("a step failed; its %d chunks are computed one by one", len(batch.chunks))
            return self._run_one_by_one(batch, error)

    def _compute(self, batch: Batch) -> SampledBatch:
        adapters, sequences = self._adapter_cache.resident, batch.sampled
        logits_BV = self._async_decoder.compute(batch, adapters)
        sampled = sample_tokens(logits_BV, sequences)
        if self._can_run_ahead(batch):
            logits_BV = logits_BV.clone() if has_logprobs(sequences) else logits_BV
            self._async_decoder.run_ahead(batch, sampled.tokens_B, adapters)
        return report(logits_BV, sequences, sampled)

    def _can_run_ahead(self, batch: Batch) -> bool:
        """Whether the next step can be launched now: it likely decodes the same sequences.

        Sequences that wait do not matter: those that can be admitted now are part of the batch.
        """
        if not self._runner.can_run_ahead or len(batch.chunks) != self.scheduler.num_running:
            return False
        return all(chunk.samples for chunk in batch.chunks)

    def _run_one_by_one(self, batch: Batch, error: Exception) -> SampledBatch:
        """Compute each chunk alone, with the same results as in the batch. Chunks that fail alone have failed."""
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        for chunk in batch.chunks:
            try:
                if len(batch.chunks) == 1:
                    raise error
                alone = Batch(chunks=(chunk,))
                result = sample(self._runner.compute(alone, self._adapter_cache.resident), alone.sampled)
            except Exception as failure:  # the first failure was logged, and this one finishes its sequence
                if not self.is_sound():
                    raise self._fail_batch(batch, failure) from failure
                self._fail(chunk.sequence, _step_error(failure))
                result = SampledBatch([-1], [None])
            if chunk.samples:
                tokens += result.tokens
                logprobs += result.logprobs
        return SampledBatch(tokens, logprobs)

    def _fail_batch(self, batch: Batch, error: Exception) -> PassFailed:
        self.scheduler.preempt(batch)
        sequences = [chunk.sequence for chunk in batch.chunks]
        for sequence in sequences:
            self.cancel(sequence, FinishReason.FAILED)
        return PassFailed(str(_step_error(error)), sequences)

    def is_sound(self) -> bool:
        """Whether the device still computes: some CUDA errors are permanent."""
        return self._runner.is_sound()

    def is_idle(self) -> bool:
        return self.scheduler.num_running == 0 and self.scheduler.num_waiting == 0


def _step_error(error: Exception) -> PassFailed:
    """Without details, which are in the log."""
    return PassFailed(f"the step that computed this completion failed: {type(error).__name__}")
