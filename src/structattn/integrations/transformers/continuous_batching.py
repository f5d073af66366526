"""Continuous batching of transformers (``generate_batch``, its server) with a paged cache that has levels.

transformers has no extension point for another cache, so this file subclasses its manager and its batch processor, and gives its scheduler
a cache with the methods that it calls. All that is not public there is used here and nowhere else. Tried on 5.20 to 5.23.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel

from structattn.cache.paged import LayerShape, PagedCache, PagePool, ShapeProbe, Tokens
from structattn.errors import CacheError, ConfigError, MissingDependencyError
from structattn.memory import free_memory

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
    raise MissingDependencyError(
        f"continuous batching with levels needs transformers 5.20 or later, and {transformers.__version__} is installed: pip install -U "
        "'transformers>=5.20'; generate() takes prompts as one batch, padded on the left"
    )

from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import (
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

_GROUP = "full_attention"  # of the two kinds of layers that transformers' input buffers know, the one that all of ours pass for
_MAX_BATCH_TOKENS = 8192  # transformers' own default


class _Allocator:
    """What transformers asks of each kind of layers: lengths of keys, and pages that a request lacks."""

    index = 0
    layer_type = _GROUP
    supports_block_table = False
    read_trash_index = write_trash_index = 0  # keys are not read and written by index

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.block_table: dict[str, list[int]] = {}  # what would be copied to the CPU

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return self._pool.missing(request_id, past_length, query_length)


class _Sectors:
    """Stands for the sectors of transformers' pool, which ours has not: all pages are of one size, and free at once."""

    def try_to_free_sectors(self) -> None:
        pass


class ServedCache(PagedCache):
    """A ``PagedCache`` with what transformers' scheduler and batch processor call.

    Attributes:
        max_batch_tokens: of one call of the model.
        num_blocks: pages of the pool.
    """

    use_prefix_sharing = False
    max_blocks_per_request = max_decode_fast_path_length = 0
    # Keys are not read by index: no request takes anything of the budget for it.
    read_cache_limit = 0
    max_tokens_read = 1

    def __init__(self, layers: list[LayerShape], pages: PagePool, max_batch_tokens: int) -> None:
        super().__init__(layers, pages)
        self.pool = _Sectors()
        self.max_batch_tokens = max_batch_tokens
        self.num_blocks = pages.num_pages
        self.bytes_per_sector = pages.page_nbytes
        self.device = pages.memory.device
        self.cache_allocators = {_GROUP: _Allocator(pages)}

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        past = state.current_len()
        if dry_run:
            return self.pages.missing(state.request_id, past, request_len) <= self.pages.num_free
        return self.pages.reserve(state.request_id, past, request_len)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        free = self.pages.num_free
        for count, needed in enumerate(list_blocks_needed):
            free -= needed[_GROUP]
            if free < 0:
                return count
        return len(list_blocks_needed)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.pages.free(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        self.pages.free_all()

    reset = free_all_requests

    def compute_free_capacity(self, relative: bool = True) -> float:
        return self.pages.num_free / self.num_blocks if relative else self.pages.num_free * self.bytes_per_sector

    def extend_read_and_write_indices(self, *_: Any) -> None:
        """Nothing: the processor says in ``step`` which requests there are."""

    # Without prefix sharing there is no page of two requests.

    def evict_cached_blocks(self) -> bool:
        return False

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        return {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        pass

    def prepare_fork_request(self, src_state: RequestState, dst_req_ids: list[str], copies: object) -> list[str]:
        return []  # none is forked: transformers computes the others from their prompt

    def perform_cache_copy(self, copies: object) -> None:
        pass


class _Processor(ContinuousBatchProcessor):  # type: ignore[misc]
    """Tells the cache which tokens the next call of the model has."""

    def _update_tp_group_state(self) -> bool:
        """Takes the new requests. transformers ends the manager, and with it all requests, when later nothing fits."""
        is_stopping = bool(super()._update_tp_group_state())
        for state in [*(self.scheduler.active_requests or self.scheduler.waiting_requests).values()]:
            length = state.position_offset + max(1, len(state.remaining_prefill_tokens))
            if (needed := self.cache.pages.needed(length)) > self.cache.num_blocks:
                self._refuse(
                    state, f"{length} tokens need {needed} pages of the cache, which has {self.cache.num_blocks}"
                )
        return is_stopping

    def _refuse(self, state: RequestState, why: str) -> None:
        """Ends one request, which is larger than the whole pool."""
        error = CacheError(f"{why}: give it more memory (num_blocks or max_memory_percent of ContinuousBatchingConfig)")
        self._handle_request_error(error, state)
        self.scheduler.finish_request(state.request_id)
        if self.scheduler.waiting_requests.pop(state.request_id, None) is not None:
            self.scheduler.waiting_requests_order.remove(state.request_id)
        self.scheduler.block_new_requests = False

    def _generation_step(self, model: PreTrainedModel) -> None:
        # What a request has processed counts the tokens of this call already.
        requests = [
            Tokens(one.state.request_id, one.state.position_offset - one.query_length, one.query_length)
            for one in self.inputs_and_outputs.requests_in_batch
        ]
        with self.cache.step(requests):
            super()._generation_step(model)


class LevelBatchingManager(ContinuousBatchingManager):  # type: ignore[misc]
    """transformers' manager, with a cache that has levels; arguments as there.

    Raises:
        ConfigError: an option that needs transformers' own cache, or a model with layers that are no attention.
    """

    def __init__(self, model: PreTrainedModel, generation_config: Any, config: Any, workload_hints: Any) -> None:
        try:
            super().__init__(model, generation_config, config, workload_hints)
        except ValueError as error:  # it knows no chunks and no states beside keys
            raise ConfigError(
                f"{type(model).__name__} cannot generate with continuous batching ({error}): use generate()"
            ) from error
        own = self.continuous_batching_config
        refused = {
            "use_async_batching": own.use_async_batching,
            "use_cuda_graph": any(own.cuda_graph_booleans),
            "varlen_compile_config": own.varlen_compile_config,
            "cpu_offload_space": own.cpu_offload_space != 0,
        }
        for name, value in refused.items():
            if value:
                raise ConfigError(f"continuous batching with levels has no {name}: leave it at its default")
        if self.distributed_helper.tp_size > 1:
            raise ConfigError(
                "continuous batching with levels runs on one device: load the model without tensor parallelism"
            )
        self._layers, self._dtype = _probed(model)
        self._use_prefix_sharing = False

    def switch_to_cb_friendly_attn(self, *_: Any, **__: Any) -> None:
        """Nothing: the attention of the model is given by its config."""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if isinstance(self.batch_processor, ContinuousBatchProcessor):  # of an earlier session
            self.batch_processor.reset()
            return self.batch_processor
        options = self.continuous_batching_config
        cache = ServedCache(self._layers, self._pages(), options.max_batch_tokens or _MAX_BATCH_TOKENS)
        update_cb_config_after_cache_creation(options, cache.num_blocks, cache.max_batch_tokens)
        if options.scheduler_type not in SCHEDULER_MAPPING:
            raise ConfigError(
                f"scheduler_type must be one of {sorted(SCHEDULER_MAPPING)}, got {options.scheduler_type!r}"
            )
        # transformers reads from the implementation whether to make masks of all pairs of tokens: ours needs none.
        config = copy.copy(self.model.config.get_text_config())
        config._attn_implementation = "structurized"
        return _Processor(
            cache=cache,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=options,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=SCHEDULER_MAPPING[options.scheduler_type](
                cache, options.safety_margin, options.max_requests_per_batch
            ),
            distributed_helper=self.distributed_helper,
        )

    def _pages(self) -> PagePool:
        """A pool of as many bytes as transformers' cache has with the same options."""
        options, device = self.continuous_batching_config, self.model.device
        if options.num_blocks is None:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
            if free is None:
                raise ConfigError(
                    "the system does not say how much memory is free: give ContinuousBatchingConfig num_blocks"
                )
            nbytes = int(free * options.max_memory_percent)
        else:
            numbers = sum(heads * dim for layer in self._layers for heads, dim in (layer.keys, layer.values))
            nbytes = options.num_blocks * options.page_size * numbers * self._dtype.itemsize
        length = getattr(self.model.config, "max_position_embeddings", None)
        return PagePool(
            self._layers,
            nbytes=nbytes,
            dtype=self._dtype,
            device=device,
            most_slots=options.page_size,
            length=length,
        )


@torch.no_grad()
def _probed(model: PreTrainedModel) -> tuple[list[LayerShape], torch.dtype]:
    """What the cache of a model keeps, and in which dtype: a call with one token shows it."""
    probe, token = ShapeProbe(), torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, is_causal=True, cache=probe)
    count = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(count)):
        raise ConfigError(
            f"{type(model).__name__} has {count} layers, and those with the numbers {sorted(probe.layers)} asked for the cache of continuous batching: "
            "the others keep something else, or their attention does not pass arguments on; use generate()"
        )
    if len(probe.places) != 1:
        raise ConfigError(
            f"continuous batching with levels keeps keys and values in one dtype on one device, and this model has {sorted(map(str, probe.places))}"
        )
    ((dtype, _),) = probe.places
    return [probe.layers[index] for index in range(count)], dtype


def manager(
    model: PreTrainedModel, generation_config: Any, continuous_batching_config: Any, workload_hints: Any
) -> ContinuousBatchingManager:
    """What ``init_continuous_batching`` returns: the manager that was kept for this model, or a new one."""
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(kept, ContinuousBatchingManager):
        return kept
    generation = model.generation_config if generation_config is None else generation_config
    if generation.eos_token_id is None:
        generation.eos_token_id = -1  # none, to transformers' manager
    options = ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config
    return LevelBatchingManager(model, generation, options, workload_hints)
